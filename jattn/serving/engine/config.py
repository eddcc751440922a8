"""How large the engine makes what it was not told the size of."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jattn.batch.bucket import Bucket, default_buckets
from jattn.parallel import num_local_mesh_devices, num_mesh_devices, num_ranks
from jattn.runtime.decode_graphs import WASTE, DecodeGraphs, GraphStep
from jattn.serving.engine.batch_invariance import check_goes_with_invariance, invariant_buckets
from jattn.serving.engine.block_manager import BlockManager
from jattn.serving.engine.input_processor import require_list_of_ints
from jattn.serving.engine.kv_cache_groups import near_layers_of, near_reach_of, reach_of, turning_length_of
from jattn.serving.engine.proposer import draft_buckets
from jattn.serving.engine.scheduler import Scheduler
from jattn.serving.engine.served_model import ServedModel
from jattn.serving.engine.step import step_graphs
from pallas_kernels.checks import require, require_int, require_positive, require_type, unsupported
from pallas_kernels.support import why_not_device

HOST_CACHE_BYTES = 2**30  # the largest cache made unasked where the device does not say what memory it has
NARROW_TABLE = 1024  # columns that cost nothing: 1 MB for 256 rows
SHARE_OF_FREE_MEMORY = 0.8  # the largest one made unasked where it does


def prefill_sizes(max_num_batched_tokens: int) -> list[int]:
    """The budget, three quarters, a half of it and so on down to 256 tokens; then quarters, down to 16.

    A prompt of 1,024 tokens in a step of 2,048 has its first token after twice the time, and those beside it
    wait as long. Up to 256 tokens a step takes the time of its weights.
    """
    sizes = [max_num_batched_tokens]
    while (last := sizes[-1]) >= 64:
        sizes += [3 * last // 4, last // 2] if last > 256 else [last // 4]
    return sizes


def few_prefill_sizes(max_num_batched_tokens: int) -> list[int]:
    """The budget, a quarter of it, a quarter of that, down to 16, where compiling costs more than padding."""
    sizes = [max_num_batched_tokens]
    while sizes[-1] >= 64:
        sizes.append(sizes[-1] // 4)
    return sizes


def table_widths(max_blocks: int) -> list[int]:
    """Columns of block tables: enough for the longest request, and eighths of that down to NARROW_TABLE.

    A step sends its table to the device, rows x columns, and what a request might have decides what serves
    it: neither should be of 131,072 tokens where 2,000 are there.
    """
    widths = [max_blocks]
    while widths[-1] > NARROW_TABLE:
        widths.append(max(widths[-1] // 8, NARROW_TABLE))
    return widths


def few_of(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Those of default_buckets that a CPU gains by.

    There XLA compiles every layer of every bucket anew: 10 of them, of 6 layers 192 wide, took 38 s of a
    CPU's time, these 5 took 21. Rows cost little: decode rows beside a prompt, or four times as many as
    decode.
    """
    few: list[Bucket] = []
    most = max(bucket.max_decodes for bucket in buckets)
    for bucket in sorted(buckets, key=lambda bucket: -bucket.max_decodes):
        if bucket.max_prefill_tokens:
            few += [bucket] if bucket.max_decodes else []
        elif bucket.max_decodes <= most:
            few, most = [*few, bucket], bucket.max_decodes // WASTE
    return few


def _beside_some(buckets: Sequence[Bucket]) -> list[Bucket]:
    """Prompts beside a quarter of the decode rows; default_buckets has them beside all and beside none.

    By the scheduler's own steps and measured times (8B width, prompts of 1,024 at 16 a second, 256 rows) the
    first token comes after 30 ms, after 35 without these: 20 decodes beside it cost as many tokens as 256.
    """
    some = max(bucket.max_decodes for bucket in buckets) // 4
    alone = [bucket for bucket in buckets if not bucket.max_decodes]
    return [dataclasses.replace(bucket, max_decodes=some) for bucket in alone if some > 1]


