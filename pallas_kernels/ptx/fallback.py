"""One mechanism for code that only a GPU runs: it comes with a fallback, the same function in plain jnp."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class DeviceFunction[R]:
    """A function of a kernel, or a kernel, twice: in PTX and as its fallback; their arguments are the same.

    Attributes:
        on_gpu: Builds the code. What it returns, R, the fallback does, too.
        fallback: What it does, in plain jnp. References may be jax.Ref, too.
        reads_smem: Interpreted, a fence follows: jax 0.12 looks for one between a read and TMA's next write
            into the same memory. On the device no fence of the two proxies stands there, though PTX's memory
            model has one for any two accesses: a stage is released by mbarrier.arrive, after which no earlier
            read comes, and a read that is done cannot see a later write. CUTLASS's pipelines release their
            stages the same way.
    """

    on_gpu: Callable[..., R]
    fallback: Callable[..., R]
    reads_smem: bool = False

    def __call__(self, *args: object, is_interpreted: bool, **static: object) -> R:
        """Inside a kernel."""
        if not is_interpreted:
            return self.on_gpu(*args, **static)
        result = self.fallback(*args, **static)
        if self.reads_smem:
            plgpu.commit_smem()
        return result

    def by_platform(self, *arrays: jax.Array, **static: object) -> R:
        """A kernel: the GPU's where a program is compiled for one, elsewhere the fallback."""
        on_gpu, fallback = (functools.partial(way, **static) for way in (self.on_gpu, self.fallback))
        return jax.lax.platform_dependent(*arrays, cuda=on_gpu, default=fallback)


def with_fallback[R](
    fallback: Callable[..., R], *, reads_smem: bool = False
) -> Callable[[Callable[..., R]], DeviceFunction[R]]:
    """A decorator for the function that builds the code."""
    return lambda on_gpu: DeviceFunction(on_gpu, fallback, reads_smem)


def rounded_to(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """f32 numbers rounded to 16 bits and still f32: a cast there and back XLA would drop."""
    kind = jnp.finfo(dtype)
    return lax.reduce_precision(x, kind.nexp, kind.nmant)
