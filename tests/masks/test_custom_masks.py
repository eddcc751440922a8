"""A mask class with arrays that a user defines works with every implementation, forward and backward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import jattn
from jattn import masks
from tests.dense.test_training import arrays, as_on_a_gpu, assert_near, loss_of
from tests.implementations.mosaic_gpu.test_kernel_masks import (
    HEADS,
    KeyMajorTile,
    QueryMajorTile,
    visible_in_kernel,
)
from tests.masks.custom_masks import EveryLookup, KeyRanges, NoLookup
from tests.regions import attend_region

pytestmark = pytest.mark.kernels

RNG = np.random.default_rng(0)
BEGINS = np.arange(240)[None] + RNG.integers(-20, 20, (3, 240))
RANGES = KeyRanges(begin=jnp.asarray(BEGINS), end=jnp.asarray(BEGINS + RNG.integers(0, 200, (3, 240))))


def every_lookup():
    draw = lambda *shape: jnp.asarray(RNG.integers(0, 30, shape))
    is_shown = jnp.asarray(RNG.random(90) < 0.2)
    return EveryLookup(draw(2, 90), draw(4, 90).astype(jnp.float32), is_shown, draw(2) + 50, draw(4))


@pytest.mark.parametrize("tile_of", [QueryMajorTile, KeyMajorTile])
@pytest.mark.parametrize(("first_query", "first_key"), [(-20, 0), (0, -7), (70, 64), (128, 100)])
def test_kernels_evaluate_the_formula_of_a_mask_with_arrays(tile_of, first_query, first_key):
    tile_start = {"row": 1, "head": 2, "first_query": first_query, "first_key": first_key, "num_columns": 128}
    composed = ~every_lookup() | masks.Window(left=9) & RANGES
    unread = ~(NoLookup(jnp.zeros((2, 9), jnp.int32)) & masks.Window(left=90))
    for mask in (RANGES, every_lookup(), composed, unread):
        actual, queries, keys = visible_in_kernel(
            mask, 300, tile_of=tile_of, least_query=first_query, **tile_start
        )
        i, j = jnp.asarray(queries)[:, None], jnp.asarray(keys)[None, :]
        expected = mask.visible(masks.Pairs(jnp.int32(2), jnp.int32(1), i, j, HEADS))
        np.testing.assert_array_equal(actual, np.broadcast_to(expected, actual.shape))
        assert actual.size > 3000


@pytest.mark.parametrize("mask", [RANGES, every_lookup()], ids=["ranges", "every lookup"])
def test_coverage_of_a_mask_with_arrays_equals_its_pairs(mask):
    visible = np.stack([np.asarray(masks.dense(mask, 96, 96, num_q_heads=4, row=row)) for row in (0, 1)])
    any_visible, all_visible = masks.tile_coverage(
        mask,
        rows=jnp.repeat(jnp.arange(2), 6),
        first_query=jnp.tile(jnp.arange(0, 96, 16), 2),
        num_queries=jnp.full(12, 16),
        seq_lens=jnp.full(12, 96),
        num_heads=HEADS,
        size=(16, 32),
        max_kv_tiles=3,
    )
    tiles = visible.reshape(2, 4, 6, 16, 3, 32).transpose(0, 2, 1, 4, 3, 5).reshape(12, 4, 3, -1)
    assert (np.asarray(any_visible) >= tiles.any(axis=-1)).all()
    assert (np.asarray(all_visible) <= tiles.all(axis=-1)).all()
    assert not any_visible.all()
    if isinstance(mask, EveryLookup):  # its default coverage is exact
        np.testing.assert_array_equal(any_visible, tiles.any(axis=-1))
        np.testing.assert_array_equal(all_visible, tiles.all(axis=-1))


def test_gradients_of_a_users_mask_agree_between_implementations():
    run = functools.partial(
        jattn.attention, cu_seqlens=jnp.asarray((0, 70, 70, 200)), causal=True, mask=RANGES, return_lse=True
    )
    qkv = arrays()
    by_xla, by_reference = (
        jax.jit(jax.grad(loss_of(functools.partial(run, implementation=name))))(qkv)
        for name in ("xla", "reference")
    )
    with as_on_a_gpu() as called:
        by_kernel = jax.jit(jax.grad(loss_of(functools.partial(run, implementation="mosaic_gpu"))))(qkv)
    assert set(called) == {"attend", "gradients"}
    assert_near(by_reference, by_xla)
    assert_near(by_kernel, by_xla)


def test_attend_with_a_users_mask_equals_the_reference():
    q, k, v = arrays(160)
    spec = jattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=64)
    metadata = jattn.build_batch_metadata([40, 100], [60, 100], [range(1, 5), range(5, 12)], block_size=16)
    cache = jattn.PagedCache.create(
        jattn.CacheSpec(num_blocks=12, block_size=16, num_kv_heads=2, head_dim=64)
    )
    slots = jnp.arange(160) + 16
    cache = jattn.write_kv(cache, k, v, slots)
    mask = RANGES.slice_rows(1) | masks.Sinks(2)
    arguments = q[: metadata.bucket.max_tokens], cache, metadata
    by_kernel = functools.partial(attend_region, spec=spec, interpret=plgpu.InterpretGPUParams())
    by_reference = functools.partial(jattn.attend, spec=spec, implementation="reference", return_lse=True)
    (out, lse), (expected, expected_lse) = (
        jax.jit(run)(*arguments, mask=mask) for run in (by_kernel, by_reference)
    )
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(expected, np.float32), atol=2e-2)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-2)
