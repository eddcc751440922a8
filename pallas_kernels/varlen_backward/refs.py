"""References of the backward kernels: arrays in global memory, shared memory and barriers.

The order of the fields is the order of the kernels' arguments, and of their shared memory. A **panel** is 64
elements of a head, or 64 rows.
"""

from typing import NamedTuple

from pallas_kernels.score_mod import KernelScoreMod
from pallas_kernels.shared.memory import TokenRows
from pallas_kernels.shared.types import Barriers, Ref
from pallas_kernels.varlen_prefill import KernelMask
from pallas_kernels.varlen_prefill import spec as prefill

LSE, DELTA, GRAD_LSE = range(3)  # indices of row statistics; see DkDvInputs.row_stats
NUM_ROW_STATS = 2  # row statistics that the dk/dv kernel reads: LSE and delta


class QueryListRefs(NamedTuple):
    """Lists of the query tiles that each work tile visits: fields of BackwardTileLists."""

    entries: Ref
    num_partial: Ref
    num_full: Ref


class DkDvScheduleRefs(NamedTuple):
    """Work tiles of the dk/dv kernel, and their order.

    Attributes:
        table: Table of the schedule [tiles, columns].
        num_valid: Number of valid rows of the table, [1].
        order: Work tiles in processing order, each as `row * grad_heads + grad_head`.
        lists: Tile lists. None if a work tile visits every query tile that causality, window and chunk leave
            visible.
    """

    table: Ref
    num_valid: Ref
    order: Ref
    lists: QueryListRefs | None


class DkDvInputs(NamedTuple):
    """Arrays that the dk/dv kernel reads.

    Attributes:
        query: Queries [tokens, q_heads, head_dim], or [..., chunks, chunk] if TMA pads the chunks of a head.
        key: Keys [kv_tokens, kv_heads, head_dim], or [..., chunks, chunk] like the queries.
        value: Values, like `key`.
        dout: Gradient of the output, like `query`.
        row_stats: Base-2 LSE (index LSE), and the row sum of O * dO minus dLSE (index DELTA), f32 [q_heads,
            2, tokens].
        slopes: ALiBi slopes times log2(e), f32 [q_heads], or None.
        schedule: Work tiles, built by make_schedule.
        mask: Mask of the partial tiles of the tile lists, or None.
        score_mod: Score function, or None.
        dq: Reference f32 [q_heads, panels, rows, 64]. The kernel adds dq without the softmax scale to it.
            None if the dq kernel computes dq.
    """

    query: TokenRows
    key: TokenRows
    value: TokenRows
    dout: TokenRows
    row_stats: Ref
    slopes: Ref
    schedule: DkDvScheduleRefs
    mask: KernelMask | None
    score_mod: KernelScoreMod | None
    dq: Ref


class DkDvOutputs(NamedTuple):
    """Arrays that the dk/dv kernel writes.

    Attributes:
        dk: Gradient of the keys [kv_tokens, grad_heads, ...], otherwise like the keys; or None. There is one
            head for each KV head and split of its lists.
        dv: Gradient of the values, like `dk`, or None.
    """

    dk: Ref
    dv: Ref


class DkDvSmem(NamedTuple):
    """Shared memory of the dk/dv kernel. An array with a first axis `warpgroups` has one part per warpgroup.

    Attributes:
        key_and_dk: Keys of a work tile [warpgroups, panels, 64, 64], later replaced by dk. Two views of the
            same memory: the first is swizzled, the second is not.
        value_and_dv: Values and dv, like `key_and_dk`; None if only dv is computed, which then replaces the
            keys.
        query: Stages of queries [teams * stages, panels, tile_q, 64], swizzled.
        dout: Stages of dO, like `query` but with dout_stages.
        stats_and_columns: Stages of row statistics, LSE and delta, f32 [teams * dout_stages + 1, 2, tile_q];
            the extra last one holds the column indices 0, 1, 2 ... of each of two warpgroups. They share an
            allocation because the compiler gives each 1 kB, which heads of 256 do not leave.
        ds: Gradients of the scores of two steps, one row per key [2, warpgroups, query panels, 64, 64],
            swizzled; None if this kernel adds no dq and its matrix products read dS from registers.
        dq: Blocks of dQ that TMA adds to global memory, f32 [warpgroups, dq_blocks, 64, 64], swizzled; None
            with a dq kernel.
        table_row: Row of the schedule's table for each team's work tile [teams, TABLE_WIDTH].
        p: Probabilities [warpgroups, query panels, 64, 64] if the matrix product cannot read registers; else
            None.
    """

    key_and_dk: Ref
    value_and_dv: Ref
    query: Ref
    dout: Ref
    stats_and_columns: Ref
    ds: Ref
    dq: Ref
    table_row: Ref
    p: Ref

    @property
    def key(self) -> Ref:
        """Keys of the work tile, swizzled."""
        (key,), _ = self.key_and_dk
        return key

    @property
    def value(self) -> Ref:
        """Values of the work tile, swizzled."""
        (value,), _ = self.value_and_dv
        return value


