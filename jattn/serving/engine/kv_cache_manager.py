"""The scheduler's interface to the KV-cache blocks of all groups."""

import dataclasses
import itertools
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jattn.serving.engine.block_manager import NULL_BLOCK, BlockManager
from jattn.serving.engine.scheduled_step import ScheduledRequest
from pallas_kernels.checks import require, require_type


@dataclasses.dataclass(frozen=True)
class LocalAttention:
    """The windows and chunk sizes of layers that all have a sliding window or chunked attention.

    Attributes:
        layers: (left window, chunk_size) of each type of layer, as in `AttentionSpec`; either may be None.
    """

    layers: frozenset[tuple[int | None, int | None]]

    def first_visible(self, position: int) -> int:
        """Return the first position that a token at `position` or later attends to in some layer."""
        return min(_first_visible(position, *layer) for layer in self.layers)

    @property
    def max_lookback(self) -> int:
        """Maximum number of earlier positions that a token attends to."""
        lookbacks = ([r for r in (left, chunk and chunk - 1) if r is not None] for left, chunk in self.layers)
        return max(map(min, lookbacks))

    def max_blocks_per_request(self, num_new: int, block_size: int) -> int:
        """Return the maximum number of blocks of a request with `num_new` new tokens per step."""
        return -(-(self.max_lookback + num_new) // block_size) + 1

    def max_blocks_per_batch(self, max_num_seqs: int, max_num_batched_tokens: int, block_size: int) -> int:
        """Return the maximum number of blocks of a batch of requests.

        Each request may hold a block before its window and start another one after it.
        """
        return max_num_seqs * (-(-self.max_lookback // block_size) + 2) + -(
            -max_num_batched_tokens // block_size
        )

    def fits_any_length(self, num_tokens: int, block_size: int) -> bool:
        """Return whether a request of any length can run, one token at a time, in a cache of `num_tokens`."""
        return num_tokens >= self.max_lookback + block_size


def _first_visible(position: int, left: int | None, chunk_size: int | None) -> int:
    window_start = 0 if left is None else position - left
    chunk_start = 0 if chunk_size is None else position // chunk_size * chunk_size
    return max(window_start, chunk_start, 0)


def find_within_windows(
    local_attention: LocalAttention, manager: BlockManager, digests: Sequence[bytes]
) -> tuple[int, ...]:
    """Return the cached blocks of the longest prefix after which a request can continue.

    Only the blocks that the next token attends to must be cached; null blocks replace the earlier ones.

    Source: vLLM V1 `SlidingWindowManager.find_longest_cache_hit`.
    """
    size, first_cached, longest_hit = manager.block_size, 0, (0, 0)
    for count, digest in enumerate(digests, 1):
        if not manager.is_cached(digest):
            first_cached = count
        first = min(local_attention.first_visible(count * size) // size, count)
        if first_cached <= first:
            longest_hit = first, count
    first, count = longest_hit
    return (NULL_BLOCK,) * first + manager.find(digests[first:count])


class KVCacheGroup(NamedTuple):
    """The blocks of layers that share a block table. A request has equally many entries in all groups.

    Attributes:
        manager: Block manager of the group.
        local_attention: Windows and chunks of the group's layers. None: they attend to the full context.
    """

    manager: BlockManager
    local_attention: LocalAttention | None = None

    @property
    def max_request_tokens(self) -> int:
        """Maximum length of a request in tokens; unlimited if a window fits the cache."""
        size = self.manager.block_size
        fit = self.manager.capacity * size
        return (
            sys.maxsize
            if self.local_attention is not None and self.local_attention.fits_any_length(fit, size)
            else fit
        )

    def free_skipped_blocks(self, request: ScheduledRequest) -> None:
        """Free a request's blocks that no later token attends to.

        The last window of the prompt stays cached for a request that repeats the prompt.
        """
        if self.local_attention is not None:
            size = self.manager.block_size
            num_shared_blocks = request.num_shared_prompt_tokens // size
            first_kept = self.local_attention.first_visible(num_shared_blocks * size) // size
            self.manager.free_skipped_blocks(
                request.request_id,
                self.local_attention.first_visible(request.num_computed),
                range(first_kept, num_shared_blocks),
            )

    def num_fitting_tokens(self, request: ScheduledRequest, count: int) -> int:
        """Free a request's skipped blocks, and return how many of its next `count` tokens fit the cache."""
        if self.local_attention is None:
            return count
        self.free_skipped_blocks(request)
        size, first = self.manager.block_size, request.num_computed
        limit = (self.manager.capacity + self.local_attention.first_visible(first) // size) * size
        return min(count, limit - first)

    def num_missing(self, request: ScheduledRequest, end: int) -> int:
        """Return how many blocks a request lacks to run up to token `end`; 0 or less if it can run."""
        num_required = self.manager.blocks_to_extend(request.request_id, request.num_computed, end)
        return num_required - self.manager.num_free

    def can_extend(self, requests: Sequence[ScheduledRequest], count: int) -> bool:
        """Return whether enough blocks are free for `count` more tokens of each request."""
        ends = [
            (request.request_id, request.num_computed, request.num_computed + count) for request in requests
        ]
        return sum(self.manager.blocks_to_extend(*request) for request in ends) <= self.manager.num_free

    def find(self, digests: Sequence[bytes]) -> tuple[int, ...]:
        """Return the cached blocks of the longest prefix of `digests` after which a request can continue."""
        if self.local_attention is None:
            return self.manager.find(digests)
        return find_within_windows(self.local_attention, self.manager, digests)

    def max_new_tokens_after(self, cached_blocks: Sequence[int], num_computed: int) -> int:
        """Return how many tokens after the computed ones fit the free blocks and `cached_blocks`."""
        num_blocks = len(cached_blocks) + self.manager.num_free_without(cached_blocks)
        return num_blocks * self.manager.block_size - num_computed

    def can_start(
        self, request: ScheduledRequest, cached_blocks: Sequence[int], max_step_tokens: int
    ) -> bool:
        """Return whether enough blocks are free for a request to start.

        Args:
            request: Request without blocks.
            cached_blocks: Cached blocks that it reuses.
            max_step_tokens: Maximum number of new tokens per step.
        """
        return self._num_required(request, cached_blocks, max_step_tokens) <= self.manager.num_free_without(
            cached_blocks
        )

    def _num_required(
        self, request: ScheduledRequest, cached_blocks: Sequence[int], max_step_tokens: int
    ) -> int:
        num_missing_blocks = self.manager.blocks_for(request.num_tokens) - len(cached_blocks)
        if self.local_attention is None:
            return num_missing_blocks
        num_needed_at_once = self.local_attention.max_blocks_per_request(
            min(request.num_new, max_step_tokens), self.manager.block_size
        )
        num_free_if_alone = self.manager.capacity - sum(block != NULL_BLOCK for block in cached_blocks)
        return min(num_missing_blocks, num_needed_at_once, num_free_if_alone)


def find_in_all_groups(groups: Sequence[KVCacheGroup], digests: Sequence[bytes]) -> list[tuple[int, ...]]:
    """Return each group's blocks of the longest prefix that is cached in all groups.

    Source: vLLM V1 `HybridKVCacheCoordinator.find_longest_cache_hit`.
    """
    while True:
        cached_blocks = [group.find(digests) for group in groups]
        count = min(map(len, cached_blocks))
        if all(len(blocks) == count for blocks in cached_blocks):
            return cached_blocks
        digests = digests[:count]


type BlockPairs = tuple[tuple[int, int], ...]


class KVCacheManager:
    """Allocates blocks to scheduled requests: new blocks, blocks of a cached prefix, or blocks of a sibling.

    If only some layers have a sliding window, they form a second group with separate blocks. A request then
    has a table in each group, and runs if both groups have blocks for it.
    """

    def __init__(
        self,
        manager: BlockManager,
        max_num_batched_tokens: int,
        local_attention: LocalAttention | None,
        batch_invariant: bool = False,
        longrope_threshold: int | None = None,
        sliding_window_manager: BlockManager | None = None,
    ) -> None:
        """Create the groups. See `Scheduler` for arguments and errors; `manager` is its block_manager."""
        require_type("block_manager", manager, BlockManager, "the blocks of the KV cache")
        if sliding_window_manager is None:
            self._groups = [KVCacheGroup(manager, local_attention)]
        else:
            if local_attention is None:
                raise ValueError(
                    "sliding_window_manager requires local_attention, which describes its layers. "
                    "Pass local_attention."
                )
            size, rule = sliding_window_manager.block_size, f"equal block_manager's ({manager.block_size})"
            require(size == manager.block_size, "sliding_window_manager.block_size", rule, size)
            self._groups = [KVCacheGroup(manager), KVCacheGroup(sliding_window_manager, local_attention)]
        self._longrope_threshold = longrope_threshold
        self._manager, self._max_step_tokens = manager, max_num_batched_tokens
        self._separates_prompts = batch_invariant  # Only prompt tokens are shared and cached.
        # (source, target) block copies of each request in each group, until its step has started.
        self.pending_copies: dict[int, list[list[tuple[int, int]]]] = {}

    @property
    def max_request_tokens(self) -> int:
        """Maximum length of a request in tokens; see `Scheduler.capacity_tokens`."""
        max_request_tokens = min([group.max_request_tokens for group in self._groups])
        num_cache_tokens = min([group.manager.capacity for group in self._groups]) * self._manager.block_size
        if self._longrope_threshold is None or self._is_long(num_cache_tokens):
            return max_request_tokens
        # A longer request's first chunk does not fit.
        return min(max_request_tokens, self._longrope_threshold)

    def num_fitting_tokens(self, request: ScheduledRequest, count: int) -> int:
        """Free a request's skipped blocks, and return how many of its next `count` tokens fit the cache."""
        for group in self._groups:
            count = group.num_fitting_tokens(request, count)
        return count

    def free_skipped_blocks(self, request: ScheduledRequest) -> None:
        """Free a request's blocks that no later token attends to."""
        for group in self._groups:
            group.free_skipped_blocks(request)

    def num_missing(self, request: ScheduledRequest, end: int) -> int:
        """Return how many blocks a request lacks to run up to token `end`; 0 or less if it can run."""
        return max([group.num_missing(request, end) for group in self._groups])

    def extend(self, request: ScheduledRequest, end: int) -> bool:
        """Allocate a request's blocks up to token `end`.

        Return False, without a change, if too few are free.
        """
        if self.num_missing(request, end) > 0:
            return False
        copies = [
            group.manager.extend(request.request_id, request.num_computed, end) for group in self._groups
        ]
        if any(copies):
            self.pending_copies[request.request_id] = copies
        request.token_capacity = self._manager.token_capacity(request.request_id)
        return True

    def can_extend(self, requests: Sequence[ScheduledRequest], count: int) -> bool:
        """Return whether every one of these requests can have `count` more tokens."""
        if any(self.num_fitting_tokens(request, count) < count for request in requests):
            return False
        return all(group.can_extend(requests, count) for group in self._groups)

    def block_tables(self, request_ids: Sequence[int]) -> list[np.ndarray]:
        """Return the block tables of each group; see `BlockManager.block_tables`."""
        return [group.manager.block_tables(request_ids) for group in self._groups]

    def crossing_threshold(
        self, requests: Iterable[ScheduledRequest], num_draft_tokens: int = 0
    ) -> list[ScheduledRequest]:
        """Return the started requests that exceed longrope_threshold in the next step.

        Their cached keys use the short frequencies, so they must be recomputed.
        """
        if self._longrope_threshold is None:
            return []
        started = (
            request
            for request in requests
            if request.num_computed and not self._is_long(request.num_computed)
        )
        return [request for request in started if self._is_long(request.num_tokens + num_draft_tokens)]

    def block_copies_of(self, request_ids: Iterable[int]) -> list[BlockPairs]:
        """Return the block copies of each group to make before a step of these requests."""
        if not self.pending_copies:
            return [()] * len(self._groups)
        copies_by_request = [
            self.pending_copies[request_id] for request_id in request_ids if request_id in self.pending_copies
        ]
        concatenate = itertools.chain.from_iterable
        return [
            tuple(concatenate(copies[group_index] for copies in copies_by_request))
            for group_index in range(len(self._groups))
        ]

    def start(self, request: ScheduledRequest, budget: int) -> int:
        """Allocate blocks for a new request's first tokens.

        Returns:
            Number of tokens to compute in this step; 0 if too few blocks are free.
        """
        cached_blocks = self._find_cached_prefix(request)
        groups_with_blocks = list(zip(self._groups, cached_blocks, strict=True))
        if not all(
            group.can_start(request, blocks, self._max_step_tokens) for group, blocks in groups_with_blocks
        ):
            return 0
        previous = request.num_computed, request.num_cached_blocks
        request.num_cached_blocks = len(cached_blocks[0])
        request.num_computed = request.num_cached_blocks * self._manager.block_size
        limit = min(
            group.max_new_tokens_after(blocks, request.num_computed) for group, blocks in groups_with_blocks
        )
        num_new = request.num_next_same_type if self._separates_prompts else request.num_new
        count = min(num_new, budget, limit)
        if self._is_long(request.num_tokens) and not self._is_long(request.num_computed + count):
            request.num_computed, request.num_cached_blocks = previous
            return 0  # Wait for a sufficient budget.
        for group, blocks in groups_with_blocks:
            group.manager.allocate(request.request_id, request.num_computed + count, blocks)
        request.token_capacity = self._manager.token_capacity(request.request_id)
        return count

    def resume_fork(self, request: ScheduledRequest, budget: int) -> int:
        """Return how many tokens a forked request computes next; 0 if too few blocks are free."""
        if self.num_missing(request, request.num_tokens) > 0:
            return 0
        count = min(request.num_new, budget)
        self.extend(request, request.num_computed + count)
        return count

    def fork(self, parent: ScheduledRequest, child: ScheduledRequest) -> None:
        """Share a prompt's KV blocks with another completion, which computes the last prompt token itself."""
        for group in self._groups:
            group.manager.fork(parent.request_id, child.request_id, parent.num_shared_prompt_tokens)
        child.num_computed, child.is_stale = parent.num_shared_prompt_tokens, parent.is_stale

    def cache_full_blocks(self, request: ScheduledRequest) -> None:
        """Cache a request's computed full blocks whose tokens the host knows."""
        if request.hashes is None or request.is_stale:
            return
        num_computed = request.num_computed
        if self._separates_prompts:
            num_computed = min(num_computed, request.num_prompt_tokens)
        num_full = min(num_computed // self._manager.block_size, len(request.hashes))
        for index in range(request.num_cached_blocks, num_full):
            digest = self._length_digest(request.hashes[index], request.num_computed)
            for group in self._groups:
                group.manager.cache_block(request.request_id, index, digest)
        request.num_cached_blocks = num_full

    def free(self, request: ScheduledRequest) -> None:
        """Free a request's blocks, and drop its pending copies."""
        self.cache_full_blocks(request)
        for group in self._groups:
            group.manager.free(request.request_id)
        self.pending_copies.pop(request.request_id, None)

    def free_all(self) -> None:
        """Free all blocks of all groups."""
        self.pending_copies.clear()
        for group in self._groups:
            group.manager.free_all()

    def reset_prefix_cache(self) -> None:
        """Discard all cached prefixes."""
        for group in self._groups:
            group.manager.reset_prefix_cache()

    # --------------------------------------------------------------------------------------- inside
    def _is_long(self, num_tokens: int) -> bool:
        return self._longrope_threshold is not None and num_tokens > self._longrope_threshold

    def _length_digest(self, digest: bytes, num_tokens: int) -> bytes:
        """Return a block's digest, which depends on whether the request exceeds longrope_threshold."""
        return digest + b"long" if self._is_long(num_tokens) else digest

    def _find_cached_prefix(self, request: ScheduledRequest) -> list[tuple[int, ...]]:
        """Return each group's cached full blocks of a request's prefix, without its last token.

        With batch_invariant, only the prompt is looked up, without the prompt's last token.
        """
        if request.hashes is None:
            return [()] * len(self._groups)
        num_tokens = request.num_prompt_tokens if self._separates_prompts else request.num_tokens
        limit = (num_tokens - 1) // self._manager.block_size
        digests = [self._length_digest(digest, request.num_tokens) for digest in request.hashes[:limit]]
        return find_in_all_groups(self._groups, digests)
