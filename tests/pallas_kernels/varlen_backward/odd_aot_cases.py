"""Backward kernels over arrays whose number of tokens is no multiple of 8, to compile ahead of time."""

import jax.numpy as jnp

from pallas_kernels.varlen_backward import default_sizes
from tests.pallas_kernels.varlen_backward.backward_aot_cases import case

TOKENS = 8187


def aot_cases():
    """Return a case per head_dim that adds up dq, and one with a dq kernel."""
    cases = {}
    for is_deterministic, head_dims in ((False, (64, 96, 128)), (True, (64, 96, 128, 192, 256))):
        for head_dim in head_dims:
            sizes = default_sizes(head_dim, deterministic=is_deterministic)
            name = f"d{head_dim}" + ("-dq_kernel" if is_deterministic else "")
            cases[name] = case(head_dim, jnp.dtype("bfloat16"), tokens=TOKENS, sizes=sizes)
    return cases
