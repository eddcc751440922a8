"""What the pages say is true: code runs; commands, names, links, files exist; tables are the rows'."""

import ast
import dataclasses
import pathlib
import re
import shlex
import urllib.parse

import jax
import jax.numpy as jnp
import pytest

import jattn
from benchmarks.__main__ import SUITES
from benchmarks.tables import bars
from benchmarks.tables.pages import PAGES, PICTURES, filled, pictures
from jattn.cache import write as cache_write
from jattn.cache.spec import QUANTIZATIONS
from jattn.implementations.mosaic_gpu.kernel_masks import why_not_kernel_mask
from jattn.serving.cli.main import VLLM_OPTIONS, build_parser
from jattn.serving.server.app import ROUTES
from pallas_kernels import support
from pallas_kernels.ptx import mma
from tests.assertions import assert_updates_in_place
from tests.readme import Block, blocks, examples, run, run_all

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCS = sorted((ROOT / "docs").glob("*.md"))
GLOSSARY = (ROOT / "docs" / "vllm.md").read_text().split("## What is deliberately different")[0]
FLOW = (ROOT / "docs" / "flow.md").read_text()
FIRST, *OTHERS = examples(README)
of_page = pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=lambda page: page.name)


@pytest.fixture(scope="module")
def names():
    """What the README's example leaves behind."""
    return run(FIRST, {})


def test_the_first_example_runs_by_itself_and_is_short(names):
    assert names["out"].shape == (7, 8, 64)
    assert len(FIRST.code.strip().splitlines()) <= 24


def test_the_first_example_s_step_writes_into_the_cache_it_is_given(names):
    rows = [jnp.ones((7, heads, 64), jnp.bfloat16) for heads in (8, 2, 2)]
    assert_updates_in_place(
        names["step"], names["cache_spec"], lambda cache: (*rows, cache, names["metadata"])
    )


LONG = ("serving.md", "sparsity.md", "models.md", "training.md")  # pages that train, serve or load


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.name, marks=pytest.mark.kernels if page.name in LONG else ())
        for page in [ROOT / "README.md", *DOCS]
    ],
)
def test_a_page_s_examples_run_in_their_order(page, tmp_path, monkeypatch):
    if "plot(" in page.read_text():
        pytest.importorskip("matplotlib")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    made = run_all(page)
    assert bool(made) == (page.name not in ("benchmarks.md", "kernels.md", "vllm.md"))


@pytest.mark.kernels
def test_the_masks_example_lists_a_prompt_s_tiles():
    block, drawn, *_ = examples((ROOT / "docs" / "sparsity.md").read_text())
    made = run(block, {})
    lists = made["tiles"].num_partial + made["tiles"].num_full
    assert lists.shape == (16, 8)
    assert int(lists.max()) <= 8
    assert 0 < made["share"] < 0.3
    assert "plot(chosen, 1024, num_q_heads=8)" in drawn.code
    pytest.importorskip("matplotlib")
    picture = jattn.sparsity.plot(made["chosen"], 1024, num_q_heads=8)
    assert [axis.get_title() for axis in picture.axes] == [f"head {n}" for n in range(4)]


@of_page
def test_every_other_block_is_of_commands_that_exist_or_a_drawing(page):
    makefile = (ROOT / "Makefile").read_text()
    for block in blocks(page.read_text()):
        assert block.language in ("python", "py", "sh", ""), block
        for line in block.code.splitlines() if block.language == "sh" else ():
            first, *words = shlex.split(line, comments=True)
            if first == "make":
                assert f"\n{words[0]}:" in makefile, line
            elif first == "jattn":
                build_parser().parse_args(words)
            elif first == "curl":
                assert urllib.parse.urlsplit(words[0]).path in {route.path for route in ROUTES}, line
            else:
                assert [first, *words[:2]] == ["python", "-m", "benchmarks"], line
                assert words[2] in SUITES, line


@of_page
def test_every_command_in_a_sentence_exists(page):
    text = page.read_text()
    makefile = (ROOT / "Makefile").read_text()
    assert [name for name in re.findall(r"`make (\S+)`", text) if f"\n{name}:" not in makefile] == []
    assert set(re.findall(r"`python -m benchmarks ([a-z0-9-]+)", text)) <= SUITES.keys()
    for name in re.findall(r"`python -m examples\.(\w+)", text):
        assert (ROOT / "examples" / f"{name}.py").exists() or (ROOT / "examples" / name).is_dir(), name


@of_page
def test_every_link_leads_somewhere(page):
    anchor = lambda title: re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if target.startswith("http"):
            continue
        path, _, part = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), target
        titles = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE) if part else []
        assert not part or part in map(anchor, titles), target


def test_the_readme_is_short_and_its_top_has_the_two_commands():
    assert len(README.splitlines()) <= 150
    top = README.split("## ")[0]
    assert "make demo" in top
    assert "make test" in top


