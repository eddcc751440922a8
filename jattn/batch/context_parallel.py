"""Keys of a request on several ranks: what one of them stores, and where.

Position p is stored on rank `(p // interleave) % size`, as vLLM's decode context parallelism has it. A block
of the metadata stands for `block_size` positions of a request; each rank holds its share of them under the
block's own id, in a cache whose blocks are so much smaller.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from jattn.batch.int_arrays import AnyArray, IntLike, IntVector, python_ints, with_namespace
from jattn.batch.metadata import BatchMetadata
from jattn.batch.slots import PAD_SLOT_ID
from jattn.pytree import replace
from pallas_kernels.checks import require, require_positive, require_shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextParallelAxis:
    """The devices that the keys of each request lie on, inside `jax.shard_map`.

    Attributes:
        axis_name: The axis of the mesh that they lie along.
        size: How many they are.
        interleave: Neighbouring positions that stay together: vLLM's cp_kv_cache_interleave_size.
    """

    axis_name: str
    size: int
    interleave: int = 1

    def __post_init__(self) -> None:
        sizes = {"size": self.size, "cp_kv_cache_interleave_size": self.interleave}
        for name, size in zip(("size", "interleave"), python_ints(**sizes), strict=True):
            object.__setattr__(self, name, size)
        require_positive(**sizes)

    @property
    def round_size(self) -> int:
        """Neighbouring positions of which each rank has `interleave`: any so many, wherever they begin."""
        return self.size * self.interleave

    @property
    def rank(self) -> Int32[Array, ""]:
        """The one that runs this. Traced, inside shard_map."""
        return jax.lax.axis_index(self.axis_name)

    def num_keys(self, num_positions: Int32[Array, " reqs"]) -> Int32[Array, " reqs"]:
        """How many of the first positions of each request this rank stores."""
        return jnp.asarray(get_dcp_local_seq_lens(num_positions, self.size, self.rank, self.interleave))

    def local_block_size(self, block_size: int) -> int:
        """Tokens of a block on each rank, of so many on all of them.

        Raises:
            ValueError: They do not fall into whole rounds.
        """
        rule = f"be a multiple of {self.size} ranks x cp_kv_cache_interleave_size ({self.interleave})"
        require(block_size % self.round_size == 0, "block_size", rule, block_size)
        return block_size // self.size


def get_dcp_local_seq_lens(
    seq_lens: IntVector,
    dcp_size: int = 1,
    dcp_rank: IntLike | None = None,
    cp_kv_cache_interleave_size: int = 1,
) -> Int32[AnyArray, " reqs"] | Int32[AnyArray, "reqs ranks"]:
    """How many keys of each request a rank stores.

    Args:
        seq_lens: Keys of each request on all ranks together. Host or traced.
        dcp_size: Number of ranks.
        dcp_rank: The rank, which may be traced; None = all of them, also when there is only one.
        cp_kv_cache_interleave_size: Neighbouring positions that stay together.

    Returns:
        One number per request, or one column per rank when dcp_rank is None.

    Raises:
        ValueError: dcp_rank is none of the ranks, or a size is no positive int.

    Source: vLLM `get_dcp_local_seq_lens`.
    """
    dcp_size, interleave = checked_ranks(dcp_size, cp_kv_cache_interleave_size)
    xp, lens, rank = with_namespace(seq_lens=seq_lens, dcp_rank=dcp_rank)
    require_rank(dcp_rank, dcp_size)
    ranks = xp.arange(dcp_size, dtype=np.int32)[None, :] if rank is None else rank
    lens = lens[:, None] if rank is None else lens
    full_rounds = lens // (interleave * dcp_size) * interleave
    rest = lens - full_rounds * dcp_size - ranks * interleave
    return (full_rounds + xp.clip(rest, 0, interleave)).astype(np.int32)


def checked_ranks(dcp_size: Any, cp_kv_cache_interleave_size: Any) -> tuple[int, ...]:
    """Both as Python's, positive ints: with others lengths and slots come out as of no rank."""
    sizes = {"dcp_size": dcp_size, "cp_kv_cache_interleave_size": cp_kv_cache_interleave_size}
    plain = python_ints(**sizes)
    require_positive(**sizes)
    return plain


def require_rank(dcp_rank: Any, dcp_size: int) -> None:
    """It must be one of the ranks, as far as the host knows it; None = all of them."""
    if dcp_rank is not None and not isinstance(dcp_rank, jax.Array):
        require_shape("dcp_rank", np.shape(dcp_rank), (), "one rank")
        require(0 <= int(dcp_rank) < dcp_size, "dcp_rank", f"lie in [0, {dcp_size})", dcp_rank)


def slot_mapping_on_rank(metadata: BatchMetadata, ranks: ContextParallelAxis) -> Int32[Array, " tokens"]:
    """Where this rank writes each token of a step: -1 for tokens that another one stores, and for padding.

    Source: vLLM V1 `BlockTable.compute_slot_mapping`.
    """
    local_size = ranks.local_block_size(metadata.block_size)
    slots, interleave = metadata.slot_mapping, ranks.interleave
    block, offset = slots // metadata.block_size, slots % metadata.block_size
    local_offset = offset // ranks.round_size * interleave + offset % interleave
    is_mine = (slots >= 0) & (offset // interleave % ranks.size == ranks.rank)
    return jnp.where(is_mine, block * local_size + local_offset, PAD_SLOT_ID)


def metadata_on_rank(metadata: BatchMetadata, ranks: ContextParallelAxis) -> BatchMetadata:
    """The step over the keys that this rank stores, which stand close together there.

    A row of which it stores none is a padding row. Where a query stands among such keys says `seq_lens` for
    the last one of its row alone.
    """
    return replace(
        metadata,
        seq_lens=ranks.num_keys(metadata.seq_lens),
        slot_mapping=slot_mapping_on_rank(metadata, ranks),
        block_size=ranks.local_block_size(metadata.block_size),
    )
