"""What the README says is true: its example runs, its names exist."""

import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

import jattn
from benchmarks.table import filled
from tests.in_place import check_in_place

README = (pathlib.Path(__file__).parents[1] / "README.md").read_text()
GLOSSARY = README.split("## From vLLM to jattn")[1].split("\n## ")[0]


def test_the_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    assert names["out"].shape == (7, 8, 64)
    assert len(example.strip().splitlines()) <= 24


def test_the_examples_step_writes_into_the_cache_it_is_given():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    rows = [jnp.ones((7, heads, 64), jnp.bfloat16) for heads in (8, 2, 2)]
    check_in_place(names["step"], names["cache_spec"], lambda cache: (*rows, cache, names["metadata"]))


def test_the_masks_example_runs():
    pytest.importorskip("matplotlib")
    (example,) = re.findall(r"```py\n(.*?)```", README, re.DOTALL)
    names = {"jax": jax, "jnp": jnp, "jattn": jattn}
    exec(compile(example, "README.md", "exec"), names)
    lists = names["tiles"].num_partial + names["tiles"].num_full
    assert lists.shape == (16, 8)
    assert int(lists.max()) <= 8
    assert 0 < names["share"] < 0.3
    assert [axis.get_title() for axis in names["picture"].axes] == [f"head {n}" for n in range(4)]


def test_every_function_that_the_glossary_promises_exists():
    promised = set()
    for row in GLOSSARY.splitlines():
        if row.startswith("| ") and row.count(" | ") == 1:
            vllm, here = row.removeprefix("| ").removesuffix(" |").split(" | ")
            promised |= set(re.findall(r"`([a-z_]+)`", here))
            if here.startswith("the same name"):
                promised |= set(vllm.split(", "))
    assert {"attend", "write_kv", "split_prefill_and_decode", "dense_to_crow_col"} <= promised
    assert [name for name in sorted(promised) if not hasattr(jattn, name)] == []


def test_the_two_commands_stand_at_the_top():
    top = README.split("## ")[0]
    assert "make demo" in top
    assert "make test" in top


def test_the_tables_are_those_of_the_raw_rows():
    assert filled(README) == README
    assert "| d_64x4k |" in README
    assert "| p_ragged |" in README
    assert "| int8_token_head |" in README
