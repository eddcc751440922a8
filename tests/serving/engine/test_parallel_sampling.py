"""Completions of one prompt: the prompt is computed once, and its blocks are shared until written."""

import random

import jax.numpy as jnp
import pytest

import jattn
from jattn.cache import block_copy
from jattn.serving import SamplingParams
from jattn.serving.engine.block_copies import BlockCopier
from jattn.serving.engine.block_manager import BlockManager
from jattn.serving.engine.scheduler import Scheduler
from tests.assertions import copies_of, record_compilations
from tests.serving.engine.test_engine_requests import drained, engine_of
from tests.serving.engine.test_prefix_cache import Pool

BLOCK_SIZE = 4
HOT = {"temperature": 1.5, "max_tokens": 7}


def scheduler_of(num_blocks=40, **limits):
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64} | limits
    return Scheduler(BlockManager(num_blocks, BLOCK_SIZE), **limits)


def add_completions(scheduler, count, num_prompt_tokens, max_tokens=9, first=0):
    scheduler.add(first, num_prompt_tokens, max_tokens)
    for child in range(first + 1, first + count):
        scheduler.add(child, num_prompt_tokens, max_tokens, parent_id=first)


def rows(step):
    return dict(zip(step.request_ids, step.query_lens, strict=True))


class TestScheduler:
    @pytest.mark.parametrize("budget", [64, 5, 3])
    def test_prompt_is_computed_once_and_forks_compute_its_last_token(self, budget):
        scheduler = scheduler_of(max_num_batched_tokens=budget)
        add_completions(scheduler, 3, 10)
        computed = {0: 0, 1: 0, 2: 0}
        while scheduler.num_running < 3 or scheduler.num_waiting:
            step = scheduler.schedule()
            for request, count, samples in zip(step.request_ids, step.query_lens, step.samples, strict=True):
                computed[request] += count
                assert samples == (computed[request] >= (10 if request == 0 else 1))
            scheduler.update_after_start(step)
        assert (computed[1], computed[2]) == (1, 1)
        assert scheduler.num_forked_tokens == 2 * 9

    def test_full_blocks_are_shared_and_the_last_block_is_copied_for_all_but_one(self):
        scheduler = scheduler_of()
        add_completions(scheduler, 3, 10)
        scheduler.update_after_start(scheduler.schedule())
        (source,) = scheduler.block_manager.block_table(0)[2:]
        assert scheduler.block_manager.num_used == 3
        step = scheduler.schedule()
        assert (rows(step), step.num_decodes) == ({0: 1, 1: 1, 2: 1}, 3)
        tables = [list(table) for table in step.block_tables]
        assert tables[0][:2] == tables[1][:2] == tables[2][:2]
        assert len({table[2] for table in tables}) == 3
        assert sorted(pair[0] for pair in step.block_copies) == [source, source]
        assert scheduler.block_manager.num_used == 5
        scheduler.update_after_start(step)
        assert scheduler.schedule().block_copies == ()

    def test_last_full_block_is_copied_since_its_last_token_is_recomputed(self):
        scheduler = scheduler_of()
        add_completions(scheduler, 2, 8)
        scheduler.update_after_start(scheduler.schedule())
        step = scheduler.schedule()
        assert [list(table)[:1] for table in step.block_tables] == [[1], [1]]
        assert len(step.block_copies) == 1

    def test_a_last_token_alone_in_its_block_needs_no_copy(self):
        scheduler = scheduler_of()
        add_completions(scheduler, 2, 9)
        scheduler.update_after_start(scheduler.schedule())
        assert scheduler.schedule().block_copies == ()

    def test_prompts_of_one_token_share_nothing(self):
        scheduler = scheduler_of()
        add_completions(scheduler, 2, 1)
        scheduler.update_after_start(scheduler.schedule())
        step = scheduler.schedule()
        assert (rows(step), step.block_copies, scheduler.num_forked_tokens) == ({0: 1, 1: 1}, (), 0)

    def test_other_requests_are_admitted_while_completions_wait_for_their_prompt(self):
        scheduler = scheduler_of(max_num_batched_tokens=6)
        add_completions(scheduler, 3, 4)
        scheduler.add(9, 2, 3)
        step = scheduler.schedule()
        assert rows(step) == {0: 4, 9: 2}
        scheduler.update_after_start(step)
        assert rows(scheduler.schedule()) == {0: 1, 1: 1, 2: 1, 9: 1}

    def test_shared_blocks_outlive_the_completion_that_computed_them(self):
        scheduler = scheduler_of(max_num_seqs=1)
        add_completions(scheduler, 2, 10, max_tokens=1)
        step = scheduler.schedule()
        scheduler.update_after_start(step, finished=[0])
        assert (scheduler.num_waiting, scheduler.block_manager.num_used) == (1, 3)
        step = scheduler.schedule()
        assert (rows(step), step.block_copies) == ({1: 1}, ())  # the block is no longer shared
        scheduler.update_after_start(step, finished=[1])
        assert scheduler.block_manager.num_used == 0

    def test_waiting_completions_are_preempted_before_older_requests(self):
        scheduler = scheduler_of(5, max_num_seqs=1)  # 4 blocks
        add_completions(scheduler, 2, 7, max_tokens=9)
        scheduler.update_after_start(scheduler.schedule())
        for _ in range(8):  # completion 0 grows to all 4 blocks, though 1 shares two and has it copy one
            step = scheduler.schedule()
            assert rows(step) == {0: 1}
            scheduler.update_after_start(step)
        assert (scheduler.num_preemptions, scheduler.block_manager.num_free) == (1, 0)
        scheduler.abort(0)
        assert rows(scheduler.schedule()) == {1: 7}

    def test_latest_request_is_preempted_if_all_wait_for_blocks(self):
        scheduler = scheduler_of(4, max_num_seqs=2)  # 3 blocks
        add_completions(scheduler, 3, 6, max_tokens=2)
        scheduler.add(9, 4, 5)
        step = scheduler.schedule()
        assert rows(step) == {0: 6, 9: 4}
        scheduler.update_after_start(
            step, finished=[0]
        )  # 1 and 2 share two blocks, 9 has one and needs another
        step = scheduler.schedule()
        assert step.preempted == (9,)
        assert rows(step) == {1: 1, 2: 1}
        scheduler.update_after_start(step)

    @pytest.mark.parametrize("dropped", [0, 1])
    def test_aborting_a_waiting_completion_keeps_the_blocks_of_the_others(self, dropped):
        scheduler = scheduler_of(max_num_batched_tokens=4)
        add_completions(scheduler, 3, 10)
        scheduler.update_after_start(scheduler.schedule())
        scheduler.abort(dropped)
        computed = {0: 0, 1: 0, 2: 0}
        for _ in range(6):
            step = scheduler.schedule()
            for request, count in rows(step).items():
                computed[request] += count
            scheduler.update_after_start(step)
        promote_completion = {0: 1, 1: 0}[dropped]
        assert computed[dropped] == 0
        assert scheduler.num_forked_tokens == 9
        for request in (promote_completion, 2):
            scheduler.abort(request)
        assert (scheduler.num_unfinished, scheduler.block_manager.num_used) == (0, 0)

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            (
                lambda s: s.add(7, 9, 1, parent_id=0),
                r"num_prompt_tokens must equal the parent's \(10\), got 9\.",
            ),
            (
                lambda s: (s.update_after_start(s.schedule()), s.add(7, 10, 1, parent_id=0)),
                r"Request 0 cannot be a parent: its prompt is already computed in part, or it has a parent",
            ),
        ],
    )
    def test_invalid_arguments_are_rejected(self, wrong, message):
        scheduler = scheduler_of()
        scheduler.add(0, 10, 1)
        with pytest.raises(ValueError, match=message):
            wrong(scheduler)
        assert scheduler.num_unfinished == 1


