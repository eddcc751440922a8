"""What warps that load and warpgroups that compute or widen hand each other, and the barriers in between."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.types import Barriers, Ref, Scalar
from pallas_kernels.varlen_prefill.refs import PrefillBarriers, PrefillSmem
from pallas_kernels.varlen_prefill.sizes import PrefillSizes


class KvStages(NamedTuple):
    """Keys or values on their way: a ring of stages.

    Attributes:
        tiles: [stages, chunks, tile_kv, width] in SMEM.
        full: A stage has been filled.
        free: A stage has been read.
    """

    tiles: Ref
    full: Barriers
    free: Barriers


class KvPipeline:
    """The stages of a team: step i, of all tiles of keys that the team loads, is in one of them.

    Attributes:
        keys: What is multiplied.
        values: Likewise.
        loaded: What TMA fills: these two, or the same in 8 bits.
    """

    def __init__(self, smem: PrefillSmem, pipeline: PrefillBarriers, sizes: PrefillSizes, team: Scalar | int):
        self.keys = KvStages(smem.k, pipeline.k_full, pipeline.k_free)
        self.values = KvStages(smem.v, pipeline.v_full, pipeline.v_free)
        self.loaded = self.keys, self.values
        narrow_s, narrow = smem.narrow, pipeline.narrow
        if narrow_s is not None and narrow is not None:
            self.loaded = (
                KvStages(narrow_s.k, narrow.k_full, narrow.k_free),
                KvStages(narrow_s.v, narrow.v_full, narrow.v_free),
            )
        self.sizes, self.team = sizes, team

    def stage(self, step: Scalar) -> Scalar:
        """Where the keys and values of a step are."""
        # Products are issued after this: a remainder costs up to 1 % over lists (sparse-variants).
        stages = self.sizes.stages
        stage = step & (stages - 1) if stages & (stages - 1) == 0 else lax.rem(step, jnp.int32(stages))
        return stage if self.sizes.teams == 1 else stage + self.team * stages

    def skip(self, step: Scalar, first: Scalar, end: Scalar) -> None:
        """Lets tiles [first, end) of an item pass, whose first keys are those of `step`."""

        @pl.loop(first, end)
        def _(i: Scalar) -> None:
            stage = self.stage(step + i)
            for stream in (self.keys, self.values):
                plgpu.barrier_wait(stream.full.at[stage])
                plgpu.barrier_arrive(stream.free.at[stage])

    def wait_until_read(self, steps: Scalar) -> None:
        """Waits for the last loaded stages of so many steps: interpret mode insists that all are awaited."""
        for stream in self.loaded:
            self.wait_for(stream, steps)

    def wait_for(self, stream: KvStages, steps: Scalar) -> None:
        """The same of one stream."""

        @pl.loop(jnp.maximum(steps - self.sizes.stages, 0), steps)
        def _(step: Scalar) -> None:
            plgpu.barrier_wait(stream.free.at[self.stage(step)])


class QueryBuffers:
    """The buffers of a warpgroup: queries and columns of its team's n-th item, in their place its output."""

    def __init__(self, smem: PrefillSmem, pipeline: PrefillBarriers, sizes: PrefillSizes, wg: Scalar | int):
        self.query, self.out, self.columns = (ref.at[wg] for ref in (smem.query, smem.out, smem.items))
        self.full, self.free = pipeline.q_full, pipeline.q_free
        self.num, self.wg = sizes.query_buffers, wg

    def buffer(self, nth: Scalar) -> Scalar:
        """Which buffer the n-th item has."""
        return lax.rem(nth, jnp.int32(self.num))

    def barrier(self, buffer: Scalar) -> Scalar:
        """Which barrier a buffer has."""
        return self.wg * self.num + buffer

    def release(self, nth: Scalar) -> None:
        """Gives the buffer of the n-th item back, when its output has left."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(self.free.at[self.barrier(self.buffer(nth))])
