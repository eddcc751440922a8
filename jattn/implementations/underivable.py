"""What has no derivative says so where it is differentiated, in words that help."""

import functools

import jax

from pallas_kernels.checks import unsupported


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def underivable[Tree](arrays: Tree, implementation: str) -> Tree:
    """The same arrays; what an implementation makes of them cannot be differentiated.

    Raises:
        NotImplementedError: As it is differentiated; the message names an implementation that can be.
    """
    return arrays


def _forward(arrays: object, implementation: str) -> tuple[object, None]:
    way_out = "Ask for implementation='reference', whose memory grows with tokens x the longest request"
    raise unsupported("a derivative of attend", f"{implementation} has none", way_out)


underivable.defvjp(_forward, lambda implementation, _, cotangent: (cotangent,))
