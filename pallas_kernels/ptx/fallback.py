"""Device functions: code that only a GPU runs, paired with a fallback in plain jnp."""

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
    """A function of a kernel, or a kernel, in PTX and as a jnp fallback with the same arguments and results.

    Attributes:
        on_gpu: Function that builds the device code and returns its results, R.
        fallback: Function that computes the same in plain jnp. Its references may be jax.Ref, too.
        reads_smem: Whether the function reads shared memory that TMA writes later. In interpret mode a fence
            follows then: jax 0.12 requires one between a read and TMA's next write into the same memory. On
            the device there is no proxy fence, although PTX's memory model requires one between any two
            accesses: a stage is released by mbarrier.arrive, after which no earlier read executes, and a
            completed read cannot observe a later write. CUTLASS's pipelines release their stages in the same
            way.
    """

    on_gpu: Callable[..., R]
    fallback: Callable[..., R]
    reads_smem: bool = False

    def __call__(self, *args: object, is_interpreted: bool, **static: object) -> R:
        """Run inside a kernel: the device code, or the fallback in interpret mode."""
        if not is_interpreted:
            return self.on_gpu(*args, **static)
        result = self.fallback(*args, **static)
        if self.reads_smem:
            plgpu.commit_smem()
        return result

    def by_platform(self, *arrays: jax.Array, **static: object) -> R:
        """Run a complete kernel where a program is compiled for an NVIDIA GPU, else the fallback."""
        on_gpu, fallback = (
            functools.partial(function, **static) for function in (self.on_gpu, self.fallback)
        )
        return jax.lax.platform_dependent(*arrays, cuda=on_gpu, default=fallback)


def with_fallback[R](
    fallback: Callable[..., R], *, reads_smem: bool = False
) -> Callable[[Callable[..., R]], DeviceFunction[R]]:
    """Return a decorator that turns a function that builds device code into a DeviceFunction."""
    return lambda on_gpu: DeviceFunction(on_gpu, fallback, reads_smem)


def round_to(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Round f32 numbers to a 16-bit dtype but keep them in f32; XLA would remove a cast and its inverse."""
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant)
