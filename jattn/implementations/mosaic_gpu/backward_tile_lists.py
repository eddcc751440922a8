"""Tile lists of varlen_backward: the query tiles that each KV tile visits under a mask."""

from typing import NamedTuple

import jax

from jattn.implementations.mosaic_gpu.kernel_config import score_of
from jattn.implementations.mosaic_gpu.kernel_masks import KernelMaskConfig, kernel_mask, why_not_kernel_mask
from jattn.implementations.mosaic_gpu.tile_lists import TileListConfig, packed_codes, tile_lists
from jattn.masks import (
    And,
    BigBird,
    BlockMask,
    Chunked,
    Document,
    GatheredColumns,
    InterleavedMask,
    LocalStrided,
    Mask,
    Or,
    Sinks,
    Window,
)
from jattn.masks.base import leaves
from jattn.spec import AttentionSpec
from pallas_kernels import varlen_backward as backward
from pallas_kernels import varlen_prefill as prefill
from pallas_kernels.shared import Score

SPARSE_MASKS = BigBird | BlockMask | Chunked | Document | GatheredColumns | LocalStrided | Sinks
KEYS = backward.TILE_KV // backward.WARPGROUPS  # keys of a warpgroup, for which a mask is evaluated at once


class PackedLens(NamedTuple):
    """Location of the requests' queries and packed keys: arguments of varlen_backward."""

    query_start_loc: jax.Array
    seq_lens: jax.Array
    kv_start_loc: jax.Array


def why_not_backward_lists(mask: Mask, sizes: backward.BackwardSizes) -> str | None:
    """Return why varlen_backward does not support a mask; None if it does."""
    if any(isinstance(leaf, InterleavedMask) for leaf in leaves(mask)):
        return "there is no kernel for gradients over keys on several devices"
    reason, dq_sizes = why_not_kernel_mask(mask, KEYS, rows=sizes.tile_q), sizes.dq_sizes
    return reason if reason is not None or dq_sizes is None else why_not_kernel_mask(mask, dq_sizes.tile_kv)


def backward_sizes(mask: Mask | None, spec: AttentionSpec, *, mean_len: int) -> backward.BackwardSizes:
    """Return the sizes of varlen_backward for a layer.

    Args:
        mask: Mask in addition to the spec's window, chunk size and causality; None adds none.
        spec: Attention of the layer.
        mean_len: Mean number of queries per request.
    """
    mean_len = 0 if mask is not None and _is_sparse(mask) else mean_len
    score, deterministic = score_of(spec), spec.deterministic
    return backward.default_layer_sizes(spec.head_dim, score, mean_len=mean_len, deterministic=deterministic)


def _is_sparse(mask: Mask) -> bool:
    """Return whether a query of a long request typically attends to few of its KV tiles, by the mask's type.

    Vertical-slash masks are not sparse in this sense: their columns and slashes lie in most tiles.
    """
    match mask:
        case And():
            return any(map(_is_sparse, mask.masks))
        case Or():
            return all(map(_is_sparse, mask.masks))
        case Window():
            return mask.left is not None
    return isinstance(mask, SPARSE_MASKS)


def backward_mask(
    mask: Mask, spec: AttentionSpec, sizes: backward.BackwardSizes, *, max_seq_len: int
) -> backward.BackwardMask:
    """Return the masks that varlen_backward evaluates pair by pair in partial tiles. Works inside jit.

    Args:
        mask: Mask in addition to the spec's numbers; why_not_backward_lists must be None.
        spec: Attention of the layer.
        sizes: Sizes of the kernel.
        max_seq_len: Maximum number of tokens per request (static).
    """
    num_heads, dq_sizes = (spec.num_q_heads, spec.num_kv_heads), sizes.dq_sizes
    config = KernelMaskConfig(num_heads, True, True, max_seq_len, KEYS, has_key_rows=True)
    dkv_mask = kernel_mask(mask, config)
    if dq_sizes is None:
        return backward.BackwardMask(dkv_mask, None)
    dq_config = config._replace(tile_kv=dq_sizes.tile_kv, has_key_rows=False)
    return backward.BackwardMask(dkv_mask, kernel_mask(mask, dq_config))


def backward_lists(
    mask: Mask,
    spec: AttentionSpec,
    lens: PackedLens,
    schedule: backward.BackwardSchedule,
    *,
    sizes: backward.BackwardSizes,
    num_tokens: int,
    max_seq_len: int,
) -> backward.BackwardTileLists:
    """Build the tile lists of a step under a mask and the spec. Works inside jit.

    Args:
        mask: Mask in addition to the spec's numbers; why_not_backward_lists must be None.
        spec: Attention of the layer.
        lens: Location of the requests' queries and keys.
        schedule: Schedule with the KV tiles.
        sizes: Sizes of the kernel (static).
        num_tokens: Number of queries including padding (static).
        max_seq_len: Maximum number of tokens per request (static).
    """
    teams = 2 * prefill.WARPGROUP_ROWS // sizes.tile_q
    query_sizes = prefill.PrefillSizes(tile_kv=backward.keys_per_code(sizes), warpgroups=2, teams=teams)
    score = Score(scale=1.0, causal=spec.causal)  # the query tiles do not depend on it
    tiles = prefill.make_schedule(
        *lens, num_tokens=num_tokens, score=score, sizes=query_sizes, has_lists=True
    )
    codes = packed_codes(mask, spec, tiles, query_sizes, TileListConfig(max_seq_len, is_packed=True))
    begins, ends = (tiles.table[:, prefill.COLUMNS.index(name)] for name in ("begin", "end"))
    query_tiles = backward.QueryTiles(tiles.first_tiles, begins, ends)
    lists = backward.make_tile_lists(schedule, query_tiles, codes, kv_heads=spec.num_kv_heads, sizes=sizes)
    if sizes.dq_sizes is None or schedule.dq_schedule is None:
        return lists
    config = TileListConfig(max_seq_len, is_packed=True)
    return lists._replace(dq_lists=tile_lists(mask, spec, schedule.dq_schedule, sizes.dq_sizes, config))
