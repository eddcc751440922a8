"""Models in which all layers have a window free the blocks that they no longer read."""

import collections
import itertools
import random
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jattn
from jattn.serving import SamplingParams
from jattn.serving.engine.block_manager import BlockHashes, BlockManager
from jattn.serving.engine.config import local_attention_of
from jattn.serving.engine.kv_cache_manager import LocalAttention, find_within_windows
from jattn.serving.engine.scheduler import Scheduler
from tests.serving.engine.test_engine_requests import drained, engine_of
from tests.serving.engine.test_prefix_cache import BLOCK_SIZE, Pool
from tests.serving.tiny import one_layer_model

WINDOW = 24
SLIDING = one_layer_model(sliding_window=WINDOW)


def seen_by(position, left, chunk_size):
    in_window = range(0 if left is None else max(position - left, 0), position + 1)
    return [p for p in in_window if chunk_size is None or p // chunk_size == position // chunk_size]


@pytest.mark.parametrize(
    "layers", [[(0, None)], [(5, None)], [(None, 4)], [(6, 4)], [(2, 8), (3, None)], [(3, None), (None, 6)]]
)
def test_the_first_visible_position_covers_every_layer(layers):
    local_attention = LocalAttention(frozenset(layers))
    for position in range(30):
        later = [seen_by(p, *layer)[0] for p in range(position, 40) for layer in layers]
        assert local_attention.first_visible(position) == min(later)
    assert local_attention.max_lookback == max(p - local_attention.first_visible(p) for p in range(30))


class Layers(nnx.Module):
    def __init__(self, *specs):
        spec = lambda fields: jattn.AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=8, **fields)
        self.layers = nnx.List([jattn.PagedAttention(8, spec(fields), rngs=nnx.Rngs(0)) for fields in specs])


@pytest.mark.parametrize(
    ("specs", "layers"),
    [
        ([{"window": (7, 0)}, {"window": (7, 0)}, {"chunk_size": 4}], {(7, None), (None, 4)}),
        ([{"window": (7, 0)}, {}], None),
        ([{"window": (None, 0)}], None),
        ([], None),
    ],
)
def test_local_attention_requires_a_window_in_every_layer(specs, layers):
    local_attention = local_attention_of(Layers(*specs))
    assert local_attention == (layers and LocalAttention(frozenset(layers)))


class Sliding(Pool):
    """A pool in which slots are read only within a layer's window, and unowned slots are forgotten unless
    cached.
    """

    def __init__(self, num_blocks, seed, local_attention, **limits):
        super().__init__(num_blocks, seed, **limits)
        self.local_attention = local_attention
        sizes = {"max_num_seqs": self.scheduler.max_num_seqs}
        sizes["max_num_batched_tokens"] = self.scheduler.max_num_batched_tokens
        self.scheduler = Scheduler(self.manager, local_attention=local_attention, **sizes)

    def first_read(self, length, count):
        return self.local_attention.first_visible(length - count)


@pytest.mark.kernels
@pytest.mark.parametrize("layers", [[(5, None)], [(None, 8)], [(0, None)], [(3, None), (7, 4)]])
@pytest.mark.parametrize("num_blocks", [6, 9, 20])
def test_random_requests_longer_than_the_pool_read_their_own_keys_and_leak_no_block(num_blocks, layers):
    pool, next_id = Sliding(num_blocks, 0, LocalAttention(frozenset(layers))), 0
    longest = 0
    for _ in range(700):
        next_id, length = pool.live(next_id)
        longest = max(longest, length)
    while pool.step():
        pass
    assert (pool.num_done, pool.scheduler.num_unfinished, pool.manager.num_used) == (next_id, 0, 0)
    assert longest > (num_blocks - 1) * BLOCK_SIZE or num_blocks == 20
    assert pool.scheduler.num_prefix_hit_tokens > 0


def test_a_prefix_is_found_if_the_next_tokens_window_is_cached():
    local_attention, hashes = LocalAttention(frozenset({(5, None)})), BlockHashes(4, range(24))
    manager = BlockManager(20, 4)
    table = manager.allocate(0, 24)
    for index in (0, 1, 3, 4):
        manager.cache_block(0, index, hashes[index])
    assert find_within_windows(local_attention, manager, hashes[:]) == (
        0,
        0,
        0,
        *table[3:5],
    )  # 20 sees 15 onward
    assert find_within_windows(local_attention, manager, hashes[:3]) == table[:2]
    assert find_within_windows(local_attention, manager, hashes[:0]) == ()


class TestPrefixesOfManyRequests:
    """Requests find as many prompt tokens as in a model without windows, in a cache of 72 window blocks."""

    def num_found(self, window, prompts_by_turn):
        """Run turns of requests one by one; a turn's prompt i continues the tokens of the turn before."""
        options = {"max_num_seqs": 8, "max_num_batched_tokens": 32}
        if window is not None:
            options["local_attention"] = LocalAttention(frozenset([(window - 1, None)]))
            options["sliding_window_manager"] = BlockManager(73, 4)
        scheduler, ids = Scheduler(BlockManager(401, 4), **options), itertools.count()
        tokens: dict[int, list[int]] = collections.defaultdict(list)
        for prompts in prompts_by_turn:
            for i, prompt in enumerate(prompts):
                request, num_tokens = next(ids), 6
                tokens[i] += prompt
                hashes = BlockHashes(4, tokens[i])
                scheduler.add(request, len(tokens[i]), num_tokens, hashes)
                while num_tokens:
                    step = scheduler.schedule()
                    num_tokens -= any(step.samples)
                    scheduler.update_after_start(step, () if num_tokens else [request])
                    if any(step.samples):
                        tokens[i].append(num_tokens)
                        if num_tokens:
                            hashes.extend([num_tokens])
        return scheduler.num_prefix_hit_tokens

    @pytest.mark.parametrize("num_sessions", [3, 4, 6, 8])
    def test_sessions_that_take_turns(self, num_sessions):
        draw = random.Random(0)
        turns = [[draw.choices(range(999), k=k) for _ in range(num_sessions)] for k in (100, 10, 10)]
        assert self.num_found(24, turns) == self.num_found(None, turns) > 200 * num_sessions

    @pytest.mark.parametrize("num_prompts", [3, 6, 12])
    def test_a_shared_beginning(self, num_prompts):
        draw = random.Random(0)
        shared = draw.choices(range(999), k=60)
        turns = [[shared + draw.choices(range(999), k=40) for _ in range(num_prompts)]]
        assert self.num_found(24, turns) == self.num_found(None, turns) == 60 * (num_prompts - 1)


