"""Masks as the kernels compute them for a tile equal the masks, for any storage and any start of a tile."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

import jattn
from jattn import masks
from jattn.implementations.mosaic_gpu.tile_lists import MaskBounds, kernel_mask, split_factors
from pallas_kernels.varlen_backward.dkdv_scores import TransposedPairTile
from pallas_kernels.varlen_prefill import PairTile, PrefillSizes
from pallas_kernels.varlen_prefill.mask_policies import pack_words
from tests.masks import mask_rules
from tests.masks.mask_rules import tiling

pytestmark = pytest.mark.kernels  # minutes, together

HEADS = (mask_rules.Q_HEADS, mask_rules.KV_HEADS)


class ArrayTile:
    """A tile over arrays instead of the refs of a kernel."""

    @property
    def row_positions(self):
        return jnp.arange(self.shape[0], dtype=jnp.int32) + self.first_row

    def fill_rows(self, x):
        return jnp.full(self.shape[:1], x)

    def load_rows(self, ref, index, first):
        assert 0 <= int(first) <= ref.shape[-1] - self.shape[0]
        return ref[(*index, slice(int(first), int(first) + self.shape[0]))]

    def look_up_rows(self, ref, index, elements):
        return jnp.asarray(ref)[index][elements]

    def load_columns(self, ref, index, first):
        assert 0 <= int(first) <= ref.shape[-1] - self.shape[1]
        return ref[(*index, slice(int(first), int(first) + self.shape[1]))]


class QueryMajorTile(ArrayTile, PairTile):
    """A tile of 64 queries and some keys."""


class KeyMajorTile(ArrayTile, TransposedPairTile):
    """A tile of 64 keys and some queries."""


def visible_in_kernel(
    mask, seq_len, *, row, head, first_query, first_key, num_columns, tile_of=QueryMajorTile, least_query=0
):
    """Return the kernel's visibility of 64 rows and some columns of a request, and their positions."""
    is_key_major = tile_of.has_key_rows
    (num_queries, num_keys) = (num_columns, 64) if is_key_major else (64, num_columns)
    is_aligned = (first_query if is_key_major else first_key) % num_columns == 0
    sizes = masks.KernelTiling(
        HEADS, num_queries, num_keys, seq_len, is_aligned=is_aligned, has_key_rows=is_key_major
    )
    in_kernel_mask = kernel_mask(mask, sizes)
    columns = jnp.broadcast_to(jnp.arange(num_columns, dtype=jnp.float32)[None], (64, num_columns))
    tile_start = {"head": head, "first_query": first_query, "first_key": first_key}
    tile = tile_of(
        **{name: jnp.int32(value) for name, value in tile_start.items()},
        columns=lambda: columns, shape=columns.shape, interpret=plgpu.InterpretGPUParams(),
    )  # fmt: skip
    loaded = in_kernel_mask.load(tile, jnp.int32(row)) if jax.tree.leaves(in_kernel_mask) else ()
    visible = in_kernel_mask.visible(tile, loaded)
    queries = [i for i in range(first_query, first_query + num_queries) if least_query <= i < seq_len]
    keys = [j for j in range(first_key, first_key + num_keys) if 0 <= j < seq_len]
    visible = np.broadcast_to(
        tile.unpack_bit_mask(visible) if in_kernel_mask.is_words else visible, tile.shape
    )
    visible = visible.T if is_key_major else visible
    return visible[np.ix_(np.array(queries) - first_query, np.array(keys) - first_key)], queries, keys


tiles = st.fixed_dictionaries(
    {
        "row": st.integers(0, 1),
        "head": st.integers(0, mask_rules.Q_HEADS - 1),
        "first_query": st.just(0) | st.integers(-15, 40),
        "first_key": st.just(0) | st.integers(-7, 40),
        "num_columns": st.sampled_from([32, 64, 128]),
        "tile_of": st.sampled_from([QueryMajorTile, KeyMajorTile]),
    }
)


@settings(max_examples=40)
@given(mask_rules.SINGLE | mask_rules.compositions(), tiles, st.booleans())
def test_kernel_masks_equal_their_definition(ruled, tile, is_second_row):
    is_key_major = tile["tile_of"] is KeyMajorTile
    if ruled.mask.why_no_kernel(tiling(128 if is_key_major else 64)) is not None:
        return
    mask = ruled.mask
    if is_second_row:  # of a mixed step, whose prefill rows follow its decode rows
        mask, tile = mask.slice_rows(1), tile | {"row": 0}
    actual, queries, keys = visible_in_kernel(mask, mask_rules.MAX_LEN, **tile)
    expected = [
        [ruled.visible(1 if is_second_row else tile["row"], tile["head"], i, j) for j in keys]
        for i in queries
    ]
    np.testing.assert_array_equal(actual, np.array(expected, bool).reshape(actual.shape))


