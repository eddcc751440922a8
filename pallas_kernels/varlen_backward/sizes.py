"""Static tile sizes of the backward kernels, and their default values."""

import dataclasses
import itertools

from pallas_kernels.architectures import ARCHITECTURES
from pallas_kernels.checks import require, require_one_of, require_positive
from pallas_kernels.shared.layouts import WARPGROUP_ROWS
from pallas_kernels.shared.memory import PANEL, head_chunks
from pallas_kernels.shared.score import Score
from pallas_kernels.support import WARP_RESERVED_BYTES
from pallas_kernels.varlen_prefill import LIST_BLOCK_SIZES, MaskBlocks, PrefillSizes

WARPGROUPS = 2  # computing warpgroups
MAX_DKDV_DIM = 128  # wider heads leave no registers for both dk and dv
MIN_TEAM_QUERIES = 4  # queries per block for which a tile of 64 queries visits fewer keys than one of 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardSizes:
    """Static sizes of the backward kernels.

    Attributes:
        tile_q: Queries per main-loop step: 64 or 128; 64 with per_warp_mma, 128 for heads of up to 64 without
            dq_sizes.
        stages: Pipeline stages of queries, at least 2; 1 or 2 with per_warp_mma.
        l2_bytes: Bytes of queries and their gradients that are processed together, so that they stay in L2; 0
            processes the longest work tiles first regardless. On an H200, 16 MB beat
            32 MB by 3 % at 8 x 2k and 1 % at 1 x 16k.
        dq_sizes: Tile sizes of a separate dq kernel, which makes dq bitwise reproducible at the cost of seven
            instead of five matrix products in total. None adds up dq in the dk/dv kernel, in an undefined
            order. Its `per_warp_mma` and `gpu` are those of all backward kernels.
        separate_dk_dv: Whether one kernel computes dk and another one dv, with eight matrix products in
            total; requires dq_sizes. Required for heads wider than 128, which leave no registers for both
            gradients.
        warpgroups: Computing warpgroups of the dk/dv kernels, with 64 keys each: 2; 1 or 2 with
            per_warp_mma.
        teams: Teams that the warpgroups of the dk/dv kernel form: 1, or 2 with dq_sizes. With 2, each
            warpgroup has its own work tiles of 64 keys, and `stages` of its own.
        list_splits: Number of splits of each list of queries; more than 1 requires dq_sizes and tile lists.
            Each split is a work tile, and their gradients are added up afterwards, so that all thread blocks
            are busy even if most queries attend to the same few keys.
        ctas: Thread blocks of a persistent grid. None launches one per work tile, so that an SM takes the
            next one when it is done: on an H200, a persistent grid was 11 % slower at 8 x 2k and
            10 % at 1 x 16k.
    """

    tile_q: int = 64
    stages: int = 2
    l2_bytes: int = 16 * 10**6
    dq_sizes: PrefillSizes | None = None
    separate_dk_dv: bool = False
    warpgroups: int = WARPGROUPS
    teams: int = 1
    list_splits: int = 1
    ctas: int | None = None

    def __post_init__(self) -> None:
        require_one_of("tile_q", self.tile_q, (64,) if self.per_warp_mma else (64, 128))
        require_positive(
            stages=self.stages, list_splits=self.list_splits, ctas=1 if self.ctas is None else self.ctas
        )
        if self.dq_sizes is None:
            require(self.list_splits == 1, "list_splits", "be 1 without dq_sizes", self.list_splits)
        require(self.l2_bytes >= 0, "l2_bytes", "be at least 0", self.l2_bytes)
        require_one_of("warpgroups", self.warpgroups, (1, 2) if self.per_warp_mma else (WARPGROUPS,))
        has_teams = self.dq_sizes is not None and not (self.per_warp_mma or self.separate_dk_dv)
        require_one_of("teams", self.teams, (1, WARPGROUPS) if has_teams else (1,))
        if self.teams > 1:
            require_one_of("stages", self.stages, (2, 4))
        if self.per_warp_mma:
            require_one_of("stages", self.stages, (1, 2))
        else:
            require(self.stages >= 2, "stages", "be at least 2", self.stages)
        if self.separate_dk_dv and self.dq_sizes is None:
            raise ValueError(
                "separate_dk_dv=True requires dq_sizes, the sizes of a dq kernel. Pass dq_sizes."
            )
        if self.dq_sizes is not None:
            for name in ("pack_gqa", "max_splits", *(["teams"] if self.separate_dk_dv else [])):
                value = getattr(self.dq_sizes, name)
                require(value == 1, f"dq_sizes.{name}", "be 1", value)

    @property
    def per_warp_mma(self) -> bool:
        """Return whether warps multiply by mma.sync and load by cp.async; see PrefillSizes.per_warp_mma."""
        return self.dq_sizes is not None and self.dq_sizes.per_warp_mma

    @property
    def team_size(self) -> int:
        """Number of warpgroups that share a work tile of the dk/dv kernel."""
        return self.warpgroups // self.teams

    @property
    def tile_kv(self) -> int:
        """Number of keys per work tile of the dk/dv kernel."""
        return self.team_size * WARPGROUP_ROWS

    @property
    def gpu(self) -> str:
        """Compute capability that the kernels are built for."""
        return "9.0" if self.dq_sizes is None else self.dq_sizes.gpu

    def shared_memory(self, width: int) -> int:
        """Return the bytes of shared memory that the kernels of dk and dv need with per_warp_mma.

        Args:
            width: Padded head_dim.
        """
        rows = self.warpgroups * WARPGROUP_ROWS + self.stages * self.tile_q
        return 2 * 2 * rows * width + WARP_RESERVED_BYTES

    @property
    def dq_computes_delta(self) -> bool:
        """Whether the dq kernel computes delta, the row sums of O * dO, and so runs before the dk/dv kernel.

        The outputs of a warpgroup's 64 rows each take the place of a tile of keys and of one of values, so
        tiles must be of 64 keys; otherwise XLA computes delta. At 16k tokens of 32 heads of 128 XLA takes 67
        us, the kernel 30.
        """
        dq = self.dq_sizes
        if dq is None or self.separate_dk_dv or self.per_warp_mma:
            return False
        return (dq.tile_kv, dq.warpgroups) == (WARPGROUP_ROWS, WARPGROUPS)


