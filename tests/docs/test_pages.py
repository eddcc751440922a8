"""The documentation pages: their code runs, and their commands, names, links and tables are correct."""

import ast
import dataclasses
import pathlib
import re
import shlex
import subprocess
import urllib.parse

import jax
import jax.numpy as jnp
import pytest

import jattn
from benchmarks.__main__ import SUITES
from benchmarks.tables import bars, pages
from benchmarks.tables.benchmarks_page import page as benchmarks_page
from jattn.cache import write as cache_write
from jattn.cache.spec import QUANTIZATIONS
from jattn.serving.cli.main import VLLM_DEFAULTS, VLLM_OPTIONS, build_parser
from jattn.serving.server.app import ROUTES
from pallas_kernels import support
from pallas_kernels.ptx import mma
from tests.assertions import assert_updates_in_place
from tests.masks.mask_rules import tiling
from tests.readme import Block, blocks, examples, run, run_all

ROOT = pathlib.Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [README, ROOT / "CONTRIBUTING.md", *DOCS]
FLOW = (ROOT / "docs" / "flow.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()
WITHOUT_EXAMPLES = ("CONTRIBUTING.md", "benchmarks.md", "kernels.md", "vllm.md")
SLOW = (
    "serving.md",
    "sparsity.md",
    "models.md",
    "training.md",
    "troubleshooting.md",
    "scheduler.md",
    "gallery.md",
)  # train, serve or load models
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=pytest.mark.kernels if page.name in SLOW else ())
        for page in PAGES
    ],
)
def test_examples_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    if "plot(" in page.read_text():
        pytest.importorskip("matplotlib")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    assert bool(run_all(page)) == (page.name not in WITHOUT_EXAMPLES)


def test_the_step_of_the_readme_updates_its_cache_in_place():
    names = run(examples(README.read_text())[0], {})
    assert names["out"].shape == (7, 8, 64)
    rows = [jnp.ones((7, heads, 64), jnp.bfloat16) for heads in (8, 2, 2)]
    assert_updates_in_place(
        names["step"], names["cache_spec"], lambda cache: (*rows, cache, names["metadata"])
    )


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "docs" / "api").glob("*.md"))], ids=str)
def test_a_page_with_several_examples_says_that_they_continue_one_another(page):
    text = " ".join(page.read_text().split())
    assert len(examples(page.read_text())) < 2 or "continue one another" in text.partition("```python")[0]


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in [*DOCS, *(ROOT / "docs" / "api").glob("*.md")]:
        assert (
            f": {page.relative_to(ROOT / 'docs')}\n" in navigation
            or f"- {page.relative_to(ROOT / 'docs')}\n" in navigation
        )


@pytest.mark.parametrize("word", ["LoRA", "dropout", "linen", "A100"])
def test_a_word_that_newcomers_search_for_is_on_a_page(word):
    assert any(word in page.read_text() for page in (README, *DOCS))


def test_the_readme_installs_what_its_examples_use():
    assert re.search(r"from a checkout with `pip install '\.\[serve\]'`", README.read_text())


def test_make_demo_installs_only_what_it_needs_and_says_where_jattn_is(tmp_path):
    command = ["make", "-n", "demo", f"VENV={tmp_path / 'venv'}"]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "-e '.[models]' jax==" in out
    assert f"The command line is {tmp_path / 'venv'}/bin/jattn" in out


@every_page
def test_commands_of_a_page_exist(page):
    for block in blocks(page.read_text()):
        assert block.language in ("python", "py", "sh", ""), block
        for line in block.code.splitlines() if block.language == "sh" else ():
            first, *words = shlex.split(line, comments=True)
            if first == "make":
                assert f"\n{words[0]}:" in MAKEFILE, line
            elif first == "jattn":
                build_parser().parse_args(words)
            elif first == "curl":
                assert urllib.parse.urlsplit(words[0]).path in {route.path for route in ROUTES}, line
            else:
                assert [first, *words[:2]] == ["python", "-m", "benchmarks"], line
                assert words[2] in SUITES, line
    text = page.read_text()
    assert [name for name in re.findall(r"`make (\S+)`", text) if f"\n{name}:" not in MAKEFILE] == []
    assert set(re.findall(r"`python -m benchmarks ([a-z0-9-]+)", text)) <= SUITES.keys()
    for name in re.findall(r"`python -m examples\.(\w+)", text):
        assert (ROOT / "examples" / f"{name}.py").exists() or (ROOT / "examples" / name).is_dir(), name


