"""The warpgroups that dequantize an 8-bit cache: one converts keys to 16 bits, one values."""

import functools
from typing import NamedTuple

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.dequant import QUANTIZED_LAYOUT, dequantize
from pallas_kernels.shared.memory import store_unoptimized
from pallas_kernels.shared.paged_kv import COLUMNS_AT_ONCE, load_head_scale
from pallas_kernels.shared.types import Ref, Scalar, Slice, Tile
from pallas_kernels.varlen_prefill.pipeline import KvPipeline, KvStages
from pallas_kernels.varlen_prefill.refs import PrefillBarriers, PrefillInputs, PrefillSmem
from pallas_kernels.varlen_prefill.spec import PrefillSpec
from pallas_kernels.varlen_prefill.tile_scheduler import PrefillTileScheduler, PrefillWorkTile


class DequantizeOperand(NamedTuple):
    """Pipeline stages and scales of the operand that a warpgroup dequantizes: keys or values.

    Attributes:
        source: Stages of 8-bit tiles, which TMA fills.
        target: Stages of 16-bit tiles, which the matrix products read.
        granularity: What has a scale: `QuantizedKV.scales` of the operand.
        scale: `KvRefs.k_scale` or `.v_scale`, in global memory.
        token_scale: `QuantizedKvSmem.k_scale` or `.v_scale`; None without scales per token.
    """

    source: KvStages
    target: KvStages
    granularity: str | None
    scale: Ref
    token_scale: Ref


class Dequantizer:
    """One warpgroup that follows the loading warp through the work tiles and dequantizes keys or values."""

    def __init__(
        self,
        inputs: PrefillInputs,
        smem: PrefillSmem,
        barriers: PrefillBarriers,
        spec: PrefillSpec,
        index: int,
    ):
        """Create the dequantizer of keys (index 0) or of values (1)."""
        self.spec, self.pipeline = spec, KvPipeline(smem, barriers, spec.sizes, 0)
        kv, quantized_s = inputs.kv, smem.quantized
        assert spec.quantized is not None
        assert quantized_s is not None
        self.operand = DequantizeOperand(
            source=self.pipeline.loaded[index],
            target=(self.pipeline.keys, self.pipeline.values)[index],
            granularity=spec.quantized.scales[index],
            scale=(kv.k_scale, kv.v_scale)[index],
            token_scale=(quantized_s.k_scale, quantized_s.v_scale)[index],
        )

    def run(self, scheduler: PrefillTileScheduler) -> None:
        """Dequantize all work tiles of the thread block."""
        rounds, tile_index = scheduler.assignment(0)

        def convert(iteration: Scalar, step: Scalar) -> Scalar:
            work_tile, _ = scheduler.read_to_registers(tile_index(iteration))
            self.dequantize_work_tile(work_tile, step)
            return step + work_tile.num

        steps = lax.fori_loop(0, rounds, convert, rounds * 0)
        if self.spec.is_interpreted:
            self.pipeline.drain_stages(self.operand.target, steps)

    def dequantize_work_tile(self, work_tile: PrefillWorkTile, step: Scalar) -> None:
        """Dequantize all KV tiles of a work tile; `step` is the step of its first KV tile."""
        head, operand = work_tile.kv_head, self.operand
        head_scale = load_head_scale(operand.scale, head) if operand.granularity == "head" else None

        @pl.loop(0, work_tile.num)
        def _(i: Scalar) -> None:
            # Wait for the 8-bit tile, then for a 16-bit stage that the computing warpgroups have read.
            stage = self.pipeline.stage(step + i)
            plgpu.barrier_wait(operand.source.full.at[stage])
            is_reused = step + i >= self.spec.sizes.stages
            pl.when(is_reused)(functools.partial(plgpu.barrier_wait, operand.target.free.at[stage]))
            self.dequantize_stage(head, head_scale, stage)
            # Commit before either stage is passed on: results were wrong when the 8-bit one was released
            # before.
            plgpu.commit_smem()
            plgpu.barrier_arrive(operand.target.full.at[stage])
            plgpu.barrier_arrive(operand.source.free.at[stage])

    def dequantize_stage(self, head: Scalar, head_scale: Scalar | None, stage: Scalar) -> None:
        """Dequantize a stage, COLUMNS_AT_ONCE columns at a time."""
        head_dims, operand = self.spec.shape.head, self.operand

        def apply_scale(x: Tile, columns: tuple[int, Slice]) -> Tile:
            if operand.granularity == "token":
                scale = plgpu.load(
                    operand.token_scale.at[stage], layout=QUANTIZED_LAYOUT.reduce(1), optimized=False
                )
                return x * lax.broadcast_in_dim(scale, x.shape, [0])
            if operand.granularity == "channel":
                channel_scale = operand.scale.at[(head, *columns)]
                scale = plgpu.load(channel_scale, layout=QUANTIZED_LAYOUT.reduce(0), optimized=False)
                return x * lax.broadcast_in_dim(scale, x.shape, [1])
            assert head_scale is not None
            return x * head_scale

        for chunk in range(head_dims.num_chunks):
            for first in range(0, head_dims.width, COLUMNS_AT_ONCE):
                columns = chunk, pl.ds(first, COLUMNS_AT_ONCE)
                index = (stage, chunk, slice(None), columns[1])
                scaled = None
                if operand.granularity is not None:
                    scaled = functools.partial(apply_scale, columns=columns)
                quantized = plgpu.load(operand.source.tiles.at[index], layout=QUANTIZED_LAYOUT)
                tile = dequantize(quantized, self.spec.dtype, scaled)
                store_unoptimized(operand.target.tiles.at[index], tile)
