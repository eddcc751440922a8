"""Matrix products of a warpgroup: S = Q K^T and O += P V for its rows and a tile of keys."""

from collections.abc import Callable

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.types import Ref, Scalar, Tile
from pallas_kernels.varlen_prefill.kernel_mask import LoadedMask
from pallas_kernels.varlen_prefill.pipeline import KvPipeline
from pallas_kernels.varlen_prefill.refs import AlibiOperands
from pallas_kernels.varlen_prefill.softmax import SoftmaxState, SoftmaxStep
from pallas_kernels.varlen_prefill.spec import PrefillSpec, f32


class PrefillMma:
    """The matrix products of one warpgroup."""

    def __init__(self, pipeline: KvPipeline, alibi: AlibiOperands | None, spec: PrefillSpec):
        self.pipeline, self.alibi, self.spec = pipeline, alibi, spec

    def issue_scores(self, s_ref: Ref, q_s: Ref, stage: Scalar) -> None:
        """Issue S += Q K^T, and the ALiBi bias if the tensor core adds it."""
        for chunk in range(self.spec.shape.head.num_chunks):
            plgpu.wgmma(s_ref, q_s.at[chunk], self.pipeline.keys.tiles.at[stage, chunk].T)
        if self.alibi is not None:
            plgpu.wgmma(s_ref, self.alibi.slopes, self.alibi.columns.T)

    def issue_values(self, acc_refs: tuple[Ref, ...], p: Tile, stage: Scalar) -> None:
        """Issue O += P V."""
        for chunk, acc_ref in enumerate(acc_refs):
            plgpu.wgmma(acc_ref, p, self.pipeline.values.tiles.at[stage, chunk])

    def scores(self, q_s: Ref, step: Scalar, during: Callable[[], None] = lambda: None) -> Tile:
        """Return Q K^T for the keys of a step; `during` runs while it is in flight."""
        stage, keys = self.pipeline.stage(step), self.pipeline.keys
        plgpu.barrier_wait(keys.full.at[stage])

        def multiply(s_ref: Ref) -> Tile:
            self.issue_scores(s_ref, q_s, stage)
            during()
            return s_ref[...]  # waits for the product

        s = pl.run_scoped(multiply, plgpu.ACC(self.spec.s_shape, f32))
        # The keys have been read: the loading warp may refill their stage.
        plgpu.barrier_arrive(keys.free.at[stage])
        return s

    def add_values(self, accs: tuple[Tile, ...], p: Tile, step: Scalar) -> tuple[Tile, ...]:
        """Return O + P V for the values of a step, which must have arrived and been cleared."""
        stage = self.pipeline.stage(step)

        def issue(refs: tuple[Ref, ...]) -> None:
            self.issue_values(refs, p, stage)

        accs = tuple(pl.run_state(issue)(tuple(plgpu.ACC.init(acc) for acc in accs)))
        plgpu.barrier_arrive(self.pipeline.values.free.at[stage])
        return accs

    def scores_and_values(
        self,
        q_s: Ref,
        step: Scalar,
        state: SoftmaxState,
        empty: SoftmaxStep,
        *,
        load_mask: Callable[[], LoadedMask],
        softmax: Callable[[Tile, LoadedMask, Callable[[], None]], SoftmaxStep],
        wait_for_values: Callable[[], None],
    ) -> tuple[tuple[Tile, ...], SoftmaxStep]:
        """Compute the scores of a step together with P V of the previous step.

        Args:
            q_s: Queries [chunks, 64, width] in shared memory.
            step: Step of the keys.
            state: Accumulators to add to, and probabilities of the previous step.
            empty: Result of Softmax.empty_step.
            load_mask: Called while both products are in flight.
            softmax: Called with the scores and the result of `load_mask` while P V is in flight. It calls its
                third argument before it computes exponentials.
            wait_for_values: Waits for the values of `step`.

        Returns:
            The accumulators, and the result of `softmax`.
        """
        k_stage, v_stage = self.pipeline.stage(step), self.pipeline.stage(step - 1)
        keys, values = self.pipeline.keys, self.pipeline.values
        # The values of the previous step were awaited in that step, so only the keys are awaited here.
        plgpu.barrier_wait(keys.full.at[k_stage])
        waits_first = self.spec.waits_for_values_first

        def before_exponentials() -> None:
            if waits_first:
                wait_for_values()
                plgpu.wgmma_wait(0)

        def compute_step(refs: tuple[tuple[Ref, ...], SoftmaxStep]) -> None:
            acc_refs, result_refs = refs

            def issue(s_ref: Ref) -> tuple[Tile, LoadedMask]:
                # S first: products complete in order, and the softmax of S overlaps with P V.
                self.issue_scores(s_ref, q_s, k_stage)
                self.issue_values(acc_refs, state.p, v_stage)
                loaded = load_mask()
                return plgpu.wgmma_accumulator_load(s_ref, wait_n=len(acc_refs)), loaded

            s, loaded = pl.run_scoped(issue, plgpu.ACC(self.spec.s_shape, f32))
            s = lax.optimization_barrier(s)
            # S is complete: the loading warp may refill the stage of its keys.
            plgpu.barrier_arrive(keys.free.at[k_stage])
            results = softmax(s, loaded, before_exponentials)
            for ref, result in zip(jax.tree.leaves(result_refs), jax.tree.leaves(results), strict=True):
                ref[...] = result
            if not waits_first:
                wait_for_values()  # its branch keeps ptxas from waiting for P V before the softmax

        start = tuple(plgpu.ACC.init(acc) for acc in state.accs)
        accs, results = pl.run_state(compute_step)((start, empty))
        # P V is complete: the loading warp may refill the stage of its values.
        plgpu.barrier_arrive(values.free.at[v_stage])
        return tuple(accs), results


class InterpretedPrefillMma(PrefillMma):
    """Matrix products in interpret mode, which has no running accumulators and no register operands."""

    def __init__(self, pipeline: KvPipeline, p_s: Ref, spec: PrefillSpec):
        """Create the products; `p_s` is shared memory [64, tile_kv] for probabilities."""
        super().__init__(pipeline, None, spec)
        self.p_s = p_s

    def add_values(self, accs: tuple[Tile, ...], p: Tile, step: Scalar) -> tuple[Tile, ...]:
        """Return O + P V, with P stored to shared memory."""
        stage, values = self.pipeline.stage(step), self.pipeline.values
        self.p_s[...] = p
        plgpu.commit_smem()

        def product(chunk: int) -> Tile:
            def multiply(ref: Ref) -> Tile:
                plgpu.wgmma(ref, self.p_s, values.tiles.at[stage, chunk])
                return ref[...]

            return pl.run_scoped(multiply, plgpu.ACC(self.spec.acc_shape, f32))

        accs = tuple(acc + product(chunk) for chunk, acc in enumerate(accs))
        plgpu.barrier_arrive(values.free.at[stage])
        return accs

    def scores_and_values(
        self,
        q_s: Ref,
        step: Scalar,
        state: SoftmaxState,
        empty: SoftmaxStep,
        *,
        load_mask: Callable[[], LoadedMask],
        softmax: Callable[[Tile, LoadedMask, Callable[[], None]], SoftmaxStep],
        wait_for_values: Callable[[], None],
    ) -> tuple[tuple[Tile, ...], SoftmaxStep]:
        """Compute the products of `PrefillMma.scores_and_values` sequentially."""
        s = self.scores(q_s, step)
        accs = self.add_values(state.accs, state.p, step - 1)
        results = softmax(s, load_mask(), lambda: None)
        wait_for_values()
        return accs, results
