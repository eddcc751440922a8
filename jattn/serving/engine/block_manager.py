"""Which block of the paged cache belongs to which request. Host side: ints and numpy."""

import collections
from collections.abc import Sequence

import numpy as np

from pallas_kernels.checks import require, require_positive


class BlockManager:
    """Hands out cache blocks, counts who shares them, and takes them back.

    A request owns the blocks of its first tokens, `block_size` in each. Requests forked from one another
    share blocks until one of them is to write into a shared block: `extend` then gives it one of its own and
    says what to copy. What a request will not read again it may give back (`give_up`): the null block stands
    there then.

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
        self.peak_used = self.num_forks = 0
        self.free_all()

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

    def block_tables(self, request_ids: Sequence[int]) -> np.ndarray:
        """Those of several requests, int32 [reqs, blocks of the longest], behind their ends 0."""
        return self._tables.rows(request_ids)

    def ref_count(self, block: int) -> int:
        """How many requests share the block; 0 = free.

        Raises:
            ValueError: No such block.
        """
        require(0 <= block < self.num_blocks, "block", f"be in [0, {self.num_blocks})", block)
        return self._ref_counts[block]

    def room(self, request_id: int) -> int:
        """Tokens that the request's blocks hold.

        Raises:
            ValueError: No such request.
        """
        return len(self._owned(request_id)) * self.block_size

    def blocks_to_extend(self, request_id: int, first: int, end: int) -> int:
        """How many free blocks `extend` would take: new ones, and one for each shared one written into.

        Raises:
            ValueError: No such request.
        """
        owned = self._owned(request_id)
        return max(self.blocks_for(end) - len(owned), 0) + len(self._shared_in(owned, first, end))

    def find(self, digests: Sequence[bytes]) -> tuple[int, ...]:
        """The published blocks of the longest beginning of `digests` that is all there."""
        found = []
        for digest in digests:
            block = self._published.get(digest)
            if block is None:
                break
            found.append(block)
        return tuple(found)

    def is_published(self, digest: bytes) -> bool:
        """Whether `find` would find it."""
        return digest in self._published

    def num_free_without(self, blocks: Sequence[int]) -> int:
        """Blocks that would be free if somebody owned these, too."""
        return self.num_free - sum(not self._ref_counts[block] for block in blocks if block != NULL_BLOCK)

    # -------------------------------------------------------------------------------------- changes
    def allocate(self, request_id: int, num_tokens: int, shared: Sequence[int] = ()) -> tuple[int, ...]:
        """Gives a new request the blocks for its first tokens.

        Args:
            request_id: The new request.
            num_tokens: How many tokens.
            shared: Full blocks of the first of them, as `find` found them; null blocks where they will not be
                read.

        Raises:
            ValueError: The request has blocks already, too few are free, or more are shared than the tokens
                fill; nothing has changed then.
        """
        require(request_id not in self._tables, "request_id", "be new", request_id)
        require(num_tokens >= 0, "num_tokens", "be at least 0", num_tokens)
        fills = len(shared) * self.block_size
        require(fills <= num_tokens, "shared", f"hold at most num_tokens ({num_tokens})", f"{fills} tokens")
        count = self.blocks_for(num_tokens) - len(shared)
        free = self.num_free_without(shared)
        require(count <= free, "blocks wanted", f"be at most the {free} free", count)
        self._share(shared)
        self._tables.add(request_id, [*shared, *self._take(count)])
        self._num_given_up[request_id] = sum(block == NULL_BLOCK for block in shared)
        return self.block_table(request_id)

    def publish(self, request_id: int, index: int, digest: bytes) -> None:
        """Lets others find a request's full block number `index` by the digest of what it holds.

        Nothing changes where another block has that digest, the first one published stays the one found, or
        the request has given it up.

        Raises:
            ValueError: No such request, or no such block.
        """
        owned = self._owned(request_id)
        require(0 <= index < len(owned), "index", f"be of a block, in [0, {len(owned)})", index)
        block = owned[index]
        if digest not in self._published and block not in self._digests and block != NULL_BLOCK:
            self._published[digest] = block
            self._digests[block] = digest

    def unpublish_all(self) -> None:
        """Forgets what all blocks hold: nothing is found until it is published again."""
        self._published.clear()
        self._digests.clear()

    def extend(self, request_id: int, first: int, end: int) -> list[tuple[int, int]]:
        """Makes room for a request to write its tokens from number `first` to before number `end`.

        Returns:
            (source, target) blocks to copy before they are written (`jattn.copy_blocks`): one pair for each
            of these blocks that was shared.

        Raises:
            ValueError: No such request, or too few blocks are free; nothing has changed then.
        """
        owned = self._owned(request_id)
        shared = self._shared_in(owned, first, end)
        taken = self._take(self.blocks_to_extend(request_id, first, end))
        for index in self._written(owned, first, end):
            if index not in shared:
                self._unpublish(owned[index])  # full once, of a request that this one was forked from
        copies = []
        for index in shared:
            source, target = owned[index], taken.pop()
            self._ref_counts[source] -= 1
            self._tables.put(request_id, index, target)
            copies.append((source, target))
        self._tables.append(request_id, taken)
        return copies

    def fork(self, parent_id: int, child_id: int, num_tokens: int | None = None) -> tuple[int, ...]:
        """Makes a request that shares the blocks of another's first tokens. Takes no block.

        Args:
            parent_id: Whose tokens.
            child_id: The new request.
            num_tokens: How many of them; None = all that there is room for.

        Raises:
            ValueError: No such parent, a child that exists, or more tokens than the parent has room for.
        """
        owned, have = self._owned(parent_id), self.room(parent_id)
        require(child_id not in self._tables, "child_id", "be new", child_id)
        num_tokens = have if num_tokens is None else num_tokens
        require(0 <= num_tokens <= have, "num_tokens", f"be in [0, {have}], the parent's room", num_tokens)
        shared = owned[: self.blocks_for(num_tokens)]
        self._share(shared)
        self._tables.add(child_id, shared)
        self._num_given_up[child_id] = min(self._num_given_up[parent_id], len(shared))
        self.num_forks += 1
        return tuple(shared)

    def give_up(self, request_id: int, num_tokens: int) -> None:
        """Takes back the blocks that the first tokens of a request fill: it will not read them again.

        Raises:
            ValueError: No such request.
        """
        owned, before = self._owned(request_id), self._num_given_up.get(request_id, 0)
        given_up = min(num_tokens // self.block_size, len(owned))
        for index in reversed(range(before, given_up)):
            self._drop(owned[index])
            self._tables.put(request_id, index, NULL_BLOCK)
        self._num_given_up[request_id] = max(before, given_up)

    def free(self, request_id: int) -> None:
        """Forgets a request; blocks that nobody else shares become free, published ones stay to be found.

        Raises:
            ValueError: No such request.
        """
        for block in reversed(self._owned(request_id)):
            if block != NULL_BLOCK:
                self._drop(block)
        self._tables.remove(request_id)
        del self._num_given_up[request_id]

    def free_all(self) -> None:
        """Forgets all requests and what all blocks hold, also where a change was broken off."""
        self._free = collections.OrderedDict.fromkeys(range(NULL_BLOCK + 1, self.num_blocks))  # next first
        self._ref_counts = [0] * self.num_blocks
        self._tables = BlockTables()
        self._num_given_up: dict[int, int] = {}
        self._published: dict[bytes, int] = {}  # digest -> block
        self._digests: dict[int, bytes] = {}  # and back

    # --------------------------------------------------------------------------------------- inside
    def _owned(self, request_id: int) -> list[int]:
        require(request_id in self._tables, "request_id", "have blocks", request_id)
        return self._tables.blocks(request_id)

    def _shared_in(self, owned: list[int], first: int, end: int) -> list[int]:
        """Which of a request's blocks others share, of those that hold its tokens from `first` to `end`."""
        return [index for index in self._written(owned, first, end) if self._ref_counts[owned[index]] > 1]

    def _written(self, owned: list[int], first: int, end: int) -> range:
        """Which of a request's blocks hold its tokens from `first` to `end`."""
        require(0 <= first <= end, "first", f"be in [0, {end}], the end", first)
        begin = first // self.block_size
        return range(begin, min(self.blocks_for(end), len(owned)) if end > first else begin)

    def _share(self, blocks: Sequence[int]) -> None:
        """Counts one more owner of each."""
        for block in blocks:
            if block != NULL_BLOCK:
                self._free.pop(block, None)
                self._ref_counts[block] += 1

    def _drop(self, block: int) -> None:
        """Counts one owner less."""
        self._ref_counts[block] -= 1
        if not self._ref_counts[block]:
            self._free[block] = None
            self._free.move_to_end(block, last=block in self._digests)

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


