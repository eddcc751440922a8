"""The warpgroups that widen: keys, or values, of 8 bits become what is multiplied."""

import functools
from typing import NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.dequant import QUANTIZED_LAYOUT, dequantize
from pallas_kernels.shared.memory import store_unoptimized
from pallas_kernels.shared.paged_kv import COLUMNS_AT_ONCE
from pallas_kernels.shared.types import Ref, Scalar, Slice, Tile
from pallas_kernels.varlen_prefill.pipeline import KvPipeline, KvStages
from pallas_kernels.varlen_prefill.refs import PrefillBarriers, PrefillInputs, PrefillSmem
from pallas_kernels.varlen_prefill.spec import PrefillSpec
from pallas_kernels.varlen_prefill.tile_scheduler import PrefillTileScheduler, PrefillWorkTile


class DequantizeOperand(NamedTuple):
    """Keys or values on their way from 8 bits.

    Attributes:
        narrow: Where they are.
        wide: Where they go.
        kind: Whose their scales are: see NarrowKV.
        scale: As CacheRefs has it.
        of_tokens: As NarrowKeys has it.
    """

    narrow: KvStages
    wide: KvStages
    kind: str | None
    scale: Ref
    of_tokens: Ref


class Dequantizer:
    """Goes through a thread block's items as its loading warp does, behind it, and widens keys or values."""

    def __init__(
        self, inputs: PrefillInputs, smem: PrefillSmem, pipeline: PrefillBarriers, spec: PrefillSpec, nth: int
    ):
        """Of keys (0) or of values (1)."""
        self.spec, self.ring = spec, KvPipeline(smem, pipeline, spec.sizes, 0)
        cache, narrow_s = inputs.cache, smem.narrow
        assert spec.narrow is not None
        assert narrow_s is not None
        self.of = DequantizeOperand(
            narrow=self.ring.loaded[nth],
            wide=(self.ring.keys, self.ring.values)[nth],
            kind=spec.narrow.scales[nth],
            scale=(cache.k_scale, cache.v_scale)[nth],
            of_tokens=(narrow_s.k_scale, narrow_s.v_scale)[nth],
        )

    def widen_share(self, work: PrefillTileScheduler) -> None:
        """All items of the thread block."""
        rounds, number_of = work.rounds_of(0)

        def widen(nth: Scalar, step: Scalar) -> Scalar:
            item, _ = work.in_registers(number_of(nth))
            self.widen_item(item, step)
            return step + item.num

        steps = lax.fori_loop(0, rounds, widen, rounds * 0)
        if self.spec.is_interpreted:
            self.ring.wait_for(self.of.wide, steps)

    def widen_item(self, item: PrefillWorkTile, step: Scalar) -> None:
        """An item whose first keys are those of `step`."""
        head, of = item.kv_head, self.of
        number = of.scale[head] if of.kind == "head" else None

        @pl.loop(0, item.num)
        def _(i: Scalar) -> None:
            stage = self.ring.stage(step + i)
            plgpu.barrier_wait(of.narrow.full.at[stage])
            has_been_used = step + i >= self.spec.sizes.stages
            pl.when(has_been_used)(functools.partial(plgpu.barrier_wait, of.wide.free.at[stage]))
            self.widen(head, number, stage)
            # Before either stage is passed on: where the narrow one was without it, numbers were wrong.
            plgpu.commit_smem()
            plgpu.barrier_arrive(of.wide.full.at[stage])
            plgpu.barrier_arrive(of.narrow.free.at[stage])

    def widen(self, head: Scalar, number: Scalar | None, stage: Scalar) -> None:
        """A stage, some columns at a time."""
        cut, of = self.spec.shape.cut, self.of

        def scaled(x: Tile, columns: tuple[int, Slice]) -> Tile:
            if of.kind == "token":
                scale = plgpu.load(of.of_tokens.at[stage], layout=QUANTIZED_LAYOUT.reduce(1), optimized=False)
                return x * lax.broadcast_in_dim(scale, x.shape, [0])
            if of.kind == "channel":
                of_columns = of.scale.at[(head, *columns)]
                scale = plgpu.load(of_columns, layout=QUANTIZED_LAYOUT.reduce(0), optimized=False)
                return x * lax.broadcast_in_dim(scale, x.shape, [1])
            assert number is not None
            return x * number

        for chunk in range(cut.num_chunks):
            for first in range(0, cut.width, COLUMNS_AT_ONCE):
                columns = chunk, pl.ds(first, COLUMNS_AT_ONCE)
                here = (stage, chunk, slice(None), columns[1])
                times = None if of.kind is None else functools.partial(scaled, columns=columns)
                tile = dequantize(
                    plgpu.load(of.narrow.tiles.at[here], layout=QUANTIZED_LAYOUT), self.spec.dtype, times
                )
                store_unoptimized(of.wide.tiles.at[here], tile)
