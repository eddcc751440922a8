"""vLLM's CUDA graph modes, padding and dispatch; in JAX, a graph is a compiled executable."""

import bisect
import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Int32

from jattn.batch.int_arrays import AnyArray, IntTable, IntVector, as_block_table, python_ints, with_namespace
from jattn.batch.slots import PAD_SLOT_ID
from pallas_kernels.checks import require, require_positive, require_type


class AttentionCGSupport(enum.IntEnum):
    """Batches that an attention back end can run inside a graph.

    The support of a model is the minimum of its back ends.

    Source: vLLM `AttentionCGSupport`.
    """

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


class CUDAGraphMode(enum.Enum):
    """Part of a step that is captured in a graph, possibly different for uniform decode and mixed batches.

    PIECEWISE captures all but attention, FULL captures the whole step.

    Source: vLLM `CUDAGraphMode`.
    """

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (2, 0)
    FULL_AND_PIECEWISE = (2, 1)

    @property
    def has_separate_routine(self) -> bool:
        """Whether uniform decode batches and mixed batches have different modes."""
        return isinstance(self.value, tuple)

    @property
    def decode_mode(self) -> "CUDAGraphMode":
        """Mode of uniform decode batches."""
        return CUDAGraphMode(self.value[0]) if self.has_separate_routine else self

    @property
    def mixed_mode(self) -> "CUDAGraphMode":
        """Mode of all batches that are not uniform decodes."""
        return CUDAGraphMode(self.value[1]) if self.has_separate_routine else self


def resolve_cudagraph_mode(
    mode: CUDAGraphMode,
    min_cg_support: AttentionCGSupport,
    *,
    uniform_decode_query_len: int = 1,
    attention_is_split_op: bool = True,
) -> CUDAGraphMode:
    """Return the mode closest to the requested one that a model's back ends support.

    Args:
        mode: Requested mode.
        min_cg_support: Minimum support among the model's back ends.
        uniform_decode_query_len: Number of tokens of each row of a uniform decode batch.
        attention_is_split_op: Whether attention can be excluded from a graph, as PIECEWISE requires.

    Raises:
        ValueError: If FULL graphs of mixed batches are requested, and a back end does not support graphs.

    Source: vLLM `resolve_cudagraph_mode_and_sizes`.
    """
    require_type("mode", mode, CUDAGraphMode, "a member, not its name")
    without_full = CUDAGraphMode.PIECEWISE if attention_is_split_op else CUDAGraphMode.NONE
    if mode.mixed_mode is CUDAGraphMode.FULL and min_cg_support is not AttentionCGSupport.ALWAYS:
        if min_cg_support is AttentionCGSupport.NEVER:
            raise ValueError(
                "mode=FULL, but one of the model's back ends does not support graphs. Use mode=PIECEWISE."
            )
        mode = CUDAGraphMode.FULL_AND_PIECEWISE if attention_is_split_op else CUDAGraphMode.FULL_DECODE_ONLY
    required_support = (
        AttentionCGSupport.UNIFORM_BATCH
        if uniform_decode_query_len > 1
        else AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )
    is_supported = mode.decode_mode is not CUDAGraphMode.FULL or min_cg_support >= required_support
    return mode if is_supported else without_full


class PadValues(NamedTuple):
    """Values of padding rows. The defaults are vLLM's; jattn's own batches pad the block table with 0.

    Source: vLLM, per-back-end padding values of full graphs.
    """

    seq_lens: int = 0
    block_table: int = -1


class PaddedBatch(NamedTuple):
    """Batch that is padded to the numbers of rows and tokens of a graph."""

    query_start_loc: Int32[AnyArray, " reqs+1"]
    seq_lens: Int32[AnyArray, " reqs"]
    block_table: Int[AnyArray, "reqs max_blocks"]
    slot_mapping: Int[AnyArray, " tokens"]


