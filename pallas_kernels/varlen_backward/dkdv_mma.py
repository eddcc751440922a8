"""Matrix products of the dk/dv kernel: up to five per warpgroup, for its keys and a tile of queries."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.head_dims import PANEL
from pallas_kernels.shared.types import Columns, Ref, Scalar, Tile
from pallas_kernels.varlen_backward.dkdv_scores import TileProbabilities
from pallas_kernels.varlen_backward.refs import DkDvSmem
from pallas_kernels.varlen_backward.sizes import WARPGROUPS
from pallas_kernels.varlen_backward.spec import BackwardSpec, ComputedGrads, StepStages, W, f32

type Panels = tuple[Tile, ...]


class DkDvSums(NamedTuple):
    """Accumulated gradients of a warpgroup's keys and values, one f32 [64, 64] tile per panel of the head.

    Attributes:
        dk: dS^T Q without the scale.
        dv: P^T dO.
    """

    dk: Panels
    dv: Panels


class DqTarget(NamedTuple):
    """Destination of a query tile's dq: query head and first row."""

    head: Scalar
    row: Scalar


class DkDvCallbacks(NamedTuple):
    """What a warpgroup does between the matrix products of a step.

    Attributes:
        zero: A 0 that the compiler does not know, read anew each step. Otherwise it keeps 24 addresses of
            keys and values for the tensor core in registers, of which there are not enough.
        wait_for_queries: Waits for the queries; called before S.
        wait_for_dout: Waits for dO and the row statistics, which arrive together; called before dP.
        wait_for_dq_buffer: Waits until the previous dq has left shared memory. Called long before it is
            needed: all threads wait for each other there, as they do for S anyway.
        row_stats: `row_stats(0)` is the LSE, `row_stats(1)` delta; see DkDvScores.row_stats.
        probabilities: Returns P from S and the LSE.
        score_grads: Returns dS from P, dP and delta.
        exchange_ds: Stores dS in 16 bits, after the other warpgroup has read what it replaces; the dS of the
            previous step is then complete.
        release_dout: Releases the stage of dO after its last product.
        add_dq: Function that adds the warpgroup's blocks of the previous step's dQ = dS K to global memory.
    """

    zero: Scalar
    wait_for_queries: Callable[[], None]
    wait_for_dout: Callable[[], None]
    wait_for_dq_buffer: Callable[[], None]
    row_stats: Callable[[int], Columns]
    probabilities: Callable[[Tile, Columns], TileProbabilities]
    score_grads: Callable[[TileProbabilities, Tile, Columns], Tile]
    exchange_ds: Callable[[Tile], None]
    release_dout: Callable[[], None]
    add_dq: Callable[[Panels], None]


