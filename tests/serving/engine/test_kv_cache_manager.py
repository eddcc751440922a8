"""Models with sliding-window and full-attention layers: each group has its own blocks."""

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn.models import Decoder, DecoderConfig
from jattn.models.loading.pretrained import read_config
from jattn.serving import Engine, SamplingParams
from jattn.serving.engine.block_manager import BlockHashes, BlockManager
from jattn.serving.engine.kv_cache_manager import KVCacheGroup, LocalAttention, find_in_all_groups
from jattn.serving.engine.scheduler import Scheduler
from tests.conftest import GOLDEN
from tests.serving.engine.test_engine_requests import engine_of
from tests.serving.engine.test_prefix_cache import BLOCK_SIZE, Pool
from tests.serving.tiny import BYTES, one_layer_model

NEAR = LocalAttention(frozenset({(5, None)}))


class TwoGroups(Pool):
    """A block pool for full-attention layers and sliding-window layers with separate blocks."""

    def __init__(self, num_blocks, num_near_blocks, seed, local_attention, **limits):
        super().__init__(num_blocks, seed, **limits)
        self.local_attention, self.near_memory = local_attention, {}
        self.near = BlockManager(num_near_blocks, BLOCK_SIZE)
        old = self.scheduler
        sizes = {"max_num_seqs": old.max_num_seqs, "max_num_batched_tokens": old.max_num_batched_tokens}
        self.scheduler = Scheduler(
            self.manager, local_attention=local_attention, sliding_window_manager=self.near, **sizes
        )

    def groups(self, step):
        first_near = lambda length, count: self.local_attention.first_visible(length - count)
        return [
            *super().groups(step),
            (self.near_memory, step.sliding_window_tables, step.sliding_window_copies, first_near),
        ]


@pytest.mark.kernels
@pytest.mark.parametrize("layers", [[(5, None)], [(None, 8)], [(0, None)], [(3, None), (7, 4)]])
@pytest.mark.parametrize(("num_blocks", "num_near_blocks"), [(20, 6), (9, 20), (40, 14)])
def test_random_requests_read_their_own_keys_in_both_groups(num_blocks, num_near_blocks, layers):
    pool, next_id = TwoGroups(num_blocks, num_near_blocks, 0, LocalAttention(frozenset(layers))), 0
    longest, most = 0, (num_blocks - 1) * BLOCK_SIZE
    for _ in range(500):
        next_id, length = pool.live(next_id, most_tokens=most)
        longest = max(longest, length)
    while pool.step():
        pass
    assert (pool.num_done, pool.scheduler.num_unfinished) == (next_id, 0)
    assert (pool.manager.num_used, pool.near.num_used) == (0, 0)
    assert longest > (num_near_blocks - 1) * BLOCK_SIZE or num_near_blocks > 9
    assert pool.scheduler.num_prefix_hit_tokens > 0
    assert pool.scheduler.num_preemptions > 0 or num_blocks == 40


def test_a_prefix_is_found_if_both_groups_have_its_blocks():
    hashes = BlockHashes(4, range(24))
    full_manager, window_manager = BlockManager(20, 4), BlockManager(20, 4)
    table, near_table = full_manager.allocate(0, 24), window_manager.allocate(0, 24)
    for index in range(5):
        full_manager.cache_block(0, index, hashes[index])
    for index in (0, 1, 3, 4, 5):
        window_manager.cache_block(0, index, hashes[index])
    groups = [KVCacheGroup(full_manager), KVCacheGroup(window_manager, NEAR)]
    assert find_in_all_groups(groups, hashes[:]) == [
        table[:5],
        (0, 0, 0, *near_table[3:5]),
    ]  # 20 sees 15 onward
    assert find_in_all_groups(groups, hashes[:4]) == [
        table[:2],
        near_table[:2],
    ]  # 16 sees 11, which is not there
    full_manager.reset_prefix_cache()
    assert find_in_all_groups(groups, hashes[:]) == [(), ()]