def list_block_sizes(sizes: BackwardSizes) -> tuple[int, ...]:
    """Return the numbers of queries per list entry for which a tile of the dk/dv kernel holds several.

    Only warpgroups with their own lists have such tiles.
    """
    return (16, 32) if sizes.teams > 1 else ()


def check_head_dim(sizes: BackwardSizes, head_dim: int) -> None:
    """Raise ValueError if the kernels of these sizes cannot compute the gradients of heads of this width."""
    fix = f"Use default_sizes({head_dim})"
    if head_dim > MAX_DKDV_DIM and not sizes.separate_dk_dv:
        raise ValueError(
            f"sizes.separate_dk_dv must be True for heads wider than {MAX_DKDV_DIM}, got False with "
            f"head_dim={head_dim}. Separate kernels of dk and dv have no teams. {fix}."
        )
    if head_dim <= PANEL and sizes.dq_sizes is None and sizes.tile_q == PANEL:
        raise ValueError(
            f"sizes.tile_q must be {WARPGROUPS * PANEL} for heads of at most {PANEL} without dq_sizes, got "
            f"{sizes.tile_q} with head_dim={head_dim}. {fix}."
        )


# Number of 64-element panels per head -> sizes of the fused kernel, which adds up dq. Two warpgroups share a
# step's dq by whole panels, so heads of one panel take two panels of queries.
FUSED_TABLE = {1: BackwardSizes(tile_q=128), 2: BackwardSizes(tile_q=64)}
# Sizes with a dq kernel: without dq the dk/dv kernel has room for one more stage.
DQ_KERNEL_TABLE = {
    1: BackwardSizes(tile_q=128, stages=3, dq_sizes=PrefillSizes(tile_kv=128, stages=3)),
    2: BackwardSizes(tile_q=64, stages=3, dq_sizes=PrefillSizes(tile_kv=64, stages=3)),
    3: BackwardSizes(separate_dk_dv=True, dq_sizes=PrefillSizes(tile_kv=64, query_buffers=1)),
    4: BackwardSizes(separate_dk_dv=True, dq_sizes=PrefillSizes(tile_kv=64, query_buffers=1)),
}
# Sizes for masks of blocks that are smaller than the tiles of DQ_KERNEL_TABLE, which hold 128 keys (dk/dv
# kernel) or 128 queries (dq kernel). Each warpgroup is a team with its own lists.
KEY_TEAMS_TABLE = {
    1: BackwardSizes(tile_q=64, stages=4, teams=2, dq_sizes=DQ_KERNEL_TABLE[1].dq_sizes),
    2: BackwardSizes(tile_q=64, stages=2, teams=2, dq_sizes=DQ_KERNEL_TABLE[2].dq_sizes),
}
QUERY_TEAMS_TABLE = {
    1: PrefillSizes(tile_kv=64, stages=4, teams=2),
    2: PrefillSizes(tile_kv=64, stages=2, teams=2, query_buffers=1),
}


