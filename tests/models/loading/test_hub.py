"""Checkpoints by their name on the Hub, from a local cache and without a network."""

import pathlib

import jax
import numpy as np
import pytest
from huggingface_hub import constants

from jattn.models import load
from jattn.models.loading.hub import resolve_checkpoint
from jattn.models.loading.pretrained import load_shapes
from jattn.serving.cli.main import main

TINY_MODEL = pathlib.Path(__file__).parents[3] / "examples" / "tiny_model"
NAME, COMMIT = "org/tiny-llama", "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def hub_cache(tmp_path, monkeypatch):
    """Make a Hub cache with one model and one branch, and switch the network off."""
    model = tmp_path / "models--org--tiny-llama"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    (model / "snapshots").mkdir()
    (model / "snapshots" / COMMIT).symlink_to(TINY_MODEL)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_a_name_loads_the_snapshot_in_the_cache():
    model, expected = load(NAME, progress=False), load(TINY_MODEL, progress=False)
    assert model.config == expected.config
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(model), jax.tree.leaves(expected))
    assert load_shapes(NAME).config == expected.config


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_a_revision_is_a_branch_or_a_commit(hub_cache, revision):
    folder = hub_cache / "models--org--tiny-llama" / "snapshots" / COMMIT
    assert resolve_checkpoint(NAME, revision) == folder


def test_a_folder_takes_precedence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir(parents=True)
    assert not resolve_checkpoint(NAME).is_absolute()


@pytest.mark.parametrize(
    ("name", "revision", "message"),
    [
        ("org/nothing", None, "^org/nothing is not a folder, and the Hub has no such model or it cannot be"),
        (NAME, "v2", f"^{NAME} is not a folder, and the Hub has no such model at revision v2 or it cannot"),
    ],
)
def test_a_missing_name_is_one_clear_error(name, revision, message):
    with pytest.raises(FileNotFoundError, match=message):
        load(name, revision=revision)


@pytest.mark.kernels
def test_the_command_line_takes_names(capsys):
    assert main(["generate", "--model", NAME, "--max-tokens=2", "--temperature=0", "a"]) == 0
    assert capsys.readouterr().out.startswith("> a\n")
    assert main(["generate", "--model", NAME, "--revision=v2", "a"]) == 1
    assert "has no such model at revision v2" in capsys.readouterr().err
    assert main(["generate", "--model", "org/nothing", "a"]) == 1
    assert capsys.readouterr().err.startswith("jattn: org/nothing is not a folder, and the Hub has no")