@every_page
def test_links_of_a_page_exist(page):
    def anchor(title):
        return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")

    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        path, _, section = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        titles = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE) if section else []
        assert not section or section in map(anchor, titles), target


@every_page
def test_names_of_jattn_on_a_page_exist(page):
    text = page.read_text().replace("jattn.plugins", "")  # a group of entry points
    for name in re.findall(r"\bjattn\.((?:\w+\.)*\w+)\b", text):
        names = jattn
        for part in name.split("."):
            assert hasattr(names, part), f"jattn.{name}"
            names = getattr(names, part)


def test_the_readme_links_to_every_page_and_example():
    for path in (*DOCS, *(ROOT / "examples").glob("*.py")):
        if path.stem not in ("__init__", "demo", "train_tiny", "python_sources"):
            assert f"]({path.relative_to(ROOT)})" in README.read_text(), path


def test_changelog_and_contributing_stay_short():
    assert len((ROOT / "CHANGELOG.md").read_text().splitlines()) <= 120
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 60


def test_examples_share_the_names_of_their_page_and_errors_are_raised(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```\nmake\n```\n## A\n```python\na = 1\n```\n```py\nb = a + 1\n```\n")
    assert blocks(page.read_text())[:2] == [Block("", "", "make\n"), Block("A", "python", "a = 1\n")]
    assert run_all(page)["b"] == 2
    with pytest.raises(NameError, match="missing"):
        run(Block("A", "py", "missing + 1\n"), {})


def test_functions_in_the_table_of_vllm_names_exist():
    rows = (ROOT / "docs" / "vllm.md").read_text().splitlines()
    promised = set()
    for row in rows:
        if row.startswith("| ") and row.count(" | ") == 1:
            vllm, jattn_name = row.removeprefix("| ").removesuffix(" |").split(" | ")
            promised |= set(re.findall(r"`(?:jattn\.(?:vllm\.)?)?([a-z_]+)`", jattn_name))
            if jattn_name.startswith("the same name"):
                promised |= set(vllm.split(", "))
    assert {"attend", "write_kv", "split_prefill_and_decode", "dense_to_crow_col"} <= promised
    assert sorted(promised - set(jattn.__all__) - set(jattn.vllm.__all__)) == []


def test_options_of_vllm_serve_are_on_its_page():
    page = (ROOT / "docs" / "vllm.md").read_text()
    (table,) = re.findall(r"\n## The engine and `vllm serve`\n(.*?)\n## ", page, re.DOTALL)
    vllm_options = [row.split(" | ")[0] for row in table.splitlines() if row.startswith("| ")]
    names = {name.partition("=")[0] for name in (*VLLM_OPTIONS, *VLLM_DEFAULTS)}
    assert set(re.findall(r"--[\w-]+", " ".join(vllm_options))) == names
    documented_options = {option for row in table.splitlines() for option in re.findall(r"`(--[\w-]+)", row)}
    (subparsers,) = build_parser()._subparsers._group_actions
    assert documented_options <= set(subparsers.choices["serve"]._option_string_actions)
    assert not set(VLLM_OPTIONS) & set(subparsers.choices["serve"]._option_string_actions)


def test_the_folder_map_names_every_package():
    (drawn,) = (block.code for block in blocks(FLOW) if block.heading == "Folder map")
    folder, names = ROOT, set()
    for line in drawn.splitlines():
        named = re.match(r"( *)((?:[\w.]+/? )*[\w.]+/?)(?: {2,}|$)", line)
        assert named is not None, line
        folder = folder if named[1] else ROOT / named[2]
        paths = [folder / name for name in named[2].split()] if named[1] else [folder]
        assert [path for path in paths if not path.exists()] == []
        names |= set(paths)
    packages = {
        path
        for package in ("jattn", "pallas_kernels")
        for path in (ROOT / package).iterdir()
        if (path / "__init__.py").exists()
    }
    assert packages <= names


def names_in(file):
    """Return the functions, classes, fields, assigned and imported names of a Python file."""
    tree = ast.parse(file.read_text())
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    targets = [node.target for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)]
    targets += [target for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in node.targets]
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names |= {alias.name for node in imported for alias in node.names}
    return names | {target.id for target in targets if isinstance(target, ast.Name)}


