"""Masks equal their definitions, are hashable values, and reject invalid arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jattn
from jattn import masks, sparsity
from jattn.masks import blocks as block_masks
from tests.masks import mask_rules

ZEROS = np.zeros((1, 2, 2), bool)
# One program per mask and size, which compiles faster than one per operation.
dense = jax.jit(masks.dense, static_argnames=("query_len", "seq_len", "num_q_heads", "num_kv_heads", "row"))


def drawn(mask, query_len, seq_len, **options):
    return np.asarray(dense(mask, query_len, seq_len, **options)).astype(int).tolist()


def test_masks_equal_literal_arrays():
    assert drawn(masks.Causal(), 2, 4) == [[[1, 1, 1, 0], [1, 1, 1, 1]]]
    assert drawn(masks.Window(1, 0) | masks.Sinks(1), 3, 4) == [[[1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1]]]
    assert drawn(masks.Causal() & masks.Dilated(2, 2), 1, 6) == [[[0, 1, 0, 1, 0, 1]]]
    assert drawn(masks.Causal() | masks.Prefix(length=jnp.int32(2)), 3, 3) == [
        [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    ]
    slash = masks.VerticalSlash.from_indices(jnp.asarray([[0, -1]]), jnp.asarray([[0, 2]]), 4)
    assert drawn(slash, 4, 4) == [[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]]
    document = masks.Document(ids=jnp.asarray([0, 0, 1, 1]))
    assert drawn(masks.Causal() & document, 3, 4) == [[[1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]]
    streaming = masks.Causal() & masks.streaming_heads([1], num_first=1, num_recent=2)
    assert drawn(streaming, 1, 5, num_q_heads=2) == [[[1, 0, 0, 1, 1]], [[1, 1, 1, 1, 1]]]
    blocks = jnp.asarray([[[True, False], [False, True]]])
    mask = masks.BlockMask(blocks=blocks, block_q=1, block_kv=2, first_q_block=jnp.asarray([1]))
    assert drawn(mask, 4, 4) == [[[0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 0]]]


def test_big_bird_has_local_global_and_the_requested_random_blocks():
    mask = masks.BigBird(block_size=1, local_blocks=2, global_blocks=1, random_blocks=3, seed=5)
    visible = np.asarray(dense(mask, 64, 64, num_q_heads=4))
    a, b = np.arange(64)[:, None], np.arange(64)[None, :]
    certain = (abs(a - b) < 2) | (np.minimum(a, b) == 0)
    assert visible[:, certain].all()
    drawn = (visible & ~certain).sum(axis=2)
    assert drawn.max() == 3
    assert drawn[:, 32:].mean() > 2.5
    assert not (visible & ~certain)[:, b > a].any()
    assert len({head.tobytes() for head in visible}) == 4


@pytest.mark.parametrize("seed", [271_182, 2**40 + 1])
def test_big_bird_accepts_any_seed(seed):
    mixed = lambda x: ((y := x % 32749 * 31337 + 12345) ^ (y // 4096)) % 32749
    random_block = lambda head, a: mixed(mixed(a * 64 + seed * 7919) + head * 977) % (a + 1)
    none = {"local_blocks": 0, "global_blocks": 0}
    visible = masks.dense(
        masks.BigBird(block_size=1, random_blocks=1, seed=seed, **none), 9, 9, num_q_heads=2
    )
    expected = [[random_block(head, a) for a in range(9)] for head in range(2)]
    np.testing.assert_array_equal(np.asarray(visible).argmax(axis=-1), expected)
    assert np.asarray(visible).sum() == 18


def test_mask_function_must_return_bool():
    """For ints, & and ~ would be bitwise: the lowest bit of 2 is not set."""
    int_mask = masks.MaskFunction(lambda head, query, key: (query - key) % 3)
    for mask in (int_mask, ~int_mask, masks.Causal() & int_mask):
        for look in (
            functools.partial(masks.dense, mask, 4, 4, num_q_heads=1),
            functools.partial(
                sparsity.schedule, mask, jnp.asarray([4]), max_query_len=4, max_seq_len=4, num_q_heads=1
            ),
        ):
            with pytest.raises(ValueError, match="The mask function must return bool, got int32"):
                look()


@pytest.mark.parametrize("answer", [True, False])
def test_mask_function_may_return_a_scalar(answer):
    mask = masks.MaskFunction(lambda head, query, key: answer)
    lens = {"seq_lens": jnp.asarray([4]), "max_query_len": 4, "max_seq_len": 4, "num_q_heads": 1}
    for tested_mask, expected in ((mask, answer), (~mask, not answer)):
        assert np.asarray(masks.dense(tested_mask, 4, 4, num_q_heads=1)).all() == expected
        assert np.asarray(masks.dense(tested_mask, 4, 4, num_q_heads=1)).any() == expected
        schedule = sparsity.schedule(tested_mask, **lens, tile_q=4, tile_kv=4)
        assert (schedule.num_partial.item(), schedule.num_full.item()) == (0, int(expected))


@pytest.mark.parametrize("mask", [masks.Dilated(2**31 - 1, 1), masks.Dilated(2**30 - 1, 2)])
def test_dilated_window_may_cover_all_positions(mask):
    schedule = sparsity.schedule(
        mask, jnp.asarray([8]), max_query_len=8, max_seq_len=8, num_q_heads=1, tile_q=4, tile_kv=4
    )
    seen = np.asarray(dense(mask, 8, 8))
    assert seen.mean() == 1 / mask.step
    np.testing.assert_array_equal((schedule.num_full + schedule.num_partial)[:, 0], [2, 2])
    np.testing.assert_array_equal(schedule.num_full[:, 0], [2 * (mask.step == 1)] * 2)


@pytest.mark.kernels
@settings(max_examples=15)
@given(mask_rules.SINGLE | mask_rules.compositions(), st.integers(1, 40), st.integers(0, 1), st.data())
def test_mask_equals_its_definition_for_every_pair(ruled, seq_len, row, data):
    query_len = data.draw(st.integers(1, seq_len))
    heads = {"num_q_heads": mask_rules.Q_HEADS, "num_kv_heads": mask_rules.KV_HEADS}
    actual = dense(ruled.mask, query_len, seq_len, row=row, **heads)
    np.testing.assert_array_equal(actual, ruled.dense(query_len, seq_len, row))


@pytest.mark.parametrize("per_row", [False, True])
def test_block_mask_beyond_the_flat_index_limit_is_read_correctly(per_row, monkeypatch):
    drawn_blocks = np.random.default_rng(1).random((3, 2, 4, 5)) < 0.5
    mask = masks.BlockMask(blocks=drawn_blocks if per_row else drawn_blocks[0], block_q=8, block_kv=8)
    see = lambda: [masks.dense(mask, 24, 32, num_q_heads=4, row=row) for row in range(3)]
    expected = see()
    monkeypatch.setattr(block_masks, "MAX_FLAT_INDEX", 7)
    np.testing.assert_array_equal(see(), expected)
    for row, seen in enumerate(expected):
        of = drawn_blocks[row if per_row else 0].repeat(2, 0).repeat(8, 1).repeat(8, 2)
        np.testing.assert_array_equal(
            seen, of[:, 8:, :32]
        )  # the last query is at the position of the last key


@pytest.mark.parametrize("first", [1, 2])
def test_slicing_rows_of_a_mask_keeps_their_visibility(first):
    """A sliced block mask stays a block mask, the only mask with arrays that the kernels support."""
    blocks = np.random.default_rng(0).random((3, 2, 4, 5)) < 0.5
    firsts = np.array([0, 1, 2], np.int32)
    many = masks.BlockMask(blocks=blocks, first_q_block=firsts, block_q=8, block_kv=8)
    whole = many & masks.Window(left=20)
    part = whole.slice_rows(first)
    assert [type(mask) for mask in part.masks] == [masks.BlockMask, masks.Window]
    for row in range(3 - first):
        visible_by_row = [
            dense(mask, 40, 40, num_q_heads=4, row=r) for mask, r in ((part, row), (whole, row + first))
        ]
        np.testing.assert_array_equal(*visible_by_row)


def test_density_is_relative_to_causal_attention():
    assert masks.density(masks.Causal(), 8, 8) == 1
    assert masks.density(masks.Window(0, 0), 4, 4) == pytest.approx(0.4)
    assert masks.density(masks.OnlyHeads((0,)), 3, 9, num_q_heads=4) == 0.25


@pytest.mark.kernels
@pytest.mark.parametrize(
    "mask",
    [
        masks.LocalStrided(block_size=16, local_blocks=2, vert_stride=4),
        masks.BlockMask(blocks=np.random.default_rng(0).random((4, 64, 64)) < 0.3, block_q=32, block_kv=32),
        masks.Document(ids=np.arange(2048) // 300),
    ],
)
def test_sampled_density_approximates_exact_density(mask):
    heads = {"num_q_heads": 4, "num_kv_heads": 2}
    exact = masks.density(mask, 2048, 2048, max_queries=2048, **heads)
    seen = np.asarray(dense(mask, 2048, 2048, **heads)) & np.tri(2048, dtype=bool)
    assert exact == pytest.approx(seen.sum() / (4 * 2048 * 2049 / 2))
    assert masks.density(mask, 2048, 2048, max_queries=128, **heads) == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ((5, 4), {}, "query_len must be at least 1 and at most seq_len .4., got 5"),
        ((0, 4), {}, "query_len must be .* got 0"),
        ((2, 4), {"max_queries": 0}, "max_queries must be at least 1, got 0"),
    ],
)
def test_density_rejects_empty_sizes(sizes, options, message):
    with pytest.raises(ValueError, match=message):
        masks.density(masks.Causal(), *sizes, **options)


def test_masks_without_arrays_are_hashable_values():
    composed = masks.Causal() & (masks.Sinks(4) | masks.Window(left=8))
    assert composed == masks.Causal() & (masks.Sinks(4) | masks.Window(left=8))
    assert len({composed, masks.Causal() & (masks.Sinks(5) | masks.Window(left=8))}) == 2
    assert composed.is_static
    assert jax.tree.leaves(composed) == []
    assert (masks.Causal() & masks.Sinks(1)) & masks.Sinks(2) == masks.And(
        (masks.Causal(), masks.Sinks(1), masks.Sinks(2))
    )
    assert masks.OnlyHeads((3, 1, 3)) == masks.OnlyHeads((1, 3))


def test_changing_mask_arrays_does_not_recompile():
    traces = []

    @jax.jit
    def run(query, cache, metadata, mask):
        traces.append(1)
        return jattn.attend(query, cache, metadata, spec, mask=mask)

    spec = jattn.AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=8)
    metadata = jattn.build_batch_metadata([1, 6], [3, 6], [[1], [2]], block_size=8)
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)
    cache = jattn.PagedCache(k=draw(0, 3, 8, 1, 8), v=draw(1, 3, 8, 1, 8))
    block = lambda blocks: masks.Window(left=9) & masks.BlockMask(blocks=blocks, block_q=2, block_kv=2)
    lower, everything = jnp.tri(4, dtype=bool)[None, :, :], jnp.ones((1, 4, 4), bool)
    a, b, c = (run(draw(2, 7, 2, 8), cache, metadata, block(x)) for x in (lower, everything, ~everything))
    assert len(traces) == 1
    np.testing.assert_allclose(a, b, atol=1e-6)
    assert not np.asarray(c).any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: masks.Window(left=-1), "left must be at least 0, got -1"),
        (lambda: masks.Sinks(0), "num must be positive, got 0"),
        (lambda: masks.Chunked(0), "size must be positive, got 0"),
        (lambda: masks.Dilated(-1, 2), "num must be at least 0, got -1"),
        (lambda: masks.Dilated(1, 0), "step must be positive, got 0"),
        (lambda: masks.BigBird(block_size=0), "block_size must be positive, got 0"),
        (lambda: masks.BigBird(local_blocks=-1), "local_blocks must be at least 0, got -1"),
        (lambda: masks.BlockMask(blocks=ZEROS, block_q=2, block_kv=0), "block_kv must be positive, got 0"),
        (lambda: masks.BlockMask(blocks=ZEROS, block_q=0, block_kv=1), "block_q must be positive, got 0"),
        (
            lambda: masks.BlockMask(blocks=ZEROS, block_q=None, block_kv=1),
            r"blocks must have one query block if block_q is None, got \(1, 2, 2\)",
        ),
        (
            lambda: masks.dense(
                masks.BlockMask(blocks=ZEROS.repeat(2, 0), block_q=1, block_kv=1), 1, 1, num_q_heads=3
            ),
            r"number of heads must divide the 3 query heads, got 2",
        ),
        (
            lambda: masks.dense(masks.VerticalSlash(columns=ZEROS[0], slashes=ZEROS[0]), 1, 1, num_q_heads=4),
            r"columns for 2 heads and slashes for 2 heads, but the layer has 4 query heads",
        ),
        (lambda: masks.dense(masks.Causal(), 3, 2), r"query_len must be .* at most seq_len \(2\), got 3"),
    ],
)
def test_invalid_mask_is_rejected(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "join",
    [
        lambda a, b: a and b,
        lambda a, b: a or b,
        lambda a, b: not a,
        lambda a, b: (a & b) and b,
    ],
)
def test_masks_reject_python_and_or(join):
    causal, window = masks.Causal(), masks.Window(left=5)
    with pytest.raises(TypeError, match=r"(Causal|And) has no truth value. Combine masks with &, \| and ~"):
        join(causal, window)


def test_spec_rejects_masks_with_arrays():
    mask = masks.Causal() & masks.BlockMask(blocks=ZEROS, block_q=1, block_kv=1)
    with pytest.raises(ValueError, match=r"sparsity must hold no arrays \(.*attend\(mask=\)\), got And"):
        jattn.AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=8, sparsity=mask)


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.uint64])
def test_numpy_ints_of_any_width_are_accepted(types_unchecked, kind):
    """In 8 bits -5 is 251, 100 x 3 is 44 and 8 x 64 is 0."""
    rings = {"block_size": 4, "local_blocks": 1}
    make_masks = lambda as_int: (
        masks.Window(as_int(5), as_int(3)),
        masks.Dilated(as_int(100), as_int(3)),
        masks.Sinks(as_int(5)) & masks.Chunked(as_int(7)),
        masks.LocalStrided(
            **{name: as_int(n) for name, n in rings.items()},
            vert_stride=as_int(100),
            tp_rank=as_int(3),
            tp_size=as_int(8),
        ),
        masks.BigBird(
            **{name: as_int(n) for name, n in rings.items()}, random_blocks=as_int(2), seed=as_int(9)
        ),
        masks.BlockMask(blocks=np.eye(100, dtype=bool)[None], block_q=as_int(4), block_kv=as_int(4)),
    )
    for numpys, plain in zip(make_masks(kind), make_masks(int), strict=True):
        seen = [dense(mask, 9, 333, num_q_heads=64, num_kv_heads=8) for mask in (numpys, plain)]
        np.testing.assert_array_equal(*seen)


BLOCKS = np.arange(12).reshape(1, 3, 4) % 5 > 1
BEFORE_0 = {
    "Chunked": (masks.Chunked, lambda a, b: a == b),
    "LocalStrided": (
        lambda size: masks.LocalStrided(block_size=size, local_blocks=2, vert_stride=3, homo_head=True),
        lambda a, b: (b <= a) & ((a - b < 2) | ((b + 1) % 3 == 0)),
    ),
    "BigBird": (
        lambda size: masks.BigBird(block_size=size, local_blocks=3, random_blocks=0),
        lambda a, b: (np.abs(a - b) < 3) | (a == 0) | (b == 0),
    ),
    "BlockMask": (
        lambda size: masks.BlockMask(blocks=BLOCKS, block_q=size, block_kv=size),
        lambda a, b: (a >= 0) & (a < 3) & (b < 4) & BLOCKS[0, np.clip(a, 0, 2), np.minimum(b, 3)],
    ),
}


@pytest.mark.kernels
@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("name", BEFORE_0)
def test_queries_before_position_0_belong_to_negative_blocks(name, size):
    """Cross attention may have more queries than keys.

    Rounding towards 0 would put those queries into block 0.
    """
    make, rule = BEFORE_0[name]
    first = -2 * size - 1
    query, key = np.arange(first, 3 * size, dtype=np.int32)[:, None], np.arange(12, dtype=np.int32)[None, :]
    pair = {"head": np.int32(0), "row": np.int32(0), "num_heads": (1, 1)}
    seen = np.broadcast_to(make(size).visible(masks.Pairs(query=query, key=key, **pair)), (len(query), 12))
    np.testing.assert_array_equal(seen, rule(query // size, key // size))
    for begin in range(first, size, 3):
        tile = {"first_query": np.int32(begin), "last_query": np.int32(begin + 2)}
        keys = {"first_key": np.int32(2), "last_key": np.int32(4)}
        any_visible, all_visible = make(size).coverage(masks.Tiles(**tile, **keys, size=(3, 3), **pair))
        inside = seen[begin - first : begin - first + 3, 2:5]
        assert (bool(any_visible), bool(all_visible)) == (inside.any(), inside.all())


def test_big_bird_draws_no_blocks_for_queries_before_position_0():
    pairs = {"head": np.int32(1), "row": np.int32(0), "num_heads": (2, 1)}
    query, key = np.arange(-9, 0, dtype=np.int32)[:, None], np.arange(12, dtype=np.int32)[None, :]
    mask = masks.BigBird(block_size=2, local_blocks=0, global_blocks=0, random_blocks=4)
    assert not np.any(mask.visible(masks.Pairs(query=query, key=key, **pairs)))
