"""What of attention has no derivative, in words that help."""

from pallas_kernels.derivatives import underivable


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
