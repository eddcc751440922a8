"""Sizes of the engine: step limits, buckets, and the number of cache blocks."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jattn.batch.bucket import Bucket, default_buckets
from jattn.parallel import num_local_mesh_devices, num_mesh_devices, num_ranks
from jattn.runtime.decode_graphs import MAX_OVERSIZE, DecodeGraphs, GraphStep
from jattn.serving.engine.batch_invariance import check_batch_invariant_options, invariant_buckets
from jattn.serving.engine.block_manager import BlockManager
from jattn.serving.engine.input_processor import require_list_of_ints
from jattn.serving.engine.kv_cache_groups import (
    local_attention_of,
    longrope_threshold_of,
    sliding_window_attention_of,
    sliding_window_layers_of,
)
from jattn.serving.engine.proposer import draft_buckets
from jattn.serving.engine.scheduler import Scheduler
from jattn.serving.engine.served_model import ServedModel
from jattn.serving.engine.step import step_graphs
from pallas_kernels.checks import require, require_int, require_positive, require_type, unsupported
from pallas_kernels.support import why_not_device

HOST_CACHE_BYTES = 2**30  # default cache size if the device does not report its memory
MIN_TABLE_WIDTH = 1024  # columns: 1 MB for 256 rows, a negligible transfer
FREE_MEMORY_FRACTION = 0.8  # default cache size if the device reports its memory


def prefill_sizes(max_num_batched_tokens: int) -> list[int]:
    """Return prefill sizes: the budget, 3/4, 1/2 and so on down to 256 tokens.

    Then follows repeatedly a quarter of the previous size, down to 16.

    A 1,024-token prompt in a 2,048-token step takes twice the time to its first token and delays the other
    requests. Below 256 tokens, a step takes as long as reading the weights.
    """
    sizes = [max_num_batched_tokens]
    while (last := sizes[-1]) >= 64:
        sizes += [3 * last // 4, last // 2] if last > 256 else [last // 4]
    return sizes


def coarse_prefill_sizes(max_num_batched_tokens: int) -> list[int]:
    """Return the budget, then repeatedly a quarter of the previous size, down to 16.

    These are the sizes for devices where compiling costs more than padding.
    """
    sizes = [max_num_batched_tokens]
    while sizes[-1] >= 64:
        sizes.append(sizes[-1] // 4)
    return sizes


def table_widths(max_blocks: int) -> list[int]:
    """Return the widths of block tables: `max_blocks`, then repeatedly an eighth of the previous width.

    The smallest width is at least MIN_TABLE_WIDTH, unless max_blocks is smaller.

    A step transfers its table to the device (rows x columns), and the maximum request length affects the
    kernel choice, so short requests should not use the widest table.
    """
    widths = [max_blocks]
    while widths[-1] > MIN_TABLE_WIDTH:
        widths.append(max(widths[-1] // 8, MIN_TABLE_WIDTH))
    return widths


def reduce_buckets_for_cpu(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return the default buckets that are worth compiling on a CPU.

    XLA compiles every layer of every bucket there: 10 buckets with 6 layers of width 192 took 38 s of CPU
    time, these 5 took 21 s. Extra rows are cheap, so prompts run beside all decode rows, and decode sizes
    grow by a factor of four.
    """
    selected: list[Bucket] = []
    max_decodes = max(bucket.max_decodes for bucket in buckets)
    for bucket in sorted(buckets, key=lambda bucket: -bucket.max_decodes):
        if bucket.max_prefill_tokens:
            selected += [bucket] if bucket.max_decodes else []
        elif bucket.max_decodes <= max_decodes:
            selected, max_decodes = [*selected, bucket], bucket.max_decodes // MAX_OVERSIZE
    return selected


