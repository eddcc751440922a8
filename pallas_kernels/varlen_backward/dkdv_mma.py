"""The tensor core's part: five products of a warpgroup's keys and a tile of queries."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.head_dims import UNIT
from pallas_kernels.shared.types import Columns, Ref, Scalar, Tile
from pallas_kernels.varlen_backward.dkdv_scores import TileProbabilities
from pallas_kernels.varlen_backward.refs import DkDvSmem
from pallas_kernels.varlen_backward.sizes import WARPGROUPS
from pallas_kernels.varlen_backward.spec import BackwardSpec, ComputedGrads, StepStages, W, f32

type Units = tuple[Tile, ...]


class DkDvSums(NamedTuple):
    """Gradients of a warpgroup's keys and values so far, a unit of the head each: [64, 64] f32.

    Attributes:
        key: dS^T Q, but for the scale.
        value: P^T dO.
    """

    key: Units
    value: Units


class DqTarget(NamedTuple):
    """Where the gradient of a tile of queries goes: query head and first row."""

    head: Scalar
    row: Scalar


class DkDvCallbacks(NamedTuple):
    """What a warpgroup does between the products of a step.

    Attributes:
        zero: A 0 that the compiler does not know, anew each step: else it keeps 24 addresses of keys and
            values for the tensor core in registers, which there are none for.
        await_queries: Before S.
        await_grad_out: Before dP and stats, which come with it.
        await_last_grad_query: Before the step's own may take its place in shared memory. Long before: all
            threads wait for each other, and here for S anyway.
        stats: What scores are less (0), or gradients of probabilities (1): see Scores.stats.
        probabilities: Of S and stats(0).
        grad_scores: Of P, dP and stats(1).
        exchange: Stores gradients of scores, in 16 bits, once the other warpgroup is done with what they take
            the place of; those that it made a step ago are there then.
        release_grad_out: They have been multiplied.
        add_grad_query: With the warpgroup's pieces of dS K, of the step before.
    """

    zero: Scalar
    await_queries: Callable[[], None]
    await_grad_out: Callable[[], None]
    await_last_grad_query: Callable[[], None]
    stats: Callable[[int], Columns]
    probabilities: Callable[[Tile, Columns], TileProbabilities]
    grad_scores: Callable[[TileProbabilities, Tile, Columns], Tile]
    exchange: Callable[[Tile], None]
    release_grad_out: Callable[[], None]
    add_grad_query: Callable[[Units], None]


class DkDvMma:
    """Of one warpgroup."""

    def __init__(self, smem: DkDvSmem, wg: Scalar, spec: BackwardSpec):
        self.smem, self.wg, self.spec = smem, wg, spec

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

    def step(self, sums: DkDvSums, stages: StepStages, buffer: Scalar, work: DkDvCallbacks) -> DkDvSums:
        """All five of a step, whose tiles are in `stages`; gradients of scores go through `buffer`.

        P is made while dP is in flight, dS while dV is; dQ, of the step before, leaves while dK is.
        """
        wg = self.wg + work.zero
        units = self.spec.units
        queries, grads = self.smem.query.at[stages.query], self.smem.grad_out.at[stages.grad_out]
        early = self.spec.query_units == 1  # those of more queries have no registers while S is made

        def products(sum_refs: Any) -> None:
            def issue(s_ref: Ref, dp_ref: Ref) -> Tile:
                work.await_queries()
                if early:
                    work.await_grad_out()
                    of_scores = work.stats(0)
                self.begin_scores(s_ref, stages.query, wg)
                if not early:
                    work.await_grad_out()
                self.begin_grad_p(dp_ref, stages.grad_out, wg)
                work.await_last_grad_query()
                s = lax.optimization_barrier(plgpu.wgmma_accumulator_load(s_ref, wait_n=units))
                of = work.probabilities(s, of_scores if early else work.stats(0))
                if early:
                    of_grads = work.stats(1)
                for unit, ref in enumerate(sum_refs.value):
                    plgpu.wgmma(ref, of.p, grads.at[unit])
                dp = lax.optimization_barrier(plgpu.wgmma_accumulator_load(dp_ref, wait_n=units))
                return work.grad_scores(of, dp, of_grads if early else work.stats(1)).astype(self.spec.dtype)

            ds = pl.run_scoped(issue, *[plgpu.ACC(self.spec.s_shape, f32)] * 2)
            work.exchange(ds)

            def issue_grads(*dq_refs: Ref) -> Units:
                for piece, ref in enumerate(dq_refs):
                    self.begin_grad_query(ref, piece, 1 - buffer, work.zero)
                for unit, ref in enumerate(sum_refs.key):
                    plgpu.wgmma(ref, ds, queries.at[unit])
                if not dq_refs:
                    plgpu.wgmma_wait(units)
                return tuple(plgpu.wgmma_accumulator_load(ref, wait_n=units) for ref in dq_refs)

            num = self.spec.pieces if self.spec.adds_grad_query else 0
            dq = pl.run_scoped(issue_grads, *[plgpu.ACC((UNIT, UNIT), f32)] * num)
            work.release_grad_out()
            if num:
                work.add_grad_query(tuple(lax.optimization_barrier(dq)))

        start = DkDvSums(*(tuple(plgpu.ACC.init(acc) for acc in units) for units in sums))
        return DkDvSums(*(tuple(units) for units in pl.run_state(products)(start)))

    def grad_query(self, buffer: Scalar, zero: Scalar) -> Units:
        """The warpgroup's pieces of dS K, of the step whose dS is in `buffer`."""
        piece = lambda n: run_mma((UNIT, UNIT), lambda ref: self.begin_grad_query(ref, n, buffer, zero))
        return tuple(piece(n) for n in range(self.spec.pieces))

    def zeros(self) -> DkDvSums:
        """No gradients yet."""
        zero = lambda: plgpu.layout_cast(jnp.zeros((UNIT, UNIT), f32), W)
        zeros = lambda is_made: tuple(zero() for _ in range(self.spec.units if is_made else 0))
        return DkDvSums(*map(zeros, self.spec.makes))


