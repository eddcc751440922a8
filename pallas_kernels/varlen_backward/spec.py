"""What is static about one backward kernel: what it is compiled for."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.head_dims import UNIT, HeadChunks, head_chunks
from pallas_kernels.shared.score import Score
from pallas_kernels.shared.types import Index, Interpret, Scalar
from pallas_kernels.varlen_backward.sizes import WARPGROUPS, BackwardSizes
from pallas_kernels.varlen_prefill import KernelMask

W = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)
COLUMN = plgpu.Layout.WGMMA.reduce(0)
f32 = jnp.float32
# Buffers for dS in shared memory: one warpgroup may be a step ahead of the other.
DS_BUFFERS = 2


def head_units(head_dim: int) -> HeadChunks:
    """The cut of a head into chunks that are a unit wide in shared memory."""
    return HeadChunks(head_dim // UNIT, UNIT, UNIT) if head_dim % UNIT == 0 else head_chunks(head_dim)


class ComputedGrads(NamedTuple):
    """Which gradients a kernel makes, beside that of queries."""

    key: bool
    value: bool

    @property
    def suffix(self) -> str:
        """Of the kernel's name."""
        return "" if self.key and self.value else "_keys" if self.key else "_values"


class StepStages(NamedTuple):
    """Where a step's queries and the gradients of their outputs are; traced."""

    query: Scalar
    grad_out: Scalar


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardSpec:
    """One kernel.

    Attributes:
        kv_heads: Kv heads.
        group: Query heads of a kv head.
        cut: The cut of head_dim: units_of's.
        score: The layer.
        sizes: The kernel's sizes.
        dtype: Of queries, keys, values and the gradient of the output.
        makes: Which sums the kernel makes, of keys and of values.
        has_alibi: Scores have a bias.
        has_lists: Items walk through lists of tiles, not through all that the score's mask leaves.
        mask: Which keys a query sees besides, in tiles that are listed as seen in part; here its functions.
        interpret: Interpret-mode parameters, or None for a GPU.
    """

    kv_heads: int
    group: int
    cut: HeadChunks
    score: Score
    sizes: BackwardSizes
    dtype: np.dtype
    makes: ComputedGrads
    has_alibi: bool
    has_lists: bool
    mask: KernelMask | None
    interpret: Interpret = None

    @property
    def is_interpreted(self) -> bool:
        """There are no operands in registers, no accumulators with a past and no additions by TMA."""
        return bool(self.interpret)

    @property
    def adds_grad_query(self) -> bool:
        """The gradient of queries is added up on the way; else another kernel makes it."""
        return self.sizes.dq_sizes is None

    @property
    def grad_out_stages(self) -> int:
        """Steps whose gradient of the output is in shared memory.

        Heads of 256 fill it with keys, values and two tiles of queries but for one such tile, which without
        a gradient of values is read once, early in a step.
        """
        return (
            1 if self.units > 3 and self.makes == ComputedGrads(key=True, value=False) else self.sizes.stages
        )

    def stages_of(self, step: Scalar) -> StepStages:
        """Where a step's tiles are."""
        of = lambda num: lax.rem(step, jnp.int32(num))
        return StepStages(of(self.sizes.stages), of(self.grad_out_stages))

    @property
    def units(self) -> int:
        """Chunks of a head."""
        return self.cut.num_chunks

    @property
    def has_parts(self) -> bool:
        """A list says of each warpgroup whether a tile is for it: for dQ one would wait for the other."""
        return self.has_lists and not self.adds_grad_query

    @property
    def s_shape(self) -> tuple[int, int]:
        """A warpgroup's scores: its keys and a tile of queries."""
        return UNIT, self.sizes.tile_q

    @property
    def query_units(self) -> int:
        """Units of a tile of queries."""
        return self.sizes.tile_q // UNIT

    @property
    def pieces(self) -> int:
        """Units of the gradient of a tile of queries that a warpgroup adds up."""
        return self.query_units * self.units // WARPGROUPS

    def at_unit(self, unit: int, zero: Scalar) -> Index:
        """The last indices of a token's head in global memory: a unit, as wide as in shared memory.

        Args:
            unit: Static.
            zero: A traced int32 0.
        """
        return self.cut.gmem_index(unit, zero) if self.cut.is_padded else (pl.ds(unit * UNIT, UNIT),)
