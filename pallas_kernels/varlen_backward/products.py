"""The tensor core's part: five products of a warpgroup's keys and a tile of queries."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.head_dims import UNIT
from pallas_kernels.shared.types import Barriers, Ref, Scalar, Tile
from pallas_kernels.varlen_backward.memory import BUFFERS
from pallas_kernels.varlen_backward.refs import Pipeline, Smem
from pallas_kernels.varlen_backward.scores import Probabilities
from pallas_kernels.varlen_backward.sizes import WARPGROUPS
from pallas_kernels.varlen_backward.spec import BackwardSpec, W, f32

type Units = tuple[Tile, ...]


class Sums(NamedTuple):
    """Gradients of a warpgroup's keys and values so far, a unit of the head each: [64, 64] f32.

    Attributes:
        key: dS^T Q, but for the scale.
        value: P^T dO.
    """

    key: Units
    value: Units


class Place(NamedTuple):
    """Where the gradient of a tile of queries goes: query head and first row."""

    head: Scalar
    row: Scalar


class Work(NamedTuple):
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


class Products:
    """Of one warpgroup."""

    def __init__(self, smem: Smem, pipeline: Pipeline, wg: Scalar, spec: BackwardSpec):
        self.smem, self.pipeline, self.wg, self.spec = smem, pipeline, wg, spec

    def begin_scores(self, s_ref: Ref, stage: Scalar, wg: Scalar) -> None:
        """Begins S^T += K Q^T."""
        for unit in range(self.spec.units):
            plgpu.wgmma(s_ref, self.smem.key.at[wg, unit], self.smem.query.at[stage, unit].T)

    def begin_grad_p(self, dp_ref: Ref, stage: Scalar, wg: Scalar) -> None:
        """Begins dP^T += V dO^T."""
        for unit in range(self.spec.units):
            plgpu.wgmma(dp_ref, self.smem.value.at[wg, unit], self.smem.grad_out.at[stage, unit].T)

    def begin_grad_query(self, dq_ref: Ref, piece: int, buffer: Scalar, zero: Scalar) -> None:
        """Begins dQ += dS K: one of the warpgroup's pieces of it, of all keys."""
        query_unit, unit = self.piece(piece)
        for wg in range(WARPGROUPS):
            grad_scores = self.smem.grad_scores.at[buffer, wg, query_unit]
            plgpu.wgmma(dq_ref, grad_scores.T, self.smem.key.at[zero + wg, unit])

    def piece(self, nth: int) -> tuple[Scalar | int, Scalar | int]:
        """Unit of queries and of the head of the warpgroup's n-th piece of dQ."""
        number = self.wg * self.spec.pieces + nth
        if self.spec.query_units == 1:
            return 0, number
        units = jnp.int32(self.spec.units)
        return (number, 0) if self.spec.units == 1 else (lax.div(number, units), lax.rem(number, units))

    def stage(self, step: Scalar) -> Scalar:
        """Where a step's queries are."""
        return lax.rem(step, jnp.int32(self.spec.sizes.stages))

    def buffer(self, step: Scalar) -> Scalar:
        """Where its gradients of scores are."""
        return lax.rem(step, jnp.int32(BUFFERS))

    def start(self, step: Scalar, work: Work) -> Begun:
        """An item's first step."""

        def products(refs: Any) -> None:
            sum_refs, ds_ref = refs

            def run(s_ref: Ref) -> None:
                self._begin_scores_of(s_ref, step, work)
                ds_ref[...] = self._finish_scores(s_ref, sum_refs, step, work, lambda: None)

            pl.run_scoped(run, plgpu.ACC(self.spec.s_shape, f32))
            work.exchange(ds_ref[...])

        return self._run(products, self.zeros(), step, work)

    def take(self, step: Scalar, work: Work, begun: Begun) -> Begun:
        """A later one: dQ and dK of the step before, then S, dP and dV, which so follow without a gap.

        dQ leaves while dK and S are in flight, P is made while dP is, dS while dV is.
        """

        def products(refs: Any) -> None:
            sum_refs, ds_ref = refs

            def run(s_ref: Ref) -> None:
                self._finish_step(sum_refs, step - 1, work, begun)
                if not self.spec.sizes.overlaps:
                    plgpu.wgmma_wait(0)
                self._begin_scores_of(s_ref, step, work)
                plgpu.wgmma_wait(self.spec.units)  # dK is there: its operand makes room for dP
                release = lambda: self._release(self.pipeline.q_free, step - 1)
                ds_ref[...] = self._finish_scores(s_ref, sum_refs, step, work, release)

            pl.run_scoped(run, plgpu.ACC(self.spec.s_shape, f32))
            work.exchange(ds_ref[...])

        return self._run(products, begun.sums, step, work)

    def finish(self, step: Scalar, work: Work, begun: Begun) -> Sums:
        """What is left of an item's last step; `work` may be any step's."""
        rest = lambda refs: self._finish_step(refs, step, work, begun)
        sums = pl.run_state(rest)(_accumulators(begun.sums))
        self._release(self.pipeline.q_free, step)
        return Sums(*(tuple(units) for units in sums))

    def _run(self, products: Callable[[Any], None], sums: Sums, step: Scalar, work: Work) -> Begun:
        empty = plgpu.layout_cast(jnp.zeros(self.spec.s_shape, self.spec.dtype), W)
        sums, ds = pl.run_state(products)((_accumulators(sums), empty))
        self._release(self.pipeline.do_free, step)
        return Begun(Sums(*(tuple(units) for units in sums)), ds, work.place)

    def _begin_scores_of(self, s_ref: Ref, step: Scalar, work: Work) -> None:
        stage = self.stage(step)
        plgpu.barrier_wait(self.pipeline.q_full.at[stage])
        self.begin_scores(s_ref, stage, self.wg + work.zero)

    def _finish_scores(
        self, s_ref: Ref, sum_refs: Any, step: Scalar, work: Work, release: Callable[[], None]
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

    def _finish_step(self, sum_refs: Any, step: Scalar, work: Work, begun: Begun) -> None:
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

    def zeros(self) -> Sums:
        """No gradients yet."""
        zero = lambda: plgpu.layout_cast(jnp.zeros((UNIT, UNIT), f32), W)
        return Sums(*(tuple(zero() for _ in range(self.spec.units)) for _ in range(2)))


class InterpretedProducts(Products):
    """For interpret mode, which has neither accumulators with a past nor operands in registers."""

    def start(self, step: Scalar, work: Work) -> Begun:
        """See Products."""
        return self._one_by_one(step, work, self.zeros())

    def take(self, step: Scalar, work: Work, begun: Begun) -> Begun:
        """See Products."""
        return self._one_by_one(step, work, self.finish(step - 1, work, begun))

    def finish(self, step: Scalar, work: Work, begun: Begun) -> Sums:
        """See Products."""
        stage, buffer, spec = self.stage(step), self.buffer(step), self.spec
        piece_of = lambda n: _product(
            (UNIT, UNIT), lambda ref: self.begin_grad_query(ref, n, buffer, work.zero)
        )
        work.add_grad_query(begun.place, tuple(piece_of(n) for n in range(spec.pieces)))
        ds_s, queries = self.smem.grad_scores.at[buffer, self.wg], self.smem.query.at[stage]
        of_unit = lambda unit, acc: acc + self._of_queries(ds_s, queries, unit)
        keys = tuple(of_unit(unit, acc) for unit, acc in enumerate(begun.sums.key))
        self._release(self.pipeline.q_free, step)
        return Sums(keys, begun.sums.value)

    def _one_by_one(self, step: Scalar, work: Work, sums: Sums) -> Begun:
        """S, dP and dV of a step."""
        spec, smem, wg, stage = self.spec, self.smem, self.wg, self.stage(step)
        plgpu.barrier_wait(self.pipeline.q_full.at[stage])
        plgpu.barrier_wait(self.pipeline.do_full.at[stage])
        work.clear()
        of = work.probabilities(_product(spec.s_shape, lambda ref: self.begin_scores(ref, stage, wg)))
        dp = _product(spec.s_shape, lambda ref: self.begin_grad_p(ref, stage, wg))
        store_units(smem.p.at[wg], of.p, spec)
        plgpu.commit_smem()
        of_unit = lambda unit, acc: acc + self._of_queries(smem.p.at[wg], smem.grad_out.at[stage], unit)
        values = tuple(of_unit(unit, acc) for unit, acc in enumerate(sums.value))
        ds = work.grad_scores(of, dp).astype(spec.dtype)
        work.exchange(ds)
        self._release(self.pipeline.do_free, step)
        return Begun(Sums(sums.key, values), ds, work.place)

    def _of_queries(self, rows_s: Ref, queries_s: Ref, unit: int) -> Tile:
        """[64, tile_q] of SMEM, in units, times a unit of a tile of queries' heads."""

        def begin(ref: Ref) -> None:
            for nth in range(self.spec.query_units):
                plgpu.wgmma(ref, rows_s.at[nth], queries_s.at[unit, pl.ds(nth * UNIT, UNIT)])

        return _product((UNIT, UNIT), begin)


def store_units(to_s: Ref, tile: Tile, spec: BackwardSpec) -> None:
    """[64, tile_q] into units of shared memory."""
    for nth in range(spec.query_units):
        to_s[nth] = tile[:, nth * UNIT : (nth + 1) * UNIT]


def _accumulators(sums: Sums) -> Sums:
    return Sums(*(tuple(plgpu.ACC.init(acc) for acc in units) for units in sums))


def _product(shape: tuple[int, int], begin: Callable[[Ref], None]) -> Tile:
    def run(ref: Ref) -> Tile:
        begin(ref)
        return ref[...]

    return pl.run_scoped(run, plgpu.ACC(shape, f32))