def _partial_decode_buckets(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Return buckets with prompts beside a quarter of the decode rows, in addition to default_buckets.

    In a simulation with measured step times (8B model, 1,024-token prompts at 16 per second, 256 rows) the
    first token arrives after 30 ms, and after 35 ms without these buckets.
    """
    num_decodes = max(bucket.max_decodes for bucket in buckets) // 4
    prefill_only = [bucket for bucket in buckets if not bucket.max_decodes]
    return [
        dataclasses.replace(bucket, max_decodes=num_decodes) for bucket in prefill_only if num_decodes > 1
    ]


def num_blocks_that_fit(
    cache_bytes: int | None,
    bytes_per_block: int,
    *,
    max_blocks: int,
    sliding_window_bytes: int = 0,
    max_sliding_window_blocks: int = 0,
) -> int:
    """Return the number of blocks that fit `cache_bytes`; if None, the free memory.

    Args:
        cache_bytes: Memory for all layers in bytes.
        bytes_per_block: Size of a block in all layers, in bytes.
        max_blocks: Maximum number of blocks that are needed.
        sliding_window_bytes: Part of bytes_per_block that belongs to layers with their own blocks.
        max_sliding_window_blocks: Maximum number of blocks that these layers need; further blocks only take
            memory in the other layers.

    Raises:
        ValueError: If fewer than two blocks fit.
    """

    def num_in(limit: int) -> int:
        if limit // bytes_per_block <= max_sliding_window_blocks or not sliding_window_bytes:
            return limit // bytes_per_block
        rest_bytes = limit - max_sliding_window_blocks * sliding_window_bytes
        return rest_bytes // (bytes_per_block - sliding_window_bytes)

    if cache_bytes is None:
        memory = jax.local_devices()[0].memory_stats() or {}
        free = memory.get("bytes_limit", 0) - memory.get("bytes_in_use", 0)
        limit = int(free * FREE_MEMORY_FRACTION) if free > 0 else HOST_CACHE_BYTES
        return min(max_blocks, max(num_in(limit), 2))
    num_blocks: int = num_in(cache_bytes)
    require(
        num_blocks > 1,
        "cache_bytes",
        f"be at least {2 * bytes_per_block}, the size of two blocks",
        cache_bytes,
    )
    return num_blocks


class StepLimits(NamedTuple):
    """The configured limits of the engine's steps.

    Attributes:
        block_size: Number of tokens per block, over all context-parallel ranks.
        max_num_seqs: Maximum number of requests per step.
        max_num_batched_tokens: Maximum number of new tokens per step.
        max_model_len: Maximum context length in tokens; None: the model's.
        batch_invariant: Whether results are independent of the batch; see `Engine`.
    """

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None = None
    batch_invariant: bool = False

    def for_context_parallel(self, model: ServedModel, draft: ServedModel | None = None) -> "StepLimits":
        """Return the limits with the scheduler's block size: `block_size` tokens per context-parallel rank.

        Raises:
            ValueError: If block_size is not a multiple of cp_kv_cache_interleave_size.
        """
        ranks = num_ranks(model)
        for spec in (model, draft) if ranks > 1 else ():
            interleave = getattr(spec, "cp_kv_cache_interleave_size", 1)
            rule = f"be a multiple of cp_kv_cache_interleave_size ({interleave})"
            require(self.block_size % interleave == 0, "block_size", rule, self.block_size)
        return self._replace(block_size=self.block_size * ranks)

    def check(self, skip_layers: Sequence[int], **memory: int | None) -> None:
        """Check that all limits and memory sizes are ints, and that the limits are positive.

        Raises:
            ValueError: If a value is invalid.
        """
        require_list_of_ints("skip_layers", skip_layers)
        require_type("batch_invariant", self.batch_invariant, bool, "True or False")
        sizes = {name: size for name, size in self._asdict().items() if name != "batch_invariant"}
        if self.max_model_len is None:
            del sizes["max_model_len"]
        require_int(**sizes, **{name: size for name, size in memory.items() if size is not None})
        require_positive(**sizes)

    def check_features(
        self,
        enable_prefix_caching: bool,
        speculative: Any,
        cascade_attention: bool | None,
        buckets: Sequence[Bucket] | None,
    ) -> None:
        """Check the engine's features; see `Engine` for the arguments.

        Raises:
            ValueError: If a flag is not a bool, or buckets are given with batch_invariant.
            NotImplementedError: If a feature does not support batch_invariant.
        """
        require_type("enable_prefix_caching", enable_prefix_caching, bool, "True or False")
        require_type("cascade_attention", cascade_attention, (bool, type(None)), "None: where it is faster")
        if self.batch_invariant:
            check_batch_invariant_options(speculative, cascade_attention, buckets)

    def max_context_len(self, model: ServedModel) -> int:
        """Return the maximum context length in tokens.

        Raises:
            ValueError: If max_model_len exceeds the model's maximum.
        """
        max_len = model.config.max_position_embeddings
        if self.max_model_len is None:
            return max_len
        if self.max_model_len > max_len:
            raise ValueError(f"max_model_len={self.max_model_len} exceeds the model's maximum of {max_len}.")
        return self.max_model_len

    def _blocks_per_request(self, model: ServedModel) -> int:
        return -(-self.max_context_len(model) // self.block_size)

    def max_blocks(self, model: ServedModel, num_blocks: int) -> int:
        """Return the number of block-table columns of the longest request."""
        max_context_len, capacity, local_attention = (
            self._blocks_per_request(model),
            num_blocks - 1,
            local_attention_of(model),
        )
        if local_attention is not None and local_attention.fits_any_length(
            capacity * self.block_size, self.block_size
        ):
            return max_context_len
        return min(max_context_len, capacity)

    def _max_blocks_at_once(self, model: ServedModel) -> int:
        """Return the number of blocks that the longest request needs at once."""
        max_context_len, local_attention = self._blocks_per_request(model), local_attention_of(model)
        if local_attention is None:
            return max_context_len
        return min(
            max_context_len,
            local_attention.max_blocks_per_request(self.max_num_batched_tokens, self.block_size),
        )

    def resolve_num_blocks(
        self,
        model: ServedModel,
        num_blocks: int | None,
        cache_bytes: int | None,
        cache: dict[str, Any],
        draft: ServedModel | None = None,
    ) -> int:
        """Return the number of blocks of each layer's cache.

        Args:
            model: The served model.
            num_blocks: Requested number of blocks. None: derived from cache_bytes.
            cache_bytes: Memory for all layers per device, in bytes. None: as much as needed, if available.
            cache: Other arguments of `ServedModel.cache_specs`.
            draft: Draft model whose caches share the memory.

        Raises:
            ValueError: If both are given, fewer than two blocks fit, or the device does not have the memory.
        """
        if num_blocks is not None:
            require(cache_bytes is None, "cache_bytes", f"be None with num_blocks={num_blocks}", cache_bytes)
        specs = [*model.cache_specs(1, block_size=self.block_size, **cache)]
        sliding_window_specs = [
            spec
            for spec, has_own_blocks in zip(specs, sliding_window_layers_of(model), strict=False)
            if has_own_blocks
        ]
        if draft is not None:
            specs += draft.cache_specs(
                1, block_size=self.block_size, dtype=None, quantization=None, skip_layers=()
            )
        max_blocks = self._max_blocks_at_once(model) * self.max_num_seqs + 1
        block_bytes = sum(spec.bytes_per_block for spec in specs) // num_mesh_devices(model)
        window_block_bytes = sum(spec.bytes_per_block for spec in sliding_window_specs) // num_mesh_devices(
            model
        )
        max_sliding_window_blocks = self._max_sliding_window_blocks(model)
        name, value = ("num_blocks", num_blocks) if cache_bytes is None else ("cache_bytes", cache_bytes)
        if num_blocks is None:
            num_blocks = num_blocks_that_fit(
                cache_bytes,
                block_bytes,
                max_blocks=max_blocks,
                sliding_window_bytes=window_block_bytes,
                max_sliding_window_blocks=max_sliding_window_blocks,
            )
        total = num_blocks * block_bytes
        total -= max(num_blocks - max_sliding_window_blocks, 0) * window_block_bytes
        require_fits_memory(name, num_blocks if value is None else value, total, model)
        return num_blocks

    def _max_sliding_window_blocks(self, model: ServedModel) -> int:
        """Return the maximum number of blocks in layers with their own blocks; 0 if there are none."""
        local_attention = sliding_window_attention_of(model)
        if local_attention is None:
            return 0
        return (
            local_attention.max_blocks_per_batch(
                self.max_num_seqs, self.max_num_batched_tokens, self.block_size
            )
            + 1
        )

    def num_blocks_per_layer(self, model: ServedModel, num_blocks: int) -> int | tuple[int, ...]:
        """Return the number of blocks of each layer's cache; one number if all layers share a block table."""
        num_window_blocks = min(num_blocks, self._max_sliding_window_blocks(model))
        return (
            tuple(
                num_window_blocks if has_own_blocks else num_blocks
                for has_own_blocks in sliding_window_layers_of(model)
            )
            or num_blocks
        )

    def scheduler(self, model: ServedModel, num_blocks: int) -> Scheduler:
        """Create the scheduler.

        Raises:
            ValueError: If there are fewer than two blocks.
            NotImplementedError: If the model's LongRoPE conflicts with the limits.
        """
        num_window_blocks = min(num_blocks, self._max_sliding_window_blocks(model))
        return Scheduler(
            BlockManager(num_blocks, self.block_size),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            local_attention=sliding_window_attention_of(model)
            if num_window_blocks
            else local_attention_of(model),
            batch_invariant=self.batch_invariant,
            longrope_threshold=self._longrope_threshold(model),
            sliding_window_manager=BlockManager(num_window_blocks, self.block_size)
            if num_window_blocks
            else None,
        )

    def _longrope_threshold(self, model: ServedModel) -> int | None:
        """Return the length above which LongRoPE changes; None if no request can exceed it."""
        length = longrope_threshold_of(model)
        if length is None or self.max_context_len(model) <= length:
            return None
        reason = f"requests of more than {length} tokens use other RoPE frequencies for all of their tokens"
        if self.batch_invariant:
            raise unsupported("batch_invariant=True", reason, f"Set max_model_len={length}")
        if self.max_num_batched_tokens <= length:
            feature = f"max_num_batched_tokens={self.max_num_batched_tokens}"
            raise unsupported(
                feature, reason, f"Set it to at least {length + 1}, or set max_model_len={length}"
            )
        return length

    def draft_buckets(self, model: ServedModel, num_blocks: int, num_draft_tokens: int) -> list[Bucket]:
        """Return the buckets of steps with this many draft tokens per row."""
        widths = table_widths(self.max_blocks(model, num_blocks))
        return [
            bucket for width in widths for bucket in draft_buckets(self.max_num_seqs, num_draft_tokens, width)
        ]

    def draft_prefill_buckets(self, model: ServedModel, num_blocks: int) -> list[Bucket]:
        """Return the buckets of a draft model's prefill steps, the largest last."""
        return [
            Bucket(max_prefills=min(self.max_num_seqs, size), max_prefill_tokens=size, max_blocks=width)
            for width in sorted(table_widths(self.max_blocks(model, num_blocks)))
            for size in sorted(coarse_prefill_sizes(self.max_num_batched_tokens))
        ]

    def graphs(
        self,
        model: ServedModel,
        step: GraphStep,
        buckets: Sequence[Bucket] | None,
        num_blocks: int,
        num_draft_tokens: int = 0,
    ) -> DecodeGraphs:
        """Create the executables of a step for the given or default buckets, and for steps with drafts.

        Raises:
            ValueError: If no bucket fits the largest step.
        """
        max_blocks = self.max_blocks(model, num_blocks)
        if self.batch_invariant:
            sizes = self.max_num_seqs, self.max_num_batched_tokens, max_blocks
            return step_graphs(step, invariant_buckets(*sizes))
        if buckets is None:
            is_cpu = jax.default_backend() == "cpu"
            chunks = (coarse_prefill_sizes if is_cpu else prefill_sizes)(self.max_num_batched_tokens)
            # No bucket has a single row: XLA would replace its matrix products by slower elementwise kernels.
            # 32 attention layers of Llama 3 8B took 2,251 us for one row and 1,547 us for 8.
            rows = max(self.max_num_seqs, 2)
            buckets = [
                bucket
                for width in table_widths(max_blocks)
                for bucket in default_buckets(rows, max_blocks=width, prefill_tokens=chunks)
                if bucket.max_tokens > 1
            ]
            buckets = (
                reduce_buckets_for_cpu(buckets) if is_cpu else [*buckets, *_partial_decode_buckets(buckets)]
            )
        if num_draft_tokens:
            buckets = [*buckets, *self.draft_buckets(model, num_blocks, num_draft_tokens)]
        graphs = step_graphs(step, buckets)
        graphs.choose(  # Raises if a step could be too large.
            num_decodes=self.max_num_seqs,
            num_prefills=min(self.max_num_seqs, self.max_num_batched_tokens),
            num_prefill_tokens=self.max_num_batched_tokens,
            num_blocks=max_blocks,
        )
        return graphs


class StepSizes(NamedTuple):
    """Maximum numbers of requests and of new tokens per step."""

    max_num_seqs: int
    max_num_batched_tokens: int


CPU_STEP_SIZES = StepSizes(16, 512)  # Each row takes time, and each bucket is compiled layer by layer.
GPU_STEP_SIZES = StepSizes(256, 2048)  # vLLM's defaults for most GPUs
KERNEL_STEP_SIZES = StepSizes(256, 8192)  # vLLM's defaults for an H100


def default_step_sizes(fills_buckets: bool) -> StepSizes:
    """Return the default step sizes for this process's first device.

    Args:
        fills_buckets: Whether each step costs its full bucket regardless of the content. If so, the CPU's
            sizes are used on all devices.
    """
    device = jax.local_devices()[0]
    if device.platform == "cpu" or fills_buckets:
        return CPU_STEP_SIZES
    return GPU_STEP_SIZES if why_not_device(device) else KERNEL_STEP_SIZES


def require_fits_memory(name: str, value: int, cache_bytes: int, model: Any) -> None:
    """Check that the KV caches fit the memory of a device. Other allocations are ignored.

    Args:
        name: Name of the argument, for the error message.
        value: Value of the argument.
        cache_bytes: Memory of the caches per device, in bytes.
        model: The served model.

    Raises:
        ValueError: If the caches do not fit.
    """
    memory = device_memory_bytes(model)
    if memory is not None and cache_bytes > memory:
        raise ValueError(
            f"{name}={value} needs {cache_bytes} bytes for the KV caches, but a device has {memory} bytes. "
            f"Reduce {name}."
        )


def device_memory_bytes(model: Any) -> int | None:
    """Return the total memory of each of a model's devices in bytes; None if it is unknown.

    The devices of a CPU share the host's memory.
    """
    device = jax.local_devices()[0]
    if device.platform != "cpu" or device.memory_stats():
        return (device.memory_stats() or {}).get("bytes_limit") or None  # 0: an allocator without a limit
    if not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // num_local_mesh_devices(model)
