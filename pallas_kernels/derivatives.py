"""What has no derivative says so where it is differentiated, in words that help."""

import functools
from typing import Any

import jax

from pallas_kernels.checks import unsupported


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def forbid_derivative[Tree](arrays: Tree, what: str, reason: str, way_out: str) -> Tree:
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


@forbid_derivative.defjvp
def _refused(what: str, reason: str, way_out: str, primals: Any, tangents: Any) -> Any:
    raise unsupported(what, reason, way_out)


def forbid_kernel_derivative[Tree](arrays: Tree, kernel: str, way_out: str) -> Tree:
    """The same arrays, for a kernel that has no derivative.

    Args:
        arrays: All that it is given, in any tree.
        kernel: Its entry's name.
        way_out: What has a derivative.

    Raises:
        NotImplementedError: As they are differentiated.
    """
    way_out = f"{way_out}, or take jax.lax.stop_gradient of what it is given"
    return forbid_derivative(arrays, f"a derivative of {kernel}", "the kernel has none", way_out)
