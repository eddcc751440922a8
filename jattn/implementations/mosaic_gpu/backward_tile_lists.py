"""From a mask to the lists of tiles that varlen_backward walks through."""

import functools
from typing import NamedTuple

import jax

from jattn.implementations.mosaic_gpu.kernel_config import score_of
from jattn.implementations.mosaic_gpu.kernel_masks import Call, kernel_mask, why_not_kernel_mask
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

FEW = BigBird | BlockMask | Chunked | Document | GatheredColumns | LocalStrided | Sinks
KEYS = backward.TILE_KV // backward.WARPGROUPS  # that a mask is asked about at once


class PackedLens(NamedTuple):
    """Where requests stand: arguments of varlen_backward."""

    query_start_loc: jax.Array
    seq_lens: jax.Array
    kv_start_loc: jax.Array


def why_not_backward_lists(mask: Mask, sizes: backward.BackwardSizes) -> str | None:
    """Why varlen_backward cannot serve a mask; None if it can."""
    if any(isinstance(leaf, InterleavedMask) for leaf in leaves(mask)):
        return "there is no kernel for gradients over keys that lie on several devices"
    reason, own = why_not_kernel_mask(mask, KEYS, rows=sizes.tile_q), sizes.dq_sizes
    return reason if reason is not None or own is None else why_not_kernel_mask(mask, own.tile_kv)


def backward_sizes(mask: Mask | None, spec: AttentionSpec, *, mean_len: int) -> backward.BackwardSizes:
    """The sizes of varlen_backward for a layer.

    Args:
        mask: Beyond the spec's numbers; None = nothing is masked.
        spec: The layer.
        mean_len: Queries of a request.
    """
    mean_len = 0 if mask is not None and _leaves_few(mask) else mean_len
    score, deterministic = score_of(spec), spec.deterministic
    return backward.default_layer_sizes(spec.head_dim, score, mean_len=mean_len, deterministic=deterministic)


def _leaves_few(mask: Mask) -> bool:
    """Whether masks of this kind leave a query few of a long request's keys; how many, arrays alone know.

    Columns and slashes, few as they are, lie in most tiles.
    """
    match mask:
        case And():
            return any(map(_leaves_few, mask.masks))
        case Or():
            return all(map(_leaves_few, mask.masks))
        case Window():
            return mask.left is not None
    return isinstance(mask, FEW)


def backward_mask(
    mask: Mask, spec: AttentionSpec, sizes: backward.BackwardSizes, *, max_seq_len: int
) -> backward.BackwardMask:
    """What varlen_backward computes for each pair of a tile that is seen in part. Traced.

    Args:
        mask: Beyond the spec's numbers; why_not_backward_lists is None.
        spec: The layer.
        sizes: The kernel's sizes.
        max_seq_len: Static: bound of the requests' lengths.
    """
    num_heads, own = (spec.num_q_heads, spec.num_kv_heads), sizes.dq_sizes
    of = functools.partial(Call, num_heads, is_prefill=True, is_packed=True, max_seq_len=max_seq_len)
    of_queries = None if own is None else kernel_mask(mask, of(tile_kv=own.tile_kv))
    return backward.BackwardMask(kernel_mask(mask, of(tile_kv=KEYS, has_key_rows=True)), of_queries)


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
    """The lists of a step's tiles of keys under a mask and the spec's numbers. Traced.

    Args:
        mask: Beyond the spec's numbers; why_not_backward_lists is None.
        spec: The layer.
        lens: Where requests stand.
        schedule: The tiles of keys.
        sizes: Static: the kernel's sizes.
        num_tokens: Static: queries, padding included.
        max_seq_len: Static: bound of the requests' lengths.
    """
    teams = 2 * prefill.WARPGROUP_ROWS // sizes.tile_q
    of_queries = prefill.PrefillSizes(tile_kv=backward.keys_per_code(sizes), warpgroups=2, teams=teams)
    score = Score(scale=1.0, causal=spec.causal)  # no number of these is looked at
    tiles = prefill.make_schedule(*lens, num_tokens=num_tokens, score=score, sizes=of_queries, has_lists=True)
    codes = packed_codes(mask, spec, tiles, of_queries, TileListConfig(max_seq_len, is_packed=True))
    column = lambda name: tiles.table[:, prefill.COLUMNS.index(name)]
    query_tiles = backward.QueryTiles(tiles.first_tiles, column("begin"), column("end"))
    lists = backward.make_tile_lists(schedule, query_tiles, codes, kv_heads=spec.num_kv_heads, sizes=sizes)
    if sizes.dq_sizes is None or schedule.dq_schedule is None:
        return lists
    call = TileListConfig(max_seq_len, is_packed=True)
    return lists._replace(dq_lists=tile_lists(mask, spec, schedule.dq_schedule, sizes.dq_sizes, call))