def test_single_waiting_completion_is_preempted_for_an_older_request():
    scheduler = scheduler_of(num_blocks=5, longrope_threshold=12)
    scheduler.add(0, 8, 9)
    add_completions(scheduler, 2, 5, max_tokens=1, first=1)
    step = scheduler.schedule()
    assert rows(step) == {0: 8, 1: 5}
    scheduler.update_after_start(step, [1])
    order = []
    while (step := scheduler.schedule()) is not None:
        order.append(rows(step))
        scheduler.update_after_start(
            step, [request for request in step.request_ids if request == 2 or step.seq_lens[0] == 16]
        )
    # Request 0 is recomputed with 13 tokens and needs all blocks, of which request 2 holds one.
    assert order == [{0: 1}] * 4 + [{0: 13}] + [{0: 1}] * 3 + [{2: 5}]
    assert (scheduler.num_unfinished, scheduler.block_manager.num_used) == (0, 0)


@pytest.mark.kernels
@pytest.mark.parametrize(("seed", "num_blocks"), [(0, 10), (1, 14), (2, 40)])
def test_random_completions_read_their_prompts_keys_and_leak_no_block(seed, num_blocks):
    pool, next_id = Pool(num_blocks, seed), 0
    draw = pool.random
    for _ in range(1500):
        event = draw.random()
        if event < 0.2 and len(pool.tokens) < 9:
            tokens = [draw.randrange(2) for _ in range(draw.randint(1, 20))]
            room = (num_blocks - 1) * BLOCK_SIZE - len(tokens) + 1
            max_tokens, parent = draw.randint(1, min(9, room)), None
            is_found = draw.random() < 0.5
            for _ in range(draw.choice([1, 2, 4])):
                pool.add(next_id, tokens, max_tokens, parent=parent, is_found=is_found)
                parent = next_id if parent is None else parent
                next_id += 1
        elif event < 0.25 and pool.tokens:
            pool.abort(draw.choice(list(pool.tokens)))
        elif event < 0.26:
            pool.update_weights()
        else:
            pool.step()
    while pool.step():
        pass
    assert (pool.num_done, pool.scheduler.num_unfinished, pool.manager.num_used) == (next_id, 0, 0)
    assert pool.scheduler.num_forked_tokens > next_id
    assert pool.scheduler.num_preemptions > 0 or num_blocks > 14


