"""Buffers and barriers between the warps that load and the warpgroups that compute or dequantize."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.types import Barriers, Ref, Scalar
from pallas_kernels.varlen_prefill.refs import PrefillBarriers, PrefillSmem
from pallas_kernels.varlen_prefill.sizes import PrefillSizes


class KvStages(NamedTuple):
    """A circular buffer of key tiles or value tiles.

    Attributes:
        tiles: Tiles [stages, chunks, tile_kv, width] in shared memory.
        full: Barriers that complete when a stage has been filled.
        free: Barriers that complete when a stage has been read.
    """

    tiles: Ref
    full: Barriers
    free: Barriers


class KvPipeline:
    """The pipeline stages of a team. A **step** is one KV tile, counted over all work tiles of the team.

    Attributes:
        keys: Stages of 16-bit keys, which the matrix products read.
        values: Stages of 16-bit values, which the matrix products read.
        loaded: Stages that TMA fills: `keys` and `values`, or the stages of 8-bit keys and values.
    """

    def __init__(self, smem: PrefillSmem, barriers: PrefillBarriers, sizes: PrefillSizes, team: Scalar | int):
        self.keys = KvStages(smem.k, barriers.k_full, barriers.k_free)
        self.values = KvStages(smem.v, barriers.v_full, barriers.v_free)
        self.loaded = self.keys, self.values
        quantized_s, quantized = smem.quantized, barriers.quantized
        if quantized_s is not None and quantized is not None:
            self.loaded = (
                KvStages(quantized_s.k, quantized.k_full, quantized.k_free),
                KvStages(quantized_s.v, quantized.v_full, quantized.v_free),
            )
        self.sizes, self.team = sizes, team

    def stage(self, step: Scalar) -> Scalar:
        """Return the index of the stage that holds the keys and values of a step."""
        # Matrix products are issued after this: a remainder costs up to 1 % with tile lists.
        stages = self.sizes.stages
        stage = step & (stages - 1) if stages & (stages - 1) == 0 else lax.rem(step, jnp.int32(stages))
        return stage if self.sizes.teams == 1 else stage + self.team * stages

    def skip(self, step: Scalar, first: Scalar, end: Scalar) -> None:
        """Release the KV tiles [first, end) of a work tile without reading them.

        Args:
            step: Step of the work tile's first KV tile.
            first: Index of the first KV tile to skip.
            end: One past the index of the last KV tile to skip.
        """

        @pl.loop(first, end)
        def _(i: Scalar) -> None:
            stage = self.stage(step + i)
            for stages in (self.keys, self.values):
                plgpu.barrier_wait(stages.full.at[stage])
                plgpu.barrier_arrive(stages.free.at[stage])

    def drain(self, steps: Scalar) -> None:
        """Wait until all tiles of the `steps` steps of the team have been read.

        Only interpret mode needs this, because it requires that every barrier completion is awaited.
        """
        for stages in self.loaded:
            self.drain_stages(stages, steps)

    def drain_stages(self, stages: KvStages, steps: Scalar) -> None:
        """Wait until `stages` have been read; see `drain`."""

        @pl.loop(jnp.maximum(steps - self.sizes.stages, 0), steps)
        def _(step: Scalar) -> None:
            plgpu.barrier_wait(stages.free.at[self.stage(step)])


class QueryBuffers:
    """A warpgroup's buffers for the queries, outputs and schedule rows of work tiles.

    `iteration` is the number of work tiles that the team processed before.
    """

    def __init__(self, smem: PrefillSmem, barriers: PrefillBarriers, sizes: PrefillSizes, wg: Scalar | int):
        self.query, self.out, self.columns = (ref.at[wg] for ref in (smem.query, smem.out, smem.tile_columns))
        self.full, self.free = barriers.q_full, barriers.q_free
        self.num, self.wg = sizes.query_buffers, wg

    def buffer(self, iteration: Scalar) -> Scalar:
        """Return the index of the buffer that a work tile uses."""
        return lax.rem(iteration, jnp.int32(self.num))

    def barrier(self, buffer: Scalar) -> Scalar:
        """Return the index of a buffer's barriers."""
        return self.wg * self.num + buffer

    def release(self, iteration: Scalar) -> None:
        """Wait until a work tile's output is in global memory, then release its buffer."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(self.free.at[self.barrier(self.buffer(iteration))])