class InterpretedDkDvMma(DkDvMma):
    """For interpret mode, which has neither accumulators with a past nor operands in registers."""

    def step(self, sums: DkDvSums, stages: StepStages, buffer: Scalar, work: DkDvCallbacks) -> DkDvSums:
        """See Products; one after the other."""
        spec, smem, wg = self.spec, self.smem, self.wg
        queries, grads = smem.query.at[stages.query], smem.grad_out.at[stages.grad_out]
        work.await_queries()
        s = run_mma(spec.s_shape, lambda ref: self.begin_scores(ref, stages.query, wg))
        work.await_grad_out()
        of = work.probabilities(s, work.stats(0))
        if spec.makes.value:
            store_units(smem.p.at[wg], of.p, spec)
            plgpu.commit_smem()
        values = tuple(
            acc + self.of_queries(smem.p.at[wg], grads, unit) for unit, acc in enumerate(sums.value)
        )
        if not spec.makes.key:
            work.release_grad_out()
            return DkDvSums((), values)
        dp = run_mma(spec.s_shape, lambda ref: self.begin_grad_p(ref, stages.grad_out, wg))
        ds = work.grad_scores(of, dp, work.stats(1)).astype(spec.dtype)
        work.exchange(ds)
        dq = self.grad_query(1 - buffer, work.zero) if spec.adds_grad_query else ()
        keys = tuple(
            acc + self.of_queries(smem.grad_scores.at[buffer, wg], queries, unit)
            for unit, acc in enumerate(sums.key)
        )
        work.release_grad_out()
        if spec.adds_grad_query:
            work.add_grad_query(dq)
        return DkDvSums(keys, values)

    def of_queries(self, rows_s: Ref, queries_s: Ref, unit: int) -> Tile:
        """[64, tile_q] of SMEM, in units, times a unit of a tile of queries' heads."""

        def begin(ref: Ref) -> None:
            for nth in range(self.spec.query_units):
                plgpu.wgmma(ref, rows_s.at[nth], queries_s.at[unit, pl.ds(nth * UNIT, UNIT)])

        return run_mma((UNIT, UNIT), begin)