class TestEngine:
    @pytest.mark.kernels
    @pytest.mark.parametrize("enable_prefix_caching", [True, False])
    def test_completions_equal_single_requests_with_their_seeds(self, enable_prefix_caching):
        engine = engine_of(enable_prefix_caching=enable_prefix_caching, budget=16)
        prompt = random.Random(0).choices(range(320), k=43)
        (result,) = engine.generate([prompt], SamplingParams(seed=10, n=4, **HOT))
        stats = engine.stats
        assert stats.num_forked_tokens == 3 * 42
        assert (
            stats.num_steps == 3 + 7
        )  # the prompt in three chunks; the other completions start a step later
        # 5 of 8 blocks are shared; the last two of the others are needed after the first has finished.
        assert stats.peak_blocks == 5 + 3 * 2
        alone = engine_of(enable_prefix_caching=False)
        expected = [alone.generate([prompt], SamplingParams(seed=10 + i, **HOT))[0] for i in range(4)]
        assert [completion.token_ids for completion in result.outputs] == [
            completion.token_ids for completion in expected
        ]
        assert len({tuple(completion.token_ids) for completion in expected}) == 4

    @pytest.mark.kernels
    def test_completions_of_several_requests_under_preemption(self):
        crowded, alone = engine_of(num_blocks=9, budget=11), engine_of()
        prompts = [random.Random(i).choices(range(320), k=15 + i) for i in range(4)]
        params = [SamplingParams(seed=i, n=3, prompt_logprobs=1 if i == 1 else None, **HOT) for i in range(4)]
        results = crowded.generate(prompts, params)
        assert crowded.stats.num_preemptions > 0
        for actual, expected in zip(results, alone.generate(prompts, params), strict=True):
            assert [completion.token_ids for completion in actual.outputs] == [
                completion.token_ids for completion in expected.outputs
            ]
        for completion in results[1].outputs:
            assert [table and next(iter(table)) for table in completion.prompt_logprobs] == [
                None,
                *prompts[1][1:],
            ]
        assert results[0].outputs[2].prompt_logprobs is None
        assert crowded.stats.num_used_blocks == 0

    def test_blocks_are_copied_in_the_donated_caches(self):
        engine = engine_of()
        engine.add_request(list(range(13)), SamplingParams(seed=0, n=2, **HOT))
        engine.step()
        before = engine._runner._caches
        pointers = [layer.k.unsafe_buffer_pointer() for layer in before]
        engine.step()
        assert all(layer.k.is_deleted() and layer.v.is_deleted() for layer in before)
        assert [layer.k.unsafe_buffer_pointer() for layer in engine._runner._caches] == pointers
        arrays = [block_copy.block_arrays(layer) for layer in engine._runner._caches]
        program = block_copy._copy_blocks.lower(arrays, block_copy.pad_block_pairs([(1, 2)])).compile()
        assert copies_of(program, arrays[0]["k"]) == []
        drained(engine)

    def test_nothing_compiles_after_precompile(self):
        engine = engine_of()
        engine.precompile(progress=False)
        params = SamplingParams(seed=0, n=3, **HOT)
        with record_compilations() as compiled:
            engine.generate([list(range(13)), list(range(50, 63))], params)
        assert (engine.stats.num_forked_tokens, compiled) == (4 * 12, [])

    def test_more_copies_than_the_largest_size_are_made(self):
        cache = jattn.PagedCache(k=jnp.arange(40.0).reshape(10, 4, 1, 1), v=jnp.zeros((10, 4, 1, 1)))
        copied = BlockCopier(1)((cache,), [(1, 7), (2, 8), (3, 9)])
        assert copied[0].k[7:, 0, 0, 0].tolist() == [4.0, 8.0, 12.0]
