"""The sizes that the prefill kernel is compiled for."""

import dataclasses
from typing import NamedTuple

from pallas_kernels.checks import require, require_one_of, require_positive
from pallas_kernels.shared.gpu import NUM_SMS
from pallas_kernels.shared.head_dims import head_cut

WARPGROUP_ROWS = 64  # the tensor core's M
SHARED_MEMORY = 221 * 1024  # bytes a thread block may have, less columns, barriers and reductions


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelSizes:
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
        max_splits: Into so many splits the keys of a tile of queries may be cut, so that a few tiles before
            many keys keep all thread blocks busy (FlashAttention's num_splits); 1: into none. Lists are not.
    """

    tile_kv: int = 128
    stages: int = 2
    warpgroups: int = 2
    teams: int = 1
    query_buffers: int = 2
    ctas: int = NUM_SMS
    batch_invariant: bool = False
    max_splits: int = 1

    def __post_init__(self) -> None:
        require_one_of("tile_kv", self.tile_kv, (64, 128))
        require_one_of("warpgroups", self.warpgroups, (2, 3))
        require_one_of("teams", self.teams, (1, self.warpgroups))
        require_one_of("query_buffers", self.query_buffers, (1, 2))
        require_positive(stages=self.stages, ctas=self.ctas, max_splits=self.max_splits)
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
    def workers(self) -> int:
        """Teams of the whole grid."""
        return self.ctas * self.teams

    def shared_memory(self, width: int) -> int:
        """Bytes of shared memory with heads of `width` 16-bit elements."""
        query = 2 * self.warpgroups * WARPGROUP_ROWS * width * self.query_buffers
        return query + self.teams * self.stages * 2 * 2 * self.tile_kv * width


# Padded head_dim -> the fastest over all rows of `python -m benchmarks tune prefill` (prefill-tiles
# in benchmarks/results). Three warpgroups have 160 registers a thread: heads of 64 beside the scores of 128
# keys fit them, heads of 128 beside those of 64 keys, wider heads do not.
TABLE = {
    64: KernelSizes(tile_kv=128, stages=3, warpgroups=3),
    128: KernelSizes(tile_kv=64, stages=3, warpgroups=3),
    192: KernelSizes(tile_kv=64, stages=3, query_buffers=1),
    256: KernelSizes(tile_kv=64, stages=2, query_buffers=1),
}
# With lists: blocks of masks are of 64 or 128 queries, which tiles of 192 would cut.
LIST_TABLE = {
    64: KernelSizes(tile_kv=128, stages=4),
    128: KernelSizes(tile_kv=128, stages=2),
    192: KernelSizes(tile_kv=64, stages=2),
    256: KernelSizes(tile_kv=64, stages=2, query_buffers=1),
}
# Two warpgroups where there are no rows for more: 128 tokens behind 64k take 216 us by them, 226 by TABLE's
# three. With rows for all three are quicker: 64 keys took them 1.02 us of 192 rows and 0.88 of 128, where two
# warpgroups took 0.84 of 128 (prefill-few).
FEW_TABLE = {128: LIST_TABLE[128]}
MAX_SPLITS = 16
# Fewer keys are soon read: what a split and the merge cost is what 10 to 12 tiles of 64 keys take.
MIN_KV_OF_SPLITS = 4096
# With more items than that for each thread block the last round is a small part of all.
ITEMS_OF_SPLITS = 2


class Load(NamedTuple):
    """Static bounds of a call over a cache, without lists.

    Attributes:
        num_tokens: Tokens of all requests.
        q_heads: Query heads.
        max_kv: Keys of a request.
    """

    num_tokens: int
    q_heads: int
    max_kv: int


def default_sizes(
    head_dim: int, *, has_lists: bool = False, batch_invariant: bool = False, load: Load | None = None
) -> KernelSizes:
    """The sizes of varlen_prefill where the caller names none.

    Args:
        head_dim: Width of a head.
        has_lists: Lists say which tiles of keys an item is to see.
        batch_invariant: As KernelSizes has it.
        load: Tells whether queries are so few that their keys may have to be cut; None: they are not.
    """
    padded_dim = head_cut(head_dim).padded_dim
    sizes = (LIST_TABLE if has_lists else TABLE)[padded_dim]
    if batch_invariant:
        return dataclasses.replace(sizes, batch_invariant=True)
    return sizes if load is None or has_lists else _sizes_of_few(padded_dim, load)


def _sizes_of_few(padded_dim: int, load: Load) -> KernelSizes:
    """For a load that may be of few queries: then keys may be cut, and tiles are as tall as they fill."""
    sizes = TABLE[padded_dim]
    items = -(-load.num_tokens // sizes.tile_q) * load.q_heads
    if items > ITEMS_OF_SPLITS * sizes.ctas or load.max_kv < MIN_KV_OF_SPLITS:
        return sizes
    two = FEW_TABLE.get(padded_dim)
    if two is not None and load.num_tokens <= two.tile_q:
        sizes = two
    return dataclasses.replace(sizes, max_splits=MAX_SPLITS)
