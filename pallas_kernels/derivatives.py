"""Errors for functions that cannot be differentiated, raised where they are differentiated."""

import functools
from typing import Any

import jax

from pallas_kernels.checks import unsupported


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def forbid_derivative[Tree](arrays: Tree, derivative: str, reason: str, fix: str) -> Tree:
    """Return `arrays` unchanged, such that differentiating anything computed from them raises.

    Args:
        arrays: Tree of arrays.
        derivative: Derivative that does not exist, such as "a derivative of paged_decode".
        reason: Clause that says why it does not exist.
        fix: Instruction that says what to do instead, without a final period.

    Raises:
        NotImplementedError: If the result is differentiated, in forward or reverse mode.
    """
    return arrays


@forbid_derivative.defjvp
def _raise_unsupported(derivative: str, reason: str, fix: str, primals: Any, tangents: Any) -> Any:
    raise unsupported(derivative, reason, fix)


def forbid_kernel_derivative[Tree](arrays: Tree, kernel: str, fix: str) -> Tree:
    """Return the inputs of a kernel without a derivative; differentiating the kernel then raises.

    Args:
        arrays: Tree of all arrays that the kernel reads.
        kernel: Name of the kernel's public function.
        fix: Instruction that names a function with a derivative, without a final period.

    Raises:
        NotImplementedError: If the result is differentiated.
    """
    fix = f"{fix}, or apply jax.lax.stop_gradient to the inputs"
    return forbid_derivative(arrays, f"a derivative of {kernel}", "the kernel has none", fix)