def test_the_readme_leads_to_every_page_and_every_example():
    for path in (*DOCS, *(ROOT / "examples").glob("*.py")):
        if path.stem not in ("__init__", "demo", "train_tiny", "python_sources"):
            assert f"]({path.relative_to(ROOT)})" in README, path


def test_it_says_how_to_install_what_no_index_has():
    assert "`pip install '.[cuda13,models]'`" in README
    sources = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *DOCS,
        *(ROOT / "jattn").rglob("*.py"),
        *(ROOT / "examples").rglob("*.py"),
    ]
    assert [path for path in sources if re.search(r"pip install '?jattn", path.read_text())] == []


def test_blocks_are_found_with_the_heading_above_them():
    text = "```\nmake\n```\n## A\nx\n```py\na = 1\n# b\n```\n### b\n```python\n```\n"
    assert blocks(text) == [
        Block("", "", "make\n"),
        Block("A", "py", "a = 1\n# b\n"),
        Block("b", "python", ""),
    ]
    assert [block.language for block in examples(text)] == ["py", "python"]


def test_a_broken_example_is_an_error():
    with pytest.raises(NameError, match="nowhere"):
        run(Block("A", "py", "nowhere + 1\n"), {})


def test_a_block_knows_the_names_of_those_before_it(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\na = 1\n```\n```py\nb = a + 1\n```\n")
    assert run_all(page)["b"] == 2


def test_every_function_that_the_glossary_promises_exists():
    promised = set()
    for row in GLOSSARY.splitlines():
        if row.startswith("| ") and row.count(" | ") == 1:
            vllm, here = row.removeprefix("| ").removesuffix(" |").split(" | ")
            promised |= set(re.findall(r"`([a-z_]+)`", here))
            if here.startswith("the same name"):
                promised |= set(vllm.split(", "))
    assert {"attend", "write_kv", "split_prefill_and_decode", "dense_to_crow_col"} <= promised
    assert sorted(promised - set(jattn.__all__) - set(jattn.vllm.__all__)) == []


def test_every_name_of_jattn_in_the_pages_exists():
    for page in (ROOT / "README.md", *DOCS):
        for name in re.findall(r"\bjattn\.((?:\w+\.)*\w+)\b", page.read_text()):
            found = jattn
            for part in name.split("."):
                assert hasattr(found, part), f"jattn.{name} in {page.name}"
                found = getattr(found, part)


def test_options_of_vllm_that_are_told_of_are_in_its_page():
    page = (ROOT / "docs" / "vllm.md").read_text()
    (table,) = re.findall(r"\n## The engine and `vllm serve`\n(.*?)\n## ", page, re.DOTALL)
    theirs = [row.split(" | ")[0] for row in table.splitlines() if row.startswith("| ")]
    assert set(re.findall(r"--[\w-]+", " ".join(theirs))) == set(VLLM_OPTIONS)
    ours = {option for row in table.splitlines() for option in re.findall(r"`(--[\w-]+)", row)}
    (subparsers,) = build_parser()._subparsers._group_actions
    assert ours <= set(subparsers.choices["serve"]._option_string_actions)
    assert not set(VLLM_OPTIONS) & set(subparsers.choices["serve"]._option_string_actions)


def test_every_name_that_the_pages_find_in_support_exists():
    found = set()
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS):
        text = page.read_text()
        found |= set(re.findall(r"(?:`\.?|kernels\.support\.)(why_not\w*)", text))
    assert {"why_not_decode", "why_not_prefill", "why_not_write"} <= found
    assert [name for name in found - {"why_not_kernel_mask"} if not hasattr(support, name)] == []


def test_the_folder_map_names_what_there_is():
    (drawn,) = (block.code for block in blocks(FLOW) if block.heading == "The folder map")
    folder, found = ROOT, set()
    for line in drawn.splitlines():
        named = re.match(r"( *)((?:[\w.]+/? )*[\w.]+/?)(?: {2,}|$)", line)
        assert named is not None, line
        folder = folder if named[1] else ROOT / named[2]
        there = [folder / name for name in named[2].split()] if named[1] else [folder]
        assert [path for path in there if not path.exists()] == []
        found |= set(there)
    everything = {
        path
        for package in ("jattn", "pallas_kernels")
        for path in (ROOT / package).iterdir()
        if path.is_dir() and (path / "__init__.py").exists()
    }
    assert everything <= found


def names_in(file):
    """Functions, classes, their methods and fields, assigned and imported names of a Python file."""
    tree = ast.parse(file.read_text())
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    targets = [node.target for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)]
    targets += [target for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in node.targets]
    imported = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    found |= {alias.name for node in imported for alias in node.names}
    return found | {target.id for target in targets if isinstance(target, ast.Name)}


