"""The ring of keys and values where there is room for more tiles of keys than of values."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.types import Scalar
from pallas_kernels.varlen_prefill.pipeline import KvPipeline, KvStages
from pallas_kernels.varlen_prefill.refs import PrefillBarriers, PrefillSmem
from pallas_kernels.varlen_prefill.spec import PrefillSpec


def has_wide_heads(spec: PrefillSpec) -> bool:
    """Heads of 192 and 256."""
    return spec.shape.cut.padded_dim > 128


def num_value_stages(spec: PrefillSpec) -> int:
    """Tiles of values in shared memory: one beside two of keys where heads are of 256.

    Values are read once, by dP; keys by S and, while the next tile's S is made, by dQ.
    """
    return 1 if spec.shape.cut.padded_dim > 192 else spec.sizes.stages


class DqKvPipeline(KvPipeline):
    """A team's stages, those of values counted for themselves."""

    def __init__(self, smem: PrefillSmem, pipeline: PrefillBarriers, spec: PrefillSpec):
        super().__init__(smem, pipeline, spec.sizes, 0)
        self.num_values = num_value_stages(spec)

    def value_stage(self, step: Scalar) -> Scalar:
        """Where the values of a step are."""
        if self.num_values == self.sizes.stages:
            return self.stage(step)
        return lax.rem(step, jnp.int32(self.num_values))

    def stages(self, step: Scalar) -> tuple[tuple[KvStages, Scalar, int], ...]:
        """Of keys and of values: the stream, where it has those of a step, and how many stages it has."""
        return (
            (self.keys, self.stage(step), self.sizes.stages),
            (self.values, self.value_stage(step), self.num_values),
        )

    def skip(self, step: Scalar, first: Scalar, end: Scalar) -> None:
        """See Ring."""

        @pl.loop(first, end)
        def _(i: Scalar) -> None:
            for stream, stage, _ in self.stages(step + i):
                plgpu.barrier_wait(stream.full.at[stage])
                plgpu.barrier_arrive(stream.free.at[stage])

    def wait_until_read(self, steps: Scalar) -> None:
        """See Ring."""
        for nth, num in enumerate((self.sizes.stages, self.num_values)):

            @pl.loop(jnp.maximum(steps - num, 0), steps)
            def _(step: Scalar, nth: int = nth) -> None:
                stream, stage, _ = self.stages(step)[nth]
                plgpu.barrier_wait(stream.free.at[stage])
