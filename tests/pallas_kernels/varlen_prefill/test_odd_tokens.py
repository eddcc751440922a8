"""Arrays whose number of tokens is no multiple of 8 are read and written in place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import jattn
from pallas_kernels.shared.memory import split_tail
from pallas_kernels.shared.score import Score
from pallas_kernels.varlen_prefill import PrefillSizes, varlen_prefill
from tests import aot
from tests.attention_problems import AttentionProblem, Setting
from tests.pallas_kernels.varlen_prefill.odd_aot_cases import TOKENS, aot_cases


@pytest.mark.parametrize("tokens", [64, 72, 139, 200])
def test_each_tile_of_rows_lies_in_the_array_or_in_its_tail(tokens):
    x = jnp.arange(tokens * 128, dtype=jnp.float32).reshape(tokens, 1, 128)
    rows, tail = split_tail(x, 64)
    assert (tail is None) == (tokens % 8 == 0)
    want = np.pad(x, ((0, 64 + -tokens % 8), (0, 0), (0, 0)))
    for first in range(0, tokens, 8):
        source, start = rows, first
        if tail is not None and first >= len(rows) + 8 - 64:
            source, start = tail, first - (len(rows) + 8 - 64)
        tile = np.pad(source, ((0, 64), (0, 0), (0, 0)))[start : start + 64]
        np.testing.assert_array_equal(tile, want[first : first + 64])


@pytest.mark.parametrize("tokens", [3, 57])
def test_an_array_shorter_than_a_tile_is_padded(tokens):
    rows, tail = split_tail(jnp.ones((tokens, 1, 128)), 64)
    assert tail is None
    assert rows.shape[0] == tokens + -tokens % 8


def test_copies_are_found_in_a_program():
    text = """HloModule m

%fused (p0: bf16[8]) -> bf16[4] {
  %p0 = bf16[8]{0} parameter(0)
  %slice.1 = bf16[6]{0} slice(%p0), slice={[0:6]}
  ROOT %call = bf16[4]{0} custom-call(%slice.1), custom_call_target="mosaic_gpu_v2"
}

ENTRY %main (a: bf16[8]) -> bf16[16] {
  %a = bf16[8]{0} parameter(0)
  ROOT %pad.2 = bf16[2,8]{1,0} pad(%a, %zero), padding=0_8
}
"""
    assert aot.largest_copy(text) == 32


def test_packed_keys_and_queries_of_odd_numbers_equal_float64():
    """One tile of queries and one of keys start where the tail does; the incomplete groups have tokens."""
    spec = jattn.AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=64)
    problem = AttentionProblem(
        Setting(spec=spec, query_lens=[70, 117], seq_lens=[80, 185], dtype="bfloat16", kv="no_cache")
    )
    assert (problem.query.shape[0], problem.kv.k.shape[0]) == (187, 270)
    run = functools.partial(
        varlen_prefill, score=Score(scale=spec.softmax_scale), sizes=PrefillSizes(tile_kv=64, ctas=2),
        return_lse=True, interpret=plgpu.InterpretGPUParams(),
    )  # fmt: skip
    lens = {"query_start_loc": problem.metadata.query_start_loc, "seq_lens": problem.metadata.seq_lens}
    kv = problem.kv
    problem.check(*jax.jit(run)(jnp.asarray(problem.query), kv.k, kv.v, kv_start_loc=kv.kv_start_loc, **lens))


@pytest.mark.kernels
def test_attend_copies_neither_queries_nor_keys_nor_the_output():
    """Padding the queries took 95 us of 700 us with 24 prompts."""
    aot.require_plugin()
    copied = aot.copied_bytes("tests.pallas_kernels.varlen_prefill.odd_aot_cases", list(aot_cases()))
    assert list(copied) == list(aot_cases())
    assert not {name: num_bytes for name, num_bytes in copied.items() if num_bytes > TOKENS * 8 * 96 * 2 / 8}
