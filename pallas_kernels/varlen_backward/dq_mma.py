"""Matrix products of the dq kernel: three per warpgroup and KV tile."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.types import Ref, Scalar, Tile
from pallas_kernels.varlen_backward.dkdv_mma import run_mma
from pallas_kernels.varlen_backward.dq_loader import DqKvPipeline
from pallas_kernels.varlen_prefill.kernel_mask import LoadedMask
from pallas_kernels.varlen_prefill.spec import PrefillSpec, W, f32


class DqOperands(NamedTuple):
    """A warpgroup's queries and dO in shared memory, [chunks, 64, width] each."""

    query: Ref
    dout: Ref


class DqState(NamedTuple):
    """State of a warpgroup between two KV tiles.

    Attributes:
        sums: Sum of dS K over all tiles before the last one, without the softmax scale; one per chunk.
        ds: Score gradients of the last tile in 16 bits.
    """

    sums: tuple[Tile, ...]
    ds: Tile


class DqCallbacks(NamedTuple):
    """Functions that a warpgroup calls between the matrix products of a tile.

    Attributes:
        wait_for_keys: Function that waits for the keys. Call it before issuing S.
        load_mask: Function that loads the mask's data. Call it while products are in flight.
        weights: Function that returns the weights (see DqScores.weights) from S and the mask's data.
        score_grads: Function that returns dS from the weights and dP.
    """

    wait_for_keys: Callable[[], None]
    load_mask: Callable[[], LoadedMask]
    weights: Callable[[Tile, LoadedMask], Tile]
    score_grads: Callable[[Tile, Tile], Tile]


class DqMma:
    """Matrix products of one warpgroup."""

    def __init__(self, pipeline: DqKvPipeline, ds_s: Ref, spec: PrefillSpec):
        """Create the matrix products of a warpgroup.

        Args:
            pipeline: Pipeline of keys and values.
            ds_s: Shared memory for dS [64, tile_kv] in interpret mode, else None.
            spec: Static description of the kernel.
        """
        self.pipeline, self.ds_s, self.spec = pipeline, ds_s, spec

    @property
    def num_chunks(self) -> int:
        """Number of chunks per head; each chunk is a separate wgmma operand."""
        return self.spec.shape.head.num_chunks

    def issue_scores(self, s_ref: Ref, operands: DqOperands, stage: Scalar) -> None:
        """Issue S += Q K^T."""
        for chunk in range(self.num_chunks):
            plgpu.wgmma(s_ref, operands.query.at[chunk], self.pipeline.keys.tiles.at[stage, chunk].T)

    def issue_dp(self, dp_ref: Ref, operands: DqOperands, stage: Scalar) -> None:
        """Issue dP += dO V^T."""
        for chunk in range(self.num_chunks):
            plgpu.wgmma(dp_ref, operands.dout.at[chunk], self.pipeline.values.tiles.at[stage, chunk].T)

    def issue_dq(self, acc_refs: Any, ds: Tile, stage: Scalar) -> None:
        """Issue dQ += dS K."""
        for chunk, ref in enumerate(acc_refs):
            plgpu.wgmma(ref, ds, self.pipeline.keys.tiles.at[stage, chunk])

    def first_step(self, operands: DqOperands, step: Scalar, callbacks: DqCallbacks) -> DqState:
        """Compute dS of a work tile's first KV tile, which `step` loaded."""
        ds = self._score_grads(operands, step, callbacks, in_flight=0, issue_more=lambda: None)
        sums = tuple(
            plgpu.layout_cast(jnp.zeros(self.spec.acc_shape, f32), W) for _ in range(self.num_chunks)
        )
        return DqState(sums, ds.astype(self.spec.dtype))

    def step(self, operands: DqOperands, step: Scalar, callbacks: DqCallbacks, state: DqState) -> DqState:
        """Compute dS of a further KV tile and, at the same time, dQ of the previous one.

        The warpgroup computes P while dP is in flight, and dS while dQ is in flight.
        """
        previous = self.pipeline.stage(step - 1)

        def compute_ds_and_dq(refs: Any) -> None:
            acc_refs, ds_ref = refs
            ds_ref[...] = self._score_grads(
                operands,
                step,
                callbacks,
                in_flight=self.num_chunks,
                issue_more=lambda: self.issue_dq(acc_refs, state.ds, previous),
            )

        start = tuple(plgpu.ACC.init(acc) for acc in state.sums)
        # dS stays in f32 until the products are complete: they read the registers of the previous one in 16
        # bits.
        empty = plgpu.layout_cast(jnp.zeros(self.spec.s_shape, f32), W)
        sums, ds = pl.run_state(compute_ds_and_dq)((start, empty))
        # dQ of the previous tile is complete, so its keys have been read for the last time.
        plgpu.barrier_arrive(self.pipeline.keys.free.at[previous])
        return DqState(tuple(sums), ds.astype(self.spec.dtype))

    def finish(self, step: Scalar, state: DqState) -> tuple[Tile, ...]:
        """Add dS K of the last tile, which `step` loaded, and return the sums."""
        stage = self.pipeline.stage(step)
        add_dq = pl.run_state(lambda refs: self.issue_dq(refs, state.ds, stage))
        sums = tuple(add_dq(tuple(plgpu.ACC.init(acc) for acc in state.sums)))
        plgpu.barrier_arrive(self.pipeline.keys.free.at[stage])
        return sums

    def _score_grads(
        self,
        operands: DqOperands,
        step: Scalar,
        callbacks: DqCallbacks,
        *,
        in_flight: int,
        issue_more: Callable[[], None],
    ) -> Tile:
        """Return dS of a tile; `issue_more` issues `in_flight` more products, which stay in flight."""
        stage, values = self.pipeline.stage(step), self.pipeline.values
        value_stage = self.pipeline.value_stage(step)
        callbacks.wait_for_keys()

        def issue(s_ref: Ref, dp_ref: Ref) -> Tile:
            # S first, so that it runs while the values are awaited.
            self.issue_scores(s_ref, operands, stage)
            plgpu.barrier_wait(values.full.at[value_stage])
            self.issue_dp(dp_ref, operands, value_stage)
            issue_more()
            loaded = callbacks.load_mask()
            s = plgpu.wgmma_accumulator_load(s_ref, wait_n=self.num_chunks + in_flight)
            weights = callbacks.weights(lax.optimization_barrier(s), loaded)
            dp = lax.optimization_barrier(plgpu.wgmma_accumulator_load(dp_ref, wait_n=in_flight))
            # dP is complete: the loading warp may refill the stage of the values.
            plgpu.barrier_arrive(values.free.at[value_stage])
            return callbacks.score_grads(weights, dp)

        return pl.run_scoped(issue, *[plgpu.ACC(self.spec.s_shape, f32)] * 2)


