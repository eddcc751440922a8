"""The static description that one dk/dv kernel is compiled from."""

import dataclasses
import itertools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.shared.layouts import WARPGROUP_ROWS
from pallas_kernels.shared.memory import PANEL, HeadChunks, head_chunks
from pallas_kernels.shared.score import Score
from pallas_kernels.shared.types import Index, Interpret, Scalar, Slice
from pallas_kernels.varlen_backward.refs import NUM_ROW_STATS
from pallas_kernels.varlen_backward.sizes import WARPGROUPS, BackwardSizes

# Buffers for dS in shared memory: one warpgroup may be a step ahead of the other.
DS_BUFFERS = 2


def head_panels(head_dim: int) -> HeadChunks:
    """Return the chunks of a head for wgmma, each one panel (64 elements) wide in shared memory."""
    if head_dim % PANEL == 0:
        return HeadChunks(head_dim // PANEL, PANEL, PANEL, head_dim, is_padded=False)
    return head_chunks(head_dim)


class ComputedGrads(NamedTuple):
    """Which of dk and dv a kernel computes."""

    dk: bool
    dv: bool

    @property
    def suffix(self) -> str:
        """Suffix of the kernel's name."""
        return "" if self.dk and self.dv else "_keys" if self.dk else "_values"


class QueryStages(NamedTuple):
    """Indices of the pipeline stages that hold the tiles of a step.

    Attributes:
        query: Index of the stage that holds the queries.
        dout: Index of the stage that holds their dO and row statistics.
    """

    query: Scalar
    dout: Scalar


@dataclasses.dataclass(frozen=True, kw_only=True)
class DkDvSpec:
    """Static description of one dk/dv kernel.

    Attributes:
        kv_heads: Number of KV heads.
        group: Query heads per KV head.
        head: Division of a head: into panels (`head_panels`) or, with per_warp_mma, into chunks
            (`head_chunks`).
        score: Scale, soft cap, causality, window and chunk size of the layer.
        sizes: Tile sizes of the kernel.
        dtype: Dtype of queries, keys, values and the gradient of the output.
        computes: Which of dk and dv the kernel computes.
        has_alibi: Whether scores have an ALiBi bias.
        has_lists: Whether work tiles follow tile lists, instead of all query tiles that `score` leaves
            visible.
        list_block_size: Number of queries per list entry if several entries fill a tile; None if an entry is
            a tile.
        interpret: Interpret-mode parameters, or None for a GPU.
    """

    kv_heads: int
    group: int
    head: HeadChunks
    score: Score
    sizes: BackwardSizes
    dtype: np.dtype
    computes: ComputedGrads
    has_alibi: bool
    has_lists: bool
    list_block_size: int | None = None
    interpret: Interpret = None

    @property
    def grad_heads(self) -> int:
        """Number of heads of the outputs: one per KV head and split of its lists."""
        return self.kv_heads * self.sizes.list_splits

    @property
    def is_interpreted(self) -> bool:
        """Whether the kernel runs in interpret mode: no register operands, running accumulators, TMA adds."""
        return bool(self.interpret)

    @property
    def adds_dq(self) -> bool:
        """Whether this kernel adds up dq; otherwise the dq kernel computes it."""
        return self.sizes.dq_sizes is None

    @property
    def dout_stages(self) -> int:
        """Number of pipeline stages of dO.

        For heads of 256, keys, values and two query tiles leave shared memory for one more tile. The kernel
        that computes only dk reads dO once, early in a step, so one stage of dO is enough.
        """
        only_dk = self.computes == ComputedGrads(dk=True, dv=False)
        return 1 if self.num_head_panels > 3 and only_dk else self.sizes.stages

    def step_stages(self, step: Scalar, team: Scalar | int) -> QueryStages:
        """Return the indices of the stages that hold the queries and dO of a team's step."""
        stages, dout_stages = self.sizes.stages, self.dout_stages
        if self.sizes.teams == 1:
            return QueryStages(lax.rem(step, jnp.int32(stages)), lax.rem(step, jnp.int32(dout_stages)))
        stage = team * stages + (step & (stages - 1))  # BackwardSizes allows teams two or four stages.
        return QueryStages(stage, stage)

    @property
    def num_head_panels(self) -> int:
        """Number of panels per head."""
        return self.head.num_chunks

    @property
    def run_length(self) -> int:
        """Number of consecutive queries in a tile: all of them, or the queries of a list entry."""
        return self.list_block_size or self.sizes.tile_q

    @property
    def runs_per_tile(self) -> int:
        """Number of runs of consecutive queries, which are the entries of a list, in a tile."""
        return self.sizes.tile_q // self.run_length

    @property
    def copies_per_tile(self) -> int:
        """Number of TMA copies that load a tile of queries, or of dO."""
        return self.num_head_panels * self.runs_per_tile

    @property
    def row_stats_copies(self) -> tuple[tuple[Slice, int], ...]:
        """The statistics and the run of each TMA copy that loads the row statistics of a tile.

        A tile of one run takes one copy. With several runs, only one statistic of a run is contiguous in
        shared memory.
        """
        if self.runs_per_tile == 1:
            return ((pl.ds(0, NUM_ROW_STATS), 0),)
        return tuple(itertools.product(range(NUM_ROW_STATS), range(self.runs_per_tile)))

    @property
    def has_warpgroup_bits(self) -> bool:
        """Whether list entries say which warpgroup needs a tile.

        This holds only for kernels that do not add up dq: for dq, a warpgroup that skips a tile would have to
        wait for the other one. Warpgroups with their own work tiles have their own lists.
        """
        return self.has_lists and not self.adds_dq and self.sizes.team_size > 1

    @property
    def s_shape(self) -> tuple[int, int]:
        """Shape of a warpgroup's transposed scores: its keys and a tile of queries."""
        return WARPGROUP_ROWS, self.sizes.tile_q

    @property
    def num_query_panels(self) -> int:
        """Number of panels per query tile."""
        return self.sizes.tile_q // PANEL

    @property
    def num_dq_blocks(self) -> int:
        """Number of [64, 64] blocks of a query tile's dQ that each warpgroup computes."""
        return self.num_query_panels * self.num_head_panels // WARPGROUPS

    def gmem_panel_index(self, panel: int, zero: Scalar) -> Index:
        """Return the last indices of a head in global memory that select one panel.

        Args:
            panel: Index of the panel. Static.
            zero: A traced int32 0.
        """
        return self.head.gmem_index(panel, zero) if self.head.is_padded else (pl.ds(panel * PANEL, PANEL),)
