"""The products of wide heads, whose gradients of keys and of values have a kernel each."""

from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.types import Ref, Scalar, Tile
from pallas_kernels.varlen_backward.products import InterpretedProducts, Products, Sums, Work
from pallas_kernels.varlen_backward.spec import BackwardSpec, Makes, Stages, f32


class KeyProducts(Products):
    """S, dP and dK: P is made while dP is in flight."""

    def step(self, sums: Sums, stages: Stages, buffer: Scalar, work: Work) -> Sums:
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
        return Sums(self.added(sums.key, ds, self.smem.query.at[stages.query]), ())

    def added(self, sums: tuple[Tile, ...], rows: Tile, queries_s: Ref) -> tuple[Tile, ...]:
        """Sums with `rows` times a tile of queries, or of gradients of their outputs."""

        def products(refs: Any) -> None:
            for unit, ref in enumerate(refs):
                plgpu.wgmma(ref, rows, queries_s.at[unit])

        return tuple(pl.run_state(products)(tuple(plgpu.ACC.init(acc) for acc in sums)))


class ValueProducts(KeyProducts):
    """S and dV."""

    def step(self, sums: Sums, stages: Stages, buffer: Scalar, work: Work) -> Sums:
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
        return Sums((), values)


def products_of(spec: BackwardSpec) -> type[Products]:
    """What a kernel multiplies with."""
    if spec.is_interpreted:
        return InterpretedProducts
    if spec.makes == Makes(key=True, value=True):
        return Products
    return KeyProducts if spec.makes.key else ValueProducts