def test_walkthroughs_name_files_and_functions_that_exist():
    walkthroughs = FLOW.split("\n## Walkthroughs\n")[1].split("\n## ")[0]
    file = r"`((?:jattn|pallas_kernels|tests)/[\w/]+\.\w+)`"
    steps = re.findall(rf"{file}(.*?)(?={file}|\n\n|\n\d|\Z)", walkthroughs, re.DOTALL)
    assert len(steps) >= 12
    for path, text, _ in steps:
        names = {name.split(".")[-1] for name in re.findall(r"`([\w.]+)`", text)}
        assert names <= names_in(ROOT / path), path


def test_kernels_page_has_the_table_of_what_each_kernel_supports():
    head, *rows = support.format_kernels()
    lines = [head, ["---"] * len(head), *rows]
    assert "".join(f"| {' | '.join(cells)} |\n" for cells in lines) in (ROOT / "docs/kernels.md").read_text()


def test_every_list_of_8_bit_types_is_the_same():
    lists = cache_write.EIGHT_BIT, support.EIGHT_BIT_DTYPES, mma.EIGHT_BIT_NAMES
    stored = {side.dtype for sides in QUANTIZATIONS.values() for side in sides if side.dtype is not None}
    for dtypes in lists:
        assert {jnp.dtype(x) for x in dtypes} == {jnp.dtype(x) for x in stored}


@dataclasses.dataclass(frozen=True)
class Multiples(jattn.masks.Mask):
    """A user-defined mask: keys at multiples of a number."""

    step: int | jax.Array

    def visible(self, pairs):
        return pairs.key % self.step == 0

    def coverage(self, tiles):
        return jattn.masks.Coverage(any_visible=True, all_visible=False)


def test_a_mask_of_a_user_needs_kernel_support_only_if_it_has_arrays():
    static, with_array = (type("Multiples", (Multiples,), {}) for _ in range(2))
    jax.tree_util.register_static(static)
    jax.tree_util.register_dataclass(with_array, data_fields=["step"], meta_fields=[])
    assert static(3).why_no_kernel(tiling()) is None
    assert "Multiples" in with_array(jnp.int32(3)).why_no_kernel(tiling())


def test_tables_and_pictures_match_the_raw_rows():
    assert (ROOT / "docs" / "benchmarks.md").read_text() == benchmarks_page()
    for page in pages.PAGES:
        assert pages.filled(page.read_text()) == page.read_text()
    drawings = pages.pictures(README.read_text())
    assert len(drawings) == len(pages.PICTURES) == 2
    for path, drawing in drawings.items():
        assert (ROOT / path).read_text() == drawing


def test_a_picture_shows_every_engine_that_has_a_row(monkeypatch):
    row = {"gpu": "G", "jax": "1", "name": "d", "quantization": "none", "us": 10.0, "gb_per_s": 300.0}
    peers = [
        {"workload": "d", "peer": "fa3_page16", "us": 20.0},
        {"workload": "d", "peer": "flashinfer_decode_bf16_page16", "us": 15.0},
    ]
    files = {"ours-2026-01-02.jsonl": [{"gpu": "G", "jax": "1", "gb_per_s": 400.0}, row], "peers": peers}
    monkeypatch.setattr(bars, "read_rows", files.__getitem__)
    panels = bars.decode_panels("ours-2026-01-02.jsonl", "peers")
    assert panels[0].cases == {"d": {"jattn": 300.0, "FlashAttention-3": 150.0, "FlashInfer": 200.0}}
    caption = bars.caption("Decode", "ours-2026-01-02.jsonl", panels)
    assert caption == "Decode; G, 2026-01-02, jax 1. No rows of cuDNN in this run. Longer is faster.\n"
    assert bars.svg(panels).count("<rect") == 3 + 3
    assert "| d | 300 | 150 | 200 |" in bars.numbers(panels[0])
