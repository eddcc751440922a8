"""Differentiable attention over keys and values outside a cache, as used in training.

The residuals are queries, keys, values, outputs and log-sum-exps; the backward pass recomputes the rest.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array

from jattn.cache import PackedKV
from jattn.implementations import mosaic_gpu, xla
from jattn.implementations.mosaic_gpu import KernelPlan
from jattn.implementations.region_inputs import OutAndLse, OutputGradients, RegionInputs
from jattn.implementations.selection import ImplementationChoice, KernelFallbackWarning
from jattn.implementations.xla import QueryTiles, match_varying_axes
from jattn.masks.functions import lift_captured_arrays
from jattn.pytree import replace
from pallas_kernels import architectures
from pallas_kernels.checks import forbid_derivative, unsupported, warn_caller


def attend(
    inputs: RegionInputs,
    choice: ImplementationChoice,
    query_tiles: QueryTiles | None,
    kernel_plan: KernelPlan | None,
    *,
    return_lse: bool,
    saved_outputs: tuple[Array, Array] | None = None,
) -> OutAndLse:
    """Attend in a region; return the output and the log-sum-exp, in its accumulation dtype, or None.

    Args:
        inputs: Inputs of the region, whose keys and values are a PackedKV of 16 bits or more.
        choice: Implementation of the region: "mosaic_gpu" or "xla".
        query_tiles: Query tiles of the prefill region for XLA; None computes them here.
        kernel_plan: Kernel plan of the region; None computes it here.
        return_lse: Return the log-sum-exp.
        saved_outputs: Output and log-sum-exp if they are known. They are returned with attention's gradient
            instead of being computed.

    Raises:
        NotImplementedError: If a kernel is called under shard_map's check of varying axes.
    """
    kv, mask, score_mod = inputs.kv, inputs.mask, inputs.score_mod
    if choice.kernel is None and score_mod is not None:
        is_f64 = inputs.query.dtype == jnp.float64
        score_mod = score_mod.lift_captured_arrays(jnp.float64 if is_f64 else jnp.float32)
    arrays: Any = (inputs.query, kv.k, kv.v, inputs.sinks, inputs.alibi_slopes, score_mod)
    # All vary over every device axis that one varies over. The broadcast happens here, so that its gradient's
    # sum over devices does, too.
    floats = (x for x in jax.tree.leaves(arrays) if jnp.issubdtype(x.dtype, jnp.floating))
    for like in floats:
        arrays = match_varying_axes(like, arrays)
    query, k, v, sinks, alibi_slopes, score_mod = arrays
    axes = sorted(jax.typeof(query).manual_axis_type.varying)
    if choice.kernel is not None and axes:
        reason = "the kernels do not support shard_map's check of varying axes"
        fix = "Pass check_vma=False to jax.shard_map, or implementation='xla'"
        feature = f'implementation="mosaic_gpu" under shard_map over {", ".join(axes)}'
        raise unsupported(feature, reason, fix)
    if choice.kernel is None and mask is not None:
        mask = lift_captured_arrays(mask)
    inputs = replace(
        inputs,
        query=query,
        kv=replace(kv, k=k, v=v),
        mask=mask,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        score_mod=score_mod,
    )
    return _attend(choice, return_lse, inputs, query_tiles, kernel_plan, saved_outputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    choice: ImplementationChoice,
    return_lse: bool,
    inputs: RegionInputs,
    query_tiles: QueryTiles | None,
    kernel_plan: KernelPlan | None,
    saved_outputs: tuple[Array, Array] | None,
) -> OutAndLse:
    """Attend, or return the saved outputs."""
    lse: Array | None
    if saved_outputs is not None:
        out, lse = saved_outputs
    elif choice.kernel is not None:
        out, lse = mosaic_gpu.attend(inputs, choice.kernel, kernel_plan, return_lse=return_lse)
    else:
        out, lse = xla.attend(inputs, query_tiles)
    return out, lse if return_lse else None


class _Residuals(NamedTuple):
    """Residuals of the forward pass.

    Attributes:
        inputs: Inputs of the region.
        out: Output.
        lse: Log-sum-exp.
        needs_slope_gradient: () if ALiBi slopes need a gradient, else None: pytrees without leaves.
        needs_score_mod_gradient: The same of the arrays of the score function.
    """

    inputs: RegionInputs
    out: Array
    lse: Array
    needs_slope_gradient: tuple[()] | None
    needs_score_mod_gradient: tuple[()] | None


def _forward(
    choice: ImplementationChoice, return_lse: bool, inputs: RegionInputs, *others: Any
) -> tuple[OutAndLse, _Residuals]:
    """Run the forward pass; each array is a CustomVJPPrimal."""
    slopes: Any = inputs.alibi_slopes
    needs_slope_gradient = () if slopes is not None and slopes.perturbed else None
    mod_arrays: Any = () if inputs.score_mod is None else inputs.score_mod.arrays
    needs_score_mod_gradient = () if any(array.perturbed for array in mod_arrays) else None
    inputs, others = jax.tree.map(lambda primal: primal.value, (inputs, others))
    inputs = reject_second_derivative(inputs)
    out, lse = _attend(choice, True, inputs, *others)
    assert lse is not None
    residuals = _Residuals(inputs, out, lse, needs_slope_gradient, needs_score_mod_gradient)
    return (out, lse if return_lse else None), residuals


def _backward(
    choice: ImplementationChoice, return_lse: bool, residuals: _Residuals, grads: tuple[Any, Any]
) -> tuple[RegionInputs, None, None, None]:
    inputs, out, lse, needs_slope_gradient, needs_score_mod_gradient = residuals
    grad_out = jnp.zeros_like(out) if isinstance(grads[0], SymbolicZero) else grads[0]
    grad_lse = None if isinstance(grads[1], SymbolicZero) else grads[1]
    inputs, out, lse, grad_out, grad_lse = reject_second_derivative((inputs, out, lse, grad_out, grad_lse))
    outputs = OutputGradients(out, lse, grad_out, grad_lse)
    sinks, slopes, score_mod = inputs.sinks, inputs.alibi_slopes, inputs.score_mod
    grad_score_mod: Any = None
    if choice.kernel is None or not _has_backward_kernel(
        choice,
        inputs,
        needs_slope_gradient=needs_slope_gradient is not None,
        needs_score_mod_gradient=needs_score_mod_gradient is not None,
    ):
        grad_query, grad_k, grad_v, grad_sinks, grad_slopes, grad_arrays = xla.gradients(inputs, outputs)
        if score_mod is not None:
            grad_score_mod = score_mod.with_arrays(grad_arrays, itertools.repeat(None))
    else:
        grad_query, grad_k, grad_v = mosaic_gpu.gradients(inputs, outputs)
        if score_mod is not None:
            zeros = map(jnp.zeros_like, score_mod.float_arrays)
            grad_score_mod = score_mod.with_arrays(zeros, itertools.repeat(None))
        grad_sinks = None if sinks is None else xla.gradient_of_sinks(sinks, outputs, inputs.metadata)
        grad_slopes = None if slopes is None else jnp.zeros_like(slopes)
    grad_inputs = replace(
        inputs,
        query=grad_query,
        kv=replace(inputs.kv, k=grad_k, v=grad_v, kv_start_loc=None),
        metadata=None,
        mask=None,
        sinks=grad_sinks,
        alibi_slopes=grad_slopes,
        score_mod=grad_score_mod,
    )
    return grad_inputs, None, None, None


_attend.defvjp(_forward, _backward, symbolic_zeros=True)


def _has_backward_kernel(
    choice: ImplementationChoice,
    inputs: RegionInputs,
    *,
    needs_slope_gradient: bool,
    needs_score_mod_gradient: bool,
) -> bool:
    """Return whether a kernel computes the gradients; if not, XLA does.

    Raises:
        NotImplementedError: If no kernel supports the gradients and XLA is not among the requested
            implementations.
    """
    kv = inputs.kv
    assert isinstance(kv, PackedKV)
    reason = mosaic_gpu.why_not_gradients(
        inputs.spec,
        {"query": inputs.query.dtype, "key": kv.k.dtype, "value": kv.v.dtype},
        inputs.mask,
        is_in_order=kv.is_in_order,
        needs_slope_gradient=needs_slope_gradient,
        needs_score_mod_gradient=needs_score_mod_gradient,
        gpu=architectures.kernel_architecture(inputs.query),
    )
    if reason is None:
        return True
    if choice.requested is not None and "xla" not in choice.requested:
        fix = "Pass implementation=None or ('mosaic_gpu', 'xla')"
        feature = 'Gradients of attention with implementation="mosaic_gpu"'
        raise unsupported(feature, reason, fix)
    if choice.requested is None:
        message = f"Gradients of attention fall back to xla on a GPU, which is slow: {reason}."
        warn_caller(message, KernelFallbackWarning)
    return False


def reject_gradient_over_cache(inputs: RegionInputs, implementation: str) -> RegionInputs:
    """Return the inputs such that differentiating them raises: there is no gradient over a cache."""
    return forbid_derivative(
        inputs,
        "Gradients of attend",
        f"{implementation} does not support them over a paged cache or 8-bit keys",
        "Attend to the step's keys (PackedKV, or cache=None in a layer), or pass "
        "implementation='reference', whose memory grows with tokens x the longest request",
    )


def reject_second_derivative[Tree](arrays: Tree) -> Tree:
    """Return the arrays; differentiating them raises, since there is no second derivative."""
    return forbid_derivative(
        arrays,
        "Second derivatives of attention",
        "the backward pass cannot be differentiated",
        "Pass implementation='reference', which has derivatives of any order",
    )
