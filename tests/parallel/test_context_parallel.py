"""Attention over keys that are distributed over ranks equals attention on one device."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.batch.bucket import exact_bucket
from jattn.batch.context_parallel import ContextParallelAxis, slot_mapping_on_rank
from jattn.masks import Causal, Chunked, InterleavedMask, Window
from jattn.masks.pairs import Pairs, Tiles
from jattn.parallel.context_parallel import attend_on_rank
from jattn.planning import plan_on_rank
from jattn.pytree import replace

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 4, 2, 16, 8  # tokens of a block on each rank
# New tokens and all tokens of each request: decode rows, then prompts, with a past and without.
# The first request starts a chunk in which all ranks but one have no key.
QUERY_LENS, SEQ_LENS = [1, 1, 1, 5, 13, 2], [73, 1, 33, 5, 50, 61]
SLOPES = jnp.asarray([0.5, 0.25, 0.06, 0.01], jnp.float32)
BLOCKS = {"block_size": 8, "local_blocks": 2, "vert_stride": 3}
SINKS = jnp.asarray([0.3, -1.0, 2.0, 0.0], jnp.float32)


def ranks_of(size, interleave=1):
    return ContextParallelAxis(axis_name="cp", size=size, interleave=interleave)


def on_ranks(ranks, function):
    """Run a function on every rank, as a vmap over the axis, and stack the results."""
    return jax.jit(jax.vmap(lambda _: function(), axis_name="cp", axis_size=ranks.size))(
        jnp.zeros(ranks.size)
    )


def step_of(ranks, query_lens=QUERY_LENS, seq_lens=SEQ_LENS, decode_query_len=1, room=1):
    """Return a step in the global blocks of all ranks, and a step that computes all earlier tokens at
    once.
    """
    size = BLOCK * ranks.size
    counts = [-(-length // size) for length in seq_lens]
    ids = np.random.default_rng(0).permutation(sum(counts)) + 1
    table = np.split(ids, np.cumsum(counts)[:-1])
    exact = exact_bucket(np.asarray(query_lens), decode_query_len=decode_query_len, max_blocks=0)
    names = ("max_decodes", "max_prefills", "max_prefill_tokens")
    grown = {name: getattr(exact, name) + room for name in names}
    bucket = jattn.Bucket(**grown, decode_query_len=decode_query_len, max_blocks=max(counts) + room)
    step = jattn.build_batch_metadata(query_lens, seq_lens, table, block_size=size, bucket=bucket)
    history = jattn.build_batch_metadata(seq_lens, seq_lens, table, block_size=size, decode_query_len=99)
    return step, history


def filled(ranks, history, **cache):
    """Return one device's cache with all keys, and those of the ranks along a new first axis; other slots
    are NaN.
    """
    tokens = history.slot_mapping.shape[0]
    key, value = (jax.random.normal(jax.random.key(i), (tokens, KV_HEADS, HEAD_DIM)) for i in (1, 2))
    num_blocks = int(history.block_table.max()) + 1

    def write(block_size, slots):
        spec = jattn.CacheSpec(
            num_blocks=num_blocks, block_size=block_size, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM,
            dtype=jnp.float32, **cache,
        )  # fmt: skip
        empty = jattn.PagedCache.create(spec)
        poisoned = jax.tree.map(
            lambda x: x if x.dtype == jnp.int8 or not x.ndim else jnp.full_like(x, jnp.nan), empty
        )
        return jattn.write_kv(poisoned, key, value, slots)

    whole = write(BLOCK * ranks.size, history.slot_mapping)
    return whole, on_ranks(ranks, lambda: write(BLOCK, slot_mapping_on_rank(history, ranks)))


def shared_step_of(ranks, seq_lens, num_shared):
    """Return the metadata of decode rows that share their first blocks."""
    size = BLOCK * ranks.size
    counts = np.maximum([-(-length // size) - num_shared for length in seq_lens], 0)
    ids = np.random.default_rng(0).permutation(num_shared + counts.sum()) + 1
    private_blocks = np.split(ids[num_shared:], np.cumsum(counts)[:-1])
    table = [np.concatenate([ids[:num_shared], blocks]) for blocks in private_blocks]
    step = jattn.build_batch_metadata([1] * len(seq_lens), seq_lens, table, block_size=size)
    history = jattn.build_batch_metadata(seq_lens, seq_lens, table, block_size=size, decode_query_len=99)
    is_again = (history.positions < num_shared * size) & (history.token_rows > 0)
    return step, replace(history, slot_mapping=jnp.where(is_again, -1, history.slot_mapping))


def both(ranks, spec, step=None, cache=(), implementation="xla", prefix_len=None, **per_head):
    """Return the output on one device and the sum of the ranks' outputs."""
    step, history = step_of(ranks) if step is None else step
    whole, caches = filled(ranks, history, **dict(cache))
    query = jax.random.normal(jax.random.key(3), (step.bucket.max_tokens, HEADS, HEAD_DIM))
    expected = jattn.attend(query, whole, step, spec, implementation=implementation, **per_head)

    @jax.jit
    @functools.partial(jax.vmap, axis_name="cp")
    def run(cache):
        plan = plan_on_rank(
            step, (spec,), (cache,), ranks, implementation=implementation, query_dtype=query.dtype,
            common_prefix_len=prefix_len,
        )  # fmt: skip
        is_cut = plan.context_parallel.regions[0][0].plan.cascade is not None
        assert is_cut == (prefix_len is not None and spec.window is None)
        rank_output = attend_on_rank(query, cache, step, spec, ranks, plan, **per_head)
        return jax.lax.psum(rank_output, "cp")

    return expected, run(caches)[0]


