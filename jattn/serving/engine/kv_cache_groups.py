"""KV-cache groups: layers that share a block table, and their sliding windows or chunks."""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from flax import nnx

from jattn.nn import PagedAttention
from jattn.serving.engine.block_manager import NULL_BLOCK, BlockManager
from jattn.serving.engine.scheduled_step import ScheduledRequest

FULL_ATTENTION = (None, None)  # (left window, chunk_size) of a layer without either


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


def local_attention_of(model: Any) -> LocalAttention | None:
    """Return the windows and chunks of a model's layers; or None.

    The result is None if any layer attends to the full context, or the model has no PagedAttention.
    """
    layers = _layers_of(model)
    return LocalAttention(layers) if layers and FULL_ATTENTION not in layers else None


def sliding_window_layers_of(model: Any) -> tuple[bool, ...]:
    """Return, per layer, whether it is in the sliding-window group; empty if the model has no such group.

    The group has separate blocks. It contains sliding-window and chunked layers.
    """
    return tuple(getattr(model, "sliding_window_layers", ()))


def sliding_window_attention_of(model: Any) -> LocalAttention | None:
    """Return the windows and chunks of the sliding-window group's layers; None if there is no such group."""
    return LocalAttention(_layers_of(model) - {FULL_ATTENTION}) if sliding_window_layers_of(model) else None


def _layers_of(model: Any) -> frozenset[tuple[int | None, int | None]]:
    specs = [module.spec for _, module in nnx.iter_modules(model) if isinstance(module, PagedAttention)]
    return frozenset((spec.window[0] if spec.window else None, spec.chunk_size) for spec in specs)


def longrope_threshold_of(model: Any) -> int | None:
    """Return the length in tokens above which LongRoPE uses other frequencies; None without LongRoPE."""
    ropes = [module.rope for _, module in nnx.iter_modules(model) if isinstance(module, PagedAttention)]
    lengths: list[int | None] = [getattr(rope, "longrope_threshold", None) for rope in ropes]
    return min((length for length in lengths if length is not None), default=None)


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
        """Free a request's blocks that no later token attends to."""
        if self.local_attention is not None:
            self.manager.free_skipped_blocks(
                request.request_id, self.local_attention.first_visible(request.num_computed)
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
