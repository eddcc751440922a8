"""Selection of the implementation for a layer configuration in a region of a step."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from jattn.implementations.layer_config import LayerConfig, RegionSizes
from jattn.implementations.mosaic_gpu import KernelConfig, choose_kernel
from jattn.masks import Mask
from jattn.spec import AttentionSpec
from pallas_kernels.checks import require, require_one_of, unsupported

IMPLEMENTATIONS = ("mosaic_gpu", "xla", "reference")  # best first

type ImplementationArg = str | Sequence[str] | None


class KernelFallbackWarning(UserWarning):
    """Warning that a layer on a GPU runs without a kernel, and thus slowly."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImplementationChoice:
    """Implementation chosen for a layer configuration in a region.

    Attributes:
        implementation: Name of the implementation.
        kernel: Kernel and its static sizes for "mosaic_gpu"; None otherwise.
        reason: Reason why a preferred implementation is not used; None if the first one is.
        requested: Requested implementations, which gradients may use, too; None if none were requested.
    """

    implementation: str
    kernel: KernelConfig | None = None
    reason: str | None = None
    requested: tuple[str, ...] | None = None


def requested_implementations(implementation: ImplementationArg) -> tuple[str, ...]:
    """Return the requested implementations in order of preference.

    Raises:
        ValueError: If a name is unknown, or the sequence is empty.
    """
    if implementation is None:
        return IMPLEMENTATIONS
    requested = (implementation,) if isinstance(implementation, str) else as_static_arg(implementation)
    assert isinstance(requested, tuple)
    if not requested:
        names = ", ".join(map(repr, IMPLEMENTATIONS))
        raise ValueError(f"implementation is empty. Pass None, or at least one of {names}.")
    for name in requested:
        require_one_of("implementation", name, IMPLEMENTATIONS)
    return requested


def as_static_arg(implementation: ImplementationArg) -> str | tuple[str, ...] | None:
    """Return the implementation argument as a hashable value; None stays None, so that a fallback warns."""
    if isinstance(implementation, str | None):
        return implementation
    names = ", ".join(map(repr, IMPLEMENTATIONS))
    rule = f"be one of {names}, or several of them in order of preference"
    require(isinstance(implementation, Iterable), "implementation", rule, repr(implementation))
    return tuple(implementation)


def unsupported_reasons(spec: AttentionSpec, no_kernels: str | None) -> dict[str, str | None]:
    """Return, for each implementation, the reason why it does not support a layer; None if it does."""
    reason = "its sums depend on the sizes of the bucket" if spec.batch_invariant else None
    return {"mosaic_gpu": no_kernels, "reference": reason}


def first_supported(requested: Sequence[str], reasons: Mapping[str, str | None]) -> tuple[str, str | None]:
    """Return the first supported implementation and the reasons against those before it.

    Raises:
        NotImplementedError: If none is supported; the message has the reason for each.
    """
    rejection_reasons: list[str] = []
    for name in requested:
        reason = reasons.get(name)
        if reason is None:
            return name, "; ".join(rejection_reasons) or None
        rejection_reasons.append(f"{name}: {reason}")
    raise unsupported("attend", "; ".join(rejection_reasons), "Pass implementation=None or 'xla'")


def choose_implementation(
    layer: LayerConfig,
    region: RegionSizes,
    mask: Mask | None,
    *,
    requested: tuple[str, ...],
    is_named: bool,
    no_kernels: str | None,
    gpu: str,
) -> ImplementationChoice:
    """Choose the first requested implementation that supports a region, from static facts alone.

    Args:
        layer: Layer configuration.
        region: Static sizes of the region.
        mask: Mask in addition to the spec's window, chunk size and causality; None adds none.
        requested: Requested implementations in order of preference.
        is_named: Whether the caller named them.
        no_kernels: Reason why the kernels cannot run on the step's device; None if they can.
        gpu: Compute capability that kernels are built for.

    Raises:
        NotImplementedError: If no requested implementation supports the region.
    """
    kernel: KernelConfig | None = None
    reasons = unsupported_reasons(layer.spec, no_kernels)
    if no_kernels is None and "mosaic_gpu" in requested:
        kernel_or_reason = choose_kernel(layer, region, mask, gpu)
        if isinstance(kernel_or_reason, str):
            reasons["mosaic_gpu"] = kernel_or_reason
        else:
            kernel = kernel_or_reason
    name, reason = first_supported(requested, reasons)
    return ImplementationChoice(
        implementation=name,
        kernel=kernel if name == "mosaic_gpu" else None,
        reason=reason,
        requested=requested if is_named else None,
    )
