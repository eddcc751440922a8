"""add_norm: the residual stream behind a layer's part, and what the next part reads, in one kernel."""

from jaxtyping import Array, Float

from pallas_kernels.add_norm.kernel import Norm, Refs, add_and_norm
from pallas_kernels.checks import require_axes, require_shape, unsupported
from pallas_kernels.derivatives import forbid_kernel_derivative
from pallas_kernels.shared.types import Interpret
from pallas_kernels.support import why_not_add_norm


def add_norm(
    x: Float[Array, "..."],
    delta: Float[Array, "..."] | None,
    weight: Float[Array, "..."],
    *,
    eps: float = 1e-6,
    is_offset: bool = False,
    interpret: Interpret = None,
) -> tuple[Float[Array, "rows width"], Float[Array, "rows width"]]:
    """Adds, rounds to x.dtype, and divides by the root mean square of each row.

    Args:
        x: The residual stream, [rows, width].
        delta: What is added, as x; None = nothing, and the first result is x.
        weight: [width]: what each column of the normalised rows is multiplied by.
        eps: Static: added to the mean square.
        is_offset: Static: multiplies by 1 + weight, then rounds (Gemma); else rounds before, too (Llama).
        interpret: Static: plgpu.InterpretGPUParams to run on a CPU.

    Returns:
        x + delta, and its norm; both in x.dtype.

    Raises:
        ValueError: Shapes disagree.
        NotImplementedError: There is no kernel for this request, or it is differentiated.

    Source: vLLM `fused_add_rms_norm`.
    """
    require_axes(2, x=x)
    require_axes(1, weight=weight)
    if delta is not None:
        require_axes(2, delta=delta)
        require_shape("delta", delta.shape, x.shape, "as x")
    require_shape("weight", weight.shape, x.shape[1:], "columns of x")
    reason = why_not_add_norm(
        dtype=x.dtype, other_dtypes=[y.dtype for y in (delta, weight) if y is not None], width=x.shape[1]
    )
    if reason is not None:
        raise unsupported("add_norm", reason, "Use another implementation")
    if x.shape[0] == 0:
        return x, x
    way_out = "Use jax.numpy, as jattn's layers do without a cache or with implementation='xla'"
    refs = forbid_kernel_derivative(Refs(x, delta, weight), "add_norm", way_out)
    return add_and_norm(refs, Norm(eps=eps, is_offset=is_offset), interpret=interpret)
