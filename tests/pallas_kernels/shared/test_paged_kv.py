"""paged_kv: block ids and the copies of a tile."""

import itertools
import pathlib
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared import paged_kv
from pallas_kernels.shared.memory import head_chunks
from pallas_kernels.shared.paged_kv import BlockTableRef, CacheTiling

SIZE, WIDTH = 16, 7
ANYTHING = st.integers(-(2**30), 2**30)
scalar = lambda x: jnp.asarray(x, jnp.int32)


class RecordingTable:
    """A block table whose row 3 has block 100 + i in column i, and that asserts that columns are in range."""

    shape = (5, WIDTH)

    def __getitem__(self, index):
        req, column = index
        assert req == 3
        assert 0 <= column < WIDTH
        return column + 100


def ids(first_column, count=4, **ends):
    seen = BlockTableRef(RecordingTable(), SIZE).visible_blocks(scalar(3), **ends)
    return seen.ids(scalar(first_column), count)


class TestBlockIds:
    @pytest.mark.parametrize("is_checked", [False, True])
    @hypothesis.given(st.integers(0, SIZE * WIDTH - 1), st.integers(1, SIZE * WIDTH), ANYTHING)
    def test_columns_outside_are_clamped_to_the_nearest_visible_block(self, is_checked, low, high, column):
        low, high = min(low, high - 1), max(low + 1, high)
        actual = ids(column, first_key=scalar(low), end_key=scalar(high), is_checked=is_checked)
        seen = range(low // SIZE, (high - 1) // SIZE + 1)
        expected = [min(max(column + j, seen[0]), seen[-1]) for j in range(4)]
        assert actual == [100 + i for i in expected]

    @hypothesis.given(ANYTHING, ANYTHING, ANYTHING)
    def test_any_range_stays_inside_the_row(self, low, high, column):
        ids(column, first_key=scalar(low), end_key=scalar(high))

    @pytest.mark.parametrize("is_checked", [False, True])
    def test_request_without_keys_uses_its_first_block(self, is_checked):
        assert ids(5, first_key=scalar(0), end_key=scalar(0), is_checked=is_checked) == [100] * 4

    @pytest.mark.parametrize(
        ("num_blocks", "expected"), [(0, [0, 0, 0, 0]), (3, [1, 2, 2, 2]), (9, [1, 2, 3, 4])]
    )
    def test_first_blocks_are_clamped_to_the_requests_last_block(self, num_blocks, expected):
        seen = BlockTableRef(RecordingTable(), SIZE).first_blocks(scalar(3), scalar(num_blocks))
        assert seen.ids(scalar(1), 4) == [100 + i for i in expected]

    def test_table_is_not_subscriptable(self):
        with pytest.raises(TypeError, match="not subscriptable"):
            BlockTableRef(RecordingTable(), SIZE)[3, 0]

    def test_split_slot_returns_block_and_offset(self):
        assert paged_kv.split_slot(scalar(5 * SIZE + 3), SIZE) == (5, 3)


def fetch_tile(cache, table, first_key, tiling):
    """Return the keys of a tile of request 1 and KV head 1, fetched by TMA: [tile_kv, head_dim]."""
    head = tiling.head

    def body(cache_g, table_g, out_g, tile_s, loaded):
        seen = BlockTableRef(table_g, tiling.block_size).visible_blocks(
            jnp.int32(1), jnp.int32(0), jnp.int32(100)
        )
        key = jax.lax.axis_index("cta") + first_key
        column, copy = tiling.locate(key)
        for j, block in enumerate(seen.ids(column, tiling.copies_per_run)):
            index = tiling.gmem_index(block, copy, jnp.int32(1))
            for chunk in range(head.num_chunks):
                source = cache_g.at[(*index, *head.gmem_index(chunk, key * 0))]
                plgpu.copy_gmem_to_smem(
                    source,
                    tile_s.at[chunk, pl.ds(j * tiling.tokens_per_copy, tiling.tokens_per_copy)],
                    loaded,
                )
        plgpu.barrier_wait(loaded)
        plgpu.copy_smem_to_gmem(tile_s, out_g)
        plgpu.wait_smem_to_gmem(0)

    shape = head.num_chunks, tiling.run_length, head.width
    out = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(shape, cache.dtype),
        scratch_types=[
            plgpu.SMEM(shape, cache.dtype),
            plgpu.Barrier(num_arrivals=tiling.copies_per_run * head.num_chunks),
        ],
        grid=(1,),
        grid_names=("cta",),
        interpret=plgpu.InterpretGPUParams(),
    )(tiling.tile_cache(cache), table)
    return np.concatenate(np.asarray(out)[:, :, : head.chunk_dim], axis=1)


class TestCopies:
    @pytest.mark.parametrize(
        ("is_hnd", "block_size", "head_dim"), [*itertools.product([False, True], [16, 64, 256], [64, 80])]
    )
    def test_copies_fetch_the_keys_of_the_tiles_positions(self, is_hnd, block_size, head_dim):
        rng, tile_kv = np.random.default_rng(0), 64
        tiling = CacheTiling(
            block_size=block_size, run_length=tile_kv, is_hnd=is_hnd, head=head_chunks(head_dim)
        )
        columns = -(-128 // block_size)
        table = rng.permutation(2 * columns).reshape(2, columns).astype(np.int32)
        keys = rng.standard_normal((2 * columns, block_size, 3, head_dim), np.float32)
        cache = keys.swapaxes(1, 2) if is_hnd else keys
        actual = fetch_tile(jnp.asarray(cache), jnp.asarray(table), 64, tiling)
        request_keys = keys[table[1]].reshape(-1, 3, head_dim)[:, 1]
        expected = request_keys[64 : 64 + tile_kv]
        final_block = request_keys[100 // block_size * block_size :][:block_size]
        if block_size == 16:  # the block after the 100th key is replaced by the last visible one
            expected = np.concatenate([request_keys[64:112], final_block])
        np.testing.assert_array_equal(actual, expected)

    @pytest.mark.parametrize("is_hnd", [False, True])
    def test_cache_dims_have_one_order_for_both_layouts(self, is_hnd):
        cache = jnp.zeros((9, 2, 16, 64) if is_hnd else (9, 16, 2, 64))
        assert paged_kv.cache_dims(cache, is_hnd=is_hnd) == (9, 16, 2, 64)

    def test_scales_are_tiled_as_the_cache(self):
        tiling = CacheTiling(block_size=256, run_length=64, is_hnd=False, head=head_chunks(64))
        scales = jnp.arange(2 * 3 * 256).reshape(2, 3, 256)
        np.testing.assert_array_equal(tiling.tile_scale(scales)[1, 2, 3], scales[1, 2, 192:])


def test_no_kernel_indexes_a_block_table_directly():
    """The check finds tables by their names. Copies of listed keys choose among visible keys themselves."""
    folder = pathlib.Path(paged_kv.__file__).parents[1]
    looks = re.compile(r"^[^`]*(block_table|table_g)\[")
    subscripts = {
        f"{path.relative_to(folder)}: {line.strip()}"
        for path in folder.rglob("*.py")
        for line in path.read_text().split("\n")
        if looks.search(line)
    }
    files = {line.split(":")[0] for line in subscripts}
    assert files == {"shared/paged_kv.py", "ptx/cp_async_paged.py"}, subscripts