class DkDvMma:
    """The matrix products of one warpgroup that computes dk, dv and, if it is added up, dq."""

    def __init__(self, smem: DkDvSmem, wg: Scalar, spec: BackwardSpec):
        self.smem, self.wg, self.spec = smem, wg, spec

    def issue_scores(self, s_ref: Ref, stage: Scalar, wg: Scalar) -> None:
        """Issue S^T += K Q^T."""
        for panel in range(self.spec.num_head_panels):
            plgpu.wgmma(s_ref, self.smem.key.at[wg, panel], self.smem.query.at[stage, panel].T)

    def issue_dp(self, dp_ref: Ref, stage: Scalar, wg: Scalar) -> None:
        """Issue dP^T += V dO^T."""
        for panel in range(self.spec.num_head_panels):
            plgpu.wgmma(dp_ref, self.smem.value.at[wg, panel], self.smem.dout.at[stage, panel].T)

    def issue_dq(self, dq_ref: Ref, index: int, buffer: Scalar, zero: Scalar) -> None:
        """Issue dQ += dS K for the warpgroup's dQ block `index`, over the keys of both warpgroups."""
        query_panel, panel = self.dq_block_indices(index)
        for wg in range(WARPGROUPS):
            ds = self.smem.ds.at[buffer, wg, query_panel]
            plgpu.wgmma(dq_ref, ds.T, self.smem.key.at[zero + wg, panel])

    def dq_block_indices(self, index: int) -> tuple[Scalar | int, Scalar | int]:
        """Return the (query panel, head panel) of the warpgroup's dQ block `index`, which is [64, 64]."""
        number = self.wg * self.spec.num_dq_blocks + index
        if self.spec.num_query_panels == 1:
            return 0, number
        panels = jnp.int32(self.spec.num_head_panels)
        return (
            (number, 0)
            if self.spec.num_head_panels == 1
            else (lax.div(number, panels), lax.rem(number, panels))
        )

    def step(self, sums: DkDvSums, stages: StepStages, buffer: Scalar, callbacks: DkDvCallbacks) -> DkDvSums:
        """Compute all products of a step.

        P is computed while dP is in flight, and dS while dV is. dQ belongs to the previous step and leaves
        while dK is in flight.

        Args:
            sums: Accumulated dk and dv.
            stages: Stages of the step's tiles.
            buffer: Buffer for the step's dS.
            callbacks: What happens between the products.
        """
        wg = self.wg + callbacks.zero
        panels = self.spec.num_head_panels
        queries, dout = self.smem.query.at[stages.query], self.smem.dout.at[stages.dout]
        # Load the row statistics early, so that the loads do not wait for the products; tiles of more queries
        # have no registers for them while S is computed.
        early = self.spec.num_query_panels == 1

        def run(sum_refs: Any) -> None:
            def issue(s_ref: Ref, dp_ref: Ref) -> Tile:
                callbacks.wait_for_queries()
                if early:
                    callbacks.wait_for_dout()
                    lse = callbacks.row_stats(0)
                self.issue_scores(s_ref, stages.query, wg)
                if not early:
                    callbacks.wait_for_dout()
                self.issue_dp(dp_ref, stages.dout, wg)
                callbacks.wait_for_dq_buffer()
                # Wait for S but not for dP: P is computed meanwhile.
                s = lax.optimization_barrier(plgpu.wgmma_accumulator_load(s_ref, wait_n=panels))
                probabilities = callbacks.probabilities(s, lse if early else callbacks.row_stats(0))
                if early:
                    delta = callbacks.row_stats(1)
                for panel, ref in enumerate(sum_refs.dv):
                    plgpu.wgmma(ref, probabilities.p, dout.at[panel])
                # Wait for dP but not for dV: dS is computed meanwhile.
                dp = lax.optimization_barrier(plgpu.wgmma_accumulator_load(dp_ref, wait_n=panels))
                delta = delta if early else callbacks.row_stats(1)
                return callbacks.score_grads(probabilities, dp, delta).astype(self.spec.dtype)

            ds = pl.run_scoped(issue, *[plgpu.ACC(self.spec.s_shape, f32)] * 2)
            callbacks.exchange_ds(ds)

            def issue_grads(*dq_refs: Ref) -> Panels:
                # The previous step's dQ first, so that it can leave while dK is in flight.
                for index, ref in enumerate(dq_refs):
                    self.issue_dq(ref, index, 1 - buffer, callbacks.zero)
                for panel, ref in enumerate(sum_refs.dk):
                    plgpu.wgmma(ref, ds, queries.at[panel])
                if not dq_refs:
                    plgpu.wgmma_wait(panels)
                return tuple(plgpu.wgmma_accumulator_load(ref, wait_n=panels) for ref in dq_refs)

            num = self.spec.num_dq_blocks if self.spec.adds_dq else 0
            dq = pl.run_scoped(issue_grads, *[plgpu.ACC((PANEL, PANEL), f32)] * num)
            # dV is complete, so dO has been read for the last time.
            callbacks.release_dout()
            if num:
                callbacks.add_dq(tuple(lax.optimization_barrier(dq)))

        start = DkDvSums(*(tuple(plgpu.ACC.init(acc) for acc in panels) for panels in sums))
        return DkDvSums(*(tuple(panels) for panels in pl.run_state(run)(start)))

    def dq(self, buffer: Scalar, zero: Scalar) -> Panels:
        """Return the warpgroup's blocks of dQ = dS K for the step whose dS is in `buffer`."""

        def compute_block(index: int) -> Tile:
            return run_mma((PANEL, PANEL), lambda ref: self.issue_dq(ref, index, buffer, zero))

        return tuple(compute_block(index) for index in range(self.spec.num_dq_blocks))

    def zeros(self) -> DkDvSums:
        """Return accumulators of zeros for the gradients that the kernel computes."""
        zero = lambda: plgpu.layout_cast(jnp.zeros((PANEL, PANEL), f32), W)
        panels = lambda is_computed: tuple(
            zero() for _ in range(self.spec.num_head_panels if is_computed else 0)
        )
        return DkDvSums(*map(panels, self.spec.computes))