def store_units(to_s: Ref, tile: Tile, spec: BackwardSpec) -> None:
    """[64, tile_q] into units of shared memory."""
    for nth in range(spec.query_units):
        to_s[nth] = tile[:, nth * UNIT : (nth + 1) * UNIT]


def run_mma(shape: tuple[int, int], begin: Callable[[Ref], None]) -> Tile:
    """Of operands in shared memory, one after the other: what `begin` adds to an accumulator of 0."""

    def run(ref: Ref) -> Tile:
        begin(ref)
        return ref[...]

    return pl.run_scoped(run, plgpu.ACC(shape, f32))


class DkMma(DkDvMma):
    """S, dP and dK: P is made while dP is in flight."""

    def step(self, sums: DkDvSums, stages: StepStages, buffer: Scalar, work: DkDvCallbacks) -> DkDvSums:
        """See Products."""
        wg, units = self.wg + work.zero, self.spec.units

        def grad_scores(s_ref: Ref, dp_ref: Ref) -> Tile:
            work.await_queries()
            self.begin_scores(s_ref, stages.query, wg)
            work.await_grad_out()
            self.begin_grad_p(dp_ref, stages.grad_out, wg)
            s = lax.optimization_barrier(plgpu.wgmma_accumulator_load(s_ref, wait_n=units))
            of = work.probabilities(s, work.stats(0))
            dp = lax.optimization_barrier(plgpu.wgmma_accumulator_load(dp_ref, wait_n=0))
            ds = work.grad_scores(of, dp, work.stats(1)).astype(self.spec.dtype)
            work.release_grad_out()
            return ds

        ds = pl.run_scoped(grad_scores, *[plgpu.ACC(self.spec.s_shape, f32)] * 2)
        return DkDvSums(self.added(sums.key, ds, self.smem.query.at[stages.query]), ())

    def added(self, sums: tuple[Tile, ...], rows: Tile, queries_s: Ref) -> tuple[Tile, ...]:
        """Sums with `rows` times a tile of queries, or of gradients of their outputs."""

        def products(refs: Any) -> None:
            for unit, ref in enumerate(refs):
                plgpu.wgmma(ref, rows, queries_s.at[unit])

        return tuple(pl.run_state(products)(tuple(plgpu.ACC.init(acc) for acc in sums)))


class DvMma(DkMma):
    """S and dV."""

    def step(self, sums: DkDvSums, stages: StepStages, buffer: Scalar, work: DkDvCallbacks) -> DkDvSums:
        """See Products."""
        wg = self.wg + work.zero

        def scores(s_ref: Ref) -> Tile:
            work.await_queries()
            self.begin_scores(s_ref, stages.query, wg)
            return plgpu.wgmma_accumulator_load(s_ref, wait_n=0)

        s = pl.run_scoped(scores, plgpu.ACC(self.spec.s_shape, f32))
        work.await_grad_out()
        of = work.probabilities(lax.optimization_barrier(s), work.stats(0))
        values = self.added(sums.value, of.p, self.smem.grad_out.at[stages.grad_out])
        work.release_grad_out()
        return DkDvSums((), values)


def mma_class(spec: BackwardSpec) -> type[DkDvMma]:
    """What a kernel multiplies with."""
    if spec.is_interpreted:
        return InterpretedDkDvMma
    if spec.makes == ComputedGrads(key=True, value=True):
        return DkDvMma
    return DkMma if spec.makes.key else DvMma
