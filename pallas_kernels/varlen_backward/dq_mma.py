"""The tensor core's part in gradients of queries: three products of a warpgroup's rows and a tile of keys."""

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
    """Of a warpgroup's item in shared memory, [chunks, 64, width] each."""

    query: Ref
    grad_out: Ref


class DqState(NamedTuple):
    """Gradients of queries so far.

    Attributes:
        sums: dS K but for the last tile's and for the scale: a chunk of a head each.
        ds: The last tile's gradients of scores, in 16 bits.
    """

    sums: tuple[Tile, ...]
    ds: Tile


class DqCallbacks(NamedTuple):
    """What a warpgroup does between the products of a tile.

    Attributes:
        await_keys: Before S.
        stored: What the mask has stored of the tile: beside the products.
        weights: Of S and that.
        grad_scores: Of these and dP.
    """

    await_keys: Callable[[], None]
    stored: Callable[[], LoadedMask]
    weights: Callable[[Tile, LoadedMask], Tile]
    grad_scores: Callable[[Tile, Tile], Tile]


class DqMma:
    """Of one warpgroup."""

    def __init__(self, ring: DqKvPipeline, ds_s: Ref, spec: PrefillSpec):
        """With [64, tile_kv] of shared memory for gradients of scores where nothing multiplies registers."""
        self.ring, self.ds_s, self.spec = ring, ds_s, spec

    @property
    def chunks(self) -> int:
        """Products that one of whole heads is made of."""
        return self.spec.shape.cut.num_chunks

    def begin_scores(self, s_ref: Ref, rows: DqOperands, stage: Scalar) -> None:
        """Begins S += Q K^T."""
        for chunk in range(self.chunks):
            plgpu.wgmma(s_ref, rows.query.at[chunk], self.ring.keys.tiles.at[stage, chunk].T)

    def begin_grad_p(self, dp_ref: Ref, rows: DqOperands, stage: Scalar) -> None:
        """Begins dP += dO V^T."""
        for chunk in range(self.chunks):
            plgpu.wgmma(dp_ref, rows.grad_out.at[chunk], self.ring.values.tiles.at[stage, chunk].T)

    def begin_grad_query(self, sum_refs: Any, ds: Tile, stage: Scalar) -> None:
        """Begins dQ += dS K."""
        for chunk, ref in enumerate(sum_refs):
            plgpu.wgmma(ref, ds, self.ring.keys.tiles.at[stage, chunk])

    def start(self, rows: DqOperands, step: Scalar, work: DqCallbacks) -> DqState:
        """An item's first tile, whose keys are those of `step`."""
        ds = self._scores(rows, step, work, in_flight=0, between=lambda: None)
        zeros = lambda: plgpu.layout_cast(jnp.zeros(self.spec.acc_shape, f32), W)
        return DqState(tuple(zeros() for _ in range(self.chunks)), ds.astype(self.spec.dtype))

    def take(self, rows: DqOperands, step: Scalar, work: DqCallbacks, state: DqState) -> DqState:
        """A later tile, beside dQ of the tile before: P is made while dP is in flight, dS while dQ is."""
        before = self.ring.stage(step - 1)

        def products(refs: Any) -> None:
            sum_refs, ds_ref = refs
            between = lambda: self.begin_grad_query(sum_refs, state.ds, before)
            ds_ref[...] = self._scores(rows, step, work, in_flight=self.chunks, between=between)

        start = tuple(plgpu.ACC.init(acc) for acc in state.sums)
        # In f32 till the products are done, which read the registers of the last ones in 16 bits.
        empty = plgpu.layout_cast(jnp.zeros(self.spec.s_shape, f32), W)
        sums, ds = pl.run_state(products)((start, empty))
        plgpu.barrier_arrive(self.ring.keys.free.at[before])
        return DqState(tuple(sums), ds.astype(self.spec.dtype))

    def finish(self, step: Scalar, state: DqState) -> tuple[Tile, ...]:
        """With the last tile's part, whose keys are those of `step`."""
        stage = self.ring.stage(step)
        issue = lambda refs: self.begin_grad_query(refs, state.ds, stage)
        sums = tuple(pl.run_state(issue)(tuple(plgpu.ACC.init(acc) for acc in state.sums)))
        plgpu.barrier_arrive(self.ring.keys.free.at[stage])
        return sums

    def _scores(
        self,
        rows: DqOperands,
        step: Scalar,
        work: DqCallbacks,
        *,
        in_flight: int,
        between: Callable[[], None],
    ) -> Tile:
        """DS of a tile; `between` issues `in_flight` products that nobody waits for."""
        stage, values, of_values = self.ring.stage(step), self.ring.values, self.ring.value_stage(step)
        work.await_keys()

        def issue(s_ref: Ref, dp_ref: Ref) -> Tile:
            self.begin_scores(s_ref, rows, stage)
            plgpu.barrier_wait(values.full.at[of_values])
            self.begin_grad_p(dp_ref, rows, of_values)
            between()
            stored = work.stored()
            s = plgpu.wgmma_accumulator_load(s_ref, wait_n=self.chunks + in_flight)
            weights = work.weights(lax.optimization_barrier(s), stored)
            dp = lax.optimization_barrier(plgpu.wgmma_accumulator_load(dp_ref, wait_n=in_flight))
            plgpu.barrier_arrive(values.free.at[of_values])
            return work.grad_scores(weights, dp)

        return pl.run_scoped(issue, *[plgpu.ACC(self.spec.s_shape, f32)] * 2)


