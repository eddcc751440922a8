"""What the README says is true: its code runs, its commands and names exist."""

import pathlib
import re

import jax.numpy as jnp
import pytest

import jattn
from benchmarks.table import PAGES, filled
from tests.in_place import check_in_place
from tests.readme import Block, blocks, examples, run

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FIRST, *OTHERS = examples(README)
GLOSSARY = README.split("## From vLLM to jattn")[1].split("\n## ")[0]


@pytest.fixture(scope="module")
def names():
    """What the first example leaves behind."""
    return run(FIRST, {})


def test_the_first_example_runs_by_itself_and_is_short(names):
    assert names["out"].shape == (7, 8, 64)
    assert len(FIRST.code.strip().splitlines()) <= 24


def test_the_first_example_s_step_writes_into_the_cache_it_is_given(names):
    rows = [jnp.ones((7, heads, 64), jnp.bfloat16) for heads in (8, 2, 2)]
    check_in_place(names["step"], names["cache_spec"], lambda cache: (*rows, cache, names["metadata"]))


@pytest.mark.parametrize("block", OTHERS, ids=lambda block: block.heading)
def test_an_example_runs_behind_the_first(block, names):
    run(block, names)


def test_the_masks_example_lists_a_prompt_s_tiles(names):
    pytest.importorskip("matplotlib")
    (block,) = (block for block in OTHERS if "BlockMask" in block.code)
    made = run(block, names)
    lists = made["tiles"].num_partial + made["tiles"].num_full
    assert lists.shape == (16, 8)
    assert int(lists.max()) <= 8
    assert 0 < made["share"] < 0.3
    assert [axis.get_title() for axis in made["picture"].axes] == [f"head {n}" for n in range(4)]


def test_every_other_block_is_of_make_s_commands_or_a_drawing():
    makefile = (ROOT / "Makefile").read_text()
    for block in blocks(README):
        assert block.language in ("python", "py", "sh", ""), block
        for target in re.findall(r"^make (\S+)", block.code, re.MULTILINE):
            assert f"\n{target}:" in makefile, target


def test_it_says_how_to_install_what_no_index_has():
    assert "`pip install '.[cuda13,models]'`" in README
    assert re.findall(r"pip install '?jattn", README) == []


def test_blocks_are_found_with_the_heading_above_them():
    text = "```\nmake\n```\n## A\nx\n```py\na = 1\nb = 2\n```\n### b\n```python\n```\n"
    assert blocks(text) == [
        Block("", "", "make\n"),
        Block("A", "py", "a = 1\nb = 2\n"),
        Block("A", "python", ""),
    ]
    assert [block.language for block in examples(text)] == ["py", "python"]


def test_a_broken_example_is_an_error():
    with pytest.raises(NameError, match="nowhere"):
        run(Block("A", "py", "nowhere + 1\n"), {})


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


def test_the_two_commands_stand_at_the_top():
    top = README.split("## ")[0]
    assert "make demo" in top
    assert "make test" in top


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_tables_are_those_of_the_raw_rows(page):
    assert filled(page.read_text()) == page.read_text()


def test_no_kind_of_table_is_missing():
    assert "| d_64x4k |" in README
    assert "| p_ragged |" in README
    assert "| int8_token_head |" in README
    assert all("<!-- GPU tests: gpu-tests.jsonl -->\n" in page.read_text() for page in PAGES)