@pytest.mark.parametrize(
    "title",
    [
        "Where is a window applied in decode?",
        "Where would a new cache format be added?",
        "Where is a tile size changed?",
        "Which files does a new mask touch?",
    ],
)
def test_a_walk_goes_through_files_and_functions_that_exist(title):
    walk = FLOW.split(f"### {title}\n")[1].split("\n#")[0]
    steps = [
        step
        for paragraph in re.split(r"\n\n|\n(?=\d\.)", walk)
        for step in re.findall(
            r"`((?:jattn|pallas_kernels|tests)/[\w/]+\.\w+)`(.*?)(?=`\w+/|$)", paragraph, re.S
        )
    ]
    assert len(steps) >= 3
    for path, told in steps:
        wanted = {name.split(".")[-1] for name in re.findall(r"`([\w.]+)`", told)}
        assert wanted <= names_in(ROOT / path), path
    assert any("`" in told for _, told in steps)


def test_the_walk_to_a_cache_format_goes_by_every_list_of_formats():
    lists = cache_write.EIGHT_BIT, support.EIGHT_BIT_DTYPES, mma.EIGHT_BIT_NAMES
    stored = {one.dtype for both in QUANTIZATIONS.values() for one in both if one.dtype is not None}
    for formats in lists:
        assert {jnp.dtype(x) for x in formats} == {jnp.dtype(x) for x in stored}


@dataclasses.dataclass(frozen=True)
class Multiples(jattn.masks.Mask):
    """A mask that somebody made by the walk: keys at multiples of a number, or where an array says so."""

    step: int | jax.Array

    def visible(self, pairs):
        return pairs.key % self.step == 0

    def coverage(self, tiles):
        return jattn.masks.Coverage(any_visible=True, all_visible=False)


def test_a_mask_touches_the_kernels_only_if_it_has_arrays():
    static, with_array = (type("Multiples", (Multiples,), {}) for _ in range(2))
    jax.tree_util.register_static(static)
    jax.tree_util.register_dataclass(with_array, data_fields=["step"], meta_fields=[])
    assert why_not_kernel_mask(static(3), 128) is None
    reason = why_not_kernel_mask(with_array(jnp.int32(3)), 128)
    assert reason == "there is no kernel for the arrays of a Multiples"


def words_of(text):
    """Word -> its meaning, of a page's table of words."""
    section = text.split("\n## Words")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| ([^|]+?) \| (.*) \|$", section, re.MULTILINE))


def test_a_word_means_the_same_to_users_and_in_the_code():
    flow, code = words_of(FLOW), words_of((ROOT / "CONTRIBUTING.md").read_text())
    shared = (flow.keys() & code.keys()) - {"word"}
    assert {"block", "slot", "span", "split", "chunk"} <= shared
    assert {word: flow[word] for word in shared} == {word: code[word] for word in shared}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tables_are_those_of_the_raw_rows(page):
    assert filled(page.read_text()) == page.read_text()


def test_the_pictures_are_those_of_the_raw_rows():
    drawings = pictures(README)
    assert len(drawings) == len(PICTURES) == 2
    for path, drawing in drawings.items():
        assert (ROOT / path).read_text() == drawing


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("page", ["#ffffff", "#0d1117"], ids=["light", "dark"])
def test_the_pictures_are_legible_on_github(page):
    contrast = lambda a, b: (max(a, b) + 0.05) / (min(a, b) + 0.05)
    assert contrast(luminance(bars.INK), luminance(page)) > 4
    for colour in bars.ENGINES.values():
        assert contrast(luminance(colour), luminance(page)) > 3
        assert contrast(luminance(colour), luminance("#ffffff")) > 4.5  # the numbers on the bars


def test_a_picture_shows_every_engine_that_has_a_row(monkeypatch):
    row = {"gpu": "G", "jax": "1", "name": "d", "quantization": "none", "us": 10.0, "gb_per_s": 300.0}
    peers = [
        {"workload": "d", "peer": "fa3_page16", "us": 20.0},
        {"workload": "d", "peer": "flashinfer_decode_bf16_page16", "us": 15.0},
    ]
    files = {"ours-2026-01-02.jsonl": [{"gpu": "G", "jax": "1", "gb_per_s": 400.0}, row], "peers": peers}
    monkeypatch.setattr(bars, "rows_of", files.__getitem__)
    panels = bars.decode_panels("ours-2026-01-02.jsonl", "peers")
    assert panels[0].cases == {"d": {"jattn": 300.0, "FlashAttention-3": 150.0, "FlashInfer": 200.0}}
    caption = bars.caption("Decode", "ours-2026-01-02.jsonl", panels)
    assert caption == "Decode; G, 2026-01-02, jax 1. No rows of cuDNN in this run. Longer is faster.\n"
    assert bars.svg(panels).count("<rect") == 3 + 3


def test_no_kind_of_table_is_missing():
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    assert "| d_64x4k |" in text
    assert "| p_ragged |" in text
    assert "| int8_token_head |" in text
    assert "| local_strided_64x32k |" in text
    assert "| graphs_llama8b_8x1024 |" in text
    assert "| NHD, 8192 |" in text
    assert "| FA3, us | FlashInfer, us | cuDNN, us | ours / best |" in text
    assert "| FA3 | FlashInfer | cuDNN | ours / best |" in text
    assert all("<!-- GPU tests: gpu-tests.jsonl -->\n" in page.read_text() for page in PAGES)
