"""What has no derivative says so where it is differentiated, in words that help."""

import functools
from typing import Any

import jax

from pallas_kernels.checks import unsupported


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def underivable[Tree](arrays: Tree, what: str, reason: str, way_out: str) -> Tree:
    """The same arrays; what is made of them cannot be differentiated, forward or backward.

    Args:
        arrays: Any tree of them.
        what: The derivative that there is not.
        reason: Why.
        way_out: What to do instead.

    Raises:
        NotImplementedError: As they are differentiated.
    """
    return arrays


@underivable.defjvp
def _refused(what: str, reason: str, way_out: str, primals: Any, tangents: Any) -> Any:
    raise unsupported(what, reason, way_out)


def underivable_cache[Tree](arrays: Tree, implementation: str) -> Tree:
    """The same arrays, for an implementation that has no derivative over a paged cache."""
    return underivable(
        arrays,
        "a derivative of attend",
        f"{implementation} has none over a paged cache or 8-bit keys",
        "Attend to the step's own keys (PackedKV, or cache=None in a layer), or ask for "
        "implementation='reference', whose memory grows with tokens x the longest request",
    )


def once_derivable[Tree](arrays: Tree) -> Tree:
    """The same arrays, in what a derivative is made of."""
    return underivable(
        arrays,
        "a derivative of a derivative of attention",
        "the backward pass has none",
        "Ask for implementation='reference', which has all of them",
    )
