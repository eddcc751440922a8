"""Whether a mask and a step belong together: what is static of both is compared, no array is looked at."""

from jattn.masks.base import And, Mask, Or, Sizes, check_is_mask
from pallas_kernels.checks import require


def check_mask(mask: Mask, sizes: Sizes, *, causal: bool) -> None:
    """What a mask must be to hold in a step: `attend(mask=)`'s, `plan(mask=)`'s, or a spec's.

    Args:
        mask: The mask.
        sizes: The step's.
        causal: Whether the layer is causal, so that this mask comes on top of causality.

    Raises:
        ValueError: It is no mask; its rows are not the step's; it has other heads; it is smaller than the
            step's lengths; or it lets queries see later keys, and causality does not.
    """
    check_ahead("mask", mask, causal=causal)
    mask.check(sizes)


def check_ahead(name: str, mask: Mask, *, causal: bool) -> None:
    """Raises ValueError where `mask` is none, or causal attention would take from it what it is there for.

    `Causal() | Prefix(length=n)` on top of causality would be causality alone.
    """
    check_is_mask(name, mask)
    rule = "let no query of a causal layer see later keys (AttentionSpec(causal=False) leaves that to it)"
    require(not (causal and mask.sees_ahead), name, rule, _written(mask))


def _written(mask: Mask) -> str:
    """A mask as it was composed, by the names of its parts."""
    if isinstance(mask, And | Or):
        sign = " & " if isinstance(mask, And) else " | "
        return "(" + sign.join(map(_written, mask.masks)) + ")"
    return type(mask).__name__
