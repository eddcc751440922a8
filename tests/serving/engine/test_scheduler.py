import dataclasses

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from jattn.batch.bucket import Bucket
from jattn.batch.metadata import build_batch_metadata
from jattn.serving.engine.block_manager import BlockManager
from jattn.serving.engine.scheduler import Scheduler

BLOCK_SIZE = 4


@dataclasses.dataclass
class Arrival:
    at_step: int
    prompt_len: int
    max_tokens: int


def next_token(context):
    return (sum((i + 1) * token for i, token in enumerate(context)) * 31 + 7) % 1009


class FakeModel:
    """A model that stores tokens in paged memory and computes the next token from what it reads back."""

    def __init__(self, scheduler):
        self.scheduler, self.memory = scheduler, {}
        self.tokens, self.first_token_order, self.steps, self.finished = {}, [], 0, {}

    def slot(self, table, position):
        return table[position // BLOCK_SIZE], position % BLOCK_SIZE

    def run(self, step, num_wanted):
        rows = list(zip(step.request_ids, step.query_lens, step.seq_lens, step.block_tables, strict=True))
        copied = {
            (target, offset): self.memory.get((source, offset))
            for source, target in step.block_copies
            for offset in range(BLOCK_SIZE)
        }
        self.memory.update(copied)
        for request, count, length, table in rows:
            for position in range(length - count, length):
                self.memory[self.slot(table, position)] = self.tokens[request][position]
        done = []
        for (request, _, length, table), samples in zip(rows, step.samples, strict=True):
            context = [self.memory[self.slot(table, position)] for position in range(length)]
            assert context == self.tokens[request][:length]
            assert samples == (length == len(self.tokens[request]))
            if samples:
                if request not in self.first_token_order:
                    self.first_token_order.append(request)
                self.tokens[request].append(next_token(context))
                if len(self.tokens[request]) == num_wanted[request]:
                    done.append(request)
        self.scheduler.update_after_start(step, done)
        self.steps += 1


def check_limits(step, scheduler):
    assert len(set(step.request_ids)) == len(step.request_ids) <= scheduler.max_num_seqs
    assert 0 < step.num_tokens <= scheduler.max_num_batched_tokens
    assert min(step.query_lens) > 0
    decodes = [q == 1 and s > 1 for q, s in zip(step.query_lens, step.seq_lens, strict=True)]
    assert decodes == sorted(decodes, reverse=True)
    assert sum(decodes) == step.num_decodes
    for ids in (step.request_ids[: step.num_decodes], step.request_ids[step.num_decodes :]):
        assert list(ids) == sorted(ids)
    # What was preempted is later than everything that runs.
    assert all(victim > max(step.request_ids) for victim in step.preempted)
    bucket = Bucket(
        max_decodes=step.num_decodes + 2,
        max_prefills=step.num_prefills,
        max_prefill_tokens=step.num_prefill_tokens,
    )
    metadata = build_batch_metadata(
        step.query_lens, step.seq_lens, step.block_tables, block_size=BLOCK_SIZE, bucket=bucket
    )
    slots = np.asarray(metadata.slot_mapping)
    assert np.unique(slots[slots >= 0]).size == step.num_tokens
    assert (slots[slots >= 0] >= BLOCK_SIZE).all()  # never the null block


def simulate(arrivals, num_blocks, max_num_seqs, budget):
    manager = BlockManager(num_blocks, BLOCK_SIZE)
    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget}
    scheduler = Scheduler(manager, **limits, prefill_sizes=(3, 9, budget))
    model = FakeModel(scheduler)
    expected = {i: a.prompt_len + a.max_tokens for i, a in enumerate(arrivals)}
    limit = sum(expected.values()) + max((a.at_step for a in arrivals), default=0) + 1
    pending = list(enumerate(arrivals))
    for now in range(limit):
        while pending and pending[0][1].at_step <= now:
            request, arrival = pending.pop(0)
            model.tokens[request] = [(request * 37 + i) % 1009 for i in range(arrival.prompt_len)]
            scheduler.add(request, arrival.prompt_len, arrival.max_tokens)
        step = scheduler.schedule()
        assert (step is None) == (scheduler.num_unfinished == 0)  # whatever is unfinished gets on
        if step is None and not pending:
            break
        if step is not None:
            check_limits(step, scheduler)
            model.run(step, expected)
    assert (scheduler.num_unfinished, pending) == (0, [])
    assert (manager.num_used, manager.num_free) == (0, num_blocks - 1)
    return model, scheduler


ARRIVALS = st.lists(st.builds(Arrival, st.integers(0, 6), st.integers(1, 20), st.integers(1, 9)), max_size=7)


