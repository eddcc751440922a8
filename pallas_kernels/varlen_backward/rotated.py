"""The rotated loop: what a warpgroup computes, each step's scores begun before the step before is done."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.types import Scalar, Tile
from pallas_kernels.varlen_backward.gradients import Gradients
from pallas_kernels.varlen_backward.items import Item
from pallas_kernels.varlen_backward.products import Sums, store_units
from pallas_kernels.varlen_backward.refs import Inputs, Outputs, Pipeline, Smem
from pallas_kernels.varlen_backward.rotated_products import (
    Begun,
    InterpretedRotatedProducts,
    Place,
    RotatedProducts,
    RotatedWork,
)
from pallas_kernels.varlen_backward.scores import QueryTile
from pallas_kernels.varlen_backward.spec import BackwardSpec


class RotatedGradients(Gradients):
    """One warpgroup."""

    def __init__(self, inputs: Inputs, outputs: Outputs, smem: Smem, pipeline: Pipeline, spec: BackwardSpec):
        super().__init__(inputs, outputs, smem, pipeline, spec)
        of = InterpretedRotatedProducts if spec.is_interpreted else RotatedProducts
        self.rotated = of(smem, pipeline, self.wg, spec)

    def grads_of(self, item: Item, step: Scalar) -> tuple[Scalar, Sums]:
        """All steps of an item, from `step` on: the one behind, and the sums."""
        first, num_steps = item.first_head()
        # Tiles of none are told apart from others by the loops alone: any will do where there is no step.
        tile = lambda nth, i, is_masked: QueryTile(
            item, item.head(nth), item.steps(nth).tile(i), self.slope(item.head(nth)), is_masked
        )

        def work() -> Sums:
            start = self.work(tile(first, jnp.int32(0), True), step)
            begun = self.rotated.start(step, start)

            def of_head(nth: Scalar, at: tuple[Scalar, Begun]) -> tuple[Scalar, Begun]:
                step, begun = at
                of_head = item.steps(nth)
                done = (nth == first).astype(jnp.int32)

                def take(is_masked: bool) -> Callable[[Scalar, Begun], Begun]:
                    work_of = lambda i: self.work(tile(nth, i, is_masked), step + i)
                    return lambda i, begun: self.rotated.take(step + i, work_of(i), begun)

                begun = lax.fori_loop(done, of_head.num_masked, take(True), begun)
                begun = lax.fori_loop(jnp.maximum(of_head.num_masked, done), of_head.num, take(False), begun)
                return step + of_head.num, begun

            _, begun = lax.fori_loop(first, self.spec.group, of_head, (step, begun))
            return self.rotated.finish(step + num_steps - 1, start, begun)

        return step + num_steps, lax.cond(num_steps > 0, work, self.rotated.zeros)

    def work(self, tile: QueryTile, step: Scalar) -> RotatedWork:
        """What is done between the products of a step."""
        stage, buffer = self.rotated.stage(step), self.rotated.buffer(step)
        smem, pipeline = self.smem, self.pipeline
        stats_s, stored = smem.stats.at[stage], self.scores.stored(tile)

        def clear() -> None:
            if tile.is_masked:
                self.clear_queries(tile, smem.query.at[stage], smem.grad_out.at[stage])

        def exchange(ds: Tile) -> None:
            store_units(smem.grad_scores.at[buffer, self.wg], ds, self.spec)
            plgpu.commit_smem()
            plgpu.barrier_arrive(pipeline.ds_full.at[buffer])
            plgpu.barrier_wait(pipeline.ds_full.at[buffer])

        return RotatedWork(
            zero=tile.item["zero"],
            place=Place(tile.head, tile.item.query_row(tile.nth)),
            clear=clear,
            probabilities=lambda s: self.scores.probabilities(s, stats_s, tile, stored),
            grad_scores=lambda of, dp: self.scores.gradients(of, dp, stats_s),
            exchange=exchange,
            add_grad_query=self.add_grad_query,
        )