def test_a_prompt_chunks_blocks_are_freed_after_it_has_run():
    scheduler = Scheduler(
        BlockManager(20, 4),
        local_attention=NEAR,
        sliding_window_manager=BlockManager(9, 4),
        max_num_batched_tokens=16,
    )
    scheduler.add(0, 48, 1)
    used = []
    while (step := scheduler.schedule()) is not None:
        assert scheduler.sliding_window_manager.num_used <= -(-(NEAR.max_lookback + 16) // 4) + 1
        scheduler.update_after_start(step, [0] if all(step.samples) else [])
        used.append((scheduler.block_manager.num_used, scheduler.sliding_window_manager.num_used))
    assert used == [(4, 2), (8, 2), (0, 0)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"local_attention": None},
            r"sliding_window_manager requires local_attention, .* Pass local_attention\.",
        ),
        (
            {"sliding_window_manager": BlockManager(9, 8)},
            r"sliding_window_manager\.block_size must equal .* \(4\), got 8\.",
        ),
    ],
)
def test_another_block_size_or_missing_local_attention_is_refused(arguments, message):
    scheduler_options = {"local_attention": NEAR, "sliding_window_manager": BlockManager(9, 4)} | arguments
    with pytest.raises(ValueError, match=message):
        Scheduler(BlockManager(9, 4), **scheduler_options)


WINDOW = 24
TWO = ("sliding_attention", "full_attention")
KINDS = ("sliding_attention", "sliding_attention", "full_attention")


@functools.cache
def gemma3(kinds=KINDS):
    """Return a model with random parameters and layers of these types, which never ends a text."""
    hf = read_config(GOLDEN / "hf" / "gemma3").to_hf()
    change = {"layer_types": [*kinds], "num_hidden_layers": len(kinds), "eos_token_id": None}
    model = Decoder(DecoderConfig.from_hf(hf | change), rngs=nnx.Rngs(0))
    model.tokenizer = BYTES
    return model


def prompts():
    draw = random.Random(1)
    shared = draw.choices(range(320), k=60)
    return [shared[: 20 * i] + draw.choices(range(320), k=40 + i) for i in range(4)]


PARAMS = [SamplingParams(max_tokens=30, temperature=i % 2, seed=i, n=1 + i % 2) for i in range(4)]


def token_ids(results):
    return [[completion.token_ids for completion in result.outputs] for result in results]


@functools.partial(jax.jit, donate_argnums=0)
def poisoned(caches, owned):
    """Return each layer's cache with NaN in the blocks that no request owns."""
    keep = lambda is_owned: lambda array: jnp.where(is_owned.reshape(-1, 1, 1, 1), array, jnp.nan)
    return tuple(jax.tree.map(keep(is_owned), cache) for cache, is_owned in zip(caches, owned, strict=True))