@settings(max_examples=120)
@given(
    arrivals=ARRIVALS,
    num_blocks=st.integers(8, 16),
    max_num_seqs=st.integers(1, 5),
    budget=st.integers(1, 24),
)
@pytest.mark.kernels
def test_requests_finish_with_their_own_tokens_in_order_of_arrival(
    arrivals, num_blocks, max_num_seqs, budget
):
    arrivals.sort(key=lambda arrival: arrival.at_step)
    model, _ = simulate(arrivals, num_blocks, max_num_seqs, budget)
    assert model.first_token_order == list(range(len(arrivals)))
    for request, arrival in enumerate(arrivals):
        alone = [(request * 37 + i) % 1009 for i in range(arrival.prompt_len)]
        for _ in range(arrival.max_tokens):
            alone.append(next_token(alone))
        assert model.tokens[request] == alone


def rows(step):
    return dict(zip(step.request_ids, step.query_lens, strict=True))


def same(step, other_step):
    fields = [
        vars(scheduled_step) | {"block_tables": scheduled_step.block_tables.tolist()}
        for scheduled_step in (step, other_step)
    ]
    return fields[0] == fields[1]


def scheduler_of(num_blocks, **limits):
    return Scheduler(BlockManager(num_blocks, BLOCK_SIZE), **limits)


def test_decodes_come_first_then_the_running_prompt_then_the_waiting_one():
    scheduler = scheduler_of(20, max_num_seqs=4, max_num_batched_tokens=6)
    scheduler.add(0, 4, 5)
    scheduler.add(1, 7, 5)
    scheduler.add(2, 3, 5)
    seen = []
    for _ in range(3):
        step = scheduler.schedule()
        seen.append((rows(step), step.num_decodes, step.samples))
        scheduler.update_after_start(step)
    assert seen == [
        ({0: 4, 1: 2}, 0, (True, False)),
        ({0: 1, 1: 5}, 1, (True, True)),
        ({0: 1, 1: 1, 2: 3}, 2, (True, True, True)),
    ]


@pytest.mark.parametrize(
    ("prompt_lens", "chunks"),
    [
        ([700], [{0: 512}, {0: 188}]),  # 512 + 256 padded tokens instead of 1,024
        ([800], [{0: 800}]),
        ([300], [{0: 300}]),  # a step of 44 tokens takes as long as one of 256
        ([400, 300], [{0: 400, 1: 112}, {0: 1, 1: 188}]),
        ([600, 100], [{0: 600, 1: 100}]),  # the last prompt is shorter than what is too much
        ([1500], [{0: 1024}, {0: 476}]),  # the budget
    ],
)
def test_a_prompt_between_two_sizes_is_split(prompt_lens, chunks):
    scheduler = scheduler_of(600, max_num_batched_tokens=1024, prefill_sizes=(64, 256, 512, 1024))
    for request, length in enumerate(prompt_lens):
        scheduler.add(request, length, 2)
    for chunk in chunks:
        step = scheduler.schedule()
        assert rows(step) == chunk
        scheduler.update_after_start(step)


def test_a_prompts_last_token_is_laid_out_as_a_decode():
    scheduler = scheduler_of(20, max_num_batched_tokens=4)
    scheduler.add(0, 5, 2)
    scheduler.update_after_start(scheduler.schedule())
    scheduler.add(1, 2, 2)
    step = scheduler.schedule()
    assert (rows(step), step.num_decodes, step.samples) == ({0: 1, 1: 2}, 1, (True, True))


def test_the_latest_request_is_preempted_and_computed_again():
    scheduler = scheduler_of(4)  # 3 blocks
    scheduler.add(0, 4, 5)
    scheduler.add(1, 4, 5)
    scheduler.update_after_start(scheduler.schedule())
    step = scheduler.schedule()  # 0 takes the last free block; 1 keeps its blocks and waits
    assert (rows(step), step.preempted) == ({0: 1}, ())
    for _ in range(3):
        scheduler.update_after_start(step)
        step = scheduler.schedule()
    scheduler.update_after_start(step, finished=[0])
    assert (rows(scheduler.schedule()), scheduler.num_preemptions) == ({1: 1}, 0)

    scheduler = scheduler_of(5)  # 4 blocks
    scheduler.add(0, 8, 5)
    scheduler.add(1, 8, 5)
    scheduler.update_after_start(scheduler.schedule())
    step = scheduler.schedule()
    assert (rows(step), step.preempted, scheduler.num_preemptions) == ({0: 1}, (1,), 1)
    scheduler.update_after_start(step, finished=[0])
    assert rows(scheduler.schedule()) == {1: 9}  # its prompt and the token it had made


def test_a_waiting_request_is_not_overtaken_by_a_smaller_one():
    scheduler = scheduler_of(5)
    scheduler.add(0, 8, 1)
    scheduler.add(1, 12, 1)
    scheduler.add(2, 1, 1)
    assert rows(scheduler.schedule()) == {0: 8}


def test_no_request_is_admitted_while_a_running_prompt_lacks_blocks():
    scheduler = scheduler_of(6, max_num_batched_tokens=9)  # 5 blocks
    scheduler.add(0, 8, 5)
    scheduler.add(1, 12, 1)
    scheduler.update_after_start(scheduler.schedule())  # all of 0 and one token of 1
    scheduler.add(2, 1, 1)
    step = scheduler.schedule()  # 1 needs two more blocks, one is free: 2 would fit
    assert (rows(step), step.preempted, scheduler.block_manager.num_free) == ({0: 1}, (), 1)