@pytest.mark.parametrize(("first_query", "first_key"), [(70, -3), (300, 128), (512, 256), (700, 64)])
@pytest.mark.parametrize("block", [16, 24, 32, 128])
@pytest.mark.parametrize("tile_of", [QueryMajorTile, KeyMajorTile])
def test_kernel_masks_are_exact_for_large_positions(first_query, first_key, block, tile_of):
    rng = np.random.default_rng(0)
    marks = rng.random((2, mask_rules.Q_HEADS, 600)) < 0.3
    slashed = masks.VerticalSlash(columns=marks[0], slashes=marks[1])
    blocks = rng.random((2, 2, 48, 48)) < 0.4
    blocked = masks.BlockMask(blocks=blocks, block_q=block, block_kv=block)
    ids = np.cumsum(rng.random((1, 650)) < 0.02, axis=1).astype(np.int32)
    for mask in (slashed, blocked, masks.Document(ids=ids)):
        tile_start = {"row": 1, "head": 3, "first_query": first_query, "first_key": first_key}
        actual, queries, keys = visible_in_kernel(mask, 764, num_columns=128, tile_of=tile_of, **tile_start)
        i, j = jnp.asarray(queries)[:, None], jnp.asarray(keys)[None, :]
        expected = mask.visible(masks.Pairs(jnp.int32(3), jnp.int32(1), i, j, HEADS))
        np.testing.assert_array_equal(actual, expected)
        assert actual.size > 3000