class InterpretedDkDvMma(DkDvMma):
    """Matrix products in interpret mode, which has no running accumulators and no register operands."""

    def step(self, sums: DkDvSums, stages: StepStages, buffer: Scalar, callbacks: DkDvCallbacks) -> DkDvSums:
        """Compute the same as DkDvMma, one product after the other."""
        spec, smem, wg = self.spec, self.smem, self.wg
        queries, dout = smem.query.at[stages.query], smem.dout.at[stages.dout]
        callbacks.wait_for_queries()
        s = run_mma(spec.s_shape, lambda ref: self.issue_scores(ref, stages.query, wg))
        callbacks.wait_for_dout()
        probabilities = callbacks.probabilities(s, callbacks.row_stats(0))
        if spec.computes.dv:
            store_panels(smem.p.at[wg], probabilities.p, spec)
            plgpu.commit_smem()
        dv = tuple(
            acc + self.sum_over_queries(smem.p.at[wg], dout, panel) for panel, acc in enumerate(sums.dv)
        )
        if not spec.computes.dk:
            callbacks.release_dout()
            return DkDvSums((), dv)
        dp = run_mma(spec.s_shape, lambda ref: self.issue_dp(ref, stages.dout, wg))
        ds = callbacks.score_grads(probabilities, dp, callbacks.row_stats(1)).astype(spec.dtype)
        callbacks.exchange_ds(ds)
        dq = self.dq(1 - buffer, callbacks.zero) if spec.adds_dq else ()
        dk = tuple(
            acc + self.sum_over_queries(smem.ds.at[buffer, wg], queries, panel)
            for panel, acc in enumerate(sums.dk)
        )
        callbacks.release_dout()
        if spec.adds_dq:
            callbacks.add_dq(dq)
        return DkDvSums(dk, dv)

    def sum_over_queries(self, rows_s: Ref, queries_s: Ref, panel: int) -> Tile:
        """Return [64, tile_q] in shared memory times one head panel of a query tile."""

        def issue(ref: Ref) -> None:
            for index in range(self.spec.num_query_panels):
                plgpu.wgmma(ref, rows_s.at[index], queries_s.at[panel, pl.ds(index * PANEL, PANEL)])

        return run_mma((PANEL, PANEL), issue)


class DkMma(DkDvMma):
    """The products S, dP and dK of wide heads, whose dk and dv have a kernel each."""

    def step(self, sums: DkDvSums, stages: StepStages, buffer: Scalar, callbacks: DkDvCallbacks) -> DkDvSums:
        """Compute S, dP and dK; P is computed while dP is in flight."""
        wg, panels = self.wg + callbacks.zero, self.spec.num_head_panels

        def compute_ds(s_ref: Ref, dp_ref: Ref) -> Tile:
            callbacks.wait_for_queries()
            self.issue_scores(s_ref, stages.query, wg)
            callbacks.wait_for_dout()
            self.issue_dp(dp_ref, stages.dout, wg)
            s = lax.optimization_barrier(plgpu.wgmma_accumulator_load(s_ref, wait_n=panels))
            probabilities = callbacks.probabilities(s, callbacks.row_stats(0))
            dp = lax.optimization_barrier(plgpu.wgmma_accumulator_load(dp_ref, wait_n=0))
            ds = callbacks.score_grads(probabilities, dp, callbacks.row_stats(1)).astype(self.spec.dtype)
            # dO is read by dP alone, so its stage is free early.
            callbacks.release_dout()
            return ds

        ds = pl.run_scoped(compute_ds, *[plgpu.ACC(self.spec.s_shape, f32)] * 2)
        return DkDvSums(self.add_product(sums.dk, ds, self.smem.query.at[stages.query]), ())

    def add_product(self, sums: tuple[Tile, ...], rows: Tile, queries_s: Ref) -> tuple[Tile, ...]:
        """Return the sums plus `rows` times a tile of queries or of dO."""

        def run(refs: Any) -> None:
            for panel, ref in enumerate(refs):
                plgpu.wgmma(ref, rows, queries_s.at[panel])

        return tuple(pl.run_state(run)(tuple(plgpu.ACC.init(acc) for acc in sums)))


class DvMma(DkMma):
    """The products S and dV of wide heads, whose dk and dv have a kernel each."""

    def step(self, sums: DkDvSums, stages: StepStages, buffer: Scalar, callbacks: DkDvCallbacks) -> DkDvSums:
        """Compute S and dV."""
        wg = self.wg + callbacks.zero

        def scores(s_ref: Ref) -> Tile:
            callbacks.wait_for_queries()
            self.issue_scores(s_ref, stages.query, wg)
            return plgpu.wgmma_accumulator_load(s_ref, wait_n=0)

        s = pl.run_scoped(scores, plgpu.ACC(self.spec.s_shape, f32))
        callbacks.wait_for_dout()
        probabilities = callbacks.probabilities(lax.optimization_barrier(s), callbacks.row_stats(0))
        dv = self.add_product(sums.dv, probabilities.p, self.smem.dout.at[stages.dout])
        callbacks.release_dout()
        return DkDvSums((), dv)


def mma_class(spec: BackwardSpec) -> type[DkDvMma]:
    """Return the class that computes a kernel's matrix products."""
    if spec.is_interpreted:
        return InterpretedDkDvMma
    if spec.computes == ComputedGrads(dk=True, dv=True):
        return DkDvMma
    return DkMma if spec.computes.dk else DvMma


def store_panels(to_s: Ref, tile: Tile, spec: BackwardSpec) -> None:
    """Store a tile [64, tile_q] in shared memory, as one [64, 64] array per query panel."""
    for index in range(spec.num_query_panels):
        to_s[index] = tile[:, index * PANEL : (index + 1) * PANEL]


def run_mma(shape: tuple[int, int], issue: Callable[[Ref], None]) -> Tile:
    """Return what `issue` adds to an accumulator of zeros."""

    def run(ref: Ref) -> Tile:
        issue(ref)
        return ref[...]

    return pl.run_scoped(run, plgpu.ACC(shape, f32))