def test_a_step_that_failed_is_scheduled_again_with_the_same_blocks():
    scheduler = scheduler_of(9, max_num_batched_tokens=6)
    scheduler.add(0, 4, 5)
    scheduler.add(1, 7, 5)
    for _ in range(4):
        step = scheduler.schedule()
        assert same(scheduler.schedule(), step)
        scheduler.update_after_start(step)


@settings(max_examples=60)
@given(
    prompt_lens=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    budget=st.integers(1, 12),
    forks=st.lists(st.booleans(), min_size=30, max_size=30),
)
def test_forked_requests_and_their_forks_keep_their_tokens(prompt_lens, budget, forks):
    """Blocks may become shared between two steps, after which no request may write to them."""
    manager = BlockManager(400, BLOCK_SIZE)
    scheduler = Scheduler(manager, max_num_seqs=3, max_num_batched_tokens=budget)
    model, expected, forked_tokens = FakeModel(scheduler), {}, {}
    for request, length in enumerate(prompt_lens):
        model.tokens[request] = [request * 37 + i for i in range(length)]
        expected[request] = length + 7
        scheduler.add(request, length, 7)
    for is_forked in forks:
        step = scheduler.schedule()
        if step is None:
            break
        model.run(step, expected)
        rows = zip(step.request_ids, step.seq_lens, strict=True)
        for request, length in rows if is_forked else ():
            if len(model.tokens[request]) < expected[request]:
                name = 1000 + len(forked_tokens)
                forked_tokens[name] = model.tokens[request][:length], manager.fork(request, name)
    for tokens, table in forked_tokens.values():
        assert [model.memory[model.slot(table, i)] for i in range(len(tokens))] == tokens


def forked(num_tokens=6):
    """Return a scheduler whose only request shares its partly filled block with a fork, 99."""
    scheduler = scheduler_of(9)
    scheduler.add(0, num_tokens, 5)
    scheduler.update_after_start(scheduler.schedule())
    scheduler.block_manager.fork(0, 99)
    return scheduler


def test_requested_block_copy_is_in_the_step_until_it_runs():
    scheduler = forked()
    shared = scheduler.block_manager.block_table(99)
    step = scheduler.schedule()
    assert step.block_tables[0][0] == shared[0]
    assert step.block_copies == ((shared[1], step.block_tables[0][1]),)
    assert same(scheduler.schedule(), step)  # it was not run
    scheduler.update_after_start(step)
    assert scheduler.schedule().block_copies == ()


def test_no_copy_is_made_for_an_aborted_request():
    scheduler = forked()
    (source, target) = scheduler.schedule().block_copies[0]
    scheduler.abort(0)
    scheduler.add(1, 4, 5)  # takes the block that was to be copied onto
    step = scheduler.schedule()
    assert (step.block_tables.tolist(), step.block_copies) == ([[target]], ())
    assert source in scheduler.block_manager.block_table(99)


def test_a_full_block_that_is_shared_is_not_copied():
    assert forked(num_tokens=4).schedule().block_copies == ()


@pytest.mark.parametrize("is_running", [True, False])
def test_abort_returns_the_blocks(is_running):
    scheduler = scheduler_of(9)
    scheduler.add(0, 8, 2)
    if is_running:
        scheduler.update_after_start(scheduler.schedule())
    scheduler.abort(0)
    assert (scheduler.num_unfinished, scheduler.block_manager.num_used) == (0, 0)
    assert scheduler.schedule() is None


def test_a_request_that_just_fits_the_cache_finishes():
    model, scheduler = simulate([Arrival(0, 8, 5)], 4, 2, 3)
    assert (len(model.tokens[0]), scheduler.block_manager.peak_used) == (13, 3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            lambda s: s.add(3, 1020, 2 + 4),
            r"Request 3 needs 1025 tokens of the KV cache .*, but the cache holds only 1024\.",
        ),
        (lambda s: s.add(3, 0, 2), r"num_prompt_tokens must be positive, got 0\."),
        (lambda s: s.add(3, 2, 0), r"max_tokens must be positive, got 0\."),
        (lambda s: s.add(0, 2, 2), r"request_id 0 is already in use\."),
        (lambda s: Scheduler(s.block_manager, max_num_seqs=0), r"max_num_seqs must be positive, got 0\."),
        (
            lambda s: Scheduler(s.block_manager, max_num_batched_tokens=0),
            r"max_num_batched_tokens must be positive, got 0\.",
        ),
    ],
)
def test_invalid_arguments_are_rejected(wrong, message):
    scheduler = scheduler_of(257)
    scheduler.add(0, 4, 4)
    with pytest.raises(ValueError, match=message):
        wrong(scheduler)
