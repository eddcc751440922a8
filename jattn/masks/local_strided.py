"""LocalStrided: the block-sparse pattern of vLLM and Phi-3-small."""

import dataclasses
from typing import Any, override

import jax
import jax.numpy as jnp

from jattn.masks.base import Mask
from jattn.masks.checks import normalize_ints
from jattn.masks.pairs import Coverage, Pairs, Tiles, floor_div, quotient, remainder
from pallas_kernels.checks import require, require_positive, set_bools


def get_head_sliding_step(n_heads: int, vert_stride: int, homo_head: bool = False) -> int:
    """Return the number of blocks by which the vertical stripes of consecutive heads are shifted.

    Source: vLLM `get_head_sliding_step`.
    """
    require_positive(n_heads=n_heads)
    return 0 if homo_head else max(1, int(vert_stride / n_heads))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalStrided(Mask):
    """Local blocks and every `vert_stride`-th block, shifted from head to head.

    A query in block a and global head h attends to block b <= a if `a - b < local_blocks` or
    `(b + shift(h) + 1) % vert_stride == 0`. vert_stride 1 is dense. A query without a visible block (possible
    only with local_blocks 0) has output zero. Within its own block a query also attends to later keys unless
    another mask, such as AttentionSpec.causal, hides them.

    Attributes:
        block_size: Number of tokens per sparse block; independent of the cache's block size.
        local_blocks: Number of blocks up to and including its own that a query attends to.
        vert_stride: Distance between stripes, in blocks.
        homo_head: Whether all heads share one pattern. Takes precedence over homo_head_group.
        homo_head_group: Whether the query heads of one kv head share one pattern.
        tp_rank: Rank of this device among the tensor-parallel devices; heads are counted globally.
        tp_size: Number of tensor-parallel devices.
        vllm_prefill_heads: Whether prefill ignores homo_head_group and shifts per query head, as vLLM does,
            although vLLM's decode shifts per kv head. False is consistent.

    Source: vLLM V0 `BlocksparseParams`, `get_sparse_attn_mask`, and `paged_attention` with block sparsity.
    """

    block_size: int = 64
    local_blocks: int = 16
    vert_stride: int = 8
    homo_head: bool = False
    homo_head_group: bool = False
    tp_rank: int = 0
    tp_size: int = 1
    vllm_prefill_heads: bool = False

    def __post_init__(self) -> None:
        normalize_ints(self, 1, "block_size", "vert_stride", "tp_size")
        normalize_ints(self, 0, "local_blocks", "tp_rank")
        set_bools(self, "homo_head", "homo_head_group", "vllm_prefill_heads")
        require(0 <= self.tp_rank < self.tp_size, "tp_rank", f"lie in [0, {self.tp_size})", self.tp_rank)

    @property
    @override
    def num_heads(self) -> tuple[int | None, int | None]:
        if self.homo_head:
            return 1, 1
        return None, None if self.homo_head_group else 1

    skips_most_tiles = True

    @property
    @override
    def block_shape(self) -> tuple[int | None, int] | None:
        return self.block_size, self.block_size

    @override
    def is_equal_within_groups(self, num_heads: tuple[int, int]) -> bool:
        return self.homo_head_group or super().is_equal_within_groups(num_heads)

    def head_sliding_step(self, num_q_heads: int, num_kv_heads: int) -> int:
        """Return vLLM's head_sliding_step for per-device numbers of heads; negative if in kv heads."""
        if self.homo_head:
            return 0
        if self.homo_head_group:
            return -get_head_sliding_step(num_kv_heads * self.tp_size, self.vert_stride)
        return get_head_sliding_step(num_q_heads * self.tp_size, self.vert_stride)

    def active_head_range(self, num_q_heads: int) -> tuple[int, int]:
        """Return the global indices of this device's first query head, and one past its last."""
        return self.tp_rank * num_q_heads, (self.tp_rank + 1) * num_q_heads

    def head_shifts(self, head: Any, num_q_heads: int, num_kv_heads: int, *, is_prefill: bool) -> Any:
        """Return `shift(h)` for this device's query head or heads `head`: an int or an array."""
        per_q_head = is_prefill and self.vllm_prefill_heads and not self.homo_head
        step = (
            get_head_sliding_step(num_q_heads * self.tp_size, self.vert_stride)
            if per_q_head
            else self.head_sliding_step(num_q_heads, num_kv_heads)
        )
        if step >= 0:
            return (self.tp_rank * num_q_heads + head) * step
        group = num_q_heads // num_kv_heads
        kv_head = head // group if isinstance(head, int) else quotient(head, group)
        return (self.tp_rank * num_kv_heads + kv_head) * -step

    @override
    def visible(self, pairs: Pairs) -> Any:
        a, b = floor_div(pairs.query, self.block_size), quotient(pairs.key, self.block_size)
        shift = self.head_shifts(pairs.head, *pairs.num_heads, is_prefill=pairs.is_prefill)
        is_stripe = remainder(b + shift + 1, self.vert_stride) == 0
        return (b <= a) & ((a - b < self.local_blocks) | is_stripe)

    @override
    def coverage(self, tiles: Tiles) -> Coverage:
        first_a, last_a = (floor_div(x, self.block_size) for x in (tiles.first_query, tiles.last_query))
        first_b, last_b = (quotient(x, self.block_size) for x in (tiles.first_key, tiles.last_key))
        shift = self.head_shifts(tiles.head, *tiles.num_heads, is_prefill=tiles.is_prefill)

        def num_stripes(first: Any, last: Any) -> Any:
            # quotient(b + shift + 1, vert_stride) counts the stripes up to block b, except for a constant.
            end, start = (quotient(b + shift + 1, self.vert_stride) for b in (last, first - 1))
            return end - start

        some_local = (last_a >= first_b) & (first_a - last_b < self.local_blocks)
        if self.local_blocks == 0:
            some_local = some_local & False
        last_past = jnp.minimum(last_b, last_a)
        some_stripe = (last_past >= first_b) & (num_stripes(first_b, jnp.maximum(last_past, first_b)) > 0)
        # Every block that is not local for the last query must be a stripe.
        last_far = jnp.minimum(last_b, last_a - self.local_blocks)
        num_far = last_far - first_b + 1
        all_stripes = (num_far <= 0) | (num_stripes(first_b, jnp.maximum(last_far, first_b)) == num_far)
        return Coverage(some_local | some_stripe, (last_b <= first_a) & all_stripes)