@pytest.fixture(scope="module")
def expected_tokens():
    """Return the tokens of the prompts if all layers share block tables."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "sliding_window_layers", ())
        engine = engine_of(model=gemma3(TWO), enable_prefix_caching=False)
        assert engine.scheduler.sliding_window_manager is None
        return token_ids(engine.generate(prompts(), PARAMS))


class TestEngine:
    @pytest.mark.kernels
    def test_tokens_equal_those_with_a_shared_block_table(self, expected_tokens):
        engine = engine_of(num_blocks=27, budget=32, model=gemma3(TWO), max_blocks=64)
        window_manager = engine.scheduler.sliding_window_manager
        near_blocks = [cache.k.shape[0] for cache in engine._runner._caches]
        assert near_blocks == [window_manager.num_blocks, 27] == [25, 27]
        for _ in range(2):
            assert token_ids(engine.generate(prompts(), PARAMS)) == expected_tokens
        stats = engine.stats
        assert min(stats.num_prefix_hit_tokens, stats.num_forked_tokens, stats.num_preemptions) > 0
        assert (stats.num_used_blocks, window_manager.num_used) == (0, 0)
        assert stats.num_compiles == 1

    @pytest.mark.kernels
    def test_freed_blocks_are_never_read(self, expected_tokens):
        """Blocks of no request, including the null block, are NaN in every step, in both groups of layers."""
        engine = engine_of(num_blocks=60, model=gemma3(TWO), enable_prefix_caching=False, max_blocks=64)
        names = [engine.add_request(*request) for request in zip(prompts(), PARAMS, strict=True)]
        scheduler, runner, ids = engine.scheduler, engine._runner, {}
        managers = [scheduler.sliding_window_manager, scheduler.block_manager]
        while engine.has_unfinished_requests():
            owned = [np.array([m.ref_count(b) > 0 for b in range(m.num_blocks)]) for m in managers]
            runner._caches = poisoned(runner._caches, owned)
            for output in engine.step():
                ids.setdefault((output.request_id, output.index), []).extend(output.new_token_ids)
        actual = [[ids[name, i] for i in range(params.n)] for name, params in zip(names, PARAMS, strict=True)]
        assert actual == expected_tokens

    @pytest.mark.kernels
    @pytest.mark.parametrize("speculative", ["ngram", one_layer_model])
    def test_drafts_are_verified_in_both_groups(self, expected_tokens, speculative):
        speculative = speculative if isinstance(speculative, str) else speculative()
        sizes = {"block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 64, "num_blocks": 65}
        engine = Engine(gemma3(TWO), speculative=speculative, check_batches=True, **sizes)
        engine._speculation._draft_cost = 0.0  # as for a draft model that is small compared with the model
        assert token_ids(engine.generate(prompts(), PARAMS)) == expected_tokens
        assert engine.stats.num_drafts > 0

    @pytest.mark.kernels
    def test_nothing_compiles_after_precompile(self):
        engine = engine_of(num_blocks=30, model=gemma3(TWO), max_blocks=64)
        engine.precompile(progress=False)
        compiles = []
        listen = lambda name, *_, **__: compiles.append(name) if "backend_compile" in name else None
        jax.monitoring.register_event_duration_secs_listener(listen)
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=3, n=2, temperature=1.0, seed=0))
        assert engine.stats.num_forked_tokens == 2
        assert compiles == []


class TestMemory:
    SIZES = {"block_size": 8, "max_num_seqs": 2, "max_num_batched_tokens": 32}  # noqa: RUF012
    # Of two requests: a window of 24 and what it straddles, 5 blocks, and 32 new tokens in a step, 4 more.
    NEAR = 2 * 5 + 4 + 1

    def test_window_layers_hold_windows_and_other_layers_hold_contexts(self):
        engine = Engine(gemma3(), **self.SIZES)
        assert [cache.k.shape[0] for cache in engine._runner._caches] == [self.NEAR, self.NEAR, 129]
        assert engine.scheduler.sliding_window_manager.num_blocks == self.NEAR

    def test_windows_allow_more_blocks_within_the_same_memory(self, monkeypatch):
        num_bytes = lambda engine: sum(x.nbytes for x in jax.tree.leaves(engine._runner._caches))
        in_one = gemma3().cache_specs(1, block_size=8)[0].bytes_per_block
        budget = 3 * 43 * in_one + 17
        engine = Engine(gemma3(), cache_bytes=budget, **self.SIZES)
        assert num_bytes(engine) == (2 * self.NEAR + 99) * in_one == budget - 17
        monkeypatch.setattr(Decoder, "sliding_window_layers", ())
        assert Engine(gemma3(), cache_bytes=budget, **self.SIZES).stats.num_blocks == 42

    @pytest.mark.parametrize("num_blocks", [2, 14, 15, 16])
    def test_a_small_cache_limits_all_layers(self, num_blocks):
        engine = Engine(gemma3(), num_blocks=num_blocks, **self.SIZES)
        window_manager = min(num_blocks, self.NEAR)
        assert [cache.k.shape[0] for cache in engine._runner._caches] == [
            window_manager,
            window_manager,
            num_blocks,
        ]
        assert engine.scheduler.capacity_tokens == 8 * (num_blocks - 1)
        budget = gemma3().cache_specs(num_blocks, block_size=8)[0].num_bytes * 3
        if num_blocks <= self.NEAR:
            assert Engine(gemma3(), cache_bytes=budget, **self.SIZES).stats.num_blocks == num_blocks - 1

    @pytest.mark.kernels
    def test_requests_that_fill_the_steps_never_wait_for_blocks_of_windows(self):
        engine = Engine(gemma3(TWO), **self.SIZES)
        engine.generate([[*range(100)], [*range(5, 88)], [*range(64)]], max_tokens=20)
        assert engine.stats.num_preemptions == 0
        assert 0 < engine.scheduler.sliding_window_manager.peak_used <= self.NEAR - 1


def test_caches_have_one_number_of_blocks_or_one_a_layer():
    specs = gemma3().cache_specs([5, 5, 9])
    assert [spec.num_blocks for spec in specs] == [5, 5, 9]
    assert [cache.k.shape[0] for cache in gemma3().create_caches([5, 6, 9])] == [5, 6, 9]
    with pytest.raises(ValueError, match=r"num_blocks must have one entry per layer \(3\), got 2\."):
        gemma3().cache_specs([5, 9])