def test_without_room_for_a_window_a_request_must_fit_the_cache():
    local_attention = LocalAttention(frozenset({(15, None)}))
    scheduler = Scheduler(
        BlockManager(5, 4), local_attention=local_attention
    )  # 4 blocks hold 16 tokens, and 15 follow the end of a block
    assert scheduler.capacity_tokens == 16
    with pytest.raises(
        ValueError, match=r"needs 17 tokens of the KV cache .*, but the cache holds only 16\."
    ):
        scheduler.add(0, 17, 1)
    assert Scheduler(BlockManager(6, 4), local_attention=local_attention).capacity_tokens > 10**9


@pytest.mark.parametrize(("num_blocks", "longest"), [(6, 22), (7, sys.maxsize)])
def test_a_long_longrope_request_must_fit_its_first_chunk(num_blocks, longest):
    local_attention = LocalAttention(frozenset({(3, None)}))
    scheduler = Scheduler(BlockManager(num_blocks, 4), local_attention=local_attention, longrope_threshold=22)
    assert scheduler.capacity_tokens == longest
    scheduler.add(0, min(longest, 99), 1)
    assert scheduler.schedule() is not None


def poisoned(caches, blocks):
    return jax.tree.map(lambda array: array.at[jnp.asarray(blocks)].set(jnp.nan), caches)


class TestEngine:
    def prompts(self):
        draw = random.Random(1)
        shared = draw.choices(range(320), k=60)
        return [shared[: 20 * i] + draw.choices(range(320), k=40 + i) for i in range(4)]

    @pytest.mark.kernels
    def test_requests_longer_than_the_cache_generate_the_same_tokens(self):
        params = [SamplingParams(max_tokens=40, temperature=i % 2, seed=i, n=1 + i % 2) for i in range(4)]
        roomy = engine_of(model=SLIDING, enable_prefix_caching=False)
        expected = roomy.generate(self.prompts(), params)
        tight = engine_of(num_blocks=8, budget=32, model=SLIDING, max_blocks=64)
        for _ in range(2):
            actual = tight.generate(self.prompts(), params)
            assert [[fields.token_ids for fields in result.outputs] for result in actual] == [
                [fields.token_ids for fields in result.outputs] for result in expected
            ]
        assert tight.stats.num_blocks * 8 < 60
        assert tight.stats.num_preemptions > 0
        assert tight.stats.num_prefix_hit_tokens > 0
        assert (tight.stats.num_used_blocks, roomy.stats.num_used_blocks) == (0, 0)

    @pytest.mark.kernels
    def test_freed_blocks_are_never_read(self):
        """Blocks of no request, including the null block, are NaN in every step."""
        expected = engine_of(model=SLIDING).generate(self.prompts(), max_tokens=30)
        engine = engine_of(num_blocks=20, model=SLIDING, enable_prefix_caching=False, max_blocks=64)
        names = [engine.add_request(prompt, SamplingParams(max_tokens=30)) for prompt in self.prompts()]
        manager, runner, ids = engine.scheduler.block_manager, engine._runner, {}
        while engine.has_unfinished_requests():
            runner._caches = poisoned(runner._caches, [b for b in range(20) if manager.ref_count(b) == 0])
            for output in engine.step():
                ids.setdefault(output.request_id, []).extend(output.new_token_ids)
        assert [ids[name] for name in names] == [result.token_ids for result in expected]

    @pytest.mark.kernels
    def test_a_prefix_is_found_after_its_first_blocks_were_freed(self):
        engine = engine_of(num_blocks=40, model=SLIDING, max_blocks=64)
        prompt = random.Random(2).choices(range(320), k=100)
        (first,) = engine.generate([prompt], max_tokens=4)
        manager = engine.scheduler.block_manager
        digests = BlockHashes(8, prompt)[:]
        for block in manager.find(digests[:3]):
            manager._uncache(block)  # as if it had been handed out for something else
        (repeated,) = engine.generate([prompt], max_tokens=4)
        assert repeated.token_ids == first.token_ids
        assert engine.stats.num_prefix_hit_tokens == 96

    def test_the_default_cache_holds_windows_not_contexts(self):
        sizes = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "block_size": 8}
        full, sliding = (
            jattn.serving.Engine(model, **sizes).stats.num_blocks for model in (one_layer_model(), SLIDING)
        )
        assert (full, sliding) == (2 * 512 // 8, 2 * (-(-(WINDOW - 1 + 32) // 8) + 1))

    def test_a_bucket_must_hold_the_longest_context_though_the_cache_does_not(self):
        with pytest.raises(ValueError, match=r"The batch .*x64 does not fit any of the buckets .*x7"):
            engine_of(num_blocks=8, model=SLIDING)
        drained(engine_of(num_blocks=8))
