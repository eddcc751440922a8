"""The shared memory between the loading warp and the computing warpgroup."""

from typing import Any, NamedTuple

# f16 probabilities go up to 2 ** 14, not 1: small ones, and small scales, would lose bits as subnormals.
HEADROOM = 14


class Stages(NamedTuple):
    """What the loading warp fills and the computing warpgroup reads.

    Attributes:
        k_s: [stages, chunks, tile_kv, width] in SMEM.
        v_s: The same.
        k_scale_s: [stages, tile_kv] f32 in SMEM: a scale per token and head; or None.
        v_scale_s: The same.
        wide_s: [chunks, tile_kv, width] in SMEM, 16-bit: widened values (in interpret mode keys too); None.
        p_s: [tile_q, tile_kv] in SMEM: the probabilities; None where each warp keeps its own.
        merge_s: [warps, head_dim + 2, tile_q] f32 in SMEM, where warps work alone: their results; or None.
        k_full: Barriers.
        v_full: Barriers.
        k_free: Barriers.
        v_free: Barriers.
    """

    k_s: Any
    v_s: Any
    k_scale_s: Any
    v_scale_s: Any
    wide_s: Any
    p_s: Any
    merge_s: Any
    k_full: Any
    v_full: Any
    k_free: Any
    v_free: Any
