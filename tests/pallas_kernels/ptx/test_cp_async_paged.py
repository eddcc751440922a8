"""The addresses of cp.async copies from a paged cache: every byte goes where TMA would write it."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ptx import cp_async_paged
from pallas_kernels.shared.memory import head_chunks, swizzle_bytes
from pallas_kernels.shared.paged_kv import CacheTiling
from tests.pallas_kernels.ptx.test_cp_async import Array, Machine, in_swizzled_memory, random_bytes

pytestmark = pytest.mark.usefixtures("types_unchecked")


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 256])
@pytest.mark.parametrize("is_hnd", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "itemsize", "head_itemsize"),
    [
        (64, 2, 2),
        (80, 2, 2),
        (120, 2, 2),
        (192, 2, 2),
        (256, 2, 2),
        (64, 1, 1),
        (80, 1, 1),
        (96, 2, 1),
        (192, 1, 1),
    ],
)
def test_each_byte_of_a_tile_goes_where_tma_would_write_it(
    monkeypatch, block_size, is_hnd, head_dim, itemsize, head_itemsize
):
    head = head_chunks(head_dim, itemsize=head_itemsize)
    tiling = CacheTiling(block_size=block_size, run_length=64, is_hnd=is_hnd, head=head)
    dtype, rng = np.dtype(np.uint8 if itemsize == 1 else np.uint16), np.random.default_rng(1)
    per_block = (3, block_size) if is_hnd else (block_size, 3)
    cache = np.asarray(tiling.tile_cache(random_bytes((7, *per_block, head_dim), dtype)))
    num_copies, kv_head = tiling.copies_per_run, 2
    blocks = rng.integers(7, size=num_copies).tolist()
    copies = rng.integers(max(block_size // 64, 1), size=num_copies).tolist()
    tile = np.zeros((head.num_chunks, 64, head.width), dtype)
    for i, (block, copy) in enumerate(zip(blocks, copies, strict=True)):
        rows = slice(i * tiling.tokens_per_copy, (i + 1) * tiling.tokens_per_copy)
        found = cache[block, kv_head, copy] if is_hnd else cache[block, copy, :, kv_head]
        found = found.reshape(tiling.tokens_per_copy, head.num_chunks, head.chunk_dim).swapaxes(0, 1)
        tile[:, rows, : head.chunk_dim] = found

    machine = Machine(cache.tobytes(), tile.nbytes)
    machine.patch(monkeypatch)
    scalars = [kv_head, *blocks, *copies]
    machine.run_warpgroup(
        cp_async_paged._copy_tile_by_lanes, Array(tile), Array(cache), scalars, tiling=tiling
    )
    expected = in_swizzled_memory(tile, swizzle_bytes(itemsize, head.width))
    np.testing.assert_array_equal(machine.smem, expected)


@pytest.mark.parametrize("block_size", [8, 16, 128, 256])
@pytest.mark.parametrize(("num_warps", "tile_kv"), [(4, 64), (8, 64), (8, 128)])
@pytest.mark.parametrize("is_hnd", [False, True])
def test_each_of_several_warps_copies_its_own_blocks(monkeypatch, block_size, num_warps, tile_kv, is_hnd):
    head, rng = head_chunks(80), np.random.default_rng(1)
    tiling = CacheTiling(block_size=block_size, run_length=tile_kv, is_hnd=is_hnd, head=head)
    per_block = (3, block_size) if is_hnd else (block_size, 3)
    cache = random_bytes((7, *per_block, 80), np.dtype(np.uint16))
    by_token = cache.swapaxes(1, 2) if is_hnd else cache
    # The second tile of a request, whose blocks are in any order.
    table, tokens = rng.integers(7, size=2 * tile_kv // 8), np.arange(tile_kv, 2 * tile_kv)
    rows = by_token[table[tokens // block_size], tokens % block_size, 2]
    tile = np.zeros((2, tile_kv, 64), np.uint16)
    tile[:, :, :40] = rows.reshape(tile_kv, 2, 40).swapaxes(0, 1)
    tiled_cache = np.asarray(tiling.tile_cache(cache))
    machine = Machine(cache.tobytes(), tile.nbytes)
    machine.patch(monkeypatch)
    warp_rows = tile_kv // num_warps
    for machine.warp in range(num_warps):
        first = tile_kv + machine.warp * warp_rows
        blocks = table[first // block_size :][: max(warp_rows // block_size, 1)].tolist()
        for machine.lane in range(32):
            cp_async_paged._copy_block_rows_by_lanes(
                None, Array(tile), Array(tiled_cache), [2, first % block_size, *blocks],
                num_rows=tile_kv, tiling=tiling, num_warps=num_warps,
            )  # fmt: skip
    np.testing.assert_array_equal(machine.smem, in_swizzled_memory(tile, 128))


@pytest.mark.parametrize("block_size", [8, 32, 256])
@pytest.mark.parametrize("is_hnd", [False, True])
@pytest.mark.parametrize(("head_dim", "itemsize"), [(64, 2), (80, 2), (128, 2), (256, 2), (64, 1), (128, 1)])
def test_each_listed_key_goes_to_its_row(monkeypatch, block_size, is_hnd, head_dim, itemsize):
    """The list ends within the tile, and its last keys lie behind the last visible one."""
    head, rng = head_chunks(head_dim, itemsize=itemsize), np.random.default_rng(1)
    tiling = CacheTiling(block_size=block_size, run_length=1, is_hnd=is_hnd, head=head)
    dtype, per_block = (
        np.dtype(np.uint8 if itemsize == 1 else np.uint16),
        (3, block_size) if is_hnd else (block_size, 3),
    )
    cache = random_bytes((7, *per_block, head_dim), dtype)
    ids, table = np.sort(rng.permutation(500)[:100]), rng.integers(7, size=-(-500 // block_size))
    end_key = ids[95]
    keys = ids[np.minimum(64 + np.arange(64), 99)]
    by_token = cache.swapaxes(1, 2) if is_hnd else cache
    rows = by_token[table[keys // block_size], keys % block_size, 2]
    rows = np.where((keys < end_key)[:, None], rows, 0).astype(dtype)
    tile = np.zeros((head.num_chunks, 64, head.width), dtype)
    tile[:, :, : head.chunk_dim] = rows.reshape(64, head.num_chunks, head.chunk_dim).swapaxes(0, 1)
    machine = Machine(cache.tobytes(), tile.nbytes)
    machine.patch(monkeypatch)
    arrays = map(Array, (tile, np.asarray(tiling.tile_cache(cache)), ids, table))
    scalars = [64, 100, 0, int(end_key), 2]
    machine.run_warpgroup(cp_async_paged._copy_listed_keys_by_lanes, *arrays, scalars, tiling=tiling)
    np.testing.assert_array_equal(machine.smem, in_swizzled_memory(tile, swizzle_bytes(itemsize, head.width)))


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 256])
def test_each_scale_goes_to_its_token(monkeypatch, block_size):
    tiling = CacheTiling(block_size=block_size, run_length=64, is_hnd=True, head=head_chunks(64))
    scale = np.asarray(
        tiling.tile_scale(jnp.asarray(np.random.default_rng(0).random((7, 3, block_size), np.float32)))
    )
    num_copies, rng = tiling.copies_per_run, np.random.default_rng(1)
    blocks = rng.integers(7, size=num_copies).tolist()
    copies = rng.integers(max(block_size // 64, 1), size=num_copies).tolist()
    machine = Machine(scale.tobytes(), 256)
    machine.patch(monkeypatch)
    scales_s = Array(np.zeros(64, np.float32))
    machine.run_warpgroup(
        cp_async_paged._copy_token_scales_by_lanes, scales_s, Array(scale), [1, *blocks, *copies]
    )
    expected = np.concatenate([scale[block, 1, copy] for block, copy in zip(blocks, copies, strict=True)])
    np.testing.assert_array_equal(machine.smem.view(np.float32), expected)
