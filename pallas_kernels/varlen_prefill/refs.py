"""What the prefill kernel works on, grouped by what it is: arrays outside of it, memory inside.

The order of fields is the order of the kernel's arguments, and of its shared memory.
"""

from typing import NamedTuple

from pallas_kernels.shared.types import Barriers, Ref


class KvRefs(NamedTuple):
    """Keys and values.

    Attributes:
        k: Packed: [tokens, kv_heads, head_dim], or [..., chunks, chunk] where the head is cut. Paged:
            CacheTiling.tile_cache's.
        v: As k.
        block_table: [reqs, max_blocks]: blocks of each request; None where keys are packed.
        k_scale: Of keys in 8 bits, f32: [kv_heads], per channel [kv_heads, chunks, width], or per token
            CacheTiling.tile_scales'; None: 1.
        v_scale: The same of values.
    """

    k: Ref
    v: Ref
    block_table: Ref
    k_scale: Ref = None
    v_scale: Ref = None


class PrefillScheduleRefs(NamedTuple):
    """What is to be done.

    Attributes:
        table: [tiles, columns]: schedule.COLUMNS; where keys may be cut [splits, columns]:
            splits.SPLIT_COLUMNS follow; with lists [items, columns]: lists.ITEM_COLUMNS do.
        num_valid: [1]: rows of the table that mean something.
        entries: [items, max_list]: the lists of tiles of keys; None = all tiles that the score's mask leaves.
    """

    table: Ref
    num_valid: Ref
    entries: Ref


class PrefillInputs(NamedTuple):
    """What the kernel reads, in global memory.

    Attributes:
        query: [tokens, q_heads, head_dim], or [..., chunks, chunk] where the head is cut; 8 divides tokens.
        cache: Keys and values.
        slopes: ALiBi slopes times log2(e), [q_heads] f32, or None.
        sinks: Times log2(e), [q_heads] f32, or None.
        schedule: The tiles of queries, or the items.
        mask: The mask's arrays.
    """

    query: Ref
    cache: KvRefs
    slopes: Ref
    sinks: Ref
    schedule: PrefillScheduleRefs
    mask: tuple[Ref, ...]


class PrefillOutputs(NamedTuple):
    """What it writes.

    Attributes:
        out: As query.
        lse: [q_heads, tokens] f32, as many tokens as `out` has, or None.
        partials: Of tiles whose keys are cut, which the two above do not have; None where none can be.
    """

    out: Ref
    lse: Ref
    partials: "SplitOutputs | None"


class SplitOutputs(NamedTuple):
    """Rows behind the keys of a split, f32.

    Attributes:
        out: [partials, items_per_tile, chunks, tile_q, width]: P V, not normalized.
        top: [partials, items_per_tile, tile_q]: what scores were less.
        total: The same of the probabilities' sums.
    """

    out: Ref
    top: Ref
    total: Ref


class CombineRefs(NamedTuple):
    """What the merge reads, and the output and LSE that it writes in place.

    Attributes:
        partials: As Outputs.partials.
        table: [rows, columns]: as ScheduleRefs.table.
        num_valid: [1]: tiles of queries that are cut.
        rows: [most]: of each the first split's row of the table.
        sinks: As Inputs.sinks.
        out: As Outputs.out.
        lse: As Outputs.lse.
    """

    partials: SplitOutputs
    table: Ref
    num_valid: Ref
    rows: Ref
    sinks: Ref
    out: Ref
    lse: Ref


class PrefillSmem(NamedTuple):
    """Shared memory, each warpgroup's own but for k, v and narrow.

    Attributes:
        query_and_out: The same memory under two names: see `query` and `out`.
        items: [warpgroups, query_buffers, columns]: the item's row of the schedule's table.
        k: [teams * stages, chunks, tile_kv, width], swizzled.
        v: As k.
        p: [warpgroups, 64, tile_kv]: probabilities where nothing multiplies registers; or None.
        columns: [warpgroups, tile_kv] f32: 0, 1, 2...
        alibi: AlibiOperands, or None.
        narrow: What k and v are made of; None where the cache has 16 bits.
    """

    query_and_out: Ref
    items: Ref
    k: Ref
    v: Ref
    p: Ref
    columns: Ref
    alibi: "AlibiOperands | None"
    narrow: "QuantizedKvSmem | None"

    @property
    def query(self) -> Ref:
        """[warpgroups, query_buffers, chunks, 64, width], swizzled; the output takes its place."""
        (query,), _ = self.query_and_out
        return query

    @property
    def out(self) -> Ref:
        """The same, not swizzled: for an output of which not all rows are live."""
        _, (out,) = self.query_and_out
        return out


class AlibiOperands(NamedTuple):
    """What the tensor core multiplies to add a bias to the scores: K is 16, of which a few count.

    Attributes:
        slopes: [warpgroups, 64, 16]: each row's slope as numbers of 16 bits that add up to it.
        columns: [warpgroups, tile_kv, 16]: the number of each key in its tile.
    """

    slopes: Ref
    columns: Ref


class QuantizedKvSmem(NamedTuple):
    """Keys and values in 8 bits, as the cache has them.

    Attributes:
        k: [stages, chunks, tile_kv, width], swizzled.
        v: As k.
        k_scale: [stages, tile_kv] f32: each key's, or None.
        v_scale: The same of values.
    """

    k: Ref
    v: Ref
    k_scale: Ref
    v_scale: Ref


class QuantizedKvBarriers(NamedTuple):
    """Between the loading warp and the warpgroup that widens, [stages] each: as Pipeline's of their names."""

    k_full: Barriers
    v_full: Barriers
    k_free: Barriers
    v_free: Barriers


class PrefillBarriers(NamedTuple):
    """Barriers between the loading warps and the warpgroups that compute: see kernel.py's figure.

    Attributes:
        q_full: [warpgroups * query_buffers]: queries and the item's columns have come.
        q_free: The same: they have been read, and the output in their place has left.
        k_full: [teams * stages]: keys have come, or have been widened.
        v_full: The same for values.
        k_free: [teams * stages]: a team's warpgroups have read the keys.
        v_free: The same for values.
        narrow: NarrowBarriers where keys are widened, or None.
    """

    q_full: Barriers
    q_free: Barriers
    k_full: Barriers
    v_full: Barriers
    k_free: Barriers
    v_free: Barriers
    narrow: QuantizedKvBarriers | None
