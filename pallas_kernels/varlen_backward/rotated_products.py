"""The five products of a step in the rotated order: a step's scores begin behind the last dQ and dK."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.head_dims import UNIT
from pallas_kernels.shared.types import Barriers, Ref, Scalar, Tile
from pallas_kernels.varlen_backward.memory import BUFFERS
from pallas_kernels.varlen_backward.products import (
    InterpretedProducts,
    Place,
    Products,
    Sums,
    Units,
    product,
    store_units,
)
from pallas_kernels.varlen_backward.refs import Pipeline, Smem
from pallas_kernels.varlen_backward.scores import Probabilities
from pallas_kernels.varlen_backward.spec import BackwardSpec, W, f32


class RotatedWork(NamedTuple):
    """What a warpgroup does between the products of a step.

    Attributes:
        zero: A 0 that the compiler does not know, anew each step: else it keeps 24 addresses of keys and
            values for the tensor core in registers, which there are none for.
        place: Of the step's dQ.
        clear: Puts zeros into rows of queries, and of gradients of their outputs, that are not the request's.
        probabilities: Of S.
        grad_scores: Of P and dP.
        exchange: Makes gradients of scores, in 16 bits, known to the other warpgroup, and awaits its own.
        add_grad_query: Adds the warpgroup's pieces of dS K to global memory, at a place.
    """

    zero: Scalar
    place: Place
    clear: Callable[[], None]
    probabilities: Callable[[Tile], Probabilities]
    grad_scores: Callable[[Probabilities, Tile], Tile]
    exchange: Callable[[Tile], None]
    add_grad_query: Callable[[Place, Units], None]


class Begun(NamedTuple):
    """An item, of whose last step dV has been added and dS been made: dK and dQ are still to be.

    Attributes:
        sums: But for the last step's dK.
        ds: The last step's gradients of scores, [64, tile_q] in 16 bits.
        place: Of its dQ.
    """

    sums: Sums
    ds: Tile
    place: Place


class RotatedProducts(Products):
    """Of one warpgroup."""

    def __init__(self, smem: Smem, pipeline: Pipeline, wg: Scalar, spec: BackwardSpec):
        super().__init__(smem, wg, spec)
        self.pipeline = pipeline

    def stage(self, step: Scalar) -> Scalar:
        """Where a step's queries are."""
        return lax.rem(step, jnp.int32(self.spec.sizes.stages))

    def buffer(self, step: Scalar) -> Scalar:
        """Where its gradients of scores are."""
        return lax.rem(step, jnp.int32(BUFFERS))

    def start(self, step: Scalar, work: RotatedWork) -> Begun:
        """An item's first step."""

        def products(refs: Any) -> None:
            sum_refs, ds_ref = refs

            def run(s_ref: Ref) -> None:
                self._begin_scores_of(s_ref, step, work)
                ds_ref[...] = self._finish_scores(s_ref, sum_refs, step, work, lambda: None)

            pl.run_scoped(run, plgpu.ACC(self.spec.s_shape, f32))
            work.exchange(ds_ref[...])

        return self._run(products, self.zeros(), step, work)

    def take(self, step: Scalar, work: RotatedWork, begun: Begun) -> Begun:
        """A later one: dQ and dK of the step before, then S, dP and dV, which so follow without a gap.

        dQ leaves while dK and S are in flight, P is made while dP is, dS while dV is.
        """

        def products(refs: Any) -> None:
            sum_refs, ds_ref = refs

            def run(s_ref: Ref) -> None:
                self._finish_step(sum_refs, step - 1, work, begun)
                self._begin_scores_of(s_ref, step, work)
                plgpu.wgmma_wait(self.spec.units)  # dK is there: its operand makes room for dP
                release = lambda: self._release(self.pipeline.q_free, step - 1)
                ds_ref[...] = self._finish_scores(s_ref, sum_refs, step, work, release)

            pl.run_scoped(run, plgpu.ACC(self.spec.s_shape, f32))
            work.exchange(ds_ref[...])

        return self._run(products, begun.sums, step, work)

    def finish(self, step: Scalar, work: RotatedWork, begun: Begun) -> Sums:
        """What is left of an item's last step; `work` may be any step's."""
        rest = lambda refs: self._finish_step(refs, step, work, begun)
        sums = pl.run_state(rest)(_accumulators(begun.sums))
        self._release(self.pipeline.q_free, step)
        return Sums(*(tuple(units) for units in sums))

    def _run(self, products: Callable[[Any], None], sums: Sums, step: Scalar, work: RotatedWork) -> Begun:
        empty = plgpu.layout_cast(jnp.zeros(self.spec.s_shape, self.spec.dtype), W)
        sums, ds = pl.run_state(products)((_accumulators(sums), empty))
        self._release(self.pipeline.do_free, step)
        return Begun(Sums(*(tuple(units) for units in sums)), ds, work.place)

    def _begin_scores_of(self, s_ref: Ref, step: Scalar, work: RotatedWork) -> None:
        stage = self.stage(step)
        plgpu.barrier_wait(self.pipeline.q_full.at[stage])
        self.begin_scores(s_ref, stage, self.wg + work.zero)

    def _finish_scores(
        self, s_ref: Ref, sum_refs: Any, step: Scalar, work: RotatedWork, release: Callable[[], None]
    ) -> Tile:
        """DS of a step whose S is in flight; dV stays in flight."""
        units, stage = self.spec.units, self.stage(step)

        def run(dp_ref: Ref) -> Tile:
            plgpu.barrier_wait(self.pipeline.do_full.at[stage])
            self.begin_grad_p(dp_ref, stage, self.wg + work.zero)
            s = lax.optimization_barrier(plgpu.wgmma_accumulator_load(s_ref, wait_n=units))
            release()
            work.clear()
            of = work.probabilities(s)
            for unit, ref in enumerate(sum_refs.value):
                plgpu.wgmma(ref, of.p, self.smem.grad_out.at[stage, unit])
            dp = lax.optimization_barrier(plgpu.wgmma_accumulator_load(dp_ref, wait_n=units))
            return work.grad_scores(of, dp).astype(self.spec.dtype)

        return pl.run_scoped(run, plgpu.ACC(self.spec.s_shape, f32))

    def _finish_step(self, sum_refs: Any, step: Scalar, work: RotatedWork, begun: Begun) -> None:
        """The dQ of a step, and its dK, which stays in flight."""
        stage, buffer = self.stage(step), self.buffer(step)

        def issue(*dq_refs: Ref) -> Units:
            for piece, ref in enumerate(dq_refs):
                self.begin_grad_query(ref, piece, buffer, work.zero)
            for unit, ref in enumerate(sum_refs.key):
                plgpu.wgmma(ref, begun.ds, self.smem.query.at[stage, unit])
            return tuple(plgpu.wgmma_accumulator_load(ref, wait_n=self.spec.units) for ref in dq_refs)

        dq = pl.run_scoped(issue, *[plgpu.ACC((UNIT, UNIT), f32)] * self.spec.pieces)
        work.add_grad_query(begun.place, tuple(lax.optimization_barrier(dq)))

    def _release(self, free: Barriers, step: Scalar) -> None:
        plgpu.barrier_arrive(free.at[self.stage(step)])