def spec_of(**changes):
    return jattn.AttentionSpec(num_q_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, **changes)


LAYERS = {
    "causal": ({}, {}),
    "not causal": ({"causal": False}, {}),
    "soft cap": ({"soft_cap": 2.0}, {}),
    "sinks": ({}, {"sinks": SINKS}),
    "a window of whole rounds": ({"window": (23, 0)}, {"sinks": SINKS}),
    "a window of other sizes": ({"window": (6, 0)}, {}),
    "a window to both sides": ({"causal": False, "window": (9, 4)}, {}),
    "chunks of whole rounds": ({"chunk_size": 24}, {}),
    "chunks of other sizes": ({"chunk_size": 7}, {}),
    "blocks": ({"sparsity": jattn.LocalStrided(**BLOCKS, homo_head=True)}, {}),
    "heads with blocks of their own": ({"sparsity": jattn.LocalStrided(**BLOCKS)}, {}),
    "batch_invariant": ({"batch_invariant": True}, {}),
}  # fmt: skip


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("size", "interleave"),
    [pytest.param(2, 1, marks=pytest.mark.slow), (3, 2), pytest.param(4, 8, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", LAYERS)
def test_sum_over_ranks_equals_one_device(name, size, interleave):
    changes, per_head = LAYERS[name]
    expected, actual = both(ranks_of(size, interleave), spec_of(**changes), **per_head)
    np.testing.assert_allclose(actual, expected, atol=3e-6)
    assert np.abs(np.asarray(expected)).max() > 0.5


@pytest.mark.kernels
@pytest.mark.parametrize("changes", [{}, {"window": (7, 0)}, {"chunk_size": 12}])
@pytest.mark.parametrize("size", [2, 3])
def test_alibi_uses_global_positions(changes, size):
    expected, actual = both(ranks_of(size), spec_of(**changes), alibi_slopes=SLOPES, sinks=SINKS)
    np.testing.assert_allclose(actual, expected, atol=3e-6)


@pytest.mark.kernels
@pytest.mark.parametrize(("size", "interleave"), [(2, 1), (3, 4)])
@pytest.mark.parametrize(
    ("changes", "per_head", "cache"),
    [
        ({}, {"sinks": SINKS}, {}),
        ({"soft_cap": 2.0}, {}, {"quantization": "int8_token_head"}),
        ({"window": (23, 0)}, {}, {"layout": "HND"}),
    ],
    ids=str,
)
def test_shared_prefix_equals_one_device(changes, per_head, cache, size, interleave):
    """Rows have so few keys after the prefix that some ranks have none."""
    ranks = ranks_of(size, interleave)
    prefix_len = 2 * BLOCK * size
    step = shared_step_of(ranks, [prefix_len + more for more in (1, 2, 50, 9)], 2)
    expected, actual = both(
        ranks, spec_of(**changes), step, cache, prefix_len=jnp.int32(prefix_len), **per_head
    )
    np.testing.assert_allclose(actual, expected, atol=3e-6)
    assert np.abs(np.asarray(expected)).max() > 0.5


@pytest.mark.kernels
@pytest.mark.parametrize("changes", [{}, {"window": (11, 0)}, {"chunk_size": 5}])
def test_prefill_rows_equal_one_device(changes):
    ranks = ranks_of(2, 4)
    step = step_of(ranks, [3, 3, 3, 2], [41, 3, 20, 9], decode_query_len=3)
    expected, actual = both(ranks, spec_of(**changes), step, sinks=SINKS)
    np.testing.assert_allclose(actual, expected, atol=3e-6)


@pytest.mark.kernels
@pytest.mark.parametrize(
    "cache",
    [
        {"layout": "HND"},
        {"layout": "packed"},
        {"quantization": "fp8_e4m3"},
        {"quantization": "int8_token_head"},
        {"quantization": "int8_token_head", "layout": "HND"},
    ],
    ids=str,
)
def test_every_cache_layout_and_dtype_equals_one_device(cache):
    expected, actual = both(ranks_of(2, 2), spec_of(window=(20, 0)), cache=cache)
    np.testing.assert_allclose(actual, expected, atol=3e-6)


@pytest.mark.kernels
def test_sliding_window_with_sinks_equals_one_device():
    """Runs without the kernels marker; the reference computes the visible keys independently."""
    expected, actual = both(ranks_of(3, 2), spec_of(window=(20, 0)), implementation="reference", sinks=SINKS)
    np.testing.assert_allclose(actual, expected, atol=3e-6)


class TestInterleaved:
    """Masks of a rank's interleaved keys, per pair and per tile."""

    MASKS = (Causal(), Window(5, 2) & Causal(), Window(3, None), Chunked(6), Chunked(5) & Causal())

    @pytest.mark.kernels
    @pytest.mark.parametrize("mask", MASKS, ids=repr)
    @pytest.mark.parametrize(("size", "interleave"), [(2, 1), (3, 2), (2, 4)])
    def test_mask_uses_global_positions(self, mask, size, interleave):
        seq_len, query_len = 29, 11
        for rank in range(size):
            stored = [p for p in range(seq_len) if p // interleave % size == rank]
            shift = seq_len - len(stored)
            queries, keys = np.arange(seq_len - query_len, seq_len), np.asarray(stored)
            in_window = self.of(mask, rank, shift, size, interleave)
            positions = np.arange(len(stored))
            actual = in_window.visible(pairs_of(queries - shift, positions))
            expected = np.asarray(mask.visible(pairs_of(queries, keys)))
            np.testing.assert_array_equal(np.asarray(actual), expected)
            self.check_tiles(in_window, expected, queries - shift)

    def of(self, mask, rank, shift, size, interleave):
        arrays = {"rank": jnp.int32(rank), "shift": jnp.asarray([0, shift], jnp.int32)}
        return InterleavedMask(mask=mask, **arrays, num_ranks=size, interleave=interleave)

    def check_tiles(self, in_window, visible, queries):
        """Check that every tile with a visible pair is listed, and that tiles marked full are full."""
        num_listed = 0
        for q, k in itertools.product(range(0, visible.shape[0], 4), range(0, visible.shape[1], 4)):
            tile = visible[q : q + 4, k : k + 4]
            ends = [int(queries[q]), int(queries[q]) + len(tile) - 1, k, k + tile.shape[1] - 1]
            ends = [jnp.int32(end) for end in ends]
            any_visible, all_visible = in_window.coverage(
                Tiles(jnp.int32(0), jnp.int32(1), *ends, (4, 2), (4, 4))
            )
            assert bool(any_visible) or not tile.any()
            assert tile.all() or not bool(all_visible)
            num_listed += bool(any_visible)
        assert num_listed >= 1


def pairs_of(queries, keys):
    query, key = (jnp.asarray(x, jnp.int32) for x in (queries, keys))
    return Pairs(jnp.int32(0), jnp.int32(1), query[:, None], key[None, :], (HEADS, KV_HEADS))


class TestRefusals:
    def test_block_size_must_be_a_multiple_of_the_round_size(self):
        with pytest.raises(ValueError, match=r"block_size must be a multiple of 2 ranks x .*\(8\), got 24"):
            ranks_of(2, 8).local_block_size(24)

    def test_interleave_must_be_positive(self):
        with pytest.raises(ValueError, match="cp_kv_cache_interleave_size must be positive, got 0"):
            ranks_of(2, 0)

    def test_plan_for_the_keys_of_all_ranks_is_rejected(self):
        ranks, spec = ranks_of(2), spec_of()
        step, history = step_of(ranks)
        whole, _ = filled(ranks, history)
        query = jnp.zeros((step.bucket.max_tokens, HEADS, HEAD_DIM))
        plan = jattn.plan(step, spec, whole)
        message = r"plan covers the keys of all ranks\. Build it with plan_on_rank"
        with pytest.raises(ValueError, match=message):
            on_ranks(ranks, lambda: attend_on_rank(query, whole, step, spec, ranks, plan))

    def test_prefix_must_be_a_multiple_of_the_global_block_size(self):
        rule = r"common_prefix_len must be a positive multiple of block_size \(16\), got 8"
        with pytest.raises(ValueError, match=rule):
            both(ranks_of(2), spec_of(), prefix_len=8)

    @pytest.mark.parametrize(
        ("changes", "interleave", "match"),
        [
            ({"sqrt_alibi": True}, 1, "spec.sqrt_alibi=True with cp > 1: "),
            ({}, 2, "cp_kv_cache_interleave_size=2 with ALiBi: "),
        ],
    )
    def test_nonlinear_alibi_is_rejected(self, changes, interleave, match):
        with pytest.raises(NotImplementedError, match=match):
            both(ranks_of(2, interleave), spec_of(**changes), alibi_slopes=SLOPES)


@pytest.mark.kernels
def test_float64_queries_are_combined_in_float64():
    """Float32 log-sum-exps would limit the result to seven digits."""
    with jax.enable_x64(True):
        slopes = SLOPES.astype(jnp.float64)
        expected, actual = both(ranks_of(2), spec_of(), sinks=SINKS, alibi_slopes=slopes)
        assert expected.dtype == actual.dtype == jnp.float64
        np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-12)
