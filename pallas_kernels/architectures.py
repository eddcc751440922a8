"""GPU architectures, and the one that the kernels of a call are built for.

That is the architecture of the GPU that holds a call's arrays, unless `target` names another one.
"""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

import jax

from pallas_kernels.checks import require_one_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """A compute capability, and the GPU that the sizes of its kernels are chosen for.

    The kernels are measured on compute capability 9.0. For other architectures they are compiled and tested,
    and sizes are estimated from these numbers, which NVIDIA's data sheets and programming guide state.

    Attributes:
        card: Name of the GPU.
        num_sms: Number of SMs of the GPU.
        bandwidth: Memory bandwidth of the GPU in GB/s.
        smem_bytes: Maximum shared memory per thread block in bytes.
        has_tma: Whether the Tensor Memory Accelerator and mbarriers exist; cp.async exists everywhere.
        has_wgmma: Whether warpgroup products (wgmma) exist; mma.sync exists everywhere.
        has_fp8_conversion: Whether an instruction converts float8 to float16.
    """

    card: str
    num_sms: int
    bandwidth: int
    smem_bytes: int
    has_tma: bool = True
    has_wgmma: bool = False
    has_fp8_conversion: bool = True

    def bytes_in_flight(self, measured: int) -> int:
        """Return the bytes that an SM should have in flight from global memory, estimated.

        Args:
            measured: Best number of bytes on an H200; others need them in proportion to an SM's bandwidth.
        """
        hopper = ARCHITECTURES["9.0"]
        return int(measured * (self.bandwidth / self.num_sms) / (hopper.bandwidth / hopper.num_sms))


SMALL_SMEM, LARGE_SMEM = 99 * 1024, 227 * 1024
AMPERE = {"has_tma": False, "has_fp8_conversion": False}
ARCHITECTURES = {
    "8.0": Architecture(card="A100", num_sms=108, bandwidth=2039, smem_bytes=163 * 1024, **AMPERE),
    "8.6": Architecture(card="GeForce RTX 3090", num_sms=82, bandwidth=936, smem_bytes=SMALL_SMEM, **AMPERE),
    "8.9": Architecture(card="L40S", num_sms=142, bandwidth=864, smem_bytes=SMALL_SMEM, has_tma=False),
    "9.0": Architecture(card="H200", num_sms=132, bandwidth=4800, smem_bytes=LARGE_SMEM, has_wgmma=True),
    "10.0": Architecture(card="B200", num_sms=148, bandwidth=8000, smem_bytes=LARGE_SMEM),
    "10.3": Architecture(card="B300", num_sms=148, bandwidth=8000, smem_bytes=LARGE_SMEM),
    "12.0": Architecture(card="GeForce RTX 5090", num_sms=170, bandwidth=1792, smem_bytes=SMALL_SMEM),
    "12.1": Architecture(card="GB10", num_sms=48, bandwidth=273, smem_bytes=SMALL_SMEM),
}
HOPPER = ("9.0",)
SINCE_AMPERE = tuple(ARCHITECTURES)
NUM_SMS = ARCHITECTURES["9.0"].num_sms
GPU_PLATFORMS = ("gpu", "cuda")


def device_of(*trees: object) -> jax.Device:
    """Return the device of the first concrete array, or JAX's default device if all arrays are traced."""
    for leaf in jax.tree.leaves(trees):
        if isinstance(leaf, jax.Array) and is_concrete(leaf):
            return min(leaf.devices(), key=lambda device: device.id)
    default = jax.config.jax_default_device
    if isinstance(default, str):
        return jax.devices(default)[0]
    return jax.devices()[0] if default is None else default


def is_concrete(*trees: object) -> bool:
    """Return whether all arrays have values: none is traced or a ShapeDtypeStruct."""
    for leaf in jax.tree.leaves(trees):
        if isinstance(leaf, jax.core.Tracer | jax.ShapeDtypeStruct):
            return False
    return True


# Compute capability of GPUs that `target` knows by name.
GPUS = {
    **{"a100": "8.0", "a10": "8.6", "rtx3090": "8.6", "l4": "8.9", "l40s": "8.9", "rtx4090": "8.9"},
    **{"h100": "9.0", "h200": "9.0", "b200": "10.0", "b300": "10.3", "rtx5090": "12.0", "gb10": "12.1"},
}
_TARGET: contextvars.ContextVar[str | None] = contextvars.ContextVar("target", default=None)


@contextlib.contextmanager
def target(gpu: str | None) -> Iterator[None]:
    """Choose implementations for another GPU than the one that JAX uses, as a context manager.

    Plans show what a layer would get there, and a function that is lowered for it contains its kernels.
    Arrays stay where they are, so functions that run a kernel still need a GPU. A newer GPU runs the kernels
    of an older architecture that use no instructions which the newer one lacks: those of 8.x run on 9.0. The
    context counts while a function is traced; a jitted function keeps what it was traced for.

    Args:
        gpu: Compute capability such as "9.0", or the name of a GPU in GPUS such as "h100"; None keeps the
            GPU of an enclosing `target`, or that of JAX.

    Raises:
        ValueError: If the GPU is unknown.
    """
    if gpu is None:
        yield
        return
    require_known_gpu(gpu=gpu)
    token = _TARGET.set(GPUS.get(gpu.lower(), gpu))
    try:
        yield
    finally:
        _TARGET.reset(token)


def target_capability() -> str | None:
    """Return the compute capability that `target` names, or None outside of its contexts."""
    return _TARGET.get()


def require_known_gpu(**gpus: str) -> None:
    """Require every named argument to be a name in GPUS, in any case, or a key of ARCHITECTURES."""
    for name, gpu in gpus.items():
        require_one_of(name, str(gpu).lower(), (*GPUS, *ARCHITECTURES))


def is_gpu(*trees: object) -> bool:
    """Return whether these arrays are on a GPU of any vendor and generation, or `target` names one."""
    return _TARGET.get() is not None or device_of(*trees).platform in GPU_PLATFORMS


def compute_capability(*trees: object) -> str | None:
    """Return the compute capability of `target`, or of the device of these arrays; None if that is no GPU."""
    target_capability = _TARGET.get()
    return target_capability or getattr(device_of(*trees), "compute_capability", None)


def kernel_architecture(*trees: object) -> str:
    """Return the compute capability that the kernels of these arrays are built for.

    This is the one place that decides it: the capability of `target` or of the arrays' device if it is in
    ARCHITECTURES, else 9.0. So interpret mode on a CPU runs the kernels of Hopper GPUs.
    """
    capability = compute_capability(*trees)
    return capability if capability in ARCHITECTURES else HOPPER[0]
