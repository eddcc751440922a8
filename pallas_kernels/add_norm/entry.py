"""add_norm: add a layer's output to the residual stream and normalize the sum, in one kernel."""

from jaxtyping import Array, Float

from pallas_kernels.add_norm.kernel import AddNormRefs, NormOptions, add_and_norm
from pallas_kernels.checks import forbid_kernel_derivative, require_axes, require_shape, unsupported
from pallas_kernels.shared.types import Interpret
from pallas_kernels.support import why_not_add_norm

FIX = "Add and normalize with jax.numpy, as jattn's layers do with implementation='xla'"


def add_norm(
    x: Float[Array, "..."],
    sublayer_out: Float[Array, "..."] | None,
    weight: Float[Array, "..."],
    *,
    eps: float = 1e-6,
    is_offset: bool = False,
    interpret: Interpret = None,
) -> tuple[Float[Array, "rows width"], Float[Array, "rows width"]]:
    """Return the sum `x + sublayer_out`, rounded to x.dtype, and the RMS norm of each row of the sum.

    Args:
        x: Residual stream, [rows, width].
        sublayer_out: Rows to add, of the shape and dtype of x; None adds nothing, and the first result is x.
        weight: Weight of the norm, [width].
        eps: Static: number added to the mean square.
        is_offset: Static: multiply by 1 + weight and round once (Gemma). Otherwise also round before
            multiplying by the weight (Llama).
        interpret: Static: plgpu.InterpretGPUParams to run on a CPU.

    Returns:
        The sum and its norm, both in x.dtype.

    Raises:
        ValueError: If shapes disagree.
        NotImplementedError: If the kernel does not support the request, or is differentiated.

    Source: vLLM `fused_add_rms_norm`.
    """
    require_axes(2, x=x)
    require_axes(1, weight=weight)
    if sublayer_out is not None:
        require_axes(2, sublayer_out=sublayer_out)
        require_shape("sublayer_out", sublayer_out.shape, x.shape, "the shape of x")
    require_shape("weight", weight.shape, x.shape[1:], "columns of x")
    other_dtypes = [y.dtype for y in (sublayer_out, weight) if y is not None]
    reason = why_not_add_norm(dtype=x.dtype, other_dtypes=other_dtypes, width=x.shape[1])
    if reason is not None:
        raise unsupported("add_norm", reason, FIX)
    if x.shape[0] == 0:
        return x, x
    refs = forbid_kernel_derivative(AddNormRefs(x, sublayer_out, weight), "add_norm", FIX)
    return add_and_norm(refs, NormOptions(eps=eps, is_offset=is_offset), interpret=interpret)