class WideDqMma(DqMma):
    """Matrix products for heads of 256, which leave no registers for dS while S and dP are in flight."""

    def step(self, operands: DqOperands, step: Scalar, callbacks: DqCallbacks, state: DqState) -> DqState:
        """Compute dQ of the previous tile, and after that dS of a further KV tile."""
        sums = self.finish(step - 1, state)
        ds = self._score_grads(operands, step, callbacks, in_flight=0, issue_more=lambda: None)
        return DqState(sums, ds.astype(self.spec.dtype))


def mma_class(spec: PrefillSpec) -> type[DqMma]:
    """Return the DqMma class for the head size and mode of `spec`."""
    if spec.is_interpreted:
        return InterpretedDqMma
    return WideDqMma if spec.shape.head.padded_dim > 192 else DqMma


class InterpretedDqMma(DqMma):
    """Matrix products in interpret mode, which has no running accumulators and no register operands."""

    def first_step(self, operands: DqOperands, step: Scalar, callbacks: DqCallbacks) -> DqState:
        """Compute dS of a work tile's first KV tile, one product after the other."""
        sums = tuple(
            plgpu.layout_cast(jnp.zeros(self.spec.acc_shape, f32), W) for _ in range(self.num_chunks)
        )
        return self._sequential_step(operands, step, callbacks, sums)

    def step(self, operands: DqOperands, step: Scalar, callbacks: DqCallbacks, state: DqState) -> DqState:
        """Compute dQ of the previous tile, then dS of a further KV tile, one product after the other."""
        return self._sequential_step(operands, step, callbacks, self.finish(step - 1, state))

    def finish(self, step: Scalar, state: DqState) -> tuple[Tile, ...]:
        """Add dS K of the last tile, with dS stored in shared memory."""
        stage, keys = self.pipeline.stage(step), self.pipeline.keys
        self.ds_s[...] = state.ds
        plgpu.commit_smem()

        def product(chunk: int) -> Tile:
            return run_mma(
                self.spec.acc_shape, lambda ref: plgpu.wgmma(ref, self.ds_s, keys.tiles.at[stage, chunk])
            )

        sums = tuple(acc + product(chunk) for chunk, acc in enumerate(state.sums))
        plgpu.barrier_arrive(keys.free.at[stage])
        return sums

    def _sequential_step(
        self, operands: DqOperands, step: Scalar, callbacks: DqCallbacks, sums: tuple[Tile, ...]
    ) -> DqState:
        stage, values, shape = self.pipeline.stage(step), self.pipeline.values, self.spec.s_shape
        value_stage = self.pipeline.value_stage(step)
        callbacks.wait_for_keys()
        s = run_mma(shape, lambda ref: self.issue_scores(ref, operands, stage))
        weights = callbacks.weights(s, callbacks.load_mask())
        plgpu.barrier_wait(values.full.at[value_stage])
        dp = run_mma(shape, lambda ref: self.issue_dp(ref, operands, value_stage))
        plgpu.barrier_arrive(values.free.at[value_stage])
        return DqState(sums, callbacks.score_grads(weights, dp).astype(self.spec.dtype))