# Visible keys per query up to which a separate dq kernel is faster. It costs two more matrix products than
# the fused kernel, but that needs a zeroed dq and its conversion to 16 bits: 175 us for 16k tokens of 32
# heads of 128, however many keys a query attends to. The two kernels take, relative to the fused one and by
# visible keys in the mean: at 1k 86 % (8 x 2k) and 91 % (a window of 1,024), at 2k 97 % (blocks, density
# .25), at 4k 104 % (1 x 8k) and 110 % (blocks, .5), on an H100 (backward-later-dq). ALiBi and caps were not
# timed at 2k.
MAX_KEYS_FOR_DQ_KERNEL = 2560


def mean_visible_keys(score: Score, mean_len: int) -> int:
    """Return an upper bound on the visible keys per query, averaged over requests of `mean_len` tokens."""
    left, right = score.window
    keys, right = (mean_len // 2, 0) if score.causal else (mean_len, right)
    if score.chunk_size is not None:
        keys = min(keys, score.chunk_size // 2 if score.causal else score.chunk_size)
    return keys if left is None or right is None else min(keys, left + 1 + right)


def default_sizes(
    head_dim: int, *, deterministic: bool = False, mean_keys: int | None = None, gpu: str = "9.0"
) -> BackwardSizes:
    """Return the default sizes of varlen_backward.

    Those of compute capability 9.0 were measured on an H200. Those of other architectures are estimated.

    Args:
        head_dim: Width of a head, one that support.why_not_backward accepts.
        deterministic: Whether all gradients must be bitwise reproducible; always the case without wgmma.
        mean_keys: Visible keys per query, see mean_visible_keys; None for many.
        gpu: Compute capability that the kernels are built for.
    """
    if not ARCHITECTURES[gpu].has_wgmma:
        return _estimate_sizes(gpu, head_chunks(head_dim).padded_dim)
    panels = -(-head_dim // PANEL)
    has_few_keys = mean_keys is not None and mean_keys <= MAX_KEYS_FOR_DQ_KERNEL and panels == 2
    has_dq_kernel = deterministic or has_few_keys or panels not in FUSED_TABLE
    return (DQ_KERNEL_TABLE if has_dq_kernel else FUSED_TABLE)[panels]


def _estimate_sizes(gpu: str, padded_dim: int) -> BackwardSizes:
    """Return sizes for an architecture without wgmma, where nothing was measured.

    As in FlashAttention-2, tiles are as large as registers allow. There are as many warpgroups, and then
    stages, as shared memory holds.

    Args:
        gpu: Compute capability.
        padded_dim: Padded head_dim.
    """
    architecture = ARCHITECTURES[gpu]

    def dq_sizes_of(warpgroups: int, stages: int) -> PrefillSizes:
        return PrefillSizes(
            tile_kv=64, stages=stages, warpgroups=warpgroups, query_buffers=1, ctas=architecture.num_sms,
            per_warp_mma=True, gpu=gpu,
        )  # fmt: skip

    choices = (2, 2), (2, 1), (1, 1)  # warpgroups and stages
    for dq_sizes in itertools.starmap(dq_sizes_of, choices):
        # dO takes as much as the queries.
        dq_bytes = dq_sizes.shared_memory(padded_dim) + 2 * dq_sizes.tile_q * padded_dim
        if dq_bytes + WARP_RESERVED_BYTES <= architecture.smem_bytes:
            break
    for warpgroups, stages in choices:
        sizes = BackwardSizes(
            tile_q=64, stages=stages, warpgroups=warpgroups, dq_sizes=dq_sizes,
            separate_dk_dv=padded_dim > MAX_DKDV_DIM,
        )  # fmt: skip
        if sizes.shared_memory(padded_dim) <= architecture.smem_bytes:
            break
    return sizes


def default_layer_sizes(
    head_dim: int,
    score: Score,
    *,
    mean_len: int,
    deterministic: bool,
    blocks: MaskBlocks | None = None,
    gpu: str = "9.0",
) -> BackwardSizes:
    """Return the default sizes for a layer.

    Args:
        head_dim: Width of a head.
        score: Mask of the layer.
        mean_len: Mean number of tokens per request; 0 if queries attend to few keys in any case.
        deterministic: Whether all gradients must be bitwise reproducible.
        blocks: Blocks of the mask: tiles are no larger if possible; None for no blocks.
        gpu: Compute capability that the kernels are built for.
    """
    mean_keys = mean_visible_keys(score, mean_len)
    sizes = default_sizes(head_dim, deterministic=deterministic, mean_keys=mean_keys, gpu=gpu)
    if blocks is None or head_dim > MAX_DKDV_DIM or not ARCHITECTURES[gpu].has_wgmma:
        return sizes
    return _sizes_for_blocks(sizes, blocks, -(-head_dim // PANEL))


def _sizes_for_blocks(sizes: BackwardSizes, blocks: MaskBlocks, panels: int) -> BackwardSizes:
    """Return the sizes, with a team per warpgroup in the kernels whose tiles would hold several blocks.

    Twice as many keys or queries are then loaded per product, which pays only if a tile of half the size
    visits fewer of them, or if the lists of key tiles name blocks of fewer queries than a tile has: for
    blocks of 32 queries and 128 keys at a density of 0.25, teams took 0.50 times as long in the dk/dv kernel
    on an H200 (backward-blocks-32x128). Under masks of single pairs smaller tiles visit almost as many. For
    blocks of 128 at a density of 0.1, teams took 1.07 (dq) and 1.05 (dk/dv) times as long (backward-blocks-
    later).
    """
    max_size = WARPGROUPS * WARPGROUP_ROWS
    has_small_queries = any(MIN_TEAM_QUERIES <= size < max_size for size in blocks.queries)
    has_small_keys = any(min(LIST_BLOCK_SIZES) <= size < max_size for size in blocks.keys)
    lists_queries = any(MIN_TEAM_QUERIES <= size < WARPGROUP_ROWS for size in blocks.queries)
    if has_small_keys or lists_queries:
        sizes = KEY_TEAMS_TABLE[panels]
    elif has_small_queries:
        sizes = DQ_KERNEL_TABLE[panels]
    return dataclasses.replace(sizes, dq_sizes=QUERY_TEAMS_TABLE[panels]) if has_small_queries else sizes
