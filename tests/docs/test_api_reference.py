"""The API reference: each public name has an entry with an example, and the examples run."""

import inspect
import pathlib
import re

import pytest

import jattn
from tests.readme import run_all

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))
PACKAGES = (jattn.masks, jattn.models, jattn.serving, jattn.sparsity, jattn.vllm, jattn)
ENTRY = re.compile(r"^::: (\S+)\n(.*?)(?=^::: |\Z)", re.MULTILINE | re.DOTALL)
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def public_names():
    """Return the full name of everything that the public packages export; each object is named once."""
    names = {}
    for package in PACKAGES:
        for name in package.__all__:
            value = getattr(package, name)
            if not inspect.ismodule(value) and name != "__version__":
                names.setdefault(id(value), f"{package.__name__}.{name}")
    return set(names.values())


def test_every_public_name_has_one_entry():
    entries = [name for page in PAGES for name, _ in ENTRY.findall(page.read_text())]
    assert sorted(entries) == sorted(public_names() | {"jattn.parallel.make_mesh"})


@every_page
def test_every_entry_has_an_example(page):
    for name, text in ENTRY.findall(page.read_text()):
        assert re.search(r"^```python\n", text, re.MULTILINE), name


@pytest.mark.kernels
@every_page
def test_the_examples_of_a_page_run_in_their_order(page, tmp_path, monkeypatch):
    if "plot(" in page.read_text():
        pytest.importorskip("matplotlib")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    assert bool(run_all(page)) == (page.stem != "index")
