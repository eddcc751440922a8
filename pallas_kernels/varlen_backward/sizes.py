"""The sizes that the backward kernel is compiled for."""

import dataclasses

from pallas_kernels.checks import require, require_one_of, require_positive
from pallas_kernels.shared.head_dims import UNIT
from pallas_kernels.shared.score import Score
from pallas_kernels.varlen_prefill import PrefillSizes

WARPGROUPS = 2  # that compute: each has half of a tile's keys
TILE_KV = UNIT * WARPGROUPS


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardSizes:
    """Static sizes of one backward kernel.

    Attributes:
        tile_q: Queries of a step: 64 or 128.
        stages: Steps in flight from global memory.
        l2_bytes: So much of queries and their gradients is read side by side; 0 = the longest items first,
            whatever they read. 16 MB beat 32 MB by 3 % at 8 x 2k and 1 % at 1 x 16k (backward-variants).
        dq_sizes: Sizes of a kernel of its own for the gradient of queries: then it has the same bits twice,
            for seven products in all instead of five. None = it is added up on the way, in any order.
        separate_dk_dv: Whether dk and dv have a kernel each, for eight matrix products in all; only with
            `dq_sizes`. Heads wider than 128 leave no registers for both sums.
        ctas: Thread blocks of the grid, each with its share of the items; None = one an item, so that an SM
            takes the next item when it is done with one: a grid of as many as there are SMs, which take
            turns, was 11 % slower at 8 x 2k and 10 % at 1 x 16k (backward-variants).
    """

    tile_q: int = 64
    stages: int = 2
    l2_bytes: int = 16 * 10**6
    dq_sizes: PrefillSizes | None = None
    separate_dk_dv: bool = False
    ctas: int | None = None

    def __post_init__(self) -> None:
        require_one_of("tile_q", self.tile_q, (64, 128))
        require_positive(stages=self.stages, ctas=1 if self.ctas is None else self.ctas)
        require(self.l2_bytes >= 0, "l2_bytes", "be at least 0", self.l2_bytes)
        require(self.stages >= 2, "stages", "be at least 2", self.stages)
        has_queries = self.dq_sizes is not None
        require(
            has_queries or not self.separate_dk_dv, "sizes.dq_sizes", "be given with separate_dk_dv", None
        )
        if self.dq_sizes is not None:
            for name in ("teams", "pack_gqa", "max_splits"):
                value = getattr(self.dq_sizes, name)
                require(value == 1, f"dq_sizes.{name}", "be 1", value)

    @property
    def fuses_delta(self) -> bool:
        """Whether the kernel of queries sums a token's outputs times their gradients, and so is the first.

        Outputs take the place of a tile of keys and of one of values, a warpgroup's rows each, so of 64; else
        XLA sums. At 16k tokens of 32 heads of 128 XLA takes 67 us, the kernel 30 (backward-sums-outputs).
        """
        own = self.dq_sizes
        return (
            own is not None
            and not self.separate_dk_dv
            and (own.tile_kv, own.warpgroups) == (UNIT, WARPGROUPS)
        )


# Units of 64 that a head fills -> sizes. Two warpgroups share the gradient of a step's queries by whole
# units, so a head of one unit takes two of queries.
TABLE = {1: BackwardSizes(tile_q=128), 2: BackwardSizes(tile_q=64)}
# With a kernel for the queries: without their gradient there is room for a stage more.
DQ_KERNEL_TABLE = {
    1: BackwardSizes(tile_q=128, stages=3, dq_sizes=PrefillSizes(tile_kv=128, stages=3)),
    2: BackwardSizes(tile_q=64, stages=3, dq_sizes=PrefillSizes(tile_kv=64, stages=3)),
    3: BackwardSizes(separate_dk_dv=True, dq_sizes=PrefillSizes(tile_kv=64, query_buffers=1)),
    4: BackwardSizes(separate_dk_dv=True, dq_sizes=PrefillSizes(tile_kv=64, query_buffers=1)),
}


# Two kernels make two products more than the fused one, but that needs zeros for dQ and dQ in 16 bits: 175 us
# for 16k tokens of 32 heads of 128, however many keys a query sees. By these, in the mean, two take of the
# fused one's time: at 1k 86 % (8 x 2k) and 91 % (a window of 1,024), at 2k 97 % (blocks, density .25), at 4k
# 104 % (1 x 8k) and 110 % (blocks, .5), on an H100 (backward-later-dq). ALiBi and caps were not timed at 2k.
MAX_KEYS_FOR_DQ_KERNEL = 2560  # that a query sees


def mean_visible_keys(score: Score, mean_len: int) -> int:
    """How many keys a query sees at most, in the mean of requests of `mean_len` tokens."""
    left, right = score.window
    keys, right = (mean_len // 2, 0) if score.causal else (mean_len, right)
    if score.chunk_size is not None:
        keys = min(keys, score.chunk_size // 2 if score.causal else score.chunk_size)
    return keys if left is None or right is None else min(keys, left + 1 + right)


def default_sizes(
    head_dim: int, *, deterministic: bool = False, mean_keys: int | None = None
) -> BackwardSizes:
    """The sizes of varlen_backward where the caller names none.

    Args:
        head_dim: Width of a head, which support.why_not_backward took.
        deterministic: Gradients are to have the same bits twice.
        mean_keys: Keys that a query sees, as mean_keys_of has it; None = many.
    """
    units = -(-head_dim // UNIT)
    sees_few = mean_keys is not None and mean_keys <= MAX_KEYS_FOR_DQ_KERNEL and units == 2
    return (DQ_KERNEL_TABLE if deterministic or sees_few or units not in TABLE else TABLE)[units]


def default_layer_sizes(head_dim: int, score: Score, *, mean_len: int, deterministic: bool) -> BackwardSizes:
    """default_sizes for requests of `mean_len` tokens in the mean; 0 = their queries see few keys anyway."""
    return default_sizes(head_dim, deterministic=deterministic, mean_keys=mean_visible_keys(score, mean_len))
