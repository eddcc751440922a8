"""Matrix products of the dk/dv kernel: up to five per warpgroup and step, for 64 keys and a query tile."""

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
from pallas_kernels.varlen_backward.spec import BackwardSpec, ComputedGrads, QueryStages, W, f32

type Panels = tuple[Tile, ...]


class DkDvSums(NamedTuple):
    """Accumulated gradients of a warpgroup's keys and values, one f32 [64, 64] tile per panel of the head.

    Attributes:
        dk: Gradient of the keys without the softmax scale, dS^T Q, summed over the steps so far.
        dv: Gradient of the values, P^T dO, summed over the steps so far.
    """

    dk: Panels
    dv: Panels


class DqTarget(NamedTuple):
    """Position of a query tile's dq in global memory.

    Attributes:
        head: Query head.
        row: First row of the tile; negative if there is no dq to add.
    """

    head: Scalar
    row: Scalar


class DkDvCallbacks(NamedTuple):
    """Functions that a warpgroup calls between the matrix products of a step.

    Attributes:
        zero: A 0 that is read from memory in each step, so that the compiler cannot treat it as a constant.
            The addresses of keys and values depend on it. Otherwise the compiler would keep 24 of these
            addresses in registers, and there are not enough registers.
        wait_for_queries: Function that waits for the queries. Call it before issuing S.
        wait_for_dout: Function that waits for dO and the row statistics, which arrive together. Call it
            before issuing dP.
        wait_for_dq_buffer: Function that waits until TMA has read the previous dq from shared memory. Call it
            together with the wait for S: it synchronizes all threads of the warpgroup.
        row_stats: Function from 0 to the LSE, and from 1 to delta; see DkDvScores.row_stats.
        probabilities: Function that returns P from S and the LSE.
        score_grads: Function that returns dS from P, dP and delta.
        exchange_ds: Function that stores this warpgroup's dS in 16 bits. It first waits until the other
            warpgroup has stored its dS of the previous step, and has read the dS that this one replaces.
        release_dout: Function that releases the stage of dO. Call it after the last product with dO.
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
    """Matrix products of one warpgroup that computes dk, dv and, without a dq kernel, its blocks of dq."""

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
        """Issue dQ += dS K for the dQ block with number `index` of the warpgroup, over the keys of both."""
        query_panel, panel = self.dq_block_indices(index)
        for wg in range(WARPGROUPS):
            ds = self.smem.ds.at[buffer, wg, query_panel]
            plgpu.wgmma(dq_ref, ds.T, self.smem.key.at[zero + wg, panel])

    def dq_block_indices(self, index: int) -> tuple[Scalar | int, Scalar | int]:
        """Return the (query panel, head panel) of the [64, 64] block of dQ that the warpgroup computes.

        Args:
            index: Number of the block among those that the warpgroup computes.
        """
        number = self.wg * self.spec.num_dq_blocks + index
        if self.spec.num_query_panels == 1:
            return 0, number
        panels = jnp.int32(self.spec.num_head_panels)
        return (
            (number, 0)
            if self.spec.num_head_panels == 1
            else (lax.div(number, panels), lax.rem(number, panels))
        )

    def step(self, sums: DkDvSums, stages: QueryStages, buffer: Scalar, callbacks: DkDvCallbacks) -> DkDvSums:
        """Compute all products of a step.

        The warpgroup computes P while dP is in flight, and dS while dV is in flight. dQ belongs to the
        previous step. It is added to global memory while dK is in flight.

        Args:
            sums: dk and dv of the previous steps.
            stages: Indices of the stages that hold the step's queries and dO.
            buffer: Index of the buffer for the step's dS.
            callbacks: Functions to call between the products.
        """
        wg = self.wg + callbacks.zero
        panels = self.spec.num_head_panels
        queries, dout = self.smem.query.at[stages.query], self.smem.dout.at[stages.dout]
        # Load the row statistics early, so that the loads do not wait for the products; tiles of more queries
        # have no registers for them while S is computed.
        early = self.spec.num_query_panels == 1

        def compute_step(acc_refs: Any) -> None:
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
                for panel, ref in enumerate(acc_refs.dv):
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
                for panel, ref in enumerate(acc_refs.dk):
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
        return DkDvSums(*(tuple(panels) for panels in pl.run_state(compute_step)(start)))

    def dq(self, buffer: Scalar, zero: Scalar) -> Panels:
        """Return the warpgroup's blocks of dQ = dS K of one step; `buffer` is the index of that step's dS."""

        def compute_block(index: int) -> Tile:
            return run_mma((PANEL, PANEL), lambda ref: self.issue_dq(ref, index, buffer, zero))

        return tuple(compute_block(index) for index in range(self.spec.num_dq_blocks))

    def zeros(self) -> DkDvSums:
        """Return accumulators of zeros for the gradients that the kernel computes."""

        def panels(is_computed: bool) -> tuple[Tile, ...]:
            num_panels = self.spec.num_head_panels if is_computed else 0
            return tuple(plgpu.layout_cast(jnp.zeros((PANEL, PANEL), f32), W) for _ in range(num_panels))

        return DkDvSums(*map(panels, self.spec.computes))


class InterpretedDkDvMma(DkDvMma):
    """Matrix products in interpret mode, which has no running accumulators and no register operands."""

    def step(self, sums: DkDvSums, stages: QueryStages, buffer: Scalar, callbacks: DkDvCallbacks) -> DkDvSums:
        """Compute all products of a step, one after the other; see DkDvMma.step for the arguments."""
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
        """Return the product of P or dS, [64, tile_q] in shared memory, and one head panel of Q or dO."""

        def issue(ref: Ref) -> None:
            for index in range(self.spec.num_query_panels):
                plgpu.wgmma(ref, rows_s.at[index], queries_s.at[panel, pl.ds(index * PANEL, PANEL)])

        return run_mma((PANEL, PANEL), issue)


class DkMma(DkDvMma):
    """Matrix products S, dP and dK of the kernel that computes only dk, for heads wider than 128."""

    def step(self, sums: DkDvSums, stages: QueryStages, buffer: Scalar, callbacks: DkDvCallbacks) -> DkDvSums:
        """Compute S, dP and dK of a step; P is computed while dP is in flight."""
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
        """Return the sums plus the product of P or dS and a tile of dO or queries.

        Args:
            sums: Accumulated dk or dv, one tile per panel of the head.
            rows: dS or P in 16 bits, one row per key.
            queries_s: Queries (for dS) or dO (for P) in shared memory [panels, tile_q, 64].
        """

        def multiply(refs: Any) -> None:
            for panel, ref in enumerate(refs):
                plgpu.wgmma(ref, rows, queries_s.at[panel])

        return tuple(pl.run_state(multiply)(tuple(plgpu.ACC.init(acc) for acc in sums)))


class DvMma(DkMma):
    """Matrix products S and dV of the kernel that computes only dv, for heads wider than 128."""

    def step(self, sums: DkDvSums, stages: QueryStages, buffer: Scalar, callbacks: DkDvCallbacks) -> DkDvSums:
        """Compute S and dV of a step."""
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
    """Return the DkDvMma class for the gradients that `spec` computes."""
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
    """Return the product that `issue` adds to an accumulator of zeros."""

    def multiply(ref: Ref) -> Tile:
        issue(ref)
        return ref[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, f32))
