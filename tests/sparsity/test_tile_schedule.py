"""A tile schedule equals the dense mask, tile by tile."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jattn import masks
from jattn.sparsity.tile_schedule import expand_schedule, schedule
from tests.masks import mask_rules

BLOCKS = masks.BlockMask(blocks=np.ones((1, 1, 4), bool), block_q=None, block_kv=20)
HEADS = {"num_q_heads": mask_rules.Q_HEADS, "num_kv_heads": mask_rules.KV_HEADS}


def classes_of(seen, tile_q, tile_kv):
    """Return (some, every) of a mask [heads, queries, keys] divided into tiles."""
    heads, queries, keys = seen.shape
    shape = heads, -(-queries // tile_q), -(-keys // tile_kv)
    any_visible, all_visible = np.zeros(shape, bool), np.zeros(shape, bool)
    for i in range(shape[1]):
        for j in range(shape[2]):
            tile = seen[:, i * tile_q : (i + 1) * tile_q, j * tile_kv : (j + 1) * tile_kv]
            any_visible[:, i, j], all_visible[:, i, j] = tile.any(axis=(1, 2)), tile.all(axis=(1, 2))
    return any_visible, all_visible


def compared(ruled, lens, tile_q, tile_kv):
    """Return for each request (partial, full) of the schedule and (some, every) of the rule."""
    max_len = mask_rules.MAX_LEN

    @jax.jit
    def tiles(mask, seq_lens, query_lens):
        options = {"max_query_len": max_len, "max_seq_len": max_len, "tile_q": tile_q, "tile_kv": tile_kv}
        return expand_schedule(schedule(mask, seq_lens, query_lens=query_lens, **options, **HEADS))

    query_lens, seq_lens = (jnp.asarray(column) for column in zip(*lens, strict=True))
    per_req = -(-max_len // tile_q)
    partial, full = (
        np.asarray(x).swapaxes(0, 1) for x in tiles(ruled.mask, seq_lens, query_lens)
    )  # [heads, q_tiles, tiles]
    for r, (query_len, seq_len) in enumerate(lens):
        any_visible, all_visible = classes_of(ruled.dense(query_len, seq_len, r), tile_q, tile_kv)
        key_slice = slice(r * per_req, r * per_req + any_visible.shape[1])
        rest = slice(key_slice.stop, (r + 1) * per_req)
        assert not (partial | full)[:, rest].any()
        assert not (partial | full)[:, key_slice, any_visible.shape[2] :].any()
        yield (
            partial[:, key_slice, : any_visible.shape[2]],
            full[:, key_slice, : any_visible.shape[2]],
            any_visible,
            all_visible,
        )


lengths = st.lists(
    st.integers(1, mask_rules.MAX_LEN).flatmap(lambda k: st.tuples(st.integers(1, k), st.just(k))),
    min_size=2, max_size=2,
)  # fmt: skip
sizes = st.tuples(st.sampled_from([4, 16]), st.sampled_from([4, 8]))


@pytest.mark.kernels
@settings(max_examples=8)
@given(mask_rules.WHOLE, lengths, sizes)
def test_schedule_equals_the_dense_mask_per_tile(ruled, lens, size):
    for partial, full, any_visible, all_visible in compared(ruled, lens, *size):
        np.testing.assert_array_equal(full, all_visible)
        np.testing.assert_array_equal(partial, any_visible & ~all_visible)


@pytest.mark.kernels
@settings(max_examples=8)
@given(mask_rules.compositions(mask_rules.WHOLE | mask_rules.vertical_slash()), lengths, sizes)
def test_composed_masks_miss_no_visible_pair_and_mark_no_masked_tile_full(ruled, lens, size):
    for partial, full, any_visible, all_visible in compared(ruled, lens, *size):
        assert not (full & ~all_visible).any()
        assert not (any_visible & ~(partial | full)).any()


@pytest.mark.kernels
@settings(max_examples=12)
@given(mask_rules.documents_in_any_order(), lengths, sizes)
def test_documents_in_any_order_miss_no_visible_pair_and_mark_no_masked_tile_full(ruled, lens, size):
    for partial, full, any_visible, all_visible in compared(ruled, lens, *size):
        assert not (full & ~all_visible).any()
        assert not (any_visible & ~(partial | full)).any()


@pytest.mark.kernels
@settings(max_examples=8)
@given(mask_rules.documents(), lengths, sizes)
def test_ascending_documents_have_exact_tiles(ruled, lens, size):
    for partial, full, any_visible, all_visible in compared(ruled, lens, *size):
        np.testing.assert_array_equal(full, all_visible)
        np.testing.assert_array_equal(partial, any_visible & ~all_visible)


@pytest.mark.kernels
def test_padding_after_the_documents_adds_only_its_first_tile():
    """Ids 1, 2, ..., 6 of 32 positions each, then zeros: no tile is missing, and one is superfluous."""
    ids = np.r_[np.repeat(np.arange(1, 7), 32), np.zeros(64, int)].astype(np.int32)
    tile_schedule = make(
        masks.Document(ids=ids), [256], max_query_len=256, max_seq_len=256, tile_q=32, tile_kv=32
    )
    partial, full = (np.asarray(x)[:, 0] for x in expand_schedule(tile_schedule))
    expected = np.eye(8, dtype=bool)
    expected[6:, 6:] = True
    np.testing.assert_array_equal(full, expected)
    assert not partial.any()
    ids[190:] = 0  # the padding begins in the middle of a tile
    tile_schedule = make(
        masks.Document(ids=ids), [256], max_query_len=256, max_seq_len=256, tile_q=32, tile_kv=32
    )
    partial, full = (np.asarray(x)[:, 0] for x in expand_schedule(tile_schedule))
    np.testing.assert_array_equal(full[:5, :5], expected[:5, :5])
    assert partial[5].all()
    assert partial[:, 5].all()


@pytest.mark.kernels
@settings(max_examples=8)
@given(mask_rules.block_masks(mask_rules.MAX_LEN + 15) | mask_rules.local_strided(), lengths)
def test_causal_block_masks_have_exact_tiles(ruled, lens):
    """The lists of a causal block pattern are exact if tiles equal blocks."""
    blocks = getattr(ruled.mask, "block_size", None) or ruled.mask.block_kv
    causal_mask = mask_rules.Ruled(
        lambda: masks.Causal() & ruled.mask, lambda r, h, i, j: j <= i and ruled.visible(r, h, i, j)
    )
    lens = [(k, k) for _, k in lens]
    if (
        getattr(ruled.mask, "block_q", blocks) not in (blocks, None)
        or getattr(ruled.mask, "first_q_block", None) is not None
    ):
        return
    for partial, full, any_visible, all_visible in compared(causal_mask, lens, blocks, blocks):
        np.testing.assert_array_equal(full, all_visible)
        np.testing.assert_array_equal(partial, any_visible & ~all_visible)


def make_eagerly(mask, seq_lens, **options):
    sizes = {"max_query_len": 64, "max_seq_len": 64, "tile_q": 16, "tile_kv": 16, "num_q_heads": 2}
    return schedule(mask, jnp.asarray(seq_lens), **sizes | options)


def make(mask, seq_lens, **options):
    return jax.jit(functools.partial(make_eagerly, **options))(mask, jnp.asarray(seq_lens))


@pytest.mark.kernels
def test_lists_start_with_partial_tiles_and_are_sorted_by_length():
    tile_schedule = make(masks.Causal() & (masks.Window(left=20) | masks.OnlyHeads((1,))), [64])
    np.testing.assert_array_equal(tile_schedule.num_partial, [[1, 1], [2, 1], [3, 1], [3, 1]])
    np.testing.assert_array_equal(tile_schedule.num_full, [[0, 0], [0, 1], [0, 2], [0, 3]])
    np.testing.assert_array_equal(tile_schedule.kv_tiles[3], [[3, 2, 1, 0], [3, 0, 1, 2]])
    np.testing.assert_array_equal(tile_schedule.order, [7, 4, 5, 6, 2, 3, 0, 1])


def test_padding_and_keys_after_the_end_are_in_no_list():
    tile_schedule = make(masks.Sinks(64), [0, 17], query_lens=jnp.asarray([0, 3]))
    np.testing.assert_array_equal(tile_schedule.num_queries, [0, 0, 0, 0, 3, 0, 0, 0])
    np.testing.assert_array_equal(
        (tile_schedule.num_partial + tile_schedule.num_full)[:, 0], [0, 0, 0, 0, 2, 0, 0, 0]
    )


def test_changing_a_traced_mask_does_not_recompile(traced_once):
    masks_of = lambda seed: (
        masks.BlockMask(
            blocks=jax.random.bernoulli(jax.random.key(seed), 0.5, (2, 4, 4)), block_q=16, block_kv=16
        ),
        jnp.asarray([seed + 40]),
    )
    for tile_schedule, (mask, lens) in zip(
        traced_once(make_eagerly, masks_of(1), masks_of(2)), map(masks_of, (1, 2)), strict=True
    ):
        _, full = expand_schedule(tile_schedule)
        blocks = np.asarray(mask.blocks).swapaxes(0, 1) & (np.arange(4) * 16 < int(lens[0]))
        np.testing.assert_array_equal(full[: -(-int(lens[0]) // 16)], blocks[: -(-int(lens[0]) // 16)])


@pytest.mark.kernels
def test_empty_batch_has_no_lists():
    tile_schedule = make(masks.Causal(), np.zeros(0, np.int32))
    assert tile_schedule.kv_tiles.shape == (0, 2, 4)
    assert tile_schedule.order.shape == (0,)
    none = make(masks.Causal(), [0, 0], query_lens=jnp.asarray([0, 0]))
    assert not (none.num_partial + none.num_full).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tile_q": 0}, "tile_q must be positive, got 0"),
        ({"max_seq_len": 0}, "max_seq_len must be positive, got 0"),
        ({"query_lens": jnp.asarray([1, 2])}, r"query_lens must have shape \(1,\) .* got \(2,\)"),
        ({"query_lens": jnp.asarray([4])}, r"query_lens must be .* at most seq_lens \[3\], got \[4\]"),
        ({"max_seq_len": 2}, r"seq_lens must be at most max_seq_len \(2\), got \[3\]"),
        ({"max_query_len": 2}, r"query_lens must be at most max_query_len \(2\), got \[3\]"),
        ({"query_lens": jnp.asarray([-1])}, r"query_lens must be at least 0 .*, got \[-1\]"),
        ({"num_kv_heads": 4}, r"num_kv_heads must divide num_q_heads \(2\), got 4"),
        ({"num_kv_heads": 0}, "num_kv_heads must be positive, got 0"),
        (
            {"mask": masks.Document(ids=np.zeros((3, 9), int))},
            "Document.ids has 3 rows, but the batch metadata has 1",
        ),
        ({"mask": masks.OnlyHeads((2,))}, r"OnlyHeads.heads must lie in \[0, 2\), got \(2,\)"),
        ({"mask": BLOCKS, "max_seq_len": 81}, "has 4 kv_blocks of 20 .* Pass at least 5"),
    ],
)
def test_invalid_arguments_are_rejected(change, message):
    with pytest.raises(ValueError, match=message):
        make_eagerly(**{"mask": masks.Causal(), "seq_lens": [3]} | change)
