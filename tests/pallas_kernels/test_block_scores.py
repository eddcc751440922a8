"""block_scores and kth_largest against plain numpy, interpreted and on a GPU; select_blocks takes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jattn.sparsity.topk import KeyBounds, select_blocks
from pallas_kernels.block_scores import MAX_LEN, block_scores, kth_largest, why_not_scores
from tests import aot

INTERPRET = plgpu.InterpretGPUParams()
WAYS = [
    pytest.param(INTERPRET, id="interpreted"),
    pytest.param(None, id="gpu", marks=pytest.mark.gpu),
]
RNG = np.random.default_rng(0)
NUM_BLOCKS = 21, 0, 10  # of each request: a part of a tile, nothing


def problem(head_dim=64, dtype=jnp.bfloat16):
    """Queries of 16 heads, bounds of 70 blocks of 8 kv heads, a block table with garbage past the ends."""
    draw = lambda *shape: jnp.asarray(RNG.normal(size=shape), dtype)
    low = draw(70, 8, head_dim)
    table = RNG.permutation(70)[:63].reshape(3, 21)
    for row, num in zip(table, NUM_BLOCKS, strict=True):
        row[num:] = 2**30
    bounds = KeyBounds(low=low, high=low + jnp.abs(draw(70, 8, head_dim)))
    return draw(3, 16, head_dim), bounds, jnp.asarray(table, jnp.int32), jnp.asarray(NUM_BLOCKS, jnp.int32)


def wanted(query, bounds, table, row, num):
    """[num, kv_heads] in float64."""
    low, high = (np.asarray(x, np.float64)[np.asarray(table)[row, :num]] for x in (bounds.low, bounds.high))
    q = np.asarray(query, np.float64)[row].reshape(8, 2, -1)
    low, high = low[:, :, None], high[:, :, None]
    return np.maximum(q * low, q * high).sum(axis=-1).max(axis=-1)


@pytest.mark.parametrize("interpret", WAYS)
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, jnp.bfloat16), (128, jnp.float16)])
def test_no_product_is_larger_and_nothing_past_the_end_is_read(head_dim, dtype, interpret):
    query, bounds, table, num_blocks = problem(head_dim, dtype)
    scores = block_scores(query, bounds.low, bounds.high, table, num_blocks, interpret=interpret)
    for row, num in enumerate(NUM_BLOCKS):
        np.testing.assert_allclose(scores[row, :num], wanted(query, bounds, table, row, num), rtol=1e-5)


@pytest.mark.parametrize("interpret", WAYS)
@pytest.mark.parametrize("k", [1, 7, 300])
def test_the_kth_largest_is_that_of_a_sort(k, interpret):
    values = RNG.normal(size=(4, 300)).astype(np.float32)
    values[0, :5], values[1, 10:], values[2] = np.inf, -np.inf, np.round(values[2])
    found = kth_largest(jnp.asarray(values), k, interpret=interpret)
    np.testing.assert_array_equal(found, np.sort(values, axis=1)[:, -k])


@pytest.mark.parametrize("interpret", WAYS)
def test_select_blocks_chooses_the_same_with_the_kernels(interpret):
    query, bounds, table, num_blocks = problem()
    arguments = query, bounds, jnp.where(table < 70, table, 0), num_blocks * 16 - 3
    options = {"num_selected": 6, "block_size": 16, "num_recent": 2}
    chosen = select_blocks(*arguments, **options, implementation="mosaic_gpu", interpret=interpret)
    want = select_blocks(*arguments, **options, implementation="xla")
    np.testing.assert_array_equal(chosen.blocks, want.blocks)
    assert chosen.blocks.sum(axis=-1)[0].tolist() == [[6]] * 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": jnp.float32}, "bounds of float32"),
        ({"kv_heads": 4}, "bounds of 4 kv heads and 32 query heads"),
        ({"q_heads": 512}, "bounds of 8 kv heads and 512 query heads"),
        ({"head_dim": 80}, "bounds of heads of 80"),
    ],
)
def test_what_has_no_kernel_is_named(changes, message):
    served = {"dtype": jnp.bfloat16, "q_heads": 32, "kv_heads": 8, "head_dim": 128}
    assert why_not_scores(**served) is None
    assert message in (why_not_scores(**served | changes) or "")


def test_refusals_reach_the_caller():
    query, bounds, table, num_blocks = problem()
    wide = jnp.zeros((3, MAX_LEN + 1), jnp.int32)
    options = {"num_selected": 1, "block_size": 16, "implementation": "mosaic_gpu", "interpret": INTERPRET}
    with pytest.raises(NotImplementedError, match=f"choose among {MAX_LEN + 1} blocks"):
        select_blocks(query, bounds, wide, num_blocks, **options)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), bounds)
    with pytest.raises(NotImplementedError, match="mosaic_gpu: there is no kernel for bounds of float32"):
        select_blocks(query.astype(jnp.float32), exact, table, num_blocks, **options)
    with pytest.raises(NotImplementedError, match="block_scores: there is no kernel for bounds of float32"):
        block_scores(query, exact.low, exact.high, table, num_blocks)
    with pytest.raises(ValueError, match=r"implementation must be one of .* got 'cuda'"):
        select_blocks(query, bounds, table, num_blocks, **options | {"implementation": "cuda"})
    with pytest.raises(Exception, match=r"high must have shape \(70, 8, 64\)|Type-check"):
        block_scores(query, bounds.low, bounds.high[:, :4], table, num_blocks)


def aot_cases():
    """Name -> function and abstract arguments."""
    shape = jax.ShapeDtypeStruct

    def scores(kv_heads, head_dim):
        bounds = shape((65537, kv_heads, head_dim), jnp.bfloat16)
        query = shape((8, 4 * kv_heads, head_dim), jnp.bfloat16)
        where = shape((8, 8192), jnp.int32), shape((8,), jnp.int32)
        return block_scores, (query, bounds, bounds, *where)

    cases = {f"scores-{heads}-{dim}": scores(heads, dim) for heads, dim in ((8, 128), (8, 256), (32, 64))}
    return cases | {"kth": (lambda x: kth_largest(x, 100), (shape((64, MAX_LEN), jnp.float32),))}


@pytest.mark.slow
def test_what_ships_compiles_and_does_not_spill():
    aot.require_plugin()
    for name, kernels in aot.compile_all("tests.pallas_kernels.test_block_scores", list(aot_cases())).items():
        assert [kernel.spilled_bytes for kernel in kernels] == [0], name