class WideDqMma(DqMma):
    """For heads of 256, whose sums leave no registers for a tile's dS beside the next one's S and dP."""

    def take(self, rows: DqOperands, step: Scalar, work: DqCallbacks, state: DqState) -> DqState:
        """See QueryProducts; dQ of the tile before is done before S begins."""
        sums = self.finish(step - 1, state)
        ds = self._scores(rows, step, work, in_flight=0, between=lambda: None)
        return DqState(sums, ds.astype(self.spec.dtype))


def mma_class(spec: PrefillSpec) -> type[DqMma]:
    """What the kernel multiplies with."""
    if spec.is_interpreted:
        return InterpretedDqMma
    return WideDqMma if spec.shape.cut.padded_dim > 192 else DqMma


class InterpretedDqMma(DqMma):
    """For interpret mode, which has neither accumulators with a past nor operands in registers."""

    def start(self, rows: DqOperands, step: Scalar, work: DqCallbacks) -> DqState:
        """See QueryProducts."""
        zeros = lambda: plgpu.layout_cast(jnp.zeros(self.spec.acc_shape, f32), W)
        return self._one_by_one(rows, step, work, tuple(zeros() for _ in range(self.chunks)))

    def take(self, rows: DqOperands, step: Scalar, work: DqCallbacks, state: DqState) -> DqState:
        """See QueryProducts; one after the other."""
        return self._one_by_one(rows, step, work, self.finish(step - 1, state))

    def finish(self, step: Scalar, state: DqState) -> tuple[Tile, ...]:
        """See QueryProducts."""
        stage, keys = self.ring.stage(step), self.ring.keys
        self.ds_s[...] = state.ds
        plgpu.commit_smem()
        of_chunk = lambda chunk: run_mma(
            self.spec.acc_shape, lambda ref: plgpu.wgmma(ref, self.ds_s, keys.tiles.at[stage, chunk])
        )
        sums = tuple(acc + of_chunk(chunk) for chunk, acc in enumerate(state.sums))
        plgpu.barrier_arrive(keys.free.at[stage])
        return sums

    def _one_by_one(
        self, rows: DqOperands, step: Scalar, work: DqCallbacks, sums: tuple[Tile, ...]
    ) -> DqState:
        stage, values, shape = self.ring.stage(step), self.ring.values, self.spec.s_shape
        of_values = self.ring.value_stage(step)
        work.await_keys()
        s = run_mma(shape, lambda ref: self.begin_scores(ref, rows, stage))
        weights = work.weights(s, work.stored())
        plgpu.barrier_wait(values.full.at[of_values])
        grad_p = run_mma(shape, lambda ref: self.begin_grad_p(ref, rows, of_values))
        plgpu.barrier_arrive(values.free.at[of_values])
        return DqState(sums, work.grad_scores(weights, grad_p).astype(self.spec.dtype))
