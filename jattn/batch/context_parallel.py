"""Context parallelism: which keys of a request a rank stores, and in which slots.

Position p is stored on rank `(p // interleave) % size`, as in vLLM's decode context parallelism. A block of
the metadata holds `block_size` positions of a request; each rank stores its share of them under the same
block id, in a cache whose blocks are smaller by the number of ranks.
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
    """Mesh axis over which the keys of each request are distributed, for use inside `jax.shard_map`.

    Attributes:
        axis_name: Name of the mesh axis.
        size: Number of ranks along the axis.
        interleave: Number of consecutive positions per rank: vLLM's cp_kv_cache_interleave_size.
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
        """Number of consecutive positions of which each rank stores `interleave`."""
        return self.size * self.interleave

    @property
    def rank(self) -> Int32[Array, ""]:
        """Index of the current rank. Runs inside shard_map."""
        return jax.lax.axis_index(self.axis_name)

    def num_keys(self, num_positions: Int32[Array, " reqs"]) -> Int32[Array, " reqs"]:
        """Return how many of the first positions of each request this rank stores."""
        return jnp.asarray(get_dcp_local_seq_lens(num_positions, self.size, self.rank, self.interleave))

    def local_block_size(self, block_size: int) -> int:
        """Return the block size on each rank for a block size of the metadata.

        Raises:
            ValueError: If block_size is not a multiple of `round_size`.
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
    """Return the number of keys of each request that a rank stores.

    Args:
        seq_lens: Total number of keys per request. On the host or traced.
        dcp_size: Number of ranks.
        dcp_rank: Rank index, which may be traced; None returns all ranks.
        cp_kv_cache_interleave_size: Number of consecutive positions per rank.

    Returns:
        Number of keys per request, int32 [reqs], or [reqs, ranks] if dcp_rank is None.

    Raises:
        ValueError: If dcp_rank is not in [0, dcp_size), or a size is not a positive int.

    Source: vLLM `get_dcp_local_seq_lens`.
    """
    dcp_size, interleave = require_ranks(dcp_size, cp_kv_cache_interleave_size)
    xp, lens, rank = with_namespace(seq_lens=seq_lens, dcp_rank=dcp_rank)
    require_rank(dcp_rank, dcp_size)
    ranks = xp.arange(dcp_size, dtype=np.int32)[None, :] if rank is None else rank
    lens = lens[:, None] if rank is None else lens
    full_rounds = lens // (interleave * dcp_size) * interleave
    remaining = lens - full_rounds * dcp_size - ranks * interleave
    return (full_rounds + xp.clip(remaining, 0, interleave)).astype(np.int32)


def require_ranks(dcp_size: Any, cp_kv_cache_interleave_size: Any) -> tuple[int, ...]:
    """Return the number of ranks and the interleave size as positive Python ints."""
    sizes = {"dcp_size": dcp_size, "cp_kv_cache_interleave_size": cp_kv_cache_interleave_size}
    plain = python_ints(**sizes)
    require_positive(**sizes)
    return plain


def require_rank(dcp_rank: Any, dcp_size: int) -> None:
    """Check that a rank known to the host is in range; None means all ranks."""
    if dcp_rank is not None and not isinstance(dcp_rank, jax.Array):
        require_shape("dcp_rank", np.shape(dcp_rank), (), "a scalar")
        require(0 <= int(dcp_rank) < dcp_size, "dcp_rank", f"lie in [0, {dcp_size})", dcp_rank)


def slot_mapping_on_rank(metadata: BatchMetadata, ranks: ContextParallelAxis) -> Int32[Array, " tokens"]:
    """Return the slot of each token on this rank; -1 for padding and for tokens that another rank stores.

    Source: vLLM V1 `BlockTable.compute_slot_mapping`.
    """
    local_size = ranks.local_block_size(metadata.block_size)
    slots, interleave = metadata.slot_mapping, ranks.interleave
    block, offset = slots // metadata.block_size, slots % metadata.block_size
    local_offset = offset // ranks.round_size * interleave + offset % interleave
    is_local = (slots >= 0) & (offset // interleave % ranks.size == ranks.rank)
    return jnp.where(is_local, block * local_size + local_offset, PAD_SLOT_ID)


def metadata_on_rank(metadata: BatchMetadata, ranks: ContextParallelAxis) -> BatchMetadata:
    """Return the metadata of the step over the keys that this rank stores contiguously.

    A row without keys on this rank is a padding row. `seq_lens` locates only the last query of a row among
    the local keys.
    """
    return replace(
        metadata,
        seq_lens=ranks.num_keys(metadata.seq_lens),
        slot_mapping=slot_mapping_on_rank(metadata, ranks),
        block_size=ranks.local_block_size(metadata.block_size),
    )