@pytest.mark.parametrize("has_first", [False, True])
@pytest.mark.parametrize(("block_q", "block_kv"), [(1, 1), (1, 5), (4, 64), (64, 4), (None, 1)])
@pytest.mark.parametrize("tile_of", [QueryMajorTile, KeyMajorTile])
def test_fine_blocks_are_exact_at_any_position(tile_of, block_q, block_kv, has_first):
    rng = np.random.default_rng(3)
    shape = (2, 2, 1 if block_q is None else 190 // block_q, 210 // block_kv)
    first = np.array([3, 20 // (block_q or 1)], np.int32) if has_first and block_q else None
    mask = masks.BlockMask(
        blocks=rng.random(shape) < 0.4, block_q=block_q, block_kv=block_kv, first_q_block=first
    )
    for row, first_query, first_key in [(1, 21, -7), (0, 130, 128), (1, -40, 0), (0, 333, 64), (1, 64, 300)]:
        tile_start = {"row": row, "head": 3, "first_query": first_query, "first_key": first_key}
        actual, queries, keys = visible_in_kernel(mask, 400, num_columns=64, tile_of=tile_of, **tile_start)
        i, j = jnp.asarray(queries)[:, None], jnp.asarray(keys)[None, :]
        expected = mask.visible(masks.Pairs(jnp.int32(3), jnp.int32(row), i, j, HEADS))
        np.testing.assert_array_equal(actual, np.broadcast_to(expected, actual.shape))


@pytest.mark.parametrize("first_query", [-300, -90, -17])
@pytest.mark.parametrize("tile_of", [QueryMajorTile, KeyMajorTile])
def test_kernel_masks_are_exact_for_queries_before_position_0(first_query, tile_of):
    """Such queries exist if there are more queries than keys."""
    rng = np.random.default_rng(2)
    marks, blocks = rng.random((2, mask_rules.Q_HEADS, 150)) < 0.3, rng.random((4, 10, 10)) < 0.6
    slashed = masks.VerticalSlash(columns=marks[0], slashes=marks[1], num_gathered=40)
    by_blocks = [masks.BlockMask(blocks=blocks, block_q=size, block_kv=16) for size in (16, 24)]
    documents = masks.Document(ids=np.arange(150)[None] // 20)
    tile_start = {"row": 0, "head": 2, "first_query": first_query, "first_key": 0, "num_columns": 128}
    for mask in (slashed, *slashed.split_gathered(), *by_blocks, ~by_blocks[0], documents):
        actual, queries, keys = visible_in_kernel(
            mask, 150, tile_of=tile_of, least_query=first_query, **tile_start
        )
        i, j = jnp.asarray(queries)[:, None], jnp.asarray(keys)[None, :]
        expected = mask.visible(masks.Pairs(jnp.int32(2), jnp.int32(0), i, j, HEADS))
        np.testing.assert_array_equal(actual, np.broadcast_to(expected, actual.shape))


@pytest.mark.parametrize("first_key", [-7, -1, 0])
def test_last_document_has_keys_in_a_tile_that_begins_before_the_request(first_key):
    """Packed requests start at any row, so a tile may begin before its request."""
    tile_start = {"row": 0, "head": 0, "first_query": 0, "num_columns": 64}
    actual, queries, keys = visible_in_kernel(
        masks.Document(ids=np.zeros(50, np.int32)), 50, first_key=first_key, **tile_start
    )
    assert (len(queries), len(keys)) == (50, 50)
    assert actual.all()


def test_32_marks_are_read_from_any_offset():
    marks = np.random.default_rng(1).random((2, 50)) < 0.5
    words = np.asarray(pack_words(jnp.asarray(marks))).view(np.uint32)
    padded = np.pad(marks, ((0, 0), (31, 31)))
    assert words.shape == (2, 81)
    for i in (0, 5, 31, 80):
        bits = (words[:, i, None] >> np.arange(32, dtype=np.uint32)) & 1
        np.testing.assert_array_equal(bits, padded[:, i : i + 32])


def test_changing_mask_arrays_does_not_retrace(traced_once):
    def stored(mask):
        return jax.tree.leaves(kernel_mask(mask, tiling()))

    arrays_of_seed = lambda n: (
        (masks.Causal() | masks.Prefix(length=jnp.asarray(n))) & masks.Document(ids=jnp.arange(9) // n)
    )
    (_, a, _), (_, b, _) = traced_once(stored, (arrays_of_seed(2),), (arrays_of_seed(3),))
    assert not np.array_equal(a, b)


@dataclasses.dataclass(frozen=True)
class CustomMask(masks.Mask):
    """A user-defined mask."""

    table: jax.Array
    row_axes: ClassVar = {}

    def visible(self, pairs):
        return self.table[pairs.key]

    def coverage(self, tiles):
        raise NotImplementedError


jax.tree_util.register_dataclass(CustomMask)
BLOCKS = np.ones((4, 6, 6), bool)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (masks.Sinks(1) | CustomMask(jnp.zeros(3)).slice_rows(2), "no kernel for the arrays of a CustomMask"),
        (
            masks.ListedBlocks(
                blocks=np.ones((2, 1, 1, 6), bool),
                block_q=None,
                block_kv=1,
                ids=np.zeros((2, 1, 6), np.int32),
                counts=np.ones((2, 1), np.int32),
            ),
            "no kernel for lists of single keys",
        ),
    ],
)
def test_masks_without_kernel_support_are_named(mask, message):
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(mask.why_no_kernel(tiling()))


def test_block_masks_that_fit_the_tiles_are_separated_from_other_factors():
    block = masks.BlockMask(blocks=BLOCKS, block_q=64, block_kv=64)
    fine, coarse = (masks.BlockMask(blocks=BLOCKS, block_q=q, block_kv=kv) for q, kv in ((64, 32), (128, 64)))
    sizes, strided = PrefillSizes(tile_kv=64), jattn.LocalStrided()
    parts = split_factors(
        strided & block & fine & coarse & masks.Sinks(9), sizes, MaskBounds(256), sizes.tile_kv
    )
    assert parts.pairs == strided & fine & coarse & masks.Sinks(9)
    assert parts.blocks == block
    assert parts.block_q == 64
    assert split_factors(block, sizes, MaskBounds(256, is_aligned=False), 64).pairs == block
    assert split_factors(block, PrefillSizes(tile_kv=128), MaskBounds(256), 128).pairs == block
    assert split_factors(fine, PrefillSizes(tile_kv=128), MaskBounds(256), 32).blocks == fine


@pytest.mark.parametrize("key_array", [jnp.int32(2), jnp.arange(8) % 3], ids=["number", "array"])
def test_kernels_decline_functions_that_close_over_arrays_or_traced_numbers(key_array):
    """Pallas would reject them with a message that names no mask. Functions may close over other numbers."""

    def reason(key_array):
        visible = lambda head, query, key: (
            (key_array if key_array.ndim == 0 else key_array[key]) + query > key
        )
        return (masks.Causal() & masks.MaskFunction(visible)).why_no_kernel(tiling())

    closes = "there is no kernel for a mask function that closes over arrays or traced numbers"
    assert reason(key_array) == (closes if key_array.ndim else None)
    seen = []
    jax.eval_shape(lambda key_array: seen.append(reason(key_array)), key_array)
    assert seen == [closes]