class InterpretedRotatedProducts(RotatedProducts, InterpretedProducts):
    """For interpret mode, which has neither accumulators with a past nor operands in registers."""

    def start(self, step: Scalar, work: RotatedWork) -> Begun:
        """See Products."""
        return self._one_by_one(step, work, self.zeros())

    def take(self, step: Scalar, work: RotatedWork, begun: Begun) -> Begun:
        """See Products."""
        return self._one_by_one(step, work, self.finish(step - 1, work, begun))

    def finish(self, step: Scalar, work: RotatedWork, begun: Begun) -> Sums:
        """See Products."""
        stage, buffer, spec = self.stage(step), self.buffer(step), self.spec
        piece_of = lambda n: product(
            (UNIT, UNIT), lambda ref: self.begin_grad_query(ref, n, buffer, work.zero)
        )
        work.add_grad_query(begun.place, tuple(piece_of(n) for n in range(spec.pieces)))
        ds_s, queries = self.smem.grad_scores.at[buffer, self.wg], self.smem.query.at[stage]
        of_unit = lambda unit, acc: acc + self.of_queries(ds_s, queries, unit)
        keys = tuple(of_unit(unit, acc) for unit, acc in enumerate(begun.sums.key))
        self._release(self.pipeline.q_free, step)
        return Sums(keys, begun.sums.value)

    def _one_by_one(self, step: Scalar, work: RotatedWork, sums: Sums) -> Begun:
        """S, dP and dV of a step."""
        spec, smem, wg, stage = self.spec, self.smem, self.wg, self.stage(step)
        plgpu.barrier_wait(self.pipeline.q_full.at[stage])
        plgpu.barrier_wait(self.pipeline.do_full.at[stage])
        work.clear()
        of = work.probabilities(product(spec.s_shape, lambda ref: self.begin_scores(ref, stage, wg)))
        dp = product(spec.s_shape, lambda ref: self.begin_grad_p(ref, stage, wg))
        store_units(smem.p.at[wg], of.p, spec)
        plgpu.commit_smem()
        of_unit = lambda unit, acc: acc + self.of_queries(smem.p.at[wg], smem.grad_out.at[stage], unit)
        values = tuple(of_unit(unit, acc) for unit, acc in enumerate(sums.value))
        ds = work.grad_scores(of, dp).astype(spec.dtype)
        work.exchange(ds)
        self._release(self.pipeline.do_free, step)
        return Begun(Sums(sums.key, values), ds, work.place)


def _accumulators(sums: Sums) -> Sums:
    return Sums(*(tuple(plgpu.ACC.init(acc) for acc in units) for units in sums))
