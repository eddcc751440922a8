"""list_tiles, by the kernel and by sorting, against a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.architectures import ARCHITECTURES
from pallas_kernels.list_tiles import (
    MAX_QUERY_BLOCKS,
    QUERY_BLOCK_SHIFT,
    build_lists_by_sorting,
    encode_tiles,
    list_tiles,
)
from pallas_kernels.ptx.list_tiles import list_tiles as kernel
from tests import aot

OTHER_GPUS = sorted(set(ARCHITECTURES) - {"9.0"})
# Lists, tiles, blocks of queries: words that are not full, 16 bits a tile, warps without a list, one warp.
SHAPES = [(1, 1, 0), (13, 129, 3), (5, 300, 7), (9, 2048, MAX_QUERY_BLOCKS), (2049, 70, 1), (64, 8192, 0)]


def drawn(lists, tiles, query_blocks, seed=0):
    rng = np.random.default_rng(seed)
    density = rng.choice([0.0, 0.1, 0.9, 1.0], (lists, 1))
    some = rng.random((lists, tiles)) < density
    every = rng.random((lists, tiles)) < 0.5
    return some, every, [rng.random((lists, tiles)) < 0.5 for _ in range(query_blocks)]


def lists_of(some, every, query_blocks):
    """Return each list and the number of its partly visible tiles."""
    for row, (seen, whole) in enumerate(zip(some, some & every, strict=True)):
        tiles = [*np.flatnonzero(seen & ~whole)[::-1], *np.flatnonzero(whole)]
        bits = lambda tile, row=row: sum(
            int(visible[row, tile]) << n for n, visible in enumerate(query_blocks)
        )
        yield [int(tile) + (bits(tile) << QUERY_BLOCK_SHIFT) for tile in tiles], int((seen & ~whole).sum())


def check(listed, some, every, query_blocks):
    entries, num_partial, num_full = map(np.asarray, listed)
    for row, (expected, partial) in enumerate(lists_of(some, every, query_blocks)):
        assert (num_partial[row], num_full[row]) == (partial, len(expected) - partial)
        assert entries[row, : len(expected)].tolist() == expected


def codes(some, every, query_blocks):
    return encode_tiles(jnp.asarray(some), jnp.asarray(every), [jnp.asarray(part) for part in query_blocks])


def test_partly_visible_tiles_come_first():
    some = jnp.asarray([[True, True, False, True], [False, False, False, False]])
    every = jnp.asarray([[True, False, True, False], [False, False, False, False]])
    listed = list_tiles(encode_tiles(some, every))
    np.testing.assert_array_equal(listed.entries, [[3, 1, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(listed.num_partial, [2, 0])
    np.testing.assert_array_equal(listed.num_full, [1, 0])


@pytest.mark.parametrize("shape", SHAPES[:-2], ids=str)
def test_lists_by_sorting_match_a_loop(shape):
    masks = drawn(*shape)
    check(build_lists_by_sorting(codes(*masks)), *masks)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_lists_of_the_kernel_match_a_loop(shape):
    masks = drawn(*shape)
    check(jax.jit(kernel.on_gpu)(codes(*masks)), *masks)


def test_too_many_tiles_are_refused():
    with pytest.raises(ValueError, match=r"codes must have at most 65535 tiles per list, got \(1, 65536\)"):
        jax.eval_shape(list_tiles, jax.ShapeDtypeStruct((1, 65536), jnp.uint8))


def aot_cases():
    """Return (function, abstract arguments) by the name of the case."""
    abstract_lists = lambda lists, tiles, query_blocks: jax.eval_shape(
        lambda: codes(*drawn(lists, tiles, query_blocks))
    )
    return {
        str(shape): (list_tiles, (abstract_lists(*shape),))
        for shape in (*SHAPES, (4, 16384, 1), (8224, 256, 2))
    }


@pytest.mark.parametrize("gpu", ["9.0", *(pytest.param(x, marks=pytest.mark.slow) for x in OTHER_GPUS)])
def test_shipped_kernels_compile_without_spills(gpu):
    aot.require_plugin()
    reports = aot.compile_all("tests.pallas_kernels.list_tiles.test_entry", list(aot_cases()), gpu)
    for name, kernels in reports.items():
        assert [kernel.spilled_bytes for kernel in kernels] == [0], name