def round_capture_sizes(capture_sizes: Sequence[int], uniform_decode_query_len: int) -> tuple[int, ...]:
    """Round capture sizes up to multiples of `uniform_decode_query_len`, without exceeding the largest size.

    Args:
        capture_sizes: Numbers of tokens to capture graphs for.
        uniform_decode_query_len: Number of tokens of each row of a uniform decode batch.

    Raises:
        ValueError: If the largest size is smaller than `uniform_decode_query_len`.

    Source: vLLM `CompilationConfig.adjust_cudagraph_sizes_for_spec_decode`.
    """
    (step,) = python_ints(uniform_decode_query_len=uniform_decode_query_len)
    require_positive(uniform_decode_query_len=step)
    require(len(capture_sizes) > 0, "capture_sizes", "have at least one size", capture_sizes)
    sizes = [python_ints(capture_sizes=size)[0] for size in capture_sizes]
    largest = max(sizes)
    require(
        step <= largest, "uniform_decode_query_len", f"be at most the largest capture size ({largest})", step
    )
    rounded = {-(-size // step) * step for size in sizes}
    return tuple(sorted(size for size in rounded if size <= largest)) or (step,)


def padded_capture_size(num_tokens: int, capture_sizes: Sequence[int]) -> int | None:
    """Return the smallest capture size of at least `num_tokens`, or None if all are smaller.

    Source: vLLM `bs_to_padded_graph_size`, `pad_for_cudagraph`.
    """
    sizes = sorted(capture_sizes)
    index = bisect.bisect_left(sizes, num_tokens)
    return sizes[index] if index < len(sizes) else None


def combine_pad_values(pad_values: Sequence[PadValues]) -> PadValues:
    """Return the pad values of a batch that several back ends share: the maximum of each value.

    Source: vLLM, per-back-end padding values of full graphs.
    """
    require(len(pad_values) > 0, "pad_values", "have at least one entry", list(pad_values))
    return PadValues(*map(max, zip(*pad_values, strict=True)))


def pad_batch_for_graph(
    query_start_loc: IntVector,
    seq_lens: IntVector,
    block_table: IntTable,
    slot_mapping: IntVector,
    *,
    max_num_reqs: int,
    max_num_tokens: int,
    pad_values: PadValues | None = None,
) -> PaddedBatch:
    """Pad a batch with rows without tokens and tokens without a slot.

    Args:
        query_start_loc: Index of the first token of each request, and one past the last token. Padding
            repeats the last value.
        seq_lens: Total number of tokens of each request.
        block_table: Block ids of each request.
        slot_mapping: Slot of each token. Padding is -1.
        max_num_reqs: Number of rows of the result.
        max_num_tokens: Number of tokens of the result.
        pad_values: Values of padding rows. None = vLLM's defaults.

    Raises:
        ValueError: If the batch exceeds `max_num_reqs` or `max_num_tokens`, or its arrays differ in the
            number of requests.

    Source: vLLM V1 `GPUModelRunner._prepare_inputs`, `_build_attention_metadata`.
    """
    pad_values = pad_values or PadValues()
    xp, starts, lens, table, slots = with_namespace(
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_table=as_block_table("block_table", block_table),
        slot_mapping=slot_mapping,
    )
    num_reqs = lens.shape[0]
    require(starts.shape == (num_reqs + 1,), "query_start_loc", f"have {num_reqs + 1} entries", starts.shape)
    require(table.shape[0] == num_reqs, "block_table", f"have {num_reqs} rows", f"shape {table.shape}")
    new_rows, new_tokens = max_num_reqs - lens.shape[0], max_num_tokens - slots.shape[0]
    require(new_rows >= 0, "number of requests", f"be at most max_num_reqs ({max_num_reqs})", lens.shape[0])
    require(
        new_tokens >= 0, "number of tokens", f"be at most max_num_tokens ({max_num_tokens})", slots.shape[0]
    )

    def pad(values: Any, count: int, fill: int) -> Any:
        return xp.concatenate([values, xp.full((count, *values.shape[1:]), fill, dtype=np.int32)])

    tail = xp.broadcast_to(starts[-1:], (new_rows,))
    return PaddedBatch(
        query_start_loc=xp.concatenate([starts, tail]),
        seq_lens=pad(lens, new_rows, pad_values.seq_lens),
        block_table=pad(table, new_rows, pad_values.block_table),
        slot_mapping=pad(slots, new_tokens, PAD_SLOT_ID),
    )


class BatchDescriptor(NamedTuple):
    """Batch properties that a graph was captured for; `num_reqs=None` matches any number of requests.

    Source: vLLM `BatchDescriptor`.
    """

    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    has_lora: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphKeys:
    """Keys of all captured graphs.

    Attributes:
        full: Keys of the graphs that include attention.
        piecewise: Keys of the graphs that exclude attention.
        capture_sizes: Numbers of tokens that batches are padded to, ascending.
        uniform_decode_query_len: Number of tokens of each row of a uniform decode batch.
    """

    full: frozenset[BatchDescriptor]
    piecewise: frozenset[BatchDescriptor]
    capture_sizes: tuple[int, ...]
    uniform_decode_query_len: int = 1


def make_graph_keys(
    mode: CUDAGraphMode,
    capture_sizes: Sequence[int],
    max_num_seqs: int,
    *,
    uniform_decode_query_len: int = 1,
    lora_cases: Sequence[bool] = (False,),
) -> GraphKeys:
    """List the keys of all graphs that a mode requires.

    Args:
        mode: Mode from `resolve_cudagraph_mode`.
        capture_sizes: Numbers of tokens to capture graphs for.
        max_num_seqs: Maximum number of requests per step.
        uniform_decode_query_len: Number of tokens of each row of a uniform decode batch.
        lora_cases: Values of `has_lora` to capture graphs for.

    Raises:
        ValueError: If an argument has an invalid type, or a size is not positive.

    Source: vLLM `CudagraphDispatcher.initialize_cudagraph_keys`.
    """
    require_type("mode", mode, CUDAGraphMode, "a member, not its name")
    max_num_seqs, query_len = python_ints(
        max_num_seqs=max_num_seqs, uniform_decode_query_len=uniform_decode_query_len
    )
    require_positive(max_num_seqs=max_num_seqs, uniform_decode_query_len=query_len)
    sizes = tuple(sorted({python_ints(capture_sizes=size)[0] for size in capture_sizes}))
    mixed = frozenset(BatchDescriptor(size, has_lora=lora) for size in sizes for lora in lora_cases)
    decode = frozenset(
        BatchDescriptor(size, size // query_len, uniform=True, has_lora=lora)
        for size in sizes
        for lora in lora_cases
        if query_len <= size <= query_len * max_num_seqs
    )
    has_decode = mode.has_separate_routine and mode.decode_mode is CUDAGraphMode.FULL
    return GraphKeys(
        full=(mixed if mode.mixed_mode is CUDAGraphMode.FULL else frozenset())
        | (decode if has_decode else frozenset()),
        piecewise=mixed if mode.mixed_mode is CUDAGraphMode.PIECEWISE else frozenset(),
        capture_sizes=sizes,
        uniform_decode_query_len=query_len,
    )


def dispatch_cudagraph(
    keys: GraphKeys,
    num_tokens: int,
    *,
    uniform_decode: bool = False,
    has_lora: bool = False,
    use_cascade_attn: bool = False,
) -> tuple[CUDAGraphMode, BatchDescriptor | None]:
    """Choose the graph for a batch: full for uniform decodes, else full for mixed batches, else piecewise.

    Args:
        keys: Keys of the captured graphs.
        num_tokens: Number of tokens of the batch before padding to a capture size.
        uniform_decode: Whether every row has `uniform_decode_query_len` tokens. Only capture sizes that are a
            multiple of it are then considered.
        has_lora: Whether the batch needs LoRA.
        use_cascade_attn: Whether the batch uses cascade attention, which full graphs do not support.

    Returns:
        The mode and the key of the graph; `(NONE, None)` if no graph matches.

    Source: vLLM `CudagraphDispatcher.dispatch`.
    """
    require_type("keys", keys, GraphKeys, "build it with make_graph_keys")

    query_len = keys.uniform_decode_query_len
    candidates: list[tuple[CUDAGraphMode, BatchDescriptor]] = []
    if uniform_decode and not use_cascade_attn:
        size = padded_capture_size(num_tokens, [s for s in keys.capture_sizes if s % query_len == 0])
        if size is not None:
            key = BatchDescriptor(size, size // query_len, uniform=True, has_lora=has_lora)
            candidates.append((CUDAGraphMode.FULL, key))
    size = padded_capture_size(num_tokens, keys.capture_sizes)
    if size is not None:
        general = BatchDescriptor(size, has_lora=has_lora)
        candidates += [] if use_cascade_attn else [(CUDAGraphMode.FULL, general)]
        candidates.append((CUDAGraphMode.PIECEWISE, general))
    exists = {CUDAGraphMode.FULL: keys.full, CUDAGraphMode.PIECEWISE: keys.piecewise}
    return next(((mode, key) for mode, key in candidates if key in exists[mode]), (CUDAGraphMode.NONE, None))