class WarpDkDvSmem(NamedTuple):
    """Shared memory of the dk/dv kernel on GPUs without wgmma.

    Attributes:
        key: Keys of a work tile [warpgroups, chunks, 64, width], swizzled.
        value: Values, like `key`; None if only dv is computed.
        query: Stages of queries [stages, chunks, tile_q, width], swizzled.
        dout: Stages of dO, like `query`.
        stats_and_columns: Stages of row statistics and column indices, f32 [stages + 1, 2, tile_q]; see
            DkDvSmem.
        table_row: Row of the schedule's table for the work tile [TABLE_WIDTH].
    """

    key: Ref
    value: Ref
    query: Ref
    dout: Ref
    stats_and_columns: Ref
    table_row: Ref


class DkDvBarriers(NamedTuple):
    """Barriers between the loading warps and the computing warpgroups; see the figure in dkdv_kernel.py.

    Attributes:
        kv_full: Keys, values and the table row of a work tile have arrived [teams].
        kv_free: Keys and values have been read, and the gradients that replaced them have been copied to
            global memory [teams].
        kv_products_issued: Both warpgroups have issued their last product with a work tile's keys; not used
            by teams of one warpgroup.
        q_full: Queries have arrived [teams * stages].
        q_free: All warpgroups of a team have read the queries [teams * stages].
        dout_full: dO and the row statistics have arrived [teams * dout_stages].
        dout_free: All warpgroups of a team have read dO and the row statistics [teams * dout_stages].
        ds_full: Both warpgroups have stored the dS of a step and multiplied the dS of the previous step [2].
    """

    kv_full: Barriers
    kv_free: Barriers
    kv_products_issued: Barriers
    q_full: Barriers
    q_free: Barriers
    dout_full: Barriers
    dout_free: Barriers
    ds_full: Barriers


class DqInputs(NamedTuple):
    """Arrays that the dq kernel reads.

    Attributes:
        attention: Queries, keys, values, slopes and query tiles of varlen_prefill. There are no sinks: the
            LSE contains them.
        dout: Gradient of the output, like the queries.
        row_stats: Row statistics, see DkDvInputs, with at least 64 more rows than tokens.
        out: Output of attention, like the queries, if this kernel computes delta from it and stores it in
            `row_stats`, which then has dLSE at index GRAD_LSE, if there is one. Otherwise None.
    """

    attention: prefill.PrefillInputs
    dout: TokenRows
    row_stats: Ref
    out: TokenRows | None

    @property
    def num_output_steps(self) -> int:
        """Number of pipeline steps at the start of each work tile that load the output of attention."""
        return 0 if self.out is None else 1


class DqSmem(NamedTuple):
    """Shared memory of the dq kernel.

    Attributes:
        attention: Queries, keys and values of varlen_prefill; dq replaces the queries.
        dout: Gradient of the output, like the queries [warpgroups, query_buffers, chunks, 64, width],
            swizzled.
    """

    attention: prefill.PrefillSmem
    dout: Ref


class WarpDqSmem(NamedTuple):
    """Shared memory of the dq kernel on GPUs without wgmma.

    Attributes:
        attention: Queries, keys and values of varlen_prefill.
        dout: Gradient of the output, like the queries [warpgroups, chunks, 64, width], swizzled.
    """

    attention: prefill.WarpPrefillSmem
    dout: Ref
