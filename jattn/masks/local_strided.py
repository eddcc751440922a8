"""LocalStrided: vLLM's block-sparse pattern (Phi-3-small's)."""

import dataclasses
from typing import Any, override

import jax
import jax.numpy as jnp

from jattn.masks.base import Mask
from jattn.masks.checks import normalize_ints
from jattn.masks.pairs import Coverage, Pairs, Tiles, floor_div, quotient, remainder
from jattn.pytree import set_bools
from pallas_kernels.checks import require, require_positive


def get_head_sliding_step(n_heads: int, vert_stride: int, homo_head: bool = False) -> int:
    """By how many blocks the vertical stripes of neighbouring heads are shifted.

    Source: vLLM `get_head_sliding_step`.
    """
    require_positive(n_heads=n_heads)
    return 0 if homo_head else max(1, int(vert_stride / n_heads))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalStrided(Mask):
    """Local blocks and every `vert_stride`-th block, the latter shifted from head to head.

    A query of block a and global head h sees block b <= a if `a - b < local_blocks` or
    `(b + shift(h) + 1) % vert_stride == 0`. vert_stride 1 is dense. A row that sees no block at all (only
    possible with local_blocks 0) comes out as zeros. Within its own block a query sees later keys too unless
    another mask forbids that: AttentionSpec.causal does.

    Attributes:
        block_size: Tokens of a sparse block; any size, whatever the cache's block_size is.
        local_blocks: Blocks before and including its own that a query sees.
        vert_stride: Distance of the stripes.
        homo_head: All heads share one pattern. Wins over homo_head_group.
        homo_head_group: The query heads of one kv head share one pattern.
        tp_rank: This device's place among the tensor-parallel devices: heads are counted globally.
        tp_size: Number of tensor-parallel devices.
        vllm_prefill_heads: vLLM forgets homo_head_group in prefill and there shifts from query head to query
            head, while its decode shifts from kv head to kv head. True does as vLLM did; False is consistent.

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

    def head_sliding_step(self, num_q_heads: int, num_kv_heads: int) -> int:
        """VLLM's head_sliding_step for these per-device head counts; negative = counted in kv heads."""
        if self.homo_head:
            return 0
        if self.homo_head_group:
            return -get_head_sliding_step(num_kv_heads * self.tp_size, self.vert_stride)
        return get_head_sliding_step(num_q_heads * self.tp_size, self.vert_stride)

    def active_head_range(self, num_q_heads: int) -> tuple[int, int]:
        """Global numbers of this device's query heads: first, and one past the last."""
        return self.tp_rank * num_q_heads, (self.tp_rank + 1) * num_q_heads

    def head_shifts(self, head: Any, num_q_heads: int, num_kv_heads: int, *, is_prefill: bool) -> Any:
        """`shift(h)` for some of this device's query heads: an int, or an array of them."""
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
        # Stripes among the blocks up to and with b, but for a constant.
        up_to = lambda b: quotient(b + shift + 1, self.vert_stride)
        stripes = lambda first, last: up_to(last) - up_to(first - 1)
        some_local = (last_a >= first_b) & (first_a - last_b < self.local_blocks)
        if self.local_blocks == 0:
            some_local = some_local & False
        last_past = jnp.minimum(last_b, last_a)
        some_stripe = (last_past >= first_b) & (stripes(first_b, jnp.maximum(last_past, first_b)) > 0)
        # Every block that is not local for the last query must be a stripe.
        last_far = jnp.minimum(last_b, last_a - self.local_blocks)
        num_far = last_far - first_b + 1
        all_stripes = (num_far <= 0) | (stripes(first_b, jnp.maximum(last_far, first_b)) == num_far)
        return Coverage(some_local | some_stripe, (last_b <= first_a) & all_stripes)
