"""Prefix caching: only equal blocks are shared, and no block is leaked."""

import random

import pytest

from jattn.serving.engine.block_manager import BlockHashes, BlockManager
from jattn.serving.engine.scheduler import Scheduler

BLOCK_SIZE = 4


def test_a_digest_depends_on_its_block_and_all_earlier_tokens():
    first, same = BlockHashes(4, range(12)), BlockHashes(4)
    for token in range(12):
        same.extend([token])
    assert (len(first), first[:], first[1]) == (3, same[:], same[1])
    different = BlockHashes(4, [9, 1, 2, 3, *range(4, 12)])
    assert not set(first[:]) & set(different[:])  # the same tokens behind another beginning
    assert len(set(BlockHashes(4, [1] * 12)[:])) == 3


def test_a_copy_of_hashes_is_independent():
    hashes = BlockHashes(4, range(7))
    copy = hashes.copy()
    copy.extend([7, 8])
    hashes.extend([9])
    for hash_list, expected in ((copy, [*range(9)]), (hashes, [*range(7), 9])):
        assert (hash_list[:], hash_list.num_tokens) == (BlockHashes(4, expected)[:], len(expected))


def test_a_block_is_not_full_before_its_last_token():
    hashes = BlockHashes(4, range(7))
    assert len(hashes) == 1
    hashes.extend([7])
    assert len(hashes) == 2


