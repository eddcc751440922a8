"""Quest-style decode: block bounds, selection of blocks, and one trace for the whole step."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.implementations.mosaic_gpu.block_lists import block_list
from jattn.sparsity.decode_selection import (
    KeyBounds,
    ListedBlocks,
    block_scores,
    select_blocks,
    write_key_bounds,
)
from pallas_kernels import support

SPEC = jattn.CacheSpec(num_blocks=9, block_size=4, num_kv_heads=2, head_dim=8, dtype=jnp.float32)


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


def test_block_bounds_cover_the_keys_written_to_the_block():
    bounds = KeyBounds.create(SPEC)
    steps = [([0, 1, 2, 3, 8], 0), ([9, -1, 10], 1), ([4, 11, 5], 2), ([0, 1], 3)]  # block 0 is used again
    saved = {}
    for slots, seed in steps:
        keys = normal(seed, len(slots) + 2, 2, 8)  # longer than the slots
        bounds = write_key_bounds(bounds, keys, jnp.asarray(slots), block_size=4)
        for slot, key in zip(slots, np.asarray(keys), strict=False):
            if slot >= 0:
                saved[slot // 4] = ([] if slot % 4 == 0 else saved[slot // 4]) + [key]
    for block, keys in saved.items():
        np.testing.assert_array_equal(bounds.min_key[block], np.min(keys, axis=0))
        np.testing.assert_array_equal(bounds.max_key[block], np.max(keys, axis=0))


def filled(reqs=3, blocks=3):
    """Return keys of whole blocks, their bounds, a block table, and queries of 4 heads."""
    keys = normal(0, 9, 4, 2, 8)
    bounds = KeyBounds(min_key=keys.min(axis=1), max_key=keys.max(axis=1))
    table = jnp.asarray([[1, 2, 3], [4, 5, 6], [7, 8, 0]], jnp.int32)[:reqs, :blocks]
    return keys, bounds, table, normal(1, reqs, 4, 8)


def test_block_score_is_an_upper_bound_of_its_key_scores():
    keys, bounds, table, query = filled()
    scores = block_scores(query, bounds, table)
    products = jnp.einsum("rgkd,rbtgd->rgbtk", query.reshape(3, 2, 2, 8), keys[table])
    assert (scores >= products.max(axis=(3, 4)) - 1e-5).all()
    assert (scores <= products.max(axis=(3, 4)) + 20).all()


def test_best_and_recent_blocks_are_selected():
    _, bounds, table, query = filled()
    seq_lens = jnp.asarray([12, 5, 0], jnp.int32)
    mask = select_blocks(query, bounds, table, seq_lens, num_selected=2, block_size=4)
    scores = np.asarray(block_scores(query, bounds, table))
    chosen = np.asarray(mask.blocks)[:, :, 0]
    for head in range(2):
        best = int(scores[0, head, :2].argmax())
        assert np.flatnonzero(chosen[0, head]).tolist() == [best, 2]
        assert np.flatnonzero(chosen[1, head]).tolist() == [0, 1]
    assert not chosen[2].any()


@pytest.mark.kernels
def test_step_writes_selects_and_attends_in_one_trace():
    spec = jattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=8)
    traces = []

    @jax.jit
    def step(cache, bounds, query, key, metadata):
        traces.append(1)
        slots = metadata.slot_mapping
        cache = jattn.write_kv(cache, key, key, slots)
        bounds = write_key_bounds(bounds, key, slots, block_size=4)
        mask = select_blocks(
            query, bounds, metadata.block_table, metadata.seq_lens, num_selected=2, block_size=4
        )
        out = jattn.attend(query, cache, metadata, spec, mask=mask)
        return cache, bounds, out, mask

    keys, bounds, table, query = filled(reqs=2)
    cache = jattn.PagedCache(k=keys, v=jnp.array(keys))
    for lens in ([9, 12], [10, 8]):
        metadata = jattn.build_batch_metadata([1, 1], lens, table, block_size=4)
        cache, bounds, out, mask = step(cache, bounds, query, normal(sum(lens), 2, 2, 8), metadata)
        expected = jattn.attend(query, cache, metadata, spec, mask=mask, implementation="reference")
        np.testing.assert_allclose(out, expected, atol=1e-5)
        assert int(mask.blocks.sum()) == 2 * 2 * 2
    assert len(traces) == 1


@pytest.mark.kernels
def test_selected_lists_are_reused_for_the_same_requests():
    spec = jattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=8)
    metadata = jattn.build_batch_metadata([1, 1], [40, 33], np.arange(6).reshape(2, 3), block_size=16)
    blocks = jnp.asarray([[[1, 0, 1], [0, 0, 1]], [[1, 1, 0], [0, 1, 1]], [[1, 1, 1], [1, 0, 0]]], bool)
    ids, counts = jnp.argsort(~blocks, axis=-1).astype(jnp.int32), blocks.sum(axis=-1, dtype=jnp.int32)
    sizes = {"block_q": None, "block_kv": 16}
    mask = ListedBlocks(blocks=blocks[:, :, None], ids=ids, counts=counts, **sizes)
    listed = block_list(mask.slice_rows(1), spec, metadata, 16)
    np.testing.assert_array_equal(listed.ids, ids[1:])
    np.testing.assert_array_equal(listed.counts, counts[1:])
    other_block_list = block_list(mask, spec, metadata, 16)  # of three requests, not two
    np.testing.assert_array_equal(other_block_list.counts, counts[:2])
    assert other_block_list.ids[0, 0, :2].tolist() == [0, 2]


def test_unowned_blocks_may_hold_nan():
    """NaN in bounds past the ends of requests, of free blocks and padding rows, and ids past the counts."""
    _, bounds, table, query = filled()
    seq_lens = jnp.asarray([12, 5, 0], jnp.int32)
    options = {"num_selected": 2, "block_size": 4}
    expected = select_blocks(query, bounds, table, seq_lens, **options).blocks
    unowned_blocks = jnp.asarray([0, 6, 7, 8])
    poisoned = jax.tree.map(lambda x: x.at[unowned_blocks].set(jnp.nan), bounds)
    table = table.at[1, 2].set(2**30).at[2].set(jnp.asarray([-7, 8, 2**31 - 1]))
    actual = select_blocks(query.at[2].set(jnp.nan), poisoned, table, seq_lens, **options).blocks
    np.testing.assert_array_equal(actual, expected)
    assert int(expected.sum()) == 2 * 2 * 2


def test_blocks_that_score_nan_are_selected():
    _, bounds, table, query = filled()
    spoiled = jax.tree.map(lambda x: x.at[1].set(jnp.nan), bounds)  # the first request's first block
    lens = jnp.asarray([12, 12, 8], jnp.int32)
    options = {"num_selected": 2, "block_size": 4, "implementation": "xla"}
    chosen = select_blocks(query, spoiled, table, lens, **options).blocks[:, :, 0]
    np.testing.assert_array_equal(chosen[0], [[True, False, True]] * 2)
    expected = select_blocks(query, bounds, table, lens, **options).blocks[:, :, 0]
    np.testing.assert_array_equal(chosen[1:], expected[1:])
    selected = select_blocks(query.at[0].set(jnp.nan), bounds, table, lens, **options).blocks
    assert selected[0].all()


def test_empty_batch_writes_and_selects_nothing():
    _, bounds, table, query = filled()
    saved = jax.tree.map(np.asarray, bounds)
    written = write_key_bounds(bounds, jnp.ones((0, 2, 8)), jnp.zeros(0, jnp.int32), block_size=4)
    np.testing.assert_array_equal(written.min_key, saved.min_key)
    for implementation in ("xla", None):
        options = {"num_selected": 1, "block_size": 4, "implementation": implementation}
        mask = select_blocks(query[:0], written, table[:0], jnp.zeros(0, jnp.int32), **options)
        assert mask.blocks.shape == (0, 2, 1, 3)


@pytest.mark.usefixtures("types_unchecked")  # the annotation has signed ints alone
def test_bounds_accept_slots_of_small_int_dtypes():
    spec = dataclasses.replace(SPEC, num_blocks=300)
    slots = jnp.asarray([4, 5, 8])
    write = lambda slots: write_key_bounds(KeyBounds.create(spec), normal(0, 3, 2, 8), slots, block_size=4)
    expected, actual = write(slots), write(slots.astype(jnp.uint8))
    np.testing.assert_array_equal(actual.min_key, expected.min_key)
    np.testing.assert_array_equal(actual.max_key, expected.max_key)


@pytest.mark.usefixtures("types_unchecked")
def test_selection_accepts_lengths_and_tables_of_small_int_dtypes():
    bounds = KeyBounds(min_key=-jnp.abs(normal(0, 300, 2, 8)), max_key=jnp.abs(normal(1, 300, 2, 8)))
    choose = lambda dtype: select_blocks(
        normal(2, 1, 4, 8), bounds, jnp.arange(16, dtype=dtype)[None], jnp.full(1, 250, dtype),
        num_selected=3, block_size=16,
    ).blocks  # fmt: skip
    np.testing.assert_array_equal(choose(jnp.uint8), choose(jnp.int32))


def test_fewer_keys_than_slots_are_rejected():
    with pytest.raises(
        ValueError, match=r"key must have at least as many tokens as slot_mapping \(3\), got 2"
    ):
        write_key_bounds(KeyBounds.create(SPEC), jnp.ones((2, 2, 8)), jnp.zeros(3, jnp.int32), block_size=4)


@pytest.mark.parametrize(
    ("reason", "platform"), [("the kernels need an NVIDIA GPU", "cpu"), ("compute capability", "gpu")]
)
def test_array_placement_determines_the_implementation(reason, platform, monkeypatch):
    why_not_on = support.why_not_on
    traced = lambda *trees: any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(trees))
    elsewhere = lambda *trees: "compute capability" if traced(trees) else why_not_on(*trees)
    monkeypatch.setattr(support, "why_not_on", elsewhere)  # as if jax's default device were a GPU
    _, bounds, table, query = filled()
    run = functools.partial(
        select_blocks,
        num_selected=1,
        block_size=4,
        implementation="mosaic_gpu",
        seq_lens=jnp.asarray([3, 3, 3]),
    )
    # Traced, they do not say where they will be.
    run = run if platform == "cpu" else functools.partial(jax.eval_shape, run)
    with pytest.raises(NotImplementedError, match=reason):
        run(query, bounds, table)


@pytest.mark.parametrize("num", [0, 4])
def test_number_of_selected_blocks_out_of_range_is_rejected(num):
    _, bounds, table, query = filled()
    with pytest.raises(ValueError, match=rf"num_selected must lie in \[1, max_blocks \(3\)\], got {num}"):
        select_blocks(query, bounds, table, jnp.asarray([3, 3, 3]), num_selected=num, block_size=4)


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_lens": jnp.asarray([3])}, r"seq_lens must have shape \(3,\) \(one per request\), got \(1,\)"),
        ({"num_recent": -1}, "num_recent must be at least 0, got -1"),
        ({"num_selected": 1.0}, "num_selected must be an int, got 1.0"),
        ({"block_size": 4.0}, "block_size must be an int, got 4.0"),
    ],
)
def test_invalid_arguments_are_rejected(change, message):
    _, bounds, table, query = filled()
    arguments = {"seq_lens": jnp.asarray([3, 3, 3]), "num_selected": 1, "block_size": 4}
    with pytest.raises(ValueError, match=message):
        select_blocks(query, bounds, table, **arguments | change)


def test_block_table_without_columns_is_rejected():
    _, bounds, table, query = filled()
    with pytest.raises(ValueError, match=r"block_table must have at least one column, got shape \(3, 0\)"):
        select_blocks(query, bounds, table[:, :0], jnp.asarray([3, 3, 3]), num_selected=1, block_size=4)
    with pytest.raises(
        ValueError,
        match=r"query's number of heads must be a multiple of the bounds' number of kv heads \(2\), got 3",
    ):
        select_blocks(query[:, :3], bounds, table, jnp.asarray([3, 3, 3]), num_selected=1, block_size=4)


def test_block_table_of_a_different_batch_is_rejected():
    _, bounds, table, query = filled()
    with pytest.raises(Exception, match=r"block_table must have shape \(3, 3\)|Type-check error"):
        select_blocks(query, bounds, table[:2], jnp.asarray([3, 3, 3]), num_selected=1, block_size=4)
