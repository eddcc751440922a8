"""Allocation of KV-cache blocks to requests. Runs on the host."""

import array
import collections
import hashlib
from collections.abc import Container, Iterable, Sequence
from typing import overload

import numpy as np

from pallas_kernels.checks import require, require_positive


class BlockManager:
    """A pool of cache blocks with reference counts and a prefix cache.

    A request owns the blocks of its tokens, `block_size` tokens in each. Forked requests share blocks until
    one of them has to write into a shared block: `extend` then gives it a new block and returns the copy to
    make. Blocks that a request does not read any more can be freed early (`free_skipped_blocks`); the null
    block replaces them.

    A full block that is cached under a digest of its content can be found by that digest (`find`) until it is
    reallocated, even after all owners have freed it. Blocks are reallocated in least-recently-used order, and
    a request's blocks from the last to the first, since later blocks are useless without the earlier ones.
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        """Start with all blocks free except block 0, the null block.

        Raises:
            ValueError: If there are fewer than two blocks.
        """
        require(num_blocks > 1, "num_blocks", "be at least 2 (block 0 is the null block)", num_blocks)
        require_positive(block_size=block_size)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.peak_used = self.num_forks = 0
        self.free_all()

    # ------------------------------------------------------------------------------------ questions
    @property
    def capacity(self) -> int:
        """Number of blocks that can be allocated."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Number of blocks without an owner, including cached ones."""
        return len(self._free) + len(self._kept)

    @property
    def num_used(self) -> int:
        """Number of blocks with an owner. A shared block counts once."""
        return self.capacity - self.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def block_table(self, request_id: int) -> tuple[int, ...]:
        """Return a request's block ids: entry i holds its tokens from `i * block_size` on."""
        return tuple(self._tables.blocks(request_id))

    def block_tables(self, request_ids: Sequence[int]) -> np.ndarray:
        """Return the block ids of several requests, int32 [reqs, blocks of the longest], padded with 0."""
        return self._tables.rows(request_ids)

    def ref_count(self, block: int) -> int:
        """Return the number of requests that share a block; 0 if it is free."""
        return self._ref_counts[block]

    def token_capacity(self, request_id: int) -> int:
        """Return the number of tokens that a request's blocks hold."""
        return len(self._tables.blocks(request_id)) * self.block_size

    def blocks_to_extend(self, request_id: int, first: int, end: int) -> int:
        """Return how many free blocks `extend` would use: new blocks, and copies of shared ones."""
        owned = self._tables.blocks(request_id)
        return max(self.blocks_for(end) - len(owned), 0) + len(self._shared_in(owned, first, end))

    def find(self, digests: Sequence[bytes]) -> tuple[int, ...]:
        """Return the cached blocks of the longest prefix of `digests`."""
        cached_blocks = []
        for digest in digests:
            block = self._cached_blocks.get(digest)
            if block is None:
                break
            cached_blocks.append(block)
        return tuple(cached_blocks)

    def is_cached(self, digest: bytes) -> bool:
        """Return whether a block is cached under this digest."""
        return digest in self._cached_blocks

    def num_free_without(self, blocks: Sequence[int]) -> int:
        """Return the number of free blocks if these blocks had an owner."""
        return self.num_free - sum(not self._ref_counts[block] for block in blocks if block != NULL_BLOCK)

    # -------------------------------------------------------------------------------------- changes
    def allocate(self, request_id: int, num_tokens: int, shared: Sequence[int] = ()) -> tuple[int, ...]:
        """Allocate the blocks for a new request's first tokens.

        Args:
            request_id: Identifier of the new request.
            num_tokens: Number of tokens.
            shared: Full blocks that hold the first tokens, as returned by `find`; null blocks replace
                blocks that will not be read.

        Raises:
            ValueError: If too few blocks are free. Nothing is changed then.
        """
        num_new_blocks = self.blocks_for(num_tokens) - len(shared)
        free = self.num_free_without(shared)
        _require_free(num_new_blocks, free)
        self._share(shared)
        self._num_found.update(shared)
        self._tables.add(request_id, [*shared, *self._take(num_new_blocks)])
        self._num_skipped[request_id] = sum(block == NULL_BLOCK for block in shared)
        return self.block_table(request_id)

    def cache_block(self, request_id: int, index: int, digest: bytes) -> None:
        """Cache a request's full block at `index` under the digest of its content.

        Does nothing if another block has this digest already, or if the request has freed the block.
        """
        block = self._tables.blocks(request_id)[index]
        if digest not in self._cached_blocks and block not in self._digests and block != NULL_BLOCK:
            self._cached_blocks[digest] = block
            self._digests[block] = digest

    def reset_prefix_cache(self) -> None:
        """Remove all blocks from the prefix cache."""
        self._cached_blocks.clear()
        self._digests.clear()

    def extend(self, request_id: int, first: int, end: int) -> list[tuple[int, int]]:
        """Allocate blocks so that a request can write its tokens from `first` to before `end`.

        Returns:
            (source, target) pairs of blocks to copy before writing (`jattn.copy_blocks`), one for each block
            that was shared.

        Raises:
            ValueError: If too few blocks are free. Nothing is changed then.
        """
        owned = self._tables.blocks(request_id)
        shared = self._shared_in(owned, first, end)
        new_blocks = self._take(self.blocks_to_extend(request_id, first, end))
        for index in self._written(owned, first, end):
            if index not in shared:
                self._uncache(owned[index])  # The parent of the fork may have cached it.
        copies = []
        for index in shared:
            source, target = owned[index], new_blocks.pop()
            self._ref_counts[source] -= 1
            self._tables.replace(request_id, index, target)
            copies.append((source, target))
        self._tables.append(request_id, new_blocks)
        return copies

    def fork(self, parent_id: int, child_id: int, num_tokens: int | None = None) -> tuple[int, ...]:
        """Create a request that shares the blocks of another request's first tokens. Allocates no block.

        Args:
            parent_id: Request whose blocks are shared.
            child_id: Identifier of the new request.
            num_tokens: Number of shared tokens. None: all tokens that the parent's blocks hold.
        """
        num_tokens = self.token_capacity(parent_id) if num_tokens is None else num_tokens
        shared = self._tables.blocks(parent_id)[: self.blocks_for(num_tokens)]
        self._share(shared)
        self._tables.add(child_id, shared)
        self._num_skipped[child_id] = min(self._num_skipped[parent_id], len(shared))
        self.num_forks += 1
        return tuple(shared)

    def free_skipped_blocks(self, request_id: int, num_tokens: int, kept_blocks: Container[int] = ()) -> None:
        """Free the blocks filled by a request's first tokens, because it does not read them any more.

        Args:
            request_id: Request whose blocks are freed.
            num_tokens: Number of tokens that it does not read any more.
            kept_blocks: Indices of the request's blocks that later requests may continue after, so that they
                are reused after the others, but before the last blocks of finished requests.
        """
        owned, num_skipped = self._tables.blocks(request_id), self._num_skipped.get(request_id, 0)
        end = min(num_tokens // self.block_size, len(owned))
        for index in reversed(range(num_skipped, end)):
            self._drop(owned[index], is_skipped=True, is_kept=index in kept_blocks)
            self._tables.replace(request_id, index, NULL_BLOCK)
        self._num_skipped[request_id] = max(num_skipped, end)

    def free(self, request_id: int) -> None:
        """Free a request's blocks.

        Blocks that other requests share stay allocated; cached ones can still be found.
        """
        for block in reversed(self._tables.blocks(request_id)):
            if block != NULL_BLOCK:
                self._drop(block)
        self._tables.remove(request_id)
        del self._num_skipped[request_id]

    def free_all(self) -> None:
        """Free all blocks and forget all digests, also after an interrupted change."""
        # Free blocks in order of reuse. Those in `_kept` are used last: a later request may continue after
        # them. Most of those that a request has left behind its window are not, unless several shared them.
        self._free = collections.OrderedDict.fromkeys(range(NULL_BLOCK + 1, self.num_blocks))
        self._kept: collections.OrderedDict[int, None] = collections.OrderedDict()
        self._ref_counts = [0] * self.num_blocks
        self._tables = BlockTables()
        self._num_skipped: dict[int, int] = {}
        self._cached_blocks: dict[bytes, int] = {}  # digest -> block
        self._digests: dict[int, bytes] = {}  # block -> digest
        self._num_found: collections.Counter[int] = collections.Counter()  # uses of cached blocks

    # --------------------------------------------------------------------------------------- inside
    def _shared_in(self, owned: list[int], first: int, end: int) -> list[int]:
        """Return the indices of the shared blocks that hold a request's tokens `first` to `end - 1`."""
        return [index for index in self._written(owned, first, end) if self._ref_counts[owned[index]] > 1]

    def _written(self, owned: list[int], first: int, end: int) -> range:
        """Return the indices of the blocks that hold a request's tokens `first` to `end - 1`."""
        begin = first // self.block_size
        return range(begin, min(self.blocks_for(end), len(owned)) if end > first else begin)

    def _share(self, blocks: Sequence[int]) -> None:
        """Increment the reference counts of blocks."""
        for block in blocks:
            if block != NULL_BLOCK:
                self._free.pop(block, None)
                self._kept.pop(block, None)
                self._ref_counts[block] += 1

    def _drop(self, block: int, *, is_skipped: bool = False, is_kept: bool = True) -> None:
        """Decrement the reference count of a block, and free it at 0; see `free_skipped_blocks`."""
        self._ref_counts[block] -= 1
        if self._ref_counts[block]:
            return
        is_cached, is_shared = block in self._digests, self._num_found[block] > 1
        if is_cached and (is_kept or is_shared):
            self._kept[block] = None
            self._kept.move_to_end(block, last=not is_skipped or is_shared)
        else:
            self._free[block] = None
            self._free.move_to_end(block, last=is_cached)

    def _uncache(self, block: int) -> None:
        """Remove a block from the prefix cache."""
        if block in self._digests:
            del self._cached_blocks[self._digests.pop(block)]
            del self._num_found[block]

    def _take(self, num_new_blocks: int) -> list[int]:
        _require_free(num_new_blocks, self.num_free)
        new_blocks = [(self._free or self._kept).popitem(last=False)[0] for _ in range(num_new_blocks)]
        for block in new_blocks:
            self._ref_counts[block] = 1
            self._uncache(block)
        self.peak_used = max(self.peak_used, self.num_used)
        return new_blocks


NULL_BLOCK = 0  # padding entry of block tables; never allocated


class BlockTables:
    """The block ids of all requests as one int32 array that is updated in place and grows on demand.

    Unused entries of a row are the null block.
    """

    def __init__(self) -> None:
        """Start without requests."""
        self._array = np.full((8, 8), NULL_BLOCK, np.int32)
        self._row_of: dict[int, int] = {}
        self._free_rows = list(range(8))
        self._blocks: dict[int, list[int]] = {}  # the same as lists
        self._lens = np.zeros(8, np.int64)  # number of blocks in each row

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._row_of

    def blocks(self, request_id: int) -> list[int]:
        """Return a request's block ids. The caller must not modify them."""
        return self._blocks[request_id]

    def rows(self, request_ids: Sequence[int]) -> np.ndarray:
        """Return a copy of some rows, int32 [reqs, blocks of the longest row]."""
        rows = np.asarray([self._row_of[request_id] for request_id in request_ids], np.int64)
        return self._array[rows, : self._lens[rows].max(initial=0)]

    def add(self, request_id: int, blocks: Sequence[int]) -> None:
        """Add a row for a new request."""
        if not self._free_rows:
            num_rows = len(self._array)
            self._free_rows = list(range(num_rows, 2 * num_rows))
            self._array = np.pad(self._array, ((0, num_rows), (0, 0)), constant_values=NULL_BLOCK)
            self._lens = np.pad(self._lens, (0, num_rows))
        self._row_of[request_id], self._blocks[request_id] = self._free_rows.pop(), []
        self.append(request_id, blocks)

    def append(self, request_id: int, blocks: Sequence[int]) -> None:
        """Append blocks to a request's row."""
        owned = self._blocks[request_id]
        first, end = len(owned), len(owned) + len(blocks)
        owned.extend(blocks)
        width = self._array.shape[1]
        if end > width:
            num_new_columns = max(width, end - width)
            self._array = np.pad(self._array, ((0, 0), (0, num_new_columns)), constant_values=NULL_BLOCK)
        row = self._row_of[request_id]
        self._array[row, first:end], self._lens[row] = blocks, end

    def replace(self, request_id: int, index: int, block: int) -> None:
        """Replace one block of a request."""
        self._blocks[request_id][index] = self._array[self._row_of[request_id], index] = block

    def remove(self, request_id: int) -> None:
        """Remove a request, and free its row."""
        row = self._row_of.pop(request_id)
        self._array[row, : len(self._blocks.pop(request_id))] = NULL_BLOCK
        self._lens[row] = 0
        self._free_rows.append(row)


def _require_free(num_blocks: int, num_free: int) -> None:
    if num_blocks > num_free:
        raise ValueError(
            f"Cannot allocate {num_blocks} blocks: only {num_free} are free. Free other requests first."
        )


DIGEST_BYTES = 16  # With 2**32 blocks a collision has probability 2**-65.


class BlockHashes(Sequence[bytes]):
    """The digests of the full blocks of a growing token list; each covers its block and all tokens before it.

    Keys and values depend on all earlier tokens, so each digest includes the previous one (a hash chain, as
    in vLLM's prefix caching).
    """

    def __init__(self, block_size: int, token_ids: Iterable[int] = ()) -> None:
        """Start with the hashes of `token_ids`."""
        self.block_size = block_size
        self._digests: list[bytes] = []
        self._rest = array.array("q")  # tokens after the last full block
        self.num_tokens = 0
        self.extend(token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens and hash the blocks that they fill."""
        num_before = len(self._rest)
        self._rest.extend(token_ids)
        self.num_tokens += len(self._rest) - num_before
        num_full = len(self._rest) // self.block_size
        for i in range(num_full):
            block = self._rest[i * self.block_size : (i + 1) * self.block_size]
            previous_digest = self._digests[-1] if self._digests else b""
            self._digests.append(
                hashlib.blake2b(previous_digest + block.tobytes(), digest_size=DIGEST_BYTES).digest()
            )
        del self._rest[: num_full * self.block_size]

    def copy(self) -> "BlockHashes":
        """Return an independent copy. Copying 32,000 tokens takes 13 us; hashing them takes 3 ms."""
        hashes = BlockHashes(self.block_size)
        hashes._digests, hashes._rest = self._digests.copy(), self._rest[:]
        hashes.num_tokens = self.num_tokens
        return hashes

    def __len__(self) -> int:
        return len(self._digests)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        return self._digests[index]
