"""The tensor core's part: S = Q K^T and O += P V of a warpgroup's rows and a tile of keys."""

from collections.abc import Callable

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.types import Ref, Scalar, Tile
from pallas_kernels.varlen_prefill.masking import LoadedMask
from pallas_kernels.varlen_prefill.pipeline import KvPipeline
from pallas_kernels.varlen_prefill.refs import AlibiOperands
from pallas_kernels.varlen_prefill.softmax import SoftmaxState, SoftmaxStep
from pallas_kernels.varlen_prefill.spec import PrefillSpec, f32


class PrefillMma:
    """Of one warpgroup."""

    def __init__(self, ring: KvPipeline, alibi: AlibiOperands | None, spec: PrefillSpec):
        self.ring, self.alibi, self.spec = ring, alibi, spec

    def begin_scores(self, s_ref: Ref, q_s: Ref, stage: Scalar) -> None:
        """Begins S += Q K^T."""
        for chunk in range(self.spec.shape.cut.num_chunks):
            plgpu.wgmma(s_ref, q_s.at[chunk], self.ring.keys.tiles.at[stage, chunk].T)
        if self.alibi is not None:
            plgpu.wgmma(s_ref, self.alibi.slopes, self.alibi.columns.T)

    def begin_values(self, acc_refs: tuple[Ref, ...], p: Tile, stage: Scalar) -> None:
        """Begins O += P V."""
        for chunk, acc_ref in enumerate(acc_refs):
            plgpu.wgmma(acc_ref, p, self.ring.values.tiles.at[stage, chunk])

    def scores(self, q_s: Ref, step: Scalar, meanwhile: Callable[[], None] = lambda: None) -> Tile:
        """Q K^T of the keys of `step`, awaited; `meanwhile` is done beside it."""
        stage, keys = self.ring.stage(step), self.ring.keys
        plgpu.barrier_wait(keys.full.at[stage])

        def product(s_ref: Ref) -> Tile:
            self.begin_scores(s_ref, q_s, stage)
            meanwhile()
            return s_ref[...]

        s = pl.run_scoped(product, plgpu.ACC(self.spec.s_shape, f32))
        plgpu.barrier_arrive(keys.free.at[stage])
        return s

    def add_values(self, accs: tuple[Tile, ...], p: Tile, step: Scalar) -> tuple[Tile, ...]:
        """O + P V with the values of `step`, which have come and are clear; awaited."""
        stage = self.ring.stage(step)
        issue = lambda refs: self.begin_values(refs, p, stage)
        accs = tuple(pl.run_state(issue)(tuple(plgpu.ACC.init(acc) for acc in accs)))
        plgpu.barrier_arrive(self.ring.values.free.at[stage])
        return accs

    def both(
        self,
        q_s: Ref,
        step: Scalar,
        state: SoftmaxState,
        empty: SoftmaxStep,
        *,
        meanwhile: Callable[[], LoadedMask],
        softmax: Callable[[Tile, LoadedMask, Callable[[], None]], SoftmaxStep],
        await_values: Callable[[], None],
    ) -> tuple[tuple[Tile, ...], SoftmaxStep]:
        """Scores of the keys of `step` and values of the step before, in flight together.

        Args:
            q_s: [chunks, 64, width] in SMEM: the queries.
            step: Of the keys.
            state: With the sums to add to, and the probabilities of the step before.
            empty: Softmax.empty_step's.
            meanwhile: Done while both are in flight.
            softmax: Of the scores and what `meanwhile` returned, done while values are; calls the third
                before it makes exponents of them.
            await_values: Waits for the values of `step`.

        Returns:
            The sums, and what `softmax` returned.
        """
        k_stage, v_stage = self.ring.stage(step), self.ring.stage(step - 1)
        keys, values = self.ring.keys, self.ring.values
        plgpu.barrier_wait(keys.full.at[k_stage])
        awaits_first = self.spec.awaits_values_first

        def before_exponents() -> None:
            if awaits_first:
                await_values()
                plgpu.wgmma_wait(0)

        def products(refs: tuple[tuple[Ref, ...], SoftmaxStep]) -> None:
            acc_refs, result_refs = refs

            def issue(s_ref: Ref) -> tuple[Tile, LoadedMask]:
                self.begin_scores(s_ref, q_s, k_stage)
                self.begin_values(acc_refs, state.p, v_stage)
                early = meanwhile()
                return plgpu.wgmma_accumulator_load(s_ref, wait_n=len(acc_refs)), early

            s, early = pl.run_scoped(issue, plgpu.ACC(self.spec.s_shape, f32))
            s = lax.optimization_barrier(s)
            plgpu.barrier_arrive(keys.free.at[k_stage])
            results = softmax(s, early, before_exponents)
            for ref, result in zip(jax.tree.leaves(result_refs), jax.tree.leaves(results), strict=True):
                ref[...] = result
            if not awaits_first:
                await_values()  # its branch keeps ptxas from awaiting P V before the softmax

        start = tuple(plgpu.ACC.init(acc) for acc in state.accs)
        accs, results = pl.run_state(products)((start, empty))
        plgpu.barrier_arrive(values.free.at[v_stage])
        return tuple(accs), results


class InterpretedPrefillMma(PrefillMma):
    """For interpret mode, which has neither accumulators with a past nor operands in registers."""

    def __init__(self, ring: KvPipeline, p_s: Ref, spec: PrefillSpec):
        """With [64, tile_kv] of shared memory for probabilities."""
        super().__init__(ring, None, spec)
        self.p_s = p_s

    def add_values(self, accs: tuple[Tile, ...], p: Tile, step: Scalar) -> tuple[Tile, ...]:
        """See Products."""
        stage, values = self.ring.stage(step), self.ring.values
        self.p_s[...] = p
        plgpu.commit_smem()

        def product(ref: Ref, chunk: int) -> Tile:
            plgpu.wgmma(ref, self.p_s, values.tiles.at[stage, chunk])
            return ref[...]

        of_chunk = lambda chunk: pl.run_scoped(
            lambda ref: product(ref, chunk), plgpu.ACC(self.spec.acc_shape, f32)
        )
        accs = tuple(acc + of_chunk(chunk) for chunk, acc in enumerate(accs))
        plgpu.barrier_arrive(values.free.at[stage])
        return accs

    def both(
        self,
        q_s: Ref,
        step: Scalar,
        state: SoftmaxState,
        empty: SoftmaxStep,
        *,
        meanwhile: Callable[[], LoadedMask],
        softmax: Callable[[Tile, LoadedMask, Callable[[], None]], SoftmaxStep],
        await_values: Callable[[], None],
    ) -> tuple[tuple[Tile, ...], SoftmaxStep]:
        """See Products; one after the other."""
        s = self.scores(q_s, step)
        accs = self.add_values(state.accs, state.p, step - 1)
        results = softmax(s, meanwhile(), lambda: None)
        await_values()
        return accs, results