def num_blocks_in(
    cache_bytes: int | None, bytes_per_block: int, *, most: int, near_bytes: int = 0, most_near: int = 0
) -> int:
    """Blocks that fit `cache_bytes`; None: `most`, or fewer where memory is short.

    Args:
        cache_bytes: Memory for all layers.
        bytes_per_block: Of all layers.
        most: As many are enough.
        near_bytes: Those of bytes_per_block that belong to layers with blocks of their own.
        most_near: As many are enough for these; beyond, a block costs what the others take.

    Raises:
        ValueError: Not even two fit.
    """
    in_memory = lambda limit: (
        limit // bytes_per_block
        if limit // bytes_per_block <= most_near or not near_bytes
        else (limit - most_near * near_bytes) // (bytes_per_block - near_bytes)
    )
    if cache_bytes is None:
        memory = jax.local_devices()[0].memory_stats() or {}
        free = memory.get("bytes_limit", 0) - memory.get("bytes_in_use", 0)
        limit = int(free * SHARE_OF_FREE_MEMORY) if free > 0 else HOST_CACHE_BYTES
        return min(most, max(in_memory(limit), 2))
    num_blocks: int = in_memory(cache_bytes)
    require(num_blocks > 1, "cache_bytes", f"hold two blocks ({2 * bytes_per_block} bytes)", cache_bytes)
    return num_blocks


