"""VerticalSlash in two passes: gathered columns and the rest each equal their definition, and combine to
the mask.
"""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks
from jattn.cache import blocks_of, gather_tokens
from jattn.implementations.mosaic_gpu import prefill
from jattn.implementations.mosaic_gpu.gathered_columns import add_gathered_gradients, gather_kv
from jattn.masks.vertical_slash import UNUSED_POSITION, marks_in_ranges
from tests.attention_problems import in_layout
from tests.dense.test_training import as_on_a_gpu
from tests.implementations.mosaic_gpu.test_kernel_masks import HEADS, KeyMajorTile, QueryMajorTile
from tests.implementations.mosaic_gpu.test_kernel_masks import visible_in_kernel as seen_in_kernel

RNG = np.random.default_rng(7)
TOKENS = 150
MARKS = RNG.random((2, 2, HEADS[0], TOKENS))  # of columns and slashes


def slashed(num_gathered, *, rows=2, tokens=TOKENS, density=0.15):
    """Return a mask with random columns and slashes for each row and head."""
    columns, slashes = MARKS[:, :rows, :, :tokens] < density
    return masks.VerticalSlash(columns=columns, slashes=slashes, num_gathered=num_gathered)


def pairs_of(keys):
    row, head, query, key = np.ogrid[:2, : HEADS[0], :TOKENS, :keys]
    return masks.Pairs(head, row, query, key, HEADS)


@pytest.mark.kernels
@pytest.mark.parametrize("num_gathered", [1, 7, TOKENS, 10 * TOKENS])
def test_each_visible_pair_is_in_exactly_one_pass(num_gathered):
    mask = slashed(num_gathered)
    columns, rest = mask.split_gathered()
    causal = np.tri(TOKENS, dtype=bool)
    in_rest = np.asarray(rest.visible(pairs_of(TOKENS))) & causal
    positions = np.asarray(columns.positions)
    assert positions.shape[-1] % 128 == 0
    by_number = np.asarray(columns.visible(pairs_of(positions.shape[-1])))
    in_columns = np.zeros_like(in_rest)
    for row, head, i in zip(*np.nonzero(positions < UNUSED_POSITION), strict=True):
        in_columns[row, head, :, positions[row, head, i]] |= by_number[row, head, :, i]
    assert by_number.sum() == in_columns.sum()  # no key is gathered twice, none that there is not is seen
    assert not (in_columns & in_rest).any()
    np.testing.assert_array_equal(in_columns | in_rest, np.asarray(mask.visible(pairs_of(TOKENS))) & causal)
    counts = np.minimum(np.cumsum(mask.columns, axis=-1), num_gathered)
    np.testing.assert_array_equal(columns.counts, counts)


@pytest.mark.parametrize("size", [(1, 1), (5, 3), (16, 32)])
def test_marks_in_ranges_equal_those_of_each_range(size):
    """Ranges of every possible length that begin before, in and after the array."""
    marks = np.random.default_rng(0).random((2, 3, 41)).repeat(3, axis=-1)[..., :50] < 0.5
    length, first = np.meshgrid(np.arange(1, sum(size) + 1), np.arange(-70, 80), indexing="ij")
    last = first + length - 1
    tile = masks.Tiles(2, 1, None, None, None, None, HEADS, size)
    has_some, has_all = marks_in_ranges(marks, tile, jnp.asarray(first), jnp.asarray(last))
    line = np.pad(marks[1, 2], 200)
    for index, begin in np.ndenumerate(first):
        entries = line[200 + begin : 200 + last[index] + 1]
        assert (has_some[index], has_all[index]) == (entries.any(), entries.all())


