"""What the backward kernel works on, grouped by what it is: arrays outside of it, memory inside.

The order of fields is the order of the kernel's arguments, and of its shared memory. A unit is 64 elements of
a head, or 64 rows.
"""

from typing import NamedTuple

from pallas_kernels.shared.types import Barriers, Ref
from pallas_kernels.varlen_prefill import refs as prefill


class QueryListRefs(NamedTuple):
    """Which tiles of queries the items see: fields of lists.TileLists."""

    entries: Ref
    num_partial: Ref
    num_full: Ref


class DkDvScheduleRefs(NamedTuple):
    """What is to be done.

    Attributes:
        table: [tiles, columns]: the schedule.
        num_valid: [1]: rows of the table that mean something.
        order: [items]: which item, as `row * kv_heads + kv_head`.
        lists: Or None: all tiles of queries that the score's mask leaves.
    """

    table: Ref
    num_valid: Ref
    order: Ref
    lists: QueryListRefs | None


class DkDvInputs(NamedTuple):
    """What the kernel reads, in global memory; 8 divides tokens and kv_tokens.

    Attributes:
        query: [tokens, q_heads, head_dim], or [..., chunks, chunk] where TMA pads the head's chunks.
        key: [kv_tokens, kv_heads, head_dim], likewise.
        value: As key.
        grad_out: As query.
        stats: [q_heads, 2, tokens] f32: what scores are less, and what gradients of probabilities are less.
        slopes: ALiBi slopes times log2(e), [q_heads] f32, or None.
        schedule: The items.
        mask: The mask's arrays.
        grad_query: jax.Ref [q_heads, units, rows, 64] f32, added to; but for the scale. None where another
            kernel makes it.
    """

    query: Ref
    key: Ref
    value: Ref
    grad_out: Ref
    stats: Ref
    slopes: Ref
    schedule: DkDvScheduleRefs
    mask: tuple[Ref, ...]
    grad_query: Ref


class DkDvOutputs(NamedTuple):
    """What it writes.

    Attributes:
        grad_key: As key; or None.
        grad_value: As key; or None.
    """

    grad_key: Ref
    grad_value: Ref


class DkDvSmem(NamedTuple):
    """Shared memory. Where a first axis is of warpgroups, each has its own.

    Attributes:
        key_and_grad: The keys of an item, [warpgroups, units, 64, 64], swizzled, then their gradient in the
            same place; as a second name the same, not swizzled.
        value_and_grad: As key_and_grad; None where only values have a gradient: that leaves as keys' would.
        query: [stages, units, tile_q, 64], swizzled.
        grad_out: As query; grad_out_stages.
        stats_and_columns: [grad_out_stages + 1, 2, tile_q] f32: stats, and behind the last for each warpgroup
            the columns 0, 1, 2... In one, for the compiler gives each 1 kB, which heads of 256 have not left.
        grad_scores: [2, warpgroups, query units, 64, 64], swizzled: a row a key, two steps' of them; None
            where nobody adds up dQ and registers are multiplied.
        grad_query: [warpgroups, pieces, 64, 64] f32, swizzled: on its way out; or None.
        item: [columns]: the item's row of the schedule's table.
        p: [warpgroups, query units, 64, 64]: probabilities where nothing multiplies registers; or None.
    """

    key_and_grad: Ref
    value_and_grad: Ref
    query: Ref
    grad_out: Ref
    stats_and_columns: Ref
    grad_scores: Ref
    grad_query: Ref
    item: Ref
    p: Ref

    @property
    def key(self) -> Ref:
        """The keys."""
        (key,), _ = self.key_and_grad
        return key

    @property
    def value(self) -> Ref:
        """The values."""
        (value,), _ = self.value_and_grad
        return value


class DkDvBarriers(NamedTuple):
    """Barriers between the loading warp and the warpgroups that compute: see kernel.py's figure.

    Attributes:
        kv_full: Keys, values and the item's columns have come.
        kv_free: They have been read, and the gradients in their place have left.
        kv_read: Both warpgroups have multiplied an item's keys for the last time.
        q_full: [stages]: queries have come.
        q_free: [stages]: they have been read.
        do_full: [grad_out_stages]: the gradient of the output and stats have come.
        do_free: [grad_out_stages]: it has been read.
        ds_full: [2]: both warpgroups' gradients of a step's scores are there, and those of the step before
            have been multiplied.
    """

    kv_full: Barriers
    kv_free: Barriers
    kv_read: Barriers
    q_full: Barriers
    q_free: Barriers
    do_full: Barriers
    do_free: Barriers
    ds_full: Barriers


class DqInputs(NamedTuple):
    """What the kernel reads, in global memory.

    Attributes:
        attention: Queries, keys, values, slopes and the tiles of queries; no sinks, which are in `stats`.
        grad_out: As the queries.
        stats: As refs.Inputs, 64 rows longer than the tokens at least.
        out: As the queries, where the kernel makes the second row of `stats`: the sum of outputs times their
            gradients, less a third row if there is one. Else None.
    """

    attention: prefill.PrefillInputs
    grad_out: Ref
    stats: Ref
    out: Ref

    @property
    def steps_before(self) -> int:
        """Stages of keys and values that an item takes for its outputs, before its keys."""
        return 0 if self.out is None else 1


class DqSmem(NamedTuple):
    """Shared memory.

    Attributes:
        attention: Queries, keys and values; the gradient leaves in the place of the queries.
        grad_out: As the queries: [warpgroups, query_buffers, chunks, 64, width], swizzled.
    """

    attention: prefill.PrefillSmem
    grad_out: Ref
