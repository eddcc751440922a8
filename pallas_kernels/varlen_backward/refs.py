"""References of the backward kernels: arrays in global memory, shared memory and barriers.

The order of the fields is the order of the kernels' arguments, and of their shared memory. A **panel** is 64
elements of a head, or 64 rows.
"""

from typing import NamedTuple

from pallas_kernels.shared.types import Barriers, Ref
from pallas_kernels.varlen_prefill import refs as prefill


class QueryListRefs(NamedTuple):
    """Lists of the query tiles that each work tile visits: fields of BackwardTileLists."""

    entries: Ref
    num_partial: Ref
    num_full: Ref


class DkDvScheduleRefs(NamedTuple):
    """The work of the dk/dv kernel.

    Attributes:
        table: Table of the schedule [tiles, columns].
        num_valid: Number of valid rows of the table, [1].
        order: Work tiles in processing order, each as `row * kv_heads + kv_head`.
        lists: Tile lists; None if every query tile that the score leaves is visited.
    """

    table: Ref
    num_valid: Ref
    order: Ref
    lists: QueryListRefs | None


class DkDvInputs(NamedTuple):
    """Arrays that the dk/dv kernel reads; tokens and kv_tokens are multiples of 8.

    Attributes:
        query: Queries [tokens, q_heads, head_dim], or [..., chunks, chunk] if TMA pads the chunks of a head.
        key: Keys [kv_tokens, kv_heads, head_dim], chunked likewise.
        value: Values, like `key`.
        dout: Gradient of the output, like `query`.
        row_stats: LSE in powers of 2, and delta, the row sum of O * dO minus dLSE: f32 [q_heads, 2, tokens].
        slopes: ALiBi slopes times log2(e), f32 [q_heads], or None.
        schedule: The work.
        mask: Arrays of the mask.
        dq: jax.Ref f32 [q_heads, panels, rows, 64] to which the unscaled dq is added; None if the dq kernel
            computes it.
    """

    query: Ref
    key: Ref
    value: Ref
    dout: Ref
    row_stats: Ref
    slopes: Ref
    schedule: DkDvScheduleRefs
    mask: tuple[Ref, ...]
    dq: Ref


class DkDvOutputs(NamedTuple):
    """Arrays that the dk/dv kernel writes.

    Attributes:
        dk: Gradient of the keys, like `key`, or None.
        dv: Gradient of the values, like `key`, or None.
    """

    dk: Ref
    dv: Ref


class DkDvSmem(NamedTuple):
    """Shared memory of the dk/dv kernel. A leading axis of warpgroups means one part per warpgroup.

    Attributes:
        key_and_dk: Keys of a work tile [warpgroups, panels, 64, 64], swizzled, later replaced by dk; the
            second name is the same memory without swizzling.
        value_and_dv: Values and dv, like `key_and_dk`; None if only dv is computed, which then replaces the
            keys.
        query: Stages of queries [stages, panels, tile_q, 64], swizzled.
        dout: Stages of dO, like `query` but with dout_stages.
        stats_and_columns: Stages of row statistics, f32 [dout_stages + 1, 2, tile_q]; the extra last one
            holds the column indices 0, 1, 2 ... of each warpgroup. They share an allocation because the
            compiler gives each 1 kB, which heads of 256 do not leave.
        ds: Gradients of the scores of two steps, one row per key [2, warpgroups, query panels, 64, 64],
            swizzled; None if dq is not added up and the matrix product reads registers.
        dq: Blocks of dQ that TMA adds to global memory, f32 [warpgroups, dq_blocks, 64, 64], swizzled; None
            with a dq kernel.
        tile_columns: The work tile's row of the schedule's table [columns].
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
    tile_columns: Ref
    p: Ref

    @property
    def key(self) -> Ref:
        """The keys."""
        (key,), _ = self.key_and_dk
        return key

    @property
    def value(self) -> Ref:
        """The values."""
        (value,), _ = self.value_and_dv
        return value


class DkDvBarriers(NamedTuple):
    """Barriers between the loading warp and the computing warpgroups; see the figure in dkdv_kernel.py.

    Attributes:
        kv_full: Keys, values and table columns of a work tile have arrived.
        kv_free: They have been read, and the gradients that replaced them have been copied to global memory.
        kv_products_issued: Both warpgroups have issued their last product with a work tile's keys.
        q_full: Queries have arrived [stages].
        q_free: Both warpgroups have read the queries [stages].
        dout_full: dO and the row statistics have arrived [dout_stages].
        dout_free: Both warpgroups have read them [dout_stages].
        ds_full: Both warpgroups have stored a step's dS, and have multiplied that of the step before [2].
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
        attention: Queries, keys, values, slopes and query tiles of varlen_prefill. No sinks: they are in the
            LSE.
        dout: Gradient of the output, like the queries.
        row_stats: Row statistics, see DkDvInputs, with at least 64 more rows than tokens.
        out: Output, like the queries, if this kernel computes delta (the second row of `row_stats`) from it;
            dLSE is then a third row if there is one. Else None.
    """

    attention: prefill.PrefillInputs
    dout: Ref
    row_stats: Ref
    out: Ref

    @property
    def num_output_steps(self) -> int:
        """Pipeline steps per work tile that carry its output, before the steps of its keys."""
        return 0 if self.out is None else 1


class DqSmem(NamedTuple):
    """Shared memory of the dq kernel.

    Attributes:
        attention: Queries, keys and values of varlen_prefill; dq leaves in place of the queries.
        dout: Gradient of the output, like the queries [warpgroups, query_buffers, chunks, 64, width],
            swizzled.
    """

    attention: prefill.PrefillSmem
    dout: Ref
