"""References of the prefill kernel: arrays in global memory, shared memory and barriers.

The order of the fields is the order of the kernel's arguments, and of its shared memory.
"""

from typing import NamedTuple

from pallas_kernels.shared.paged_kv import KvRefs
from pallas_kernels.shared.softmax import SplitOutputs
from pallas_kernels.shared.types import Barriers, Ref


class PrefillScheduleRefs(NamedTuple):
    """The work tiles of a step.

    Attributes:
        table: One row per query tile [tiles, columns] with schedule.COLUMNS; with KV splits one row per
            split, extended by splits.SPLIT_COLUMNS; with tile lists one row per work tile, extended by
            tile_lists.LIST_COLUMNS.
        num_valid: Number of valid rows of the table, [1].
        entries: Lists of KV tiles [lists, max_list]; None if every KV tile that the score leaves is visited.
    """

    table: Ref
    num_valid: Ref
    entries: Ref


class PrefillInputs(NamedTuple):
    """Arrays that the kernel reads.

    Attributes:
        query: Queries [tokens, q_heads, head_dim], or [..., chunks, chunk] if the head is chunked. The number
            of tokens is a multiple of 8.
        kv: Keys and values.
        slopes: ALiBi slopes times log2(e), f32 [q_heads], or None.
        sinks: Attention sinks times log2(e), f32 [q_heads], or None.
        schedule: Work tiles of the step.
        mask: Arrays of the mask.
        query_tail: Last rows of the queries as `split_tail` returns them, or None.
    """

    query: Ref
    kv: KvRefs
    slopes: Ref
    sinks: Ref
    schedule: PrefillScheduleRefs
    mask: tuple[Ref, ...]
    query_tail: Ref = None


class PrefillOutputs(NamedTuple):
    """Arrays that the kernel writes.

    Attributes:
        out: Output [tokens, ...], otherwise like the queries.
        lse: Log-sum-exp f32 [q_heads, tokens], or None.
        split_outputs: Results of query tiles whose keys are split; the combine kernel completes `out` and
            `lse` from them. `tiles` are work_tiles_per_query_tile, accumulators P V. None without KV splits.
    """

    out: Ref
    lse: Ref
    split_outputs: SplitOutputs | None


class CombineRefs(NamedTuple):
    """Arrays that the combine kernel reads, and the output and LSE that it updates in place.

    Attributes:
        split_outputs: Results of the splits.
        table: Table of the schedule, like PrefillScheduleRefs.table.
        num_valid: Number of split query tiles, [1].
        rows: Row in the table of each split query tile's first split.
        sinks: Attention sinks, like PrefillInputs.sinks.
        out: Output, like PrefillOutputs.out.
        lse: Log-sum-exp, like PrefillOutputs.lse.
    """

    split_outputs: SplitOutputs
    table: Ref
    num_valid: Ref
    rows: Ref
    sinks: Ref
    out: Ref
    lse: Ref


class AlibiOperands(NamedTuple):
    """Operands of a matrix product that adds ALiBi to the scores.

    Its K axis has 16 columns, most of them zero.

    Attributes:
        slopes: Slope of each row as 16-bit terms that add up to it, [warpgroups, 64, 16].
        columns: Index of each key within its tile, [warpgroups, tile_kv, 16].
    """

    slopes: Ref
    columns: Ref


class QuantizedKvSmem(NamedTuple):
    """Stages of 8-bit keys and values, as the cache stores them.

    Attributes:
        k: Keys [stages, chunks, tile_kv, width], swizzled.
        v: Values, like `k`.
        k_scale: Scale of each key, f32 [stages, tile_kv], or None.
        v_scale: Scale of each value, like `k_scale`.
    """

    k: Ref
    v: Ref
    k_scale: Ref
    v_scale: Ref


class PrefillSmem(NamedTuple):
    """Shared memory of a thread block.

    The warpgroups of a team share the stages of `k`, `v` and `quantized`. All other arrays have one slice per
    warpgroup.

    Attributes:
        query_and_out: Memory of `query` and `out`, which overlap.
        tile_columns: Row of the schedule's table for each buffered work tile [warpgroups, query_buffers,
            columns].
        k: Stages of keys [teams * stages, chunks, tile_kv, width], swizzled.
        v: Stages of values, like `k`.
        p: Probabilities [warpgroups, 64, tile_kv] if the matrix product cannot read registers; else None.
        columns: Column indices 0, 1, 2 ... f32 [warpgroups, tile_kv].
        alibi: Operands of the ALiBi product, or None.
        quantized: Stages of an 8-bit cache, from which `k` and `v` are dequantized; else None.
    """

    query_and_out: Ref
    tile_columns: Ref
    k: Ref
    v: Ref
    p: Ref
    columns: Ref
    alibi: AlibiOperands | None
    quantized: QuantizedKvSmem | None

    @property
    def query(self) -> Ref:
        """Queries [warpgroups, query_buffers, chunks, 64, width], swizzled; the output replaces them."""
        (query,), _ = self.query_and_out
        return query

    @property
    def out(self) -> Ref:
        """The memory of `query` without swizzling, for an output of which only some rows are valid."""
        _, (out,) = self.query_and_out
        return out


class QuantizedKvBarriers(NamedTuple):
    """Barriers between the loading warp and the dequantizing warpgroups, [stages] each.

    Their meaning is that of `k_full`, `v_full`, `k_free` and `v_free` in PrefillBarriers.
    """

    k_full: Barriers
    v_full: Barriers
    k_free: Barriers
    v_free: Barriers


class PrefillBarriers(NamedTuple):
    """Barriers between the loading warps and the computing warpgroups; see the figure in kernel.py.

    Attributes:
        q_full: Queries and table columns of a work tile have arrived [warpgroups * query_buffers].
        q_free: Queries and table columns have been read, and the output that replaced the queries has been
            copied to global memory [warpgroups * query_buffers].
        k_full: Keys have arrived, or have been dequantized [teams * stages].
        v_full: Values have arrived, or have been dequantized [teams * stages].
        k_free: All warpgroups of a team have read the keys [teams * stages].
        v_free: All warpgroups of a team have read the values [teams * stages].
        quantized: Barriers of an 8-bit cache, or None.
    """

    q_full: Barriers
    q_free: Barriers
    k_full: Barriers
    v_full: Barriers
    k_free: Barriers
    v_free: Barriers
    quantized: QuantizedKvBarriers | None
