"""How sizes of graphs are chosen, and how a batch is padded to one of them."""

import bisect
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Int32

from jattn.batch.host_arrays import int_table, plain_ints
from jattn.batch.namespace import AnyArray, IntTable, IntVector, with_namespace
from jattn.batch.slots import PAD_SLOT_ID
from pallas_kernels.checks import require, require_positive


class PadValues(NamedTuple):
    """What padding rows hold: vLLM's defaults (jattn's own batches pad the block table with 0).

    Source: vLLM, per-back-end padding values of full graphs.
    """

    seq_lens: int = 0
    block_table: int = -1


class PaddedBatch(NamedTuple):
    """A batch with the row and token counts of a graph."""

    query_start_loc: Int32[AnyArray, " reqs+1"]
    seq_lens: Int32[AnyArray, " reqs"]
    block_table: Int[AnyArray, "reqs max_blocks"]
    slot_mapping: Int[AnyArray, " tokens"]


def round_capture_sizes(capture_sizes: Sequence[int], uniform_decode_query_len: int) -> tuple[int, ...]:
    """Sizes that hold whole decode rows of `uniform_decode_query_len` tokens; none above the largest given.

    Raises:
        ValueError: Not one row fits the largest size.

    Source: vLLM `CompilationConfig.adjust_cudagraph_sizes_for_spec_decode`.
    """
    (step,) = plain_ints(uniform_decode_query_len=uniform_decode_query_len)
    require_positive(uniform_decode_query_len=step)
    require(len(capture_sizes) > 0, "capture_sizes", "have at least one size", capture_sizes)
    sizes = [plain_ints(capture_sizes=size)[0] for size in capture_sizes]
    largest = max(sizes)
    require(
        step <= largest, "uniform_decode_query_len", f"be at most the largest capture size ({largest})", step
    )
    rounded = {-(-size // step) * step for size in sizes}
    return tuple(sorted(size for size in rounded if size <= largest)) or (step,)


def padded_capture_size(num_tokens: int, capture_sizes: Sequence[int]) -> int | None:
    """The smallest size that holds `num_tokens`; None when none does.

    Source: vLLM `bs_to_padded_graph_size`, `pad_for_cudagraph`.
    """
    sizes = sorted(capture_sizes)
    place = bisect.bisect_left(sizes, num_tokens)
    return sizes[place] if place < len(sizes) else None


def combine_pad_values(pad_values: Sequence[PadValues]) -> PadValues:
    """What to pad with when several back ends share a batch: the largest of each.

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
    """Adds rows without tokens and tokens without a slot.

    Args:
        query_start_loc: First token of each request, and one past the last; padding repeats its last value.
        seq_lens: All tokens of each request.
        block_table: Blocks of each request.
        slot_mapping: Slot of each token; padding is -1.
        max_num_reqs: Rows of the result.
        max_num_tokens: Tokens of the result.
        pad_values: What new rows hold; None = vLLM's defaults.

    Raises:
        ValueError: The batch is larger than that, or its arrays are of several numbers of requests.

    Source: vLLM V1 `GPUModelRunner._prepare_inputs`, `_build_attention_metadata`.
    """
    pad_values = pad_values or PadValues()
    xp, starts, lens, table, slots = with_namespace(
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_table=int_table("block_table", block_table),
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
