"""Which graph serves a batch."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from jattn.batch.host_arrays import plain_ints
from jattn.vllm.graph_modes import CUDAGraphMode
from jattn.vllm.graph_padding import padded_capture_size
from pallas_kernels.checks import require_positive, require_type


class BatchDescriptor(NamedTuple):
    """What a graph was made for. `num_reqs` is None where any number of requests will do.

    Source: vLLM `BatchDescriptor`.
    """

    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    has_lora: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class GraphKeys:
    """The graphs that exist.

    Attributes:
        full: Keys of graphs with attention inside.
        piecewise: Keys of graphs with attention outside.
        capture_sizes: Token counts that batches are padded to.
        uniform_decode_query_len: Tokens of a row of a uniform batch.
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
    """Lists the graphs of a mode.

    Args:
        mode: A resolved mode.
        capture_sizes: Token counts.
        max_num_seqs: Most requests of a step.
        uniform_decode_query_len: Tokens of a decode row.
        lora_cases: Whether to make graphs without LoRA, with it, or both.

    Source: vLLM `CudagraphDispatcher.initialize_cudagraph_keys`.
    """
    require_type("mode", mode, CUDAGraphMode, "a member, not its name")
    max_num_seqs, query_len = plain_ints(
        max_num_seqs=max_num_seqs, uniform_decode_query_len=uniform_decode_query_len
    )
    require_positive(max_num_seqs=max_num_seqs, uniform_decode_query_len=query_len)
    sizes = tuple(sorted({plain_ints(capture_sizes=size)[0] for size in capture_sizes}))
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
    """Picks the graph for a batch: full and made for it, full and general, piecewise, none.

    Args:
        keys: The graphs that exist.
        num_tokens: Tokens of the batch; padded to the next capture size.
        uniform_decode: Every row has `uniform_decode_query_len` tokens; the size then holds whole rows.
        has_lora: The batch needs LoRA.
        use_cascade_attn: Cascade attention never runs inside a graph.

    Returns:
        The mode and the key; `(NONE, None)` when no graph fits.

    Source: vLLM `CudagraphDispatcher.dispatch`.
    """
    require_type("keys", keys, GraphKeys, "make_graph_keys makes them")
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