NULL_BLOCK = 0  # what padding points to; never handed out


class BlockTables:
    """A row of block ids for each request, in an array that grows with the requests and the longest of them.

    Behind a request's last block its row holds null blocks.
    """

    def __init__(self) -> None:
        """Starts without requests."""
        self._array = np.full((8, 8), NULL_BLOCK, np.int32)
        self._row_of: dict[int, int] = {}
        self._free_rows = list(range(8))
        self._blocks: dict[int, list[int]] = {}  # the same, for those who take them one by one
        self._lens = np.zeros(8, np.int64)  # of each row

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._row_of

    def blocks(self, request_id: int) -> list[int]:
        """A request's blocks; not to be changed."""
        return self._blocks[request_id]

    def rows(self, request_ids: Sequence[int]) -> np.ndarray:
        """A copy of some rows, as wide as the longest of them: int32 [reqs, blocks]."""
        rows = np.asarray([self._row_of[one] for one in request_ids], np.int64)
        return self._array[rows, : self._lens[rows].max(initial=0)]

    def add(self, request_id: int, blocks: Sequence[int]) -> None:
        """A row for a new request."""
        if not self._free_rows:
            num_rows = len(self._array)
            self._free_rows = list(range(num_rows, 2 * num_rows))
            self._array = np.pad(self._array, ((0, num_rows), (0, 0)), constant_values=NULL_BLOCK)
            self._lens = np.pad(self._lens, (0, num_rows))
        self._row_of[request_id], self._blocks[request_id] = self._free_rows.pop(), []
        self.append(request_id, blocks)

    def append(self, request_id: int, blocks: Sequence[int]) -> None:
        """Puts blocks behind a request's last one."""
        owned = self._blocks[request_id]
        first, end = len(owned), len(owned) + len(blocks)
        owned.extend(blocks)
        width = self._array.shape[1]
        if end > width:
            more = max(width, end - width)
            self._array = np.pad(self._array, ((0, 0), (0, more)), constant_values=NULL_BLOCK)
        row = self._row_of[request_id]
        self._array[row, first:end], self._lens[row] = blocks, end

    def put(self, request_id: int, index: int, block: int) -> None:
        """Puts another block in the place of one."""
        self._blocks[request_id][index] = self._array[self._row_of[request_id], index] = block

    def remove(self, request_id: int) -> None:
        """A row is free again."""
        row = self._row_of.pop(request_id)
        self._array[row, : len(self._blocks.pop(request_id))] = NULL_BLOCK
        self._lens[row] = 0
        self._free_rows.append(row)
