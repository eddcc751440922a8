"""The scheduler's interface to the KV-cache blocks of all groups."""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from jattn.serving.engine.block_manager import BlockManager
from jattn.serving.engine.kv_cache_groups import KVCacheGroup, LocalAttention, find_in_all_groups
from jattn.serving.engine.scheduled_step import ScheduledRequest
from pallas_kernels.checks import require, require_type

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
        max_request_tokens = min(group.max_request_tokens for group in self._groups)
        num_cache_tokens = min(group.manager.capacity for group in self._groups) * self._manager.block_size
        if self._longrope_threshold is None or self._is_long(num_cache_tokens):
            return max_request_tokens
        # A longer request's first chunk does not fit.
        return min(max_request_tokens, self._longrope_threshold)

    @property
    def num_forks(self) -> int:
        """Number of forks so far."""
        return self._manager.num_forks

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
        extension = request.request_id, request.num_computed, end
        copies = [group.manager.extend(*extension) for group in self._groups]
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