@pytest.mark.kernels
@pytest.mark.parametrize("size", [(16, 16), (48, 20)])
@pytest.mark.parametrize("part", ["columns", "remainder"])
def test_tile_coverage_of_a_pass_equals_its_pairs(part, size):
    mask = slashed(40, density=0.3)
    every_key = np.arange(TOKENS) >= 100  # after the gathered keys
    mask = dataclasses.replace(mask, columns=mask.columns | every_key, slashes=mask.slashes & every_key)
    part_mask = getattr(mask.split_gathered(), part)
    num = part_mask.positions.shape[-1] if part == "columns" else TOKENS
    first = np.arange(0, TOKENS, size[0], dtype=np.int32)
    any_visible, all_visible = (
        np.asarray(x)
        for x in masks.tile_coverage(
            part_mask,
            rows=jnp.ones(len(first), jnp.int32),
            first_query=jnp.asarray(first),
            num_queries=jnp.minimum(size[0], TOKENS - first),
            seq_lens=jnp.full(len(first), num, jnp.int32),
            num_heads=HEADS,
            size=size,
            max_kv_tiles=-(-num // size[1]),
        )
    )
    visible = np.asarray(part_mask.visible(pairs_of(num)))[1]
    for (i, head, j), has_some in np.ndenumerate(any_visible):
        tile = visible[head, first[i] : first[i] + size[0], j * size[1] : (j + 1) * size[1]]
        assert has_some >= tile.any()
        assert all_visible[i, head, j] <= tile.all()
    assert all_visible.any()
    assert not all_visible.all()
    assert not any_visible.all()


def test_keys_after_the_gathered_ones_are_masked_out():
    """The keys of the next row follow; a NaN in them would reach the product."""
    columns, _ = slashed(128, density=0.95).split_gathered()
    assert (np.asarray(columns.positions) < UNUSED_POSITION).all()
    any_visible, all_visible = masks.tile_coverage(
        columns,
        rows=jnp.zeros(1, jnp.int32),
        first_query=jnp.full(1, TOKENS - 1),
        num_queries=jnp.ones(1, jnp.int32),
        seq_lens=jnp.full(1, 1000),
        num_heads=HEADS,
        size=(64, 64),
        max_kv_tiles=3,
    )
    np.testing.assert_array_equal(any_visible, np.broadcast_to([True, True, False], any_visible.shape))
    assert not all_visible[..., 2].any()


@pytest.mark.kernels
@pytest.mark.parametrize("tile_of", [QueryMajorTile, KeyMajorTile])
@pytest.mark.parametrize(("first_query", "first_key"), [(0, 0), (-15, 0), (70, 64), (128, 100)])
def test_kernel_masks_equal_the_mask_of_each_pass(tile_of, first_query, first_key):
    for part in slashed(25).split_gathered():
        tile_start = {"row": 1, "head": 3, "first_query": first_query, "first_key": first_key}
        actual, queries, keys = seen_in_kernel(part, TOKENS, num_columns=128, tile_of=tile_of, **tile_start)
        i, j = jnp.asarray(queries)[:, None], jnp.asarray(keys)[None, :]
        expected = part.visible(masks.Pairs(jnp.int32(3), jnp.int32(1), i, j, HEADS))
        np.testing.assert_array_equal(actual, expected)
        assert actual.size > 500


def cache_of(k, v, layout):
    """Return a cache with the given NHD blocks in another layout."""
    to_layout = lambda x, is_key: in_layout(
        np.asarray(x).reshape(-1, *x.shape[2:]), 16, layout, is_key=is_key
    )
    return jattn.PagedCache(k=to_layout(k, True), v=to_layout(v, False), layout=layout)


@pytest.mark.parametrize("layout", ["NHD", "HND", "packed"])
def test_gathered_tokens_are_read_from_their_blocks(layout):
    k, v = RNG.standard_normal((2, 6, 16, 2, 8)).astype(np.float32)
    cache = cache_of(k, v, layout)
    np.testing.assert_array_equal(blocks_of(cache, np.arange(6))[0], k)
    table = np.array([[4, 1], [2, 5]], np.int32)
    positions = RNG.integers(0, 32, (2, 9, 4), dtype=np.int32)
    is_real = RNG.random((2, 9, 4)) < 0.7
    actual = gather_tokens(cache, jnp.asarray(table), jnp.asarray(positions), jnp.asarray(is_real))
    for actual_array, stored in zip(actual, (k, v), strict=True):
        expected = stored[table].reshape(2, 32, 2, 8)
        for (row, i, head), real in np.ndenumerate(is_real):
            keys_of_row = expected[row, positions[row, i, head], head // 2] if real else np.zeros(8)
            np.testing.assert_array_equal(actual_array[row, i, head], keys_of_row)


@pytest.mark.kernels
def test_each_region_gathers_the_columns_of_its_rows():
    bucket = jattn.Bucket(max_decodes=2, max_prefills=1, max_prefill_tokens=16, max_blocks=3)
    table = [[1, 2], [3, 4, 5], [6, 7]]
    metadata = jattn.build_batch_metadata([1, 1, 9], [20, 45, 30], table, block_size=16, bucket=bucket)
    marks = RNG.random((2, 3, HEADS[0], 48)) < 0.2
    mask = masks.VerticalSlash(columns=marks[0], slashes=marks[1], num_gathered=20)
    k = jnp.broadcast_to(jnp.arange(8 * 16.0).reshape(8, 16, 1, 1), (8, 16, HEADS[1], 8))  # a key is its slot
    cache, rows = jattn.PagedCache(k=k, v=k), iter(zip((20, 45, 30), table, marks[0], strict=True))
    for part, first in ((metadata.decode_region, 0), (metadata.prefill_region, 2)):
        columns, _ = mask.slice_rows(first).split_gathered()
        gathered, _ = gather_kv(cache, part, columns)
        for keys_of_row in np.asarray(gathered.k).reshape(part.bucket.max_reqs, -1, *gathered.k.shape[1:]):
            seq_len, blocks, its = next(rows)
            for head in range(HEADS[0]):
                positions = np.flatnonzero(its[head])
                positions = positions[positions < seq_len]
                slots = np.asarray(blocks)[positions // 16] * 16 + positions % 16
                np.testing.assert_array_equal(keys_of_row[: len(positions), head, 0], slots)
                assert not keys_of_row[len(positions) :, head].any()


def test_gradients_of_gathered_keys_reach_the_original_keys():
    rest = jnp.asarray(RNG.standard_normal((20, 2, 8)), jnp.bfloat16)
    gathered_grad = jnp.asarray(RNG.standard_normal((2 * 3, 4, 8)), jnp.bfloat16)
    positions = np.array(
        [[0, 1, 2, 3], [5, 5, 5, UNUSED_POSITION], [7, UNUSED_POSITION, 9, UNUSED_POSITION]]
    )[None].repeat(2, axis=0)
    expected, starts = np.asarray(rest, np.float64), np.array([0, 10])
    for (row, i, head), tile_start in np.ndenumerate(positions):
        if tile_start < UNUSED_POSITION:
            expected[starts[row] + tile_start, head // 2] += np.asarray(gathered_grad, np.float64)[
                3 * row + i, head
            ]
    actual = add_gathered_gradients(
        rest, gathered_grad, jnp.asarray(positions, jnp.int32), jnp.asarray(starts)
    )
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=2**-8, atol=1e-6)


CACHE = jattn.PagedCache(k=jnp.zeros((4, 16, 2, 64), jnp.bfloat16), v=jnp.zeros((4, 16, 2, 64), jnp.bfloat16))
SLOPES = jnp.ones(4)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("changes", "slopes", "calls"),
    [
        ({}, None, [2, 4]),  # KV heads: each query head has its own gathered keys
        ({"causal": False}, None, [2]),
        ({"window": (20, 0)}, None, [2]),
        ({"chunk_size": 16}, None, [2]),
        ({"batch_invariant": True}, None, [2]),
        ({}, SLOPES, [2]),
    ],
)
def test_columns_are_not_gathered_if_biases_depend_on_positions(monkeypatch, changes, slopes, calls):
    monkeypatch.setattr("pallas_kernels.support.why_not_on", lambda *_: None)  # as on a Hopper GPU
    kernel = mock.Mock(side_effect=lambda query, *_, **__: (query, jnp.zeros(query.shape[1::-1])))
    monkeypatch.setattr(prefill, "varlen_prefill", kernel)
    heads = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    spec, mask = jattn.AttentionSpec(**heads, **changes), slashed(5, rows=1, tokens=40)
    metadata = jattn.build_batch_metadata([33], [33], [[1, 2, 3]], block_size=16)
    options = {"mask": mask, "alibi_slopes": slopes, "implementation": "mosaic_gpu"}
    query = jax.ShapeDtypeStruct((33, 4, 64), jnp.bfloat16)
    jax.eval_shape(functools.partial(jattn.attend, spec=spec, **options), query, CACHE, metadata=metadata)
    assert [call.args[1].shape[-2] for call in kernel.call_args_list] == calls


def test_gather_argument_sets_num_gathered(types_unchecked):
    attend_with = functools.partial(
        masks.VerticalSlash.from_indices, jnp.asarray([[3, 9, -1]]), jnp.asarray([[0]]), 16
    )
    assert (attend_with().num_gathered, attend_with(gather=False).num_gathered) == (3, 0)
    assert isinstance(slashed(np.uint8(200)).num_gathered, int)


@pytest.mark.kernels
def test_attention_over_gathered_columns_equals_xla():
    """A chunk of a prompt and a whole prompt; some heads have more columns than are gathered."""
    mask = slashed(12, tokens=100)
    mask = dataclasses.replace(mask, columns=mask.columns[:, :2], slashes=mask.slashes[:, :2])
    k, v = jax.random.normal(jax.random.key(1), (2, 12, 16, 1, 64), jnp.bfloat16)
    table = [[3, 5, 1, 7, 9, 11], [2, 4, 6, 8, 10]]
    metadata = jattn.build_batch_metadata([40, 70], [90, 70], table, block_size=16).prefill_region
    spec = jattn.AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=64)
    arguments = jax.random.normal(jax.random.key(0), (110, 2, 64), jnp.bfloat16), cache_of(k, v, "HND")
    options = {"mask": mask, "sinks": jnp.linspace(-1.0, 1.0, 2)}
    attend = functools.partial(jattn.attend, *arguments, metadata, spec, return_lse=True, **options)
    expected = attend(implementation="xla")
    with as_on_a_gpu() as called:
        actual = attend(implementation="mosaic_gpu")
    assert called == ["attend"]
    for actual_array, expected_array, tolerance in zip(actual, expected, (0.02, 1e-4), strict=True):
        np.testing.assert_allclose(
            actual_array.astype(jnp.float32), expected_array.astype(jnp.float32), rtol=0, atol=tolerance
        )
