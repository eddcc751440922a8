import collections

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from jattn.serving.engine.block_manager import BlockManager

BLOCK_SIZE, NUM_BLOCKS = 4, 12


class AgainstWrittenTokens(RuleBasedStateMachine):
    """A state machine that writes each token to its slot and reads each request back from its blocks.

    A block that is lost, owned twice or not copied on write shows as a token of another request or a wrong
    count.
    """

    requests = Bundle("requests")

    def __init__(self):
        super().__init__()
        self.manager = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
        self.tokens = {}  # request -> the tokens it wrote or inherited
        self.gone = {}  # request -> how many blocks of them it gave up
        self.memory = {}  # (block, offset) -> token
        self.next_id = self.next_token = self.peak = 0

    def write(self, request, count):
        table = self.manager.block_table(request)
        for _ in range(count):
            block, offset = divmod(len(self.tokens[request]), BLOCK_SIZE)
            self.memory[table[block], offset] = self.next_token
            self.tokens[request].append(self.next_token)
            self.next_token += 1

    def fresh(self):
        self.next_id += 1
        self.tokens[self.next_id] = []
        self.gone[self.next_id] = 0
        return self.next_id

    @rule(target=requests, count=st.integers(0, 17))
    def allocate(self, count):
        request, free = self.fresh(), self.manager.num_free
        if -(-count // BLOCK_SIZE) > free:
            with pytest.raises(ValueError, match=f"only {free} are free"):
                self.manager.allocate(request, count)
            count = 0
        self.manager.allocate(request, count)
        self.write(request, count)
        return request

    @rule(request=requests, count=st.integers(0, 9))
    def extend(self, request, count):
        first = len(self.tokens[request])
        copied_range = request, first, first + count
        free, need = self.manager.num_free, self.manager.blocks_to_extend(*copied_range)
        if need > free:
            before = self.manager.block_table(request)
            with pytest.raises(ValueError, match=f"Cannot allocate {need} blocks: only {free} are free"):
                self.manager.extend(*copied_range)
            assert self.manager.block_table(request) == before
            return
        for source, target in self.manager.extend(*copied_range):
            for offset in range(BLOCK_SIZE):
                self.memory[target, offset] = self.memory.get((source, offset))
        assert self.manager.num_free == free - need
        self.write(request, count)

    @rule(target=requests, parent=requests, fraction=st.floats(0, 1))
    def fork(self, parent, fraction):
        count = round(fraction * len(self.tokens[parent]))
        child, free = self.fresh(), self.manager.num_free
        self.manager.fork(parent, child, count)
        self.tokens[child] = self.tokens[parent][:count]
        self.gone[child] = min(self.gone[parent], -(-count // BLOCK_SIZE))
        assert self.manager.num_free == free
        return child

    @rule(request=requests, fraction=st.floats(0, 1))
    def free_skipped_blocks(self, request, fraction):
        count = round(fraction * len(self.tokens[request]))
        self.manager.free_skipped_blocks(request, count)
        self.gone[request] = max(self.gone[request], count // BLOCK_SIZE)

    @precondition(lambda self: self.tokens)
    @rule(request=consumes(requests))
    def free(self, request):
        self.manager.free(request)
        del self.tokens[request]

    @invariant()
    def every_request_reads_its_own_tokens(self):
        for request, tokens in self.tokens.items():
            table = self.manager.block_table(request)
            assert len(table) == -(-len(tokens) // BLOCK_SIZE)
            assert self.manager.token_capacity(request) == len(table) * BLOCK_SIZE
            first = self.gone[request] * BLOCK_SIZE
            assert set(table[: self.gone[request]]) <= {0}
            read = [self.memory[table[i // BLOCK_SIZE], i % BLOCK_SIZE] for i in range(first, len(tokens))]
            assert read == tokens[first:]

    @invariant()
    def tables_together_are_those_of_each(self):
        requests = list(self.tokens)[::-1]
        together = self.manager.block_tables(requests)
        for request, row in zip(requests, together.tolist(), strict=True):
            table = list(self.manager.block_table(request))
            assert row == table + [0] * (len(row) - len(table))
            assert self.manager.block_tables([request]).tolist() == [table]

    @invariant()
    def every_block_is_counted(self):
        owners = collections.Counter(b for r in self.tokens for b in self.manager.block_table(r) if b)
        assert [self.manager.ref_count(b) for b in range(NUM_BLOCKS)] == [
            owners[b] for b in range(NUM_BLOCKS)
        ]
        assert self.manager.num_used == len(owners)
        assert self.manager.num_free == NUM_BLOCKS - 1 - len(owners)
        self.peak = max(self.peak, len(owners))
        assert self.manager.peak_used == self.peak


TestAgainstWrittenTokens = AgainstWrittenTokens.TestCase
TestAgainstWrittenTokens.pytestmark = [pytest.mark.kernels]
TestAgainstWrittenTokens.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_two_forks_of_a_partial_block_copy_once():
    manager = BlockManager(8, 4)
    (block,) = manager.allocate(1, 3)
    manager.fork(1, 2)
    ((source, target),) = manager.extend(2, 3, 4)
    assert (source, manager.block_table(2)) == (block, (target,))
    assert manager.extend(1, 3, 4) == []  # alone now
    assert manager.block_table(1) == (block,)


def test_a_full_shared_block_is_never_copied():
    manager = BlockManager(8, 4)
    manager.allocate(1, 4)
    manager.fork(1, 2)
    assert manager.extend(2, 4, 5) == []
    assert manager.block_table(2)[0] == manager.block_table(1)[0]


def test_peak_counts_a_shared_block_once_and_stays_after_free():
    manager = BlockManager(8, 4)
    manager.allocate(1, 12)
    manager.fork(1, 2)
    manager.free(1)
    manager.free(2)
    assert (manager.num_used, manager.peak_used) == (0, 3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda m: BlockManager(1, 4), r"num_blocks must be at least 2 .*, got 1\."),
        (lambda m: BlockManager(4, 0), r"block_size must be positive, got 0\."),
        (lambda m: m.allocate(8, 40), r"Cannot allocate 10 blocks: only 5 are free\."),
        (lambda m: m.extend(7, 5, 40), r"Cannot allocate 8 blocks: only 5 are free\."),
    ],
)
def test_invalid_arguments_are_rejected(wrong, message):
    manager = BlockManager(8, 4)
    manager.allocate(7, 5)
    with pytest.raises(ValueError, match=message):
        wrong(manager)
