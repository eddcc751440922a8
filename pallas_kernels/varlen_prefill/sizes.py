"""The sizes that the prefill kernel is compiled for."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.checks import require, require_one_of, require_positive
from pallas_kernels.shared.head_dims import head_chunks
from pallas_kernels.shared.score import Score
from pallas_kernels.support import NUM_SMS

WARPGROUP_ROWS = 64  # the tensor core's M
PACK_GQA_CHOICES = (1, 2, 4, 8)  # a warpgroup's rows of a head are a multiple of 8, what TMA fills at once
MAX_SPLITS = 16
SHARED_MEMORY = 221 * 1024  # bytes a thread block may have, less columns, barriers and reductions


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillSizes:
    """Static sizes of one prefill kernel.

    Attributes:
        tile_kv: Keys of a step: 64 or 128.
        stages: Steps in flight from global memory, for each team.
        warpgroups: Warpgroups that compute, 64 query rows each: 2 or 3.
        teams: The warpgroups form so many teams, each with items and stages of its own; 1 or as many as they
            are.
        query_buffers: 1 or 2: items whose queries are in shared memory; the output leaves the same way.
        ctas: Thread blocks of the grid; each stays on its SM and works through its share of the tiles.
        batch_invariant: A row's bits do not depend on the other rows of its tile, also where a window or
            lists hide the tile's first keys from it.
        pack_gqa: Query heads of a kv head that share a tile, of as many fewer tokens (FlashAttention's
            pack_gqa): 1, 2, 4 or 8. Requests of few tokens fill tiles so. 1 with lists.
        max_splits: Into so many splits the keys of a tile of queries may be cut, so that a few tiles before
            many keys keep all thread blocks busy (FlashAttention's num_splits), MAX_SPLITS at most; 1: into
            none, as with lists. How many there are, and so a row's last bits, depends on all rows of a step.
    """

    tile_kv: int = 128
    stages: int = 2
    warpgroups: int = 2
    teams: int = 1
    query_buffers: int = 2
    ctas: int = NUM_SMS
    batch_invariant: bool = False
    pack_gqa: int = 1
    max_splits: int = 1

    def __post_init__(self) -> None:
        require_one_of("tile_kv", self.tile_kv, (64, 128))
        require_one_of("warpgroups", self.warpgroups, (2, 3))
        require_one_of("teams", self.teams, (1, self.warpgroups))
        require_one_of("query_buffers", self.query_buffers, (1, 2))
        require_one_of("pack_gqa", self.pack_gqa, PACK_GQA_CHOICES)
        require_positive(stages=self.stages, ctas=self.ctas, max_splits=self.max_splits)
        may_be = self.max_splits <= MAX_SPLITS
        require(may_be, "max_splits", f"be at most {MAX_SPLITS}", self.max_splits)
        require(self.stages >= 2, "stages", "be at least 2", self.stages)
        is_one = self.max_splits == 1 or not self.batch_invariant
        require(is_one, "max_splits", "be 1 where a row's bits are its own", self.max_splits)

    @property
    def team_size(self) -> int:
        """Warpgroups that work on a tile."""
        return self.warpgroups // self.teams

    @property
    def tile_q(self) -> int:
        """Query rows of a tile."""
        return self.team_size * WARPGROUP_ROWS

    @property
    def tile_tokens(self) -> int:
        """Tokens of a tile: as many rows are one token's as heads share the tile."""
        return self.tile_q // self.pack_gqa

    @property
    def warpgroup_tokens(self) -> int:
        """Tokens of a warpgroup's rows: those of the first head, those of the second and so on."""
        return WARPGROUP_ROWS // self.pack_gqa

    @property
    def workers(self) -> int:
        """Teams of the whole grid."""
        return self.ctas * self.teams

    def shared_memory(self, width: int, *, is_narrow: bool = False) -> int:
        """Bytes of shared memory with heads of `width` 16-bit elements, which may be made of 8-bit ones."""
        query = 2 * self.warpgroups * WARPGROUP_ROWS * width * self.query_buffers
        return query + self.teams * self.stages * 2 * (2 + is_narrow) * self.tile_kv * width


# Padded head_dim -> the fastest over all rows of `python -m benchmarks tune prefill` (prefill-tiles
# in benchmarks/results). Three warpgroups have 160 registers a thread: heads of 64 beside the scores of 128
# keys fit them, heads of 128 beside those of 64 keys, wider heads do not.
TABLE = {
    64: PrefillSizes(tile_kv=128, stages=3, warpgroups=3),
    128: PrefillSizes(tile_kv=64, stages=3, warpgroups=3),
    192: PrefillSizes(tile_kv=64, stages=3, query_buffers=1),
    256: PrefillSizes(tile_kv=64, stages=2, query_buffers=1),
}
# With lists: blocks of masks are of 64 or 128 queries, which tiles of 192 would cut.
LIST_TABLE = {
    64: PrefillSizes(tile_kv=128, stages=4),
    128: PrefillSizes(tile_kv=128, stages=2),
    192: PrefillSizes(tile_kv=64, stages=2),
    256: PrefillSizes(tile_kv=64, stages=2, query_buffers=1),
}
# Few queries fill tiles of fewer tokens better, of which heads share each: 64 tokens behind 64k take 128 us
# for 164, 8 x 64 behind 16k 228 for 345, 512 behind 64k 769 for 796 (prefill-heads). With many queries keys
# are read by tiles that drift apart, and 4 x 2k behind 14k take 2,869 us for 2,778.
# Sizes for few, and what a step of 64 keys takes with them, in us, all rows live.
SMALL_BATCH_TABLE = {128: ((TABLE[128], 1.10), (LIST_TABLE[128], 0.84))}
MIN_TOKENS_PER_REQ = (
    16  # of a request, or its bound says nothing: engines allow for as many requests as tokens
)
# Over keys of 8 bits, which two warpgroups widen: two are left to compute.
QUANTIZED_TABLE = {64: PrefillSizes(tile_kv=128, stages=3), 128: PrefillSizes(tile_kv=64, stages=3)}
# Query rows of a request before a kv head up to which the kernel should widen keys, as it does for each tile,
# and not have them read into 16 bits first. An H200 took over fp8 308 to 315 us for 256 rows (8 x 64 tokens
# behind 16k), 460 read first (prefill-narrow), and 315 for 512 (1 x 128 behind 64k), 334 read first; an H100,
# whose memory is slower, for 1,024 615 and 664, or 607 and 618 (prefill-narrow-crossing). What takes more to
# widen pays for less: int8 with a scale a token and head 381 and 362 for 512, 746 and 610 for 1,024. What was
# not timed, int8 with a scale a head and fp8 with scales a token, has int8's limit.
MAX_DEQUANTIZED_ROWS, MAX_COSTLY_DEQUANTIZED_ROWS = 512, 256
# Fewer keys are soon read: what a split and the merge cost is what 10 to 12 tiles of 64 keys take.
MIN_KV_TO_SPLIT = 4096
MAX_PACKED_HEADS = (
    4  # in a tile: eight spill up to 460 bytes with ALiBi and sinks, and were not timed with splits
)
MAX_ESTIMATED_SPLITS = 8  # more of them cost what they save
# With more items than that for each thread block the last round is a small part of all.
SMALL_BATCH_TILES_PER_CTA = 2


class CallBounds(NamedTuple):
    """Static bounds of a call over a cache, without lists.

    Attributes:
        num_tokens: Tokens of all requests.
        reqs: Requests.
        q_heads: Query heads.
        kv_heads: Kv heads.
        max_kv: Keys of a request that a tile of queries sees.
    """

    num_tokens: int
    reqs: int
    q_heads: int
    kv_heads: int
    max_kv: int

    @property
    def estimated_reqs(self) -> int:
        """As many, or one where there is room for more than have tokens."""
        return self.reqs if 0 < MIN_TOKENS_PER_REQ * self.reqs <= self.num_tokens else 1

    def limited_by(self, score: Score) -> "CallBounds":
        """With no more keys than windows and chunks let a tile of queries see."""
        seen = score.max_visible_keys(3 * WARPGROUP_ROWS)
        return self if seen is None else self._replace(max_kv=min(seen, self.max_kv))


def default_sizes(
    head_dim: int,
    *,
    has_lists: bool = False,
    batch_invariant: bool = False,
    bounds: CallBounds | None = None,
    widens: bool = False,
) -> PrefillSizes:
    """The sizes of varlen_prefill where the caller names none.

    Args:
        head_dim: Width of a head.
        has_lists: Lists say which tiles of keys an item is to see.
        batch_invariant: As KernelSizes has it.
        bounds: Tell whether queries are so few that their keys may have to be cut; None: they are not.
        widens: Keys have 8 bits.

    Raises:
        ValueError: Keys of 8 bits come with lists, or a row's bits are to be its own over them.
    """
    padded_dim = head_chunks(head_dim).padded_dim
    if widens:
        require(not has_lists, "has_lists", "be False with keys of 8 bits", has_lists)
        require(not batch_invariant, "batch_invariant", "be False with keys of 8 bits", batch_invariant)
        sizes = QUANTIZED_TABLE[padded_dim]
        return sizes if bounds is None or not is_small_batch(head_dim, bounds) else _for_few(sizes, bounds)
    sizes = (LIST_TABLE if has_lists else TABLE)[padded_dim]
    if batch_invariant:
        return dataclasses.replace(sizes, batch_invariant=True)
    if bounds is None or has_lists or not is_small_batch(head_dim, bounds):
        return sizes
    # Tiles are as tall as makes all keys be gone through soonest, if requests are alike.
    choices = [
        (_for_few(each, bounds), step) for each, step in SMALL_BATCH_TABLE.get(padded_dim, ((sizes, 1.0),))
    ]
    return min(choices, key=lambda choice: choice[1] * _rounds(bounds, choice[0]))[0]


def is_small_batch(head_dim: int, bounds: CallBounds) -> bool:
    """Whether queries are so few, and keys so many, that keys may have to be cut."""
    sizes = TABLE[head_chunks(head_dim).padded_dim]
    items = -(-bounds.num_tokens // sizes.tile_q) * bounds.q_heads
    return items <= SMALL_BATCH_TILES_PER_CTA * sizes.ctas and bounds.max_kv >= MIN_KV_TO_SPLIT


def should_dequantize_in_kernel(
    head_dim: int, bounds: CallBounds, *, kv_dtypes: tuple[DTypeLike, DTypeLike], has_token_scales: bool
) -> bool:
    """Whether the kernel should widen keys of 8 bits itself.

    Args:
        head_dim: Width of a head.
        bounds: Of the call.
        kv_dtypes: Of stored keys, and of values.
        has_token_scales: Some of them have a scale for each token.
    """
    rows = -(-bounds.num_tokens // bounds.estimated_reqs) * (bounds.q_heads // bounds.kv_heads)
    is_costly = has_token_scales or not all(jnp.issubdtype(dtype, jnp.floating) for dtype in kv_dtypes)
    return is_small_batch(head_dim, bounds) and rows <= (
        MAX_COSTLY_DEQUANTIZED_ROWS if is_costly else MAX_DEQUANTIZED_ROWS
    )


def _for_few(sizes: PrefillSizes, bounds: CallBounds) -> PrefillSizes:
    """With keys that may be cut, and as many heads a tile as a group allows."""
    group = bounds.q_heads // bounds.kv_heads
    together = max(n for n in PACK_GQA_CHOICES if group % n == 0 and n <= MAX_PACKED_HEADS)
    return dataclasses.replace(sizes, pack_gqa=together, max_splits=MAX_SPLITS)


def _rounds(bounds: CallBounds, sizes: PrefillSizes) -> float:
    """How often a thread block goes through all of a request's keys, if requests are alike."""
    reqs = bounds.estimated_reqs
    tiles = -(-bounds.num_tokens // (reqs * sizes.tile_tokens)) * reqs
    items = tiles * bounds.q_heads // sizes.pack_gqa
    return min(-(-items * splits // sizes.workers) / splits for splits in range(1, MAX_ESTIMATED_SPLITS + 1))
