"""Which block of the paged cache belongs to which request. Host side: ints only."""

import collections
from collections.abc import Sequence

from pallas_kernels.checks import require, require_positive

NULL_BLOCK = 0  # what padding points to; never handed out


class BlockManager:
    """Hands out cache blocks, counts who shares them, and takes them back.

    A request owns `ceil(num_tokens / block_size)` blocks. Requests forked from one another share blocks until
    one of them writes into a shared block: `append` then gives it one of its own and says what to copy.

    A full block that was published under a digest of what it holds is found again by it (`find`), also when
    nobody owns it any more: until it is handed out for something else, the longest unused first, and of a
    request's blocks the last first, since the others are of use without it.
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        """Starts with every block free but block 0, the null block.

        Raises:
            ValueError: There would be no block to hand out.
        """
        require(num_blocks > 1, "num_blocks", "be at least 2 (block 0 is the null block)", num_blocks)
        require_positive(block_size=block_size)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.peak_used = 0
        self._free = collections.OrderedDict.fromkeys(range(NULL_BLOCK + 1, num_blocks))  # next one first
        self._ref_counts = [0] * num_blocks
        self._blocks: dict[int, list[int]] = {}
        self._num_tokens: dict[int, int] = {}
        self._published: dict[bytes, int] = {}  # digest -> block
        self._digests: dict[int, bytes] = {}  # and back

    # ------------------------------------------------------------------------------------ questions
    @property
    def capacity(self) -> int:
        """Blocks that requests can have, all together."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns, published ones too."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody owns; a shared block counts once."""
        return self.capacity - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold that many tokens."""
        return -(-num_tokens // self.block_size)

    def block_table(self, request_id: int) -> tuple[int, ...]:
        """The request's blocks: entry i holds its tokens from `i * block_size` on.

        Raises:
            ValueError: No such request.
        """
        return tuple(self._owned(request_id))

    def num_tokens(self, request_id: int) -> int:
        """Tokens that the request has room for, as allocated and appended so far.

        Raises:
            ValueError: No such request.
        """
        self._owned(request_id)
        return self._num_tokens[request_id]

    def ref_count(self, block: int) -> int:
        """How many requests share the block; 0 = free.

        Raises:
            ValueError: No such block.
        """
        require(0 <= block < self.num_blocks, "block", f"be in [0, {self.num_blocks})", block)
        return self._ref_counts[block]

    def blocks_to_append(self, request_id: int, num_tokens: int) -> int:
        """How many free blocks `append` would take: 0 for none, and one for a shared block written into.

        Raises:
            ValueError: No such request.
        """
        owned, have = self._owned(request_id), self._num_tokens[request_id]
        return self.blocks_for(have + num_tokens) - len(owned) + self._must_copy(request_id, num_tokens)

    def find(self, digests: Sequence[bytes]) -> tuple[int, ...]:
        """The published blocks of the longest beginning of `digests` that is all there."""
        found = []
        for digest in digests:
            block = self._published.get(digest)
            if block is None:
                break
            found.append(block)
        return tuple(found)

    def num_free_without(self, blocks: Sequence[int]) -> int:
        """Blocks that would be free if somebody owned these, too."""
        return self.num_free - sum(not self._ref_counts[block] for block in blocks)

    # -------------------------------------------------------------------------------------- changes
    def allocate(self, request_id: int, num_tokens: int, shared: Sequence[int] = ()) -> tuple[int, ...]:
        """Gives a new request the blocks for its first tokens.

        Args:
            request_id: The new request.
            num_tokens: How many tokens.
            shared: Full blocks of the first of them, as `find` found them.

        Raises:
            ValueError: The request has blocks already, too few are free, or more are shared than the tokens
                fill; nothing has changed then.
        """
        require(request_id not in self._blocks, "request_id", "be new", request_id)
        require(num_tokens >= 0, "num_tokens", "be at least 0", num_tokens)
        fills = len(shared) * self.block_size
        require(fills <= num_tokens, "shared", f"hold at most num_tokens ({num_tokens})", f"{fills} tokens")
        count = self.blocks_for(num_tokens) - len(shared)
        free = self.num_free_without(shared)
        require(count <= free, "blocks wanted", f"be at most the {free} free", count)
        for block in shared:
            self._free.pop(block, None)
            self._ref_counts[block] += 1
        owned = [*shared, *self._take(count)]
        self._blocks[request_id], self._num_tokens[request_id] = owned, num_tokens
        return tuple(owned)

    def publish(self, request_id: int, index: int, digest: bytes) -> None:
        """Lets others find a request's full block number `index` by the digest of what it holds.

        Nothing changes where another block has that digest: the first one published stays the one found.

        Raises:
            ValueError: No such request, or the block is not full.
        """
        owned, num_full = self._owned(request_id), self._num_tokens[request_id] // self.block_size
        require(0 <= index < num_full, "index", f"be of a full block, in [0, {num_full})", index)
        if digest not in self._published and owned[index] not in self._digests:
            self._published[digest] = owned[index]
            self._digests[owned[index]] = digest

    def unpublish_all(self) -> None:
        """Forgets what all blocks hold: nothing is found until it is published again."""
        self._published.clear()
        self._digests.clear()

    def append(self, request_id: int, num_tokens: int = 1) -> list[tuple[int, int]]:
        """Makes room for more tokens of a request.

        Returns:
            (source, target) blocks to copy before the new tokens are written (`jattn.copy_blocks`): one pair
            where the request's last block was partly filled and shared, else none.

        Raises:
            ValueError: No such request, or too few blocks are free; nothing has changed then.
        """
        require(num_tokens >= 0, "num_tokens", "be at least 0", num_tokens)
        owned, must_copy = self._owned(request_id), self._must_copy(request_id, num_tokens)
        taken = self._take(self.blocks_to_append(request_id, num_tokens))
        copies = []
        if must_copy:
            source, target = owned[-1], taken.pop()
            self._ref_counts[source] -= 1
            owned[-1] = target
            copies = [(source, target)]
        elif num_tokens > 0 and self._is_partly_filled(request_id):
            self._unpublish(owned[-1])  # full once, of a request that this one was forked from
        owned.extend(taken)
        self._num_tokens[request_id] += num_tokens
        return copies

    def fork(self, parent_id: int, child_id: int, num_tokens: int | None = None) -> tuple[int, ...]:
        """Makes a request that shares the blocks of another's first tokens. Takes no block.

        Args:
            parent_id: Whose tokens.
            child_id: The new request.
            num_tokens: How many of them; None = all.

        Raises:
            ValueError: No such parent, a child that exists, or more tokens than the parent has.
        """
        owned, have = self._owned(parent_id), self._num_tokens[parent_id]
        require(child_id not in self._blocks, "child_id", "be new", child_id)
        num_tokens = have if num_tokens is None else num_tokens
        require(0 <= num_tokens <= have, "num_tokens", f"be in [0, {have}], the parent's", num_tokens)
        shared = owned[: self.blocks_for(num_tokens)]
        for block in shared:
            self._ref_counts[block] += 1
        self._blocks[child_id], self._num_tokens[child_id] = shared, num_tokens
        return tuple(shared)

    def free(self, request_id: int) -> None:
        """Forgets a request; blocks that nobody else shares become free, published ones stay to be found.

        Raises:
            ValueError: No such request.
        """
        for block in reversed(self._owned(request_id)):
            self._ref_counts[block] -= 1
            if not self._ref_counts[block]:
                self._free[block] = None
                self._free.move_to_end(block, last=block in self._digests)
        del self._blocks[request_id], self._num_tokens[request_id]

    # --------------------------------------------------------------------------------------- inside
    def _owned(self, request_id: int) -> list[int]:
        require(request_id in self._blocks, "request_id", "have blocks", request_id)
        return self._blocks[request_id]

    def _must_copy(self, request_id: int, num_tokens: int) -> bool:
        """Whether the next tokens go into a block that others share."""
        is_shared = self._is_partly_filled(request_id) and self._ref_counts[self._blocks[request_id][-1]] > 1
        return num_tokens > 0 and is_shared

    def _is_partly_filled(self, request_id: int) -> bool:
        return self._num_tokens[request_id] % self.block_size > 0

    def _unpublish(self, block: int) -> None:
        if block in self._digests:
            del self._published[self._digests.pop(block)]

    def _take(self, count: int) -> list[int]:
        require(count <= self.num_free, "blocks wanted", f"be at most the {self.num_free} free", count)
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._ref_counts[block] = 1
            self._unpublish(block)
        self.peak_used = max(self.peak_used, self.num_used)
        return taken
