import importlib.metadata
import json
import os
import subprocess
import sys

import jax
import pytest

from jattn.models import families, load, save
from jattn.serving.cli.main import main
from tests.conftest import GOLDEN
from tests.serving.cli.conftest import RecordingEngine
from tests.serving.tiny import one_layer_model

MODEL = ["generate", "--model", str(GOLDEN / "hf" / "llama")]


class TestMain:
    @pytest.mark.parametrize(
        ("command", "default"),
        [("generate", "else 0)"), ("chat", "else 0; with --url, the server's)")],
    )
    def test_help_states_the_default_temperature(self, capsys, command, default):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        text = " ".join(capsys.readouterr().out.split())
        assert f"(default: the checkpoint's, {default}" in text

    def test_missing_command_is_an_error(self, capsys):
        with pytest.raises(SystemExit, match="2"):
            main([])
        assert "command" in capsys.readouterr().err

    def test_version(self, capsys):
        with pytest.raises(SystemExit, match="0"):
            main(["--version"])
        assert capsys.readouterr().out == f"jattn 0.1.0, jax {jax.__version__}\n"

    def test_version_of_a_package_that_is_not_installed(self, capsys, monkeypatch):
        installed_version = importlib.metadata.version

        def without_jattn(name):
            if name == "jattn":
                raise importlib.metadata.PackageNotFoundError(name)
            return installed_version(name)

        monkeypatch.setattr(importlib.metadata, "version", without_jattn)
        with pytest.raises(SystemExit):
            main(["--version"])
        assert capsys.readouterr().out == f"jattn of a checkout, jax {jax.__version__}\n"

    @pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU may have the kernels")
    def test_an_unsupported_implementation_names_the_option(self, tmp_path, capsys):
        save(one_layer_model(), tmp_path)
        assert main(["generate", f"--model={tmp_path}", "--implementation=mosaic_gpu", "a"]) == 1
        err = capsys.readouterr().err
        assert err.endswith("here is 'cpu'. Omit --implementation, or use xla.\n")

    def test_dtype_option_sets_the_models_dtype(self, tmp_path, monkeypatch, recording_engine):
        dtypes = []
        monkeypatch.setattr(
            RecordingEngine, "__call__", lambda self, model, **_: dtypes.append(model.dtype) or self
        )
        save(one_layer_model(), tmp_path)
        assert main(["generate", "--model", str(tmp_path), "--dtype=float16", "--max-tokens=1", "a"]) == 0
        assert dtypes == [jax.numpy.float16]

    def test_draft_model_is_loaded_with_the_models_options(self, tmp_path, recording_engine, capsys):
        save(one_layer_model(), tmp_path)
        words = ["generate", f"--model={tmp_path}", f"--speculative={tmp_path}", "--dtype=float16", "a"]
        assert main(words) == 0
        assert recording_engine.options["speculative"].dtype == jax.numpy.float16
        assert capsys.readouterr().err == ""  # No progress bar: stderr is not a terminal.

    def test_ctrl_c_exits_with_130_and_no_traceback(self, recording_engine, monkeypatch, capsys):
        def interrupt(*args, **kwargs):
            raise KeyboardInterrupt

        monkeypatch.setattr(recording_engine, "generate", interrupt)
        assert main([*MODEL, "a"]) == 130
        assert capsys.readouterr().err == "\n"


@pytest.mark.kernels
def test_closed_output_pipe_is_not_an_error():
    """The pipe has no reader, so the first write fails."""
    reader, writer = os.pipe()
    os.close(reader)
    code = "import sys; from jattn.serving.cli.main import main; sys.exit(main(['doctor']))"
    process = subprocess.run(
        [sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert process.returncode == 0
    assert "Error" not in process.stderr


PLUGIN = """
import dataclasses
from jattn.models.families import FAMILIES

FAMILIES["{name}"] = dataclasses.replace(FAMILIES["llama"], model_type="{name}", config_class="llama")
"""


class TestPlugins:
    @pytest.fixture(autouse=True)
    def _other_families(self, tmp_path, monkeypatch):
        known = dict(families.FAMILIES)
        monkeypatch.setattr(sys, "path", [*sys.path])
        monkeypatch.chdir(tmp_path)
        yield
        families.FAMILIES.clear()
        families.FAMILIES.update(known)
        families.load_plugins.cache_clear()

    def save_checkpoint(self, folder, model_type):
        save(one_layer_model(), folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type}))

    def test_a_module_of_the_current_folder_registers_a_family(self, tmp_path, recording_engine, capsys):
        (tmp_path / "cli_plugin.py").write_text(PLUGIN.format(name="of_a_module"))
        self.save_checkpoint(tmp_path / "model", "of_a_module")
        command = ["generate", "--model=model", "--max-tokens=1", "a"]
        assert main(command) == 1
        assert "no model family is registered for it" in capsys.readouterr().err
        assert main([*command, "--plugin=cli_plugin"]) == 0

    def test_a_file_registers_a_family(self, tmp_path, recording_engine, capsys):
        (tmp_path / "folder").mkdir()
        (tmp_path / "folder" / "file_plugin.py").write_text(PLUGIN.format(name="of_a_file"))
        self.save_checkpoint(tmp_path / "model", "of_a_file")
        words = ["generate", "--model=model", "--max-tokens=1", "a"]
        assert main([*words, "--plugin=./folder/file_plugin.py"]) == 0
        assert main([*words, "--plugin=folder/missing.py"]) == 1
        assert "--plugin folder/missing.py: FileNotFoundError" in capsys.readouterr().err

    def test_a_missing_module_is_an_error_of_one_line(self, capsys):
        assert main(["generate", "--model=m", "--plugin=no_such_plugin", "a"]) == 1
        err = capsys.readouterr().err
        assert (
            err == "jattn: --plugin no_such_plugin: ModuleNotFoundError: No module named 'no_such_plugin'\n"
        )

    def install(self, folder, value):
        """Write the metadata of an installed package with a plugin."""
        info = folder / "a_package-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: a-package\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[jattn.plugins]\nmine = {value}\n")
        sys.path.insert(0, str(folder))
        families.load_plugins.cache_clear()

    def test_an_entry_point_registers_a_family(self, tmp_path):
        (tmp_path / "installed_plugin.py").write_text(PLUGIN.format(name="of_an_entry_point"))
        self.save_checkpoint(tmp_path / "model", "of_an_entry_point")
        self.install(tmp_path, "installed_plugin")
        assert load(tmp_path / "model", progress=False).config.family.model_type == "of_an_entry_point"

    def test_an_entry_point_that_fails_is_named(self, tmp_path):
        self.save_checkpoint(tmp_path / "model", "llama")
        self.install(tmp_path, "no_such_module")
        with pytest.raises(
            ImportError, match=r"The plugin 'mine' \(no_such_module\) failed: No module named"
        ):
            load(tmp_path / "model", progress=False)
