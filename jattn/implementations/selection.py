"""Which implementation serves a kind of layer in a region of a step: the one place that chooses."""

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
    """A layer on a GPU that is served without a kernel, and so slowly, though nobody asked for that."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImplementationChoice:
    """What serves a kind of layer in a region.

    Attributes:
        implementation: Its name.
        kernel: Which kernel, of which sizes; None of the others.
        reason: Why a better one was passed over; None where none was.
        asked: Names that were asked for, one of which may compute the gradients; None = nobody asked.
    """

    implementation: str
    kernel: KernelConfig | None = None
    reason: str | None = None
    asked: tuple[str, ...] | None = None


def requested_implementations(implementation: ImplementationArg) -> tuple[str, ...]:
    """The names of implementations in the order in which they are tried.

    Raises:
        ValueError: There is no implementation of a name, or none is named.
    """
    named = as_static_arg(implementation)
    asked = IMPLEMENTATIONS if named is None else (named,) if isinstance(named, str) else named
    require(len(asked) > 0, "implementation", "name at least one of " + ", ".join(IMPLEMENTATIONS), asked)
    for name in asked:
        require_one_of("implementation", name, IMPLEMENTATIONS)
    return asked


def as_static_arg(implementation: ImplementationArg) -> str | tuple[str, ...] | None:
    """What was asked for, as a static argument may be. None stays None: nobody asked, so a fallback warns."""
    if isinstance(implementation, str | None):
        return implementation
    rule = "be a name, or several in order of preference, of " + ", ".join(IMPLEMENTATIONS)
    require(isinstance(implementation, Iterable), "implementation", rule, repr(implementation))
    return tuple(implementation)


def unsupported_reasons(spec: AttentionSpec, no_kernels: str | None) -> dict[str, str | None]:
    """Why implementations cannot serve a layer, by their names; None of one that can."""
    return {"mosaic_gpu": no_kernels, "reference": reference.why_not(spec)}


def first_supported(asked: Sequence[str], reasons: Mapping[str, str | None]) -> tuple[str, str | None]:
    """The first name that no reason speaks against, and the reasons against those before it.

    Raises:
        NotImplementedError: There is none; the message has each one's reason.
    """
    declined: list[str] = []
    for name in asked:
        reason = reasons.get(name)
        if reason is None:
            return name, "; ".join(declined) or None
        declined.append(f"{name}: {reason}")
    raise unsupported("attend", "; ".join(declined), "Leave implementation=None or ask for 'xla'")


def choose_implementation(
    layer: LayerConfig,
    region: RegionSizes,
    mask: Mask | None,
    *,
    implementation: ImplementationArg,
    no_kernels: str | None,
) -> ImplementationChoice:
    """The first implementation of those asked for that can serve a region. Looks at shapes alone.

    Args:
        layer: The kind of layer.
        region: Its sizes.
        mask: What queries see beyond the spec's numbers.
        implementation: A name, several in order of preference, or None = the best.
        no_kernels: Why the kernels cannot run where this step runs; None if they can.

    Raises:
        ValueError: There is no implementation of that name.
        NotImplementedError: None of them can; the message has each one's reason.
    """
    asked = requested_implementations(implementation)
    kernel: KernelConfig | None = None
    reasons = unsupported_reasons(layer.spec, no_kernels)
    if no_kernels is None and "mosaic_gpu" in asked:
        found = choose_kernel(layer, region, mask)
        if isinstance(found, str):
            reasons["mosaic_gpu"] = found
        else:
            kernel = found
    name, reason = first_supported(asked, reasons)
    named = None if implementation is None else asked
    kernel = kernel if name == "mosaic_gpu" else None
    return ImplementationChoice(implementation=name, kernel=kernel, reason=reason, asked=named)
