"""Pools and packed keys of more than 2^31 elements, on a GPU.

Results past the 2^31st element of a large array are compared bit for bit with those of a small array. Large
arrays are created on the device and are zero elsewhere.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks
from pallas_kernels.cache_read import cache_read
from pallas_kernels.cache_write import cache_write
from tests.contract import case_id
from tests.covering_array import covering_array

pytestmark = pytest.mark.gpu

SIZE, HEADS, WIDTH = 64, 2, 128
SMALL, LARGE = 13, 140_000  # blocks
IDS = np.random.default_rng(0).permutation(SMALL - 1) + 1  # ids of the small pool's blocks in the large one
FAR = np.where(np.arange(SMALL - 1) % 4 == 3, IDS, LARGE - IDS)  # most at the large pool's end
LENS = {"decode": ([1, 1], [333, 300]), "prompt": ([70, 40], [333, 300])}


def draw(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def block_shape(layout):
    return (SIZE, HEADS, WIDTH) if layout == "NHD" else (HEADS, SIZE, WIDTH)


@functools.partial(jax.jit, static_argnums=0)
def enlarged(blocks, small):
    """Return a pool of zeros with the blocks of the small pool at the given ids."""
    large = jnp.zeros((blocks, *small.shape[1:]), small.dtype)
    assert large.size > 2**31 or small.ndim == 3
    return large.at[jnp.asarray(FAR)].set(small[jnp.asarray(IDS)])


def small_cache(layout, stored):
    """Return a cache, with random scales per token and head if it has any."""
    k, v = (draw(seed, SMALL, *block_shape(layout)) for seed in (0, 1))
    if stored == "bfloat16":
        return jattn.PagedCache(k=k, v=v, layout=layout)
    rounded = [jnp.clip(x * 40, -127, 127).astype(stored) for x in (k, v)]
    scales = [jnp.abs(draw(seed, SMALL, SIZE, HEADS)).astype(jnp.float32) / 40 for seed in (2, 3)]
    return jattn.PagedCache(k=rounded[0], v=rounded[1], k_scale=scales[0], v_scale=scales[1], layout=layout)


def large_cache(cache, layout):
    """Return the cache with its blocks in a pool of more than 2^31 elements."""
    grow = lambda x: None if x is None else enlarged(LARGE, jnp.asarray(x))
    scales = {name: grow(getattr(cache, name)) for name in ("k_scale", "v_scale")}
    return jattn.PagedCache(k=grow(cache.k), v=grow(cache.v), **scales, layout=layout)


POOLS = {
    "kind": ["decode", "prompt", "lists"],
    "layout": ["NHD", "HND"],
    "stored": ["bfloat16", "int8", "float8_e4m3fn"],
}


@pytest.mark.parametrize("case", covering_array(POOLS), ids=case_id)
def test_attention_reads_the_end_of_a_large_pool(case):
    kind, layout, stored = case.values()
    spec = jattn.AttentionSpec(num_q_heads=8, num_kv_heads=HEADS, head_dim=WIDTH)
    query_lens, seq_lens = LENS["decode" if kind == "decode" else "prompt"]
    mask = masks.Dilated(100, 3) | masks.Sinks(4) if kind == "lists" else None
    query = draw(9, sum(query_lens), 8, WIDTH)

    def attended(cache, ids):
        table = np.asarray(ids).reshape(2, -1)
        metadata = jattn.build_batch_metadata(query_lens, seq_lens, table, block_size=SIZE)
        run = functools.partial(jattn.attend, spec=spec, implementation="mosaic_gpu", return_lse=True)
        return jax.jit(run)(query, cache, metadata, mask=mask)

    small = small_cache(layout, stored)
    expected = attended(small, IDS)
    assert np.asarray(expected[0], np.float32).any()
    for a, b in zip(attended(large_cache(small, layout), FAR), expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
def test_cache_read_copies_from_a_large_pool_to_a_large_buffer(layout, stored):
    small = draw(0, SMALL, *block_shape(layout))
    small = small if stored == "bfloat16" else jnp.clip(small * 40, -127, 127).astype(stored)
    lens = jnp.asarray([333, 300], jnp.int32)
    rows = 2**31 // (HEADS * WIDTH) + 2048

    def read(cache, ids, first_row, buffer_len):
        starts = jnp.asarray([first_row, first_row + 384], jnp.int32)
        table = jnp.asarray(ids.reshape(2, -1), jnp.int32)
        run = functools.partial(cache_read, dtype=jnp.bfloat16, layout=layout, buffer_len=buffer_len)
        out = jax.jit(run)(cache, table, jnp.zeros(2, jnp.int32), lens, kv_start_loc=starts)
        slice_of = lambda first, n: np.asarray(jax.lax.dynamic_slice_in_dim(out, first, n))
        return [
            slice_of(start, n) for start, n in zip(np.asarray(starts).tolist(), lens.tolist(), strict=True)
        ]

    expected = read(small, IDS, 0, 768)
    assert expected[0].astype(np.float32).any()
    for a, b in zip(read(enlarged(LARGE, small), FAR, rows - 1024, rows), expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("stored", ["bfloat16", "int8"])
def test_cache_write_writes_to_a_large_pool(layout, stored):
    key, value = draw(5, 100, HEADS, WIDTH), draw(6, 100, HEADS, WIDTH)
    positions = np.random.default_rng(1).permutation(len(IDS) * SIZE)[:100]

    def written(blocks, ids):
        k, v = (jnp.zeros((blocks, *block_shape(layout)), stored) for _ in range(2))
        scale = lambda: None if stored == "bfloat16" else jnp.zeros((blocks, HEADS, SIZE), jnp.float32)
        slots = jnp.asarray(ids[positions // SIZE] * SIZE + positions % SIZE, jnp.int32)
        run = jax.jit(functools.partial(cache_write, layout=layout), donate_argnums=(2, 3))
        arrays = run(key, value, k, v, slots, k_scale=scale(), v_scale=scale())
        return [x for x in arrays if x is not None]

    small, large = written(SMALL, IDS), written(LARGE, FAR)
    assert large[0].size > 2**31
    for a, b in zip(large, small, strict=True):
        np.testing.assert_array_equal(a[jnp.asarray(FAR)], b[jnp.asarray(IDS)])
        assert int(jnp.count_nonzero(a)) == int(jnp.count_nonzero(b))  # no other element was written


@pytest.mark.parametrize("mask", [None, masks.Dilated(100, 3)])
def test_attention_reads_the_end_of_many_packed_keys(mask):
    lens, kv_heads = [333, 300], 8
    spec = jattn.AttentionSpec(num_q_heads=8, num_kv_heads=kv_heads, head_dim=WIDTH)
    metadata = jattn.build_batch_metadata(lens, lens, IDS.reshape(2, -1), block_size=SIZE)
    query, k, v = draw(9, sum(lens), 8, WIDTH), draw(1, 640, kv_heads, WIDTH), draw(2, 640, kv_heads, WIDTH)
    rows = 2**31 // (kv_heads * WIDTH) + 2048
    grow = jax.jit(lambda x: jnp.zeros((rows, kv_heads, WIDTH), x.dtype).at[-640:].set(x))

    def attended(k, v):
        starts = jnp.asarray([len(k) - 640, len(k) - 640 + 333], jnp.int32)
        run = functools.partial(jattn.attend, spec=spec, implementation="mosaic_gpu", return_lse=True)
        return jax.jit(run)(query, jattn.PackedKV(k=k, v=v, kv_start_loc=starts), metadata, mask=mask)

    for a, b in zip(attended(grow(k), grow(v)), attended(k, v), strict=True):
        np.testing.assert_array_equal(a, b)
