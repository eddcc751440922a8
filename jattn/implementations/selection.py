"""Selection of the implementation for a layer configuration in a region of a step."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from jattn.implementations import reference
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
    named = as_static_arg(implementation)
    requested = IMPLEMENTATIONS if named is None else (named,) if isinstance(named, str) else named
    require(
        len(requested) > 0, "implementation", "name at least one of " + ", ".join(IMPLEMENTATIONS), requested
    )
    for name in requested:
        require_one_of("implementation", name, IMPLEMENTATIONS)
    return requested


def as_static_arg(implementation: ImplementationArg) -> str | tuple[str, ...] | None:
    """Return the implementation argument as a hashable value; None stays None, so that a fallback warns."""
    if isinstance(implementation, str | None):
        return implementation
    rule = "be a name, or several in order of preference, of " + ", ".join(IMPLEMENTATIONS)
    require(isinstance(implementation, Iterable), "implementation", rule, repr(implementation))
    return tuple(implementation)


def unsupported_reasons(spec: AttentionSpec, no_kernels: str | None) -> dict[str, str | None]:
    """Return by name the reason why an implementation does not support a layer; None if it does."""
    return {"mosaic_gpu": no_kernels, "reference": reference.why_not(spec)}


def first_supported(requested: Sequence[str], reasons: Mapping[str, str | None]) -> tuple[str, str | None]:
    """Return the first supported implementation and the reasons against those before it.

    Raises:
        NotImplementedError: If none is supported; the message has the reason for each.
    """
    declined: list[str] = []
    for name in requested:
        reason = reasons.get(name)
        if reason is None:
            return name, "; ".join(declined) or None
        declined.append(f"{name}: {reason}")
    raise unsupported("attend", "; ".join(declined), "Pass implementation=None or 'xla'")


def choose_implementation(
    layer: LayerConfig,
    region: RegionSizes,
    mask: Mask | None,
    *,
    implementation: ImplementationArg,
    no_kernels: str | None,
) -> ImplementationChoice:
    """Choose the first requested implementation that supports a region, from static facts alone.

    Args:
        layer: Layer configuration.
        region: Static sizes of the region.
        mask: Mask in addition to the spec's window, chunk size and causality; None adds none.
        implementation: Requested implementations; None chooses the best.
        no_kernels: Reason why the kernels cannot run on the step's device; None if they can.

    Raises:
        ValueError: If a name is unknown.
        NotImplementedError: If no requested implementation supports the region.
    """
    requested = requested_implementations(implementation)
    kernel: KernelConfig | None = None
    reasons = unsupported_reasons(layer.spec, no_kernels)
    if no_kernels is None and "mosaic_gpu" in requested:
        found = choose_kernel(layer, region, mask)
        if isinstance(found, str):
            reasons["mosaic_gpu"] = found
        else:
            kernel = found
    name, reason = first_supported(requested, reasons)
    named = None if implementation is None else requested
    kernel = kernel if name == "mosaic_gpu" else None
    return ImplementationChoice(implementation=name, kernel=kernel, reason=reason, requested=named)