class StepLimits(NamedTuple):
    """What the engine was told of its steps.

    Attributes:
        block_size: Tokens of a block, of all devices together.
        max_num_seqs: Most requests of a step.
        max_num_batched_tokens: Most new tokens of a step.
        max_model_len: Longest context; None = the model's.
        batch_invariant: As `Engine` has it.
    """

    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int | None = None
    batch_invariant: bool = False

    def on_ranks(self, model: ServedModel, draft: ServedModel | None = None) -> "StepLimits":
        """Blocks as the scheduler counts them: each rank has `block_size` tokens of one.

        Raises:
            ValueError: They are no multiple of the tokens that stay together.
        """
        ranks = num_ranks(model)
        for one in (model, draft) if ranks > 1 else ():
            interleave = getattr(one, "cp_kv_cache_interleave_size", 1)
            rule = f"be a multiple of cp_kv_cache_interleave_size ({interleave})"
            require(self.block_size % interleave == 0, "block_size", rule, self.block_size)
        return self._replace(block_size=self.block_size * ranks)

    def check(self, skip_layers: Sequence[int], **memory: int | None) -> None:
        """Raises ValueError unless all are ints: positive the limits, None perhaps the memory's sizes."""
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
        """Checks what else the engine is to do; arguments as `Engine` has them.

        Raises:
            ValueError: What is on or off is no bool, or buckets are given with batch_invariant.
            NotImplementedError: Another one does not go with batch_invariant.
        """
        require_type("enable_prefix_caching", enable_prefix_caching, bool, "True or False")
        require_type("cascade_attention", cascade_attention, (bool, type(None)), "None = where it pays")
        if self.batch_invariant:
            check_goes_with_invariance(speculative, cascade_attention, buckets)

    def longest(self, model: ServedModel) -> int:
        """The longest context, in tokens.

        Raises:
            ValueError: max_model_len is longer than the model's.
        """
        most = model.config.max_position_embeddings
        if self.max_model_len is None:
            return most
        rule = f"be at most the model's {most} positions"
        require(self.max_model_len <= most, "max_model_len", rule, self.max_model_len)
        return self.max_model_len

    def _blocks_of_longest(self, model: ServedModel) -> int:
        return -(-self.longest(model) // self.block_size)

    def max_blocks(self, model: ServedModel, num_blocks: int) -> int:
        """Block-table columns of the longest request, of so many blocks in all."""
        longest, capacity, reach = self._blocks_of_longest(model), num_blocks - 1, reach_of(model)
        if reach is not None and reach.fits(capacity * self.block_size, self.block_size):
            return longest
        return min(longest, capacity)

    def _blocks_at_once(self, model: ServedModel) -> int:
        """Blocks that the longest request has need of at once."""
        longest, reach = self._blocks_of_longest(model), reach_of(model)
        if reach is None:
            return longest
        return min(longest, reach.blocks_at_once(self.max_num_batched_tokens, self.block_size))

    def num_blocks_for(
        self,
        model: ServedModel,
        num_blocks: int | None,
        cache_bytes: int | None,
        cache: dict[str, Any],
        draft: ServedModel | None = None,
    ) -> int:
        """Blocks of each layer's cache.

        Args:
            model: Whose caches.
            num_blocks: So many; None = as cache_bytes says.
            cache_bytes: Memory for all layers, on each device; None = enough, where there is enough.
            cache: What else `ServedModel.cache_specs` takes.
            draft: A model whose caches, of as many blocks, share the memory.

        Raises:
            ValueError: Both are given, not even two blocks fit, or the device cannot hold them.
        """
        if num_blocks is not None:
            require(cache_bytes is None, "cache_bytes", f"be None with num_blocks={num_blocks}", cache_bytes)
        specs = [*model.cache_specs(1, block_size=self.block_size, **cache)]
        own = [spec for spec, is_near in zip(specs, near_layers_of(model), strict=False) if is_near]
        if draft is not None:
            plain: dict[str, Any] = {"dtype": None, "quantization": None, "skip_layers": ()}
            specs += draft.cache_specs(1, block_size=self.block_size, **plain)
        most = self._blocks_at_once(model) * self.max_num_seqs + 1
        size, near_size = (
            sum(one.bytes_per_block for one in of) // num_mesh_devices(model) for of in (specs, own)
        )
        most_near = self._most_near_blocks(model)
        name, value = ("num_blocks", num_blocks) if cache_bytes is None else ("cache_bytes", cache_bytes)
        if num_blocks is None:
            near: Any = {"near_bytes": near_size, "most_near": most_near}
            num_blocks = num_blocks_in(cache_bytes, size, most=most, **near)
        total = num_blocks * size - max(num_blocks - most_near, 0) * near_size
        require_fits(name, num_blocks if value is None else value, total, model)
        return num_blocks

    def _most_near_blocks(self, model: ServedModel) -> int:
        """Blocks that are enough for layers with blocks of their own; 0 where there are none."""
        reach = near_reach_of(model)
        if reach is None:
            return 0
        return reach.blocks_of_all(self.max_num_seqs, self.max_num_batched_tokens, self.block_size) + 1

    def blocks_of_layers(self, model: ServedModel, num_blocks: int) -> int | tuple[int, ...]:
        """Blocks of each layer's cache; one number where all layers share a block table."""
        near = min(num_blocks, self._most_near_blocks(model))
        return tuple(near if is_near else num_blocks for is_near in near_layers_of(model)) or num_blocks

    def scheduler(self, model: ServedModel, num_blocks: int) -> Scheduler:
        """A scheduler of a model's requests, over so many blocks.

        Raises:
            ValueError: There would be no block to hand out.
            NotImplementedError: Long requests are turned otherwise, and not as the steps would need it.
        """
        near = min(num_blocks, self._most_near_blocks(model))
        return Scheduler(
            BlockManager(num_blocks, self.block_size),
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            reach=near_reach_of(model) if near else reach_of(model),
            batch_invariant=self.batch_invariant,
            turning_length=self._turning_length(model),
            near_manager=BlockManager(near, self.block_size) if near else None,
        )

    def _turning_length(self, model: ServedModel) -> int | None:
        """Of requests that may become as long; None = of none."""
        length = turning_length_of(model)
        if length is None or self.longest(model) <= length:
            return None
        reason = f"requests of more than {length} tokens are turned by other frequencies, all of them"
        if self.batch_invariant:
            raise unsupported("batch_invariant=True", reason, f"Give max_model_len={length}")
        if self.max_num_batched_tokens <= length:
            what = f"max_num_batched_tokens={self.max_num_batched_tokens}"
            raise unsupported(what, reason, f"Give at least {length + 1}, or max_model_len={length}")
        return length

    def draft_buckets(self, model: ServedModel, num_blocks: int, num_draft_tokens: int) -> list[Bucket]:
        """Of steps with so many drafts a row."""
        widths = table_widths(self.max_blocks(model, num_blocks))
        return [one for n in widths for one in draft_buckets(self.max_num_seqs, num_draft_tokens, n)]

    def reading_buckets(self, model: ServedModel, num_blocks: int) -> list[Bucket]:
        """Of steps that only read prompts, the largest last."""
        return [
            Bucket(max_prefills=min(self.max_num_seqs, size), max_prefill_tokens=size, max_blocks=width)
            for width in sorted(table_widths(self.max_blocks(model, num_blocks)))
            for size in sorted(few_prefill_sizes(self.max_num_batched_tokens))
        ]

    def graphs(
        self,
        model: ServedModel,
        step: GraphStep,
        buckets: Sequence[Bucket] | None,
        num_blocks: int,
        num_draft_tokens: int = 0,
    ) -> DecodeGraphs:
        """The executables of a step, for the buckets given or a handful, and those of steps with drafts.

        Raises:
            ValueError: No bucket fits the largest step.
        """
        max_blocks = self.max_blocks(model, num_blocks)
        if self.batch_invariant:
            sizes = self.max_num_seqs, self.max_num_batched_tokens, max_blocks
            return step_graphs(step, invariant_buckets(*sizes))
        if buckets is None:
            is_cpu = jax.default_backend() == "cpu"
            chunks = (few_prefill_sizes if is_cpu else prefill_sizes)(self.max_num_batched_tokens)
            # None of one row: XLA then multiplies weights out into memory in the place of a matrix product.
            # 32 layers of Llama 3 8B's attention took 2,251 us for one row, 1,547 for 8 (benchmarks/results).
            rows = max(self.max_num_seqs, 2)
            buckets = [
                bucket
                for width in table_widths(max_blocks)
                for bucket in default_buckets(rows, max_blocks=width, prefill_tokens=chunks)
                if bucket.max_tokens > 1
            ]
            buckets = few_of(buckets) if is_cpu else [*buckets, *_beside_some(buckets)]
        if num_draft_tokens:
            buckets = [*buckets, *self.draft_buckets(model, num_blocks, num_draft_tokens)]
        graphs = step_graphs(step, buckets)
        graphs.choose(  # raises where a step could be too large
            num_decodes=self.max_num_seqs,
            num_prefills=min(self.max_num_seqs, self.max_num_batched_tokens),
            num_prefill_tokens=self.max_num_batched_tokens,
            num_blocks=max_blocks,
        )
        return graphs


class StepSizes(NamedTuple):
    """Most requests and most new tokens of a step."""

    max_num_seqs: int
    max_num_batched_tokens: int


OF_A_CPU = StepSizes(16, 512)  # where each row costs its time, and each bucket is compiled layer by layer
OF_A_GPU = StepSizes(256, 2048)  # vLLM's of most GPUs
WITH_KERNELS = StepSizes(256, 8192)  # vLLM's of an H100


def default_step_sizes(fills_buckets: bool) -> StepSizes:
    """Those of this process's first device.

    Args:
        fills_buckets: Each step costs its sizes, whatever is in it; then they are a CPU's everywhere.
    """
    device = jax.local_devices()[0]
    if device.platform == "cpu" or fills_buckets:
        return OF_A_CPU
    return OF_A_GPU if why_not_device(device) else WITH_KERNELS


def require_fits(name: str, value: int, cache_bytes: int, model: Any) -> None:
    """Caches must fit the memory of a device, whatever else is there; unknown memory is enough.

    Args:
        name: What was asked for, for the message.
        value: Its value.
        cache_bytes: That it makes of caches, on each device.
        model: Whose caches.

    Raises:
        ValueError: They do not.
    """
    most = memory_of_device(model)
    rule = f"fit the memory of a device ({most} bytes; these caches take {cache_bytes})"
    require(most is None or cache_bytes <= most, name, rule, value)


def memory_of_device(model: Any) -> int | None:
    """All memory of each of a model's devices, in bytes; None where it is unknown.

    Devices of a CPU share the host's.
    """
    device = jax.local_devices()[0]
    if device.platform != "cpu" or device.memory_stats():
        return (device.memory_stats() or {}).get("bytes_limit") or None  # 0: of allocators without a limit
    if not hasattr(os, "sysconf"):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // num_local_mesh_devices(model)
