"""Errors for functions that cannot be differentiated, raised where they are differentiated."""

import functools
from typing import Any

import jax

from pallas_kernels.checks import unsupported


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def forbid_derivative[Tree](arrays: Tree, derivative: str, reason: str, way_out: str) -> Tree:
    """Return `arrays` unchanged, such that differentiating anything computed from them raises.

    Args:
        arrays: Tree of arrays.
        derivative: Derivative that does not exist, such as "a derivative of paged_decode".
        reason: Clause that says why it does not exist.
        way_out: Sentence that says what to do instead, without a final period.

    Raises:
        NotImplementedError: If the result is differentiated, in forward or reverse mode.
    """
    return arrays


@forbid_derivative.defjvp
def _raise_unsupported(derivative: str, reason: str, way_out: str, primals: Any, tangents: Any) -> Any:
    raise unsupported(derivative, reason, way_out)


def forbid_kernel_derivative[Tree](arrays: Tree, kernel: str, way_out: str) -> Tree:
    """Return the inputs of a kernel without a derivative; differentiating the kernel then raises.

    Args:
        arrays: Tree of all arrays that the kernel reads.
        kernel: Name of the kernel's public function.
        way_out: Sentence that names a function with a derivative.

    Raises:
        NotImplementedError: If the result is differentiated.
    """
    way_out = f"{way_out}, or apply jax.lax.stop_gradient to the inputs"
    return forbid_derivative(arrays, f"a derivative of {kernel}", "the kernel has none", way_out)
