"""jax.vmap of the kernels, which adds one axis to the grid."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import cache_write as write
from pallas_kernels import paged_decode as decode
from pallas_kernels import varlen_prefill as prefill
from pallas_kernels.shared.score import Score
from tests import aot
from tests.pallas_kernels.cache_read import test_entry as cache_read_tests
from tests.pallas_kernels.cache_write import test_entry as cache_write_tests
from tests.pallas_kernels.paged_decode import decode_aot_cases

SIZE, HEADS, DIM, BLOCKS = 16, 2, 64, 12
KEY, VALUE = 1, 2


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def decode_problem(is_interpreted):
    """Return two decode steps over one cache; requests are split, so that the combine kernel runs, too."""
    cache = (BLOCKS, SIZE, HEADS, DIM)
    table = jnp.asarray([np.arange(12).reshape(2, 6), np.arange(12)[::-1].reshape(2, 6)], jnp.int32)
    lens = jnp.asarray([[90, 7], [0, 70]], jnp.int32)
    sizes = decode.DecodeSizes(tile_kv=64, stages=2, ctas=2 * HEADS, max_rows=16)
    run = functools.partial(decode.paged_decode, score=Score(scale=0.1), sizes=sizes)
    run = functools.partial(run, interpret=plgpu.InterpretGPUParams() if is_interpreted else None)
    arguments = normal(0, 2, 2, 4, DIM), normal(KEY, *cache), normal(VALUE, *cache), table, lens
    return run, arguments, (0, None, None, 0, 0)


def prefill_problem(is_interpreted):
    """Return two prefill steps over the same packed keys."""
    sizes = prefill.PrefillSizes(tile_kv=64, stages=2, ctas=3)
    starts = jnp.asarray([0, 20, 30], jnp.int32)

    def run(query, key, value):
        return prefill.varlen_prefill(
            query,
            key,
            value,
            query_start_loc=starts,
            seq_lens=jnp.asarray([20, 10], jnp.int32),
            kv_start_loc=starts[:-1],
            score=Score(scale=0.1),
            sizes=sizes,
            interpret=plgpu.InterpretGPUParams() if is_interpreted else None,
        )[0]

    keys_and_values = (normal(seed, 30, HEADS, DIM) for seed in (KEY, VALUE))
    return run, (normal(0, 2, 30, 2, DIM), *keys_and_values), (0, None, None)


def write_problem(is_interpreted):
    """Return two steps that write to one cache; each of them gets a copy of it."""
    interpret = plgpu.InterpretGPUParams() if is_interpreted else None
    new, cache = (2, 3, HEADS, DIM), (BLOCKS, SIZE, HEADS, DIM)
    slots = jnp.asarray([[1, 9, -1], [2, -1, 20]], jnp.int32)
    run = lambda *arguments: write.cache_write(*arguments, interpret=interpret)[:2]
    arguments = *(normal(s, *new) for s in (0, 1)), *(normal(s, *cache) for s in (2, 3)), slots
    return run, arguments, (0, 0, None, None, 0)


PROBLEMS = [decode_problem, prefill_problem, write_problem]


def check(problem, is_interpreted):
    run, arguments, axes = problem(is_interpreted)
    together = jax.jit(jax.vmap(run, in_axes=axes))(*arguments)
    single_call = jax.jit(run)
    for i in range(2):
        alone = single_call(*(x if axis is None else x[i] for x, axis in zip(arguments, axes, strict=True)))
        for actual, expected in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
            np.testing.assert_array_equal(actual[i], expected)


@pytest.mark.parametrize(
    "problem", [decode_problem, pytest.param(prefill_problem, marks=pytest.mark.slow), write_problem]
)
def test_vmapped_kernels_give_the_same_bits_as_single_calls(problem):
    check(problem, is_interpreted=True)


@pytest.mark.gpu
@pytest.mark.parametrize("problem", PROBLEMS)
def test_vmapped_kernels_give_the_same_bits_as_single_calls_on_a_gpu(problem):
    check(problem, is_interpreted=False)


def aot_cases():
    """Return kernels with all arguments mapped, and prefill of 30 tokens with mapped queries."""
    cases = {}
    for module in (decode_aot_cases, cache_read_tests, cache_write_tests):
        name, (run, arguments, *_) = next(iter(module.aot_cases().items()))
        stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2, *x.shape), x.dtype), arguments)
        cases[f"{module.__name__}-{name}"] = (jax.vmap(run), stacked)
    run, arguments, axes = prefill_problem(is_interpreted=False)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    cases["odd tokens"] = (jax.vmap(run, in_axes=axes), shapes)
    return cases


def test_vmapped_kernels_compile():
    aot.require_plugin()
    assert list(aot.compile_all("tests.pallas_kernels.test_vmap", list(aot_cases()))) == list(aot_cases())
