"""Parameters of the block patterns: hashable values."""

import dataclasses

from pallas_kernels.checks import require, require_positive


def get_head_sliding_step(n_heads: int, vert_stride: int, homo_head: bool = False) -> int:
    """By how many blocks the vertical stripes of neighbouring heads are shifted.

    Source: vLLM `get_head_sliding_step`.
    """
    return 0 if homo_head else max(1, int(vert_stride / n_heads))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalStrided:
    """Local blocks and every `vert_stride`-th block, the latter shifted from head to head.

    A query of block a and global head h sees block b <= a if `a - b < local_blocks` or
    `(b + shift(h) + 1) % vert_stride == 0`. vert_stride 1 is dense. A row that sees no block at all (only
    possible with local_blocks 0) comes out as zeros.

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
        require_positive(block_size=self.block_size, vert_stride=self.vert_stride, tp_size=self.tp_size)
        require(self.local_blocks >= 0, "local_blocks", "be at least 0", self.local_blocks)
        require(0 <= self.tp_rank < self.tp_size, "tp_rank", f"lie in [0, {self.tp_size})", self.tp_rank)

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

    def head_shifts(self, num_q_heads: int, num_kv_heads: int, *, is_prefill: bool) -> tuple[int, ...]:
        """`shift(h)` for each of this device's query heads."""
        per_q_head = is_prefill and self.vllm_prefill_heads and not self.homo_head
        step = (
            get_head_sliding_step(num_q_heads * self.tp_size, self.vert_stride)
            if per_q_head
            else self.head_sliding_step(num_q_heads, num_kv_heads)
        )
        if step >= 0:
            first, last = self.active_head_range(num_q_heads)
            return tuple(head * step for head in range(first, last))
        first_kv, group = self.tp_rank * num_kv_heads, num_q_heads // num_kv_heads
        return tuple((first_kv + head // group) * -step for head in range(num_q_heads))