class Pool:
    """Requests in a scheduler over a slow model of the cache.

    A slot stores all tokens up to its own, since keys depend on them, and the version of the weights.
    """

    def __init__(self, num_blocks, seed, *, budget=9, max_num_seqs=4):
        self.random = random.Random(seed)
        self.manager = BlockManager(num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(self.manager, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)
        self.memory, self.tokens, self.known, self.hashes, self.left = {}, {}, {}, {}, {}
        self.weights, self.unread, self.num_done = 0, [], 0
        self.made_by = {}  # request -> the weights that were in force when its oldest keys were made
        self.parents, self.begun = {}, {}  # of completions, whose keys may be as old as their first sibling's

    def add(self, request, tokens, max_tokens, *, parent=None, is_found=True):
        self.tokens[request], self.left[request] = list(tokens), max_tokens
        self.hashes[request] = BlockHashes(BLOCK_SIZE, tokens)
        hashes = self.hashes[request] if is_found else None
        self.parents[request] = request if parent is None else parent
        self.scheduler.add(request, len(tokens), max_tokens, hashes, parent_id=parent)

    def live(self, next_id, *, most_tokens=1000):
        """Execute a random event: requests arrive, with completions, or are aborted, weights change, or a
        step runs.

        Returns:
            The next request id, and the maximum length of new requests, 0 if there are none.
        """
        draw, event = self.random, self.random.random()
        if event < 0.15 and len(self.tokens) < 6:
            old = list(draw.choice(list(self.tokens.values()))) if self.tokens and draw.random() < 0.5 else []
            length = draw.randint(1, min(45, most_tokens - 8))
            tokens = (old + [draw.randrange(2) for _ in range(length)])[:length]
            parent, max_tokens = None, draw.randint(1, min(20, most_tokens - length))
            for _ in range(draw.choice([1, 1, 3])):
                self.add(next_id, tokens, max_tokens, parent=parent)
                parent = next_id if parent is None else parent
                next_id += 1
            return next_id, length + max_tokens
        if event < 0.18 and self.tokens:
            self.abort(draw.choice(list(self.tokens)))
        elif event < 0.19:
            self.update_weights()
        else:
            self.step()
        return next_id, 0

    def slot(self, table, position):
        return table[position // BLOCK_SIZE], position % BLOCK_SIZE

    def first_read(self, length, count):
        """Return the first position that a row reads."""
        return 0

    def groups(self, step):
        """Return for each group of layers its memory, tables, copies, and the first position that a row
        reads.
        """
        return [(self.memory, step.block_tables, step.block_copies, self.first_read)]

    def step(self):
        """Run a step; the host learns the tokens of the previous step only now."""
        step = self.scheduler.schedule()
        if step is None:
            return False
        for request in step.preempted:
            self.made_by.pop(request, None)
        rows = list(zip(step.request_ids, step.query_lens, step.seq_lens, strict=True))
        for request in step.request_ids:
            begun = self.begun.setdefault(self.parents[request], self.weights)
            self.made_by.setdefault(request, self.weights if self.parents[request] == request else begun)
        for group in self.groups(step):
            self.run(rows, *group)
        finished, unread = [], []
        for (request, *_), samples in zip(rows, step.samples, strict=True):
            tokens = self.tokens[request]
            if samples:
                tokens.append(self.random.randrange(2))
                unread.append((request, tokens[-1]))
                self.left[request] -= 1
                if not self.left[request]:
                    finished.append(request)
        self.scheduler.update_after_start(step, finished)
        for request in finished:
            self.forget(request)
        for request, token in self.unread:
            if request in self.hashes:
                self.hashes[request].extend([token])
        self.unread = unread
        return True

    def run(self, rows, memory, tables, copies, first_read):
        """Apply a step to one group of layers: all copies, then all writes, then all reads."""
        for source, target in copies:
            for offset in range(BLOCK_SIZE):
                memory[target, offset] = memory.get((source, offset))
        for (request, count, length), table in zip(rows, tables, strict=True):
            for position in range(length - count, length):
                tokens = self.tokens[request][: position + 1]
                memory[self.slot(table, position)] = (*tokens, "by", self.weights)
        for (request, count, length), table in zip(rows, tables, strict=True):
            for position in range(first_read(length, count), length):
                *prefix, _, weights = memory[self.slot(table, position)]
                assert prefix == self.tokens[request][: position + 1]
                assert weights >= self.made_by[request]  # of no weights older than its beginning

    def abort(self, request):
        self.scheduler.abort(request)
        self.forget(request)

    def forget(self, request):
        del self.tokens[request], self.hashes[request], self.left[request]
        self.made_by.pop(request, None)
        self.num_done += 1

    def update_weights(self):
        self.scheduler.reset_prefix_cache()
        self.weights += 1


@pytest.mark.parametrize(("seed", "num_blocks"), [(0, 9), (1, 12), (2, 20), (3, 40)])
def test_random_steps_share_only_equal_blocks_and_leak_none(seed, num_blocks):
    pool, next_id, forks = Pool(num_blocks, seed), 0, []
    draw = pool.random
    for _ in range(3000):
        event = draw.random()
        if event < 0.25 and len(pool.tokens) < 8:
            length = draw.randint(1, 20)
            old = list(draw.choice(list(pool.tokens.values()))) if pool.tokens and draw.random() < 0.5 else []
            tokens = (old + [draw.randrange(2) for _ in range(length)])[:length]
            pool.add(next_id, tokens, draw.randint(1, min(9, (num_blocks - 1) * BLOCK_SIZE - length + 1)))
            next_id += 1
        elif event < 0.29 and pool.tokens:
            pool.abort(draw.choice(list(pool.tokens)))
        elif event < 0.30:
            pool.update_weights()
        elif event < 0.33 and len(forks) < 1 and pool.made_by:
            request = draw.choice(list(pool.made_by))
            count = draw.randint(0, pool.manager.token_capacity(request))
            forks.append((-1 - next_id, count))
            pool.manager.fork(request, *forks[-1])
        elif event < 0.40 and forks:
            fork, count = forks.pop()
            slot_range = fork, count, count + 1
            if draw.random() < 0.5 and pool.manager.blocks_to_extend(*slot_range) <= pool.manager.num_free:
                for _, target in pool.manager.extend(*slot_range):
                    for offset in range(BLOCK_SIZE):
                        pool.memory[target, offset] = None
                # What it writes is nobody else's.
                pool.memory[pool.slot(pool.manager.block_table(fork), count)] = None
            pool.manager.free(fork)
        else:
            pool.step()
    for fork, _ in forks:
        pool.manager.free(fork)
    while pool.step():
        pass
    assert (pool.num_done, pool.scheduler.num_unfinished, pool.manager.num_used) == (next_id, 0, 0)
    assert pool.scheduler.num_prefix_hit_tokens > next_id  # it was worth something
    assert pool.scheduler.num_preemptions > 0 or num_blocks > 12


def first_step(pool, request, tokens, max_tokens=1):
    pool.add(request, tokens, max_tokens)
    step = pool.scheduler.schedule()
    (row,) = [i for i, name in enumerate(step.request_ids) if name == request]
    return step.query_lens[row]


def test_a_cached_prompt_is_computed_from_the_first_different_block():
    pool = Pool(20, 0, budget=100)
    pool.add(0, range(10), 1)
    pool.step()
    assert first_step(pool, 1, [*range(9), 99, 98]) == 3
    pool.scheduler.add(2, 5, 1)  # looks for nothing
    pool.scheduler.update_after_start(pool.scheduler.schedule())
    assert (pool.scheduler.num_prefix_tokens, pool.scheduler.num_prefix_hit_tokens) == (21, 8)


def test_the_last_token_is_computed_even_if_all_blocks_are_cached():
    pool = Pool(20, 0, budget=100)
    pool.add(0, range(8), 1)
    pool.step()
    assert first_step(pool, 1, range(8)) == 4


def test_generated_tokens_are_found():
    pool = Pool(20, 0, budget=100)
    pool.add(0, range(6), 9)
    while pool.left:
        tokens = pool.tokens[0]
        pool.step()
    assert first_step(pool, 1, [*tokens, 5, 5, 5]) <= 6  # 15 tokens; the last ones were never read in time


def test_the_least_recently_used_blocks_are_reused_first_and_prefixes_last():
    pool = Pool(9, 0, budget=100)  # 8 blocks
    pool.add(0, range(12), 1)
    pool.step()
    pool.add(1, range(100, 112), 1)
    pool.step()
    pool.add(2, range(200, 216), 1)  # takes the two uncached blocks, then the end of request 0's three
    pool.step()
    assert first_step(pool, 3, [*range(12), 1]) == 13 - 4
    pool.abort(3)
    assert first_step(pool, 4, [*range(200, 216), 1]) == 1
    pool.abort(4)
    assert first_step(pool, 5, [*range(100, 112), 1]) == 13


def test_keys_of_old_weights_are_neither_found_nor_cached():
    pool = Pool(20, 0, budget=100)
    pool.add(0, range(8), 9)
    pool.step()
    pool.update_weights()
    pool.step()
    assert first_step(pool, 1, [*range(8), 1]) == 9


def test_a_preempted_request_finds_its_own_blocks():
    pool = Pool(5, 0, budget=100)  # 4 blocks
    pool.add(0, range(8), 5)
    pool.add(1, range(50, 58), 5)
    pool.step()
    pool.step()  # 0 needs a third block: 1's last is taken, its first stays to be found
    assert pool.scheduler.num_preemptions == 1
    while 0 in pool.left:
        pool.step()
    hits = pool.scheduler.num_prefix_hit_tokens
    pool.step()
    assert pool.scheduler.num_prefix_hit_tokens == hits + 4


def test_a_request_that_does_not_fit_changes_nothing():
    manager = BlockManager(8, 4)
    manager.allocate(7, 5)
    with pytest.raises(ValueError, match=r"Cannot allocate 6 blocks: only 5 are free\."):
        manager.allocate(8, 28, manager.block_table(7)[:1])
    assert manager.num_used == 2
