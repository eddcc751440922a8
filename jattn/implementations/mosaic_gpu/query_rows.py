"""Query heads that share a mask of blocks, as rows of one head.

A tile has 64 rows of queries and visits the keys that any of them attends to: if the mask differs from token
to token, as in native sparse attention, 64 tokens attend to most keys. So the queries of several heads become
consecutive rows of each token: [tokens, heads, head_dim] to
[tokens * rows_per_token, heads / rows_per_token, head_dim]. With Score.rows_per_token the kernel masks each
row by the position of its token.
"""

import functools
import operator
from typing import Any

from jaxtyping import Array, Shaped

from jattn.masks import BlockMask, Mask
from jattn.masks.base import factors
from jattn.pytree import replace
from jattn.spec import AttentionSpec
from pallas_kernels.list_tiles import MAX_TILES
from pallas_kernels.varlen_backward import MIN_TEAM_QUERIES
from pallas_kernels.varlen_prefill import LIST_BLOCK_SIZES, WARPGROUP_ROWS, max_tiles


def num_rows_per_token(mask: Mask, spec: AttentionSpec, *, num_tokens: int, num_reqs: int) -> int:
    """Return how many query heads of a KV head, which share a mask, to take as rows of one head.

    It is the largest power of two with which the rows of a block of queries fit in a tile. It is 1 for masks
    that are not of blocks, for blocks of so few keys that queries attend to a part of most tiles, and for
    fewer rows per block than make a difference.

    Args:
        mask: Mask in addition to the spec's window, chunk size and causality.
        spec: Attention of the layer.
        num_tokens: Number of queries of all requests, including padding.
        num_reqs: Number of requests.
    """
    blocks = [factor for factor in factors(mask) if isinstance(factor, BlockMask)]
    block_sizes = [block.block_q for block in blocks if block.block_q is not None]
    if len(blocks) < len(factors(mask)) or not block_sizes:
        return 1
    if min(block.block_kv for block in blocks) < min(LIST_BLOCK_SIZES):
        return 1
    rows = 1
    while (
        2 * rows * min(block_sizes) <= WARPGROUP_ROWS
        and share_mask(mask, spec, 2 * rows)
        and max_tiles(num_tokens * 2 * rows, num_reqs, WARPGROUP_ROWS) <= MAX_TILES
    ):
        rows *= 2
    return rows if rows * min(block_sizes) >= MIN_TEAM_QUERIES else 1


def share_mask(mask: Mask, spec: AttentionSpec, num_heads: int) -> bool:
    """Return whether every `num_heads` consecutive query heads belong to one KV head and share a mask."""
    q_heads = spec.num_q_heads
    is_in_group = spec.q_heads_per_kv_head % num_heads == 0
    return is_in_group and mask.is_equal_within_groups((q_heads, q_heads // num_heads))


def mask_of_rows(mask: Mask, rows_per_token: int) -> Mask:
    """Return a mask of blocks whose positions of queries count rows."""
    if rows_per_token == 1:
        return mask

    def scaled(block: Any) -> Mask:
        return block if block.block_q is None else replace(block, block_q=block.block_q * rows_per_token)

    return functools.reduce(operator.and_, map(scaled, factors(mask)))


def heads_to_rows(
    x: Shaped[Array, "tokens heads *head_dim"], rows_per_token: int
) -> Shaped[Array, "rows head_groups *head_dim"]:
    """Return an array of heads as rows."""
    if rows_per_token == 1:
        return x
    tokens, heads, *head_dim = x.shape
    x = x.reshape(tokens, heads // rows_per_token, rows_per_token, *head_dim)
    return x.swapaxes(1, 2).reshape(tokens * rows_per_token, heads // rows_per_token, *head_dim)


def rows_to_heads(
    x: Shaped[Array, "rows head_groups *head_dim"], rows_per_token: int
) -> Shaped[Array, "tokens heads *head_dim"]:
    """Return an array of rows as heads; the inverse of heads_to_rows."""
    if rows_per_token == 1:
        return x
    rows, groups, *head_dim = x.shape
    x = x.reshape(rows // rows_per_token, rows_per_token, groups, *head_dim)
    return x.swapaxes(1, 2).reshape(rows // rows_per_token, groups * rows_per_token, *head_dim)
