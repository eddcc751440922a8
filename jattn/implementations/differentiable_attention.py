"""Differentiable attention over keys and values outside a cache, as used in training.

The residuals are queries, keys, values, outputs and log-sum-exps; the backward pass recomputes the rest.
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from jattn.batch.metadata import BatchMetadata
from jattn.cache import PackedKV
from jattn.implementations import mosaic_gpu, xla
from jattn.implementations.mosaic_gpu import KernelPlan
from jattn.implementations.selection import ImplementationChoice, KernelFallbackWarning
from jattn.implementations.xla import QueryTiles, match_varying_axes
from jattn.masks import Mask
from jattn.masks.functions import lift_captured_arrays
from jattn.pytree import replace
from jattn.score_mod import ScoreMod
from jattn.spec import AttentionSpec
from pallas_kernels import architectures
from pallas_kernels.checks import forbid_derivative, unsupported, warn_caller

type OutAndLse = tuple[Array, Array | None]


class Inputs(NamedTuple):
    """Arguments that have a gradient; keys and values are a PackedKV."""

    query: Float[Array, "tokens q_heads head_dim"]
    kv: PackedKV
    sinks: Float[Array, " q_heads"] | None
    alibi_slopes: Float[Array, " q_heads"] | None
    score_mod: ScoreMod | None


class Context(NamedTuple):
    """Arguments without a gradient; see `attend`."""

    metadata: BatchMetadata
    mask: Mask | None
    query_tiles: QueryTiles | None
    kernel_plan: KernelPlan | None
    saved_outputs: tuple[Array, Array] | None


def attend(
    query: Float[Array, "tokens q_heads head_dim"],
    kv: PackedKV,
    metadata: BatchMetadata,
    spec: AttentionSpec,
    choice: ImplementationChoice,
    *,
    mask: Mask | None,
    query_tiles: QueryTiles | None,
    kernel_plan: KernelPlan | None,
    sinks: Float[Array, " q_heads"] | None,
    alibi_slopes: Float[Array, " q_heads"] | None,
    score_mod: ScoreMod | None,
    return_lse: bool,
    saved_outputs: tuple[Array, Array] | None = None,
) -> OutAndLse:
    """Attend in a region; return the output and the log-sum-exp, in its accumulation dtype, or None.

    Args:
        query: Queries of the region.
        kv: Keys and values of 16 bits or more.
        metadata: Metadata of the region as a separate step.
        spec: Attention of the layer.
        choice: Implementation of the region: "mosaic_gpu" or "xla".
        mask: Mask in addition to the spec's window, chunk size and causality; None adds none.
        query_tiles: Query tiles of the prefill region for XLA; None computes them here.
        kernel_plan: Kernel plan of the region; None computes it here.
        sinks: Attention sinks per head.
        alibi_slopes: ALiBi slope per head.
        score_mod: Score function of the layer; None without one.
        return_lse: Return the log-sum-exp.
        saved_outputs: Output and log-sum-exp if they are known. They are returned with attention's gradient
            instead of being computed.

    Raises:
        NotImplementedError: If a kernel is called under shard_map's check of varying axes.
    """
    if choice.kernel is None and score_mod is not None:
        is_f64 = query.dtype == jnp.float64
        score_mod = score_mod.lift_captured_arrays(jnp.float64 if is_f64 else jnp.float32)
    arrays: Any = (query, kv.k, kv.v, sinks, alibi_slopes, score_mod)
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
    inputs = Inputs(query, replace(kv, k=k, v=v), sinks, alibi_slopes, score_mod)
    context = Context(metadata, mask, query_tiles, kernel_plan, saved_outputs)
    return _attend(spec, choice, return_lse, inputs, context)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attend(
    spec: AttentionSpec, choice: ImplementationChoice, return_lse: bool, inputs: Inputs, context: Context
) -> OutAndLse:
    """Attend, or return the saved outputs."""
    if context.saved_outputs is not None:
        out, lse = context.saved_outputs
        return out, lse if return_lse else None
    if choice.kernel is not None:
        return mosaic_gpu.attend(
            inputs.query,
            inputs.kv,
            context.metadata,
            spec,
            choice.kernel,
            context.kernel_plan,
            mask=context.mask,
            sinks=inputs.sinks,
            alibi_slopes=inputs.alibi_slopes,
            score_mod=inputs.score_mod,
            return_lse=return_lse,
        )
    out, lse = xla.attend(
        inputs.query,
        inputs.kv,
        context.metadata,
        spec,
        tiles=context.query_tiles,
        mask=context.mask,
        sinks=inputs.sinks,
        alibi_slopes=inputs.alibi_slopes,
        score_mod=inputs.score_mod,
    )
    return out, lse if return_lse else None


class _Residuals(NamedTuple):
    """Residuals of the forward pass.

    Attributes:
        inputs: Differentiable arguments.
        metadata: Metadata of the region.
        mask: Mask of the region.
        out: Output.
        lse: Log-sum-exp.
        needs_slope_gradient: () if ALiBi slopes need a gradient, else None: pytrees without leaves.
        needs_score_mod_gradient: The same of the arrays of the score function.
    """

    inputs: Inputs
    metadata: BatchMetadata
    mask: Mask | None
    out: Array
    lse: Array
    needs_slope_gradient: tuple[()] | None
    needs_score_mod_gradient: tuple[()] | None


def _forward(
    spec: AttentionSpec, choice: ImplementationChoice, return_lse: bool, inputs: Inputs, context: Context
) -> tuple[OutAndLse, _Residuals]:
    """Run the forward pass; each array is a CustomVJPPrimal."""
    slopes: Any = inputs.alibi_slopes
    needs_slope_gradient = () if slopes is not None and slopes.perturbed else None
    mod_arrays: Any = () if inputs.score_mod is None else inputs.score_mod.arrays
    needs_score_mod_gradient = () if any(array.perturbed for array in mod_arrays) else None
    inputs, context = jax.tree.map(lambda primal: primal.value, (inputs, context))
    inputs = reject_second_derivative(inputs)
    out, lse = _attend(spec, choice, True, inputs, context)
    assert lse is not None
    needs = (needs_slope_gradient, needs_score_mod_gradient)
    residuals = _Residuals(inputs, context.metadata, context.mask, out, lse, *needs)
    return (out, lse if return_lse else None), residuals


def _backward(
    spec: AttentionSpec,
    choice: ImplementationChoice,
    return_lse: bool,
    residuals: _Residuals,
    grads: tuple[Any, Any],
) -> tuple[Inputs, None]:
    inputs, metadata, mask, out, lse, needs_slope_gradient, needs_score_mod_gradient = residuals
    grad_out = jnp.zeros_like(out) if isinstance(grads[0], SymbolicZero) else grads[0]
    grad_lse = None if isinstance(grads[1], SymbolicZero) else grads[1]
    inputs, out, lse, grad_out, grad_lse = reject_second_derivative((inputs, out, lse, grad_out, grad_lse))
    (query, kv, sinks, slopes, score_mod), outputs = inputs, xla.OutputGradients(out, lse, grad_out, grad_lse)
    grad_score_mod: Any = None
    if choice.kernel is None or not _has_backward_kernel(
        spec,
        choice,
        inputs,
        mask,
        needs_slope_gradient=needs_slope_gradient is not None,
        needs_score_mod_gradient=needs_score_mod_gradient is not None,
    ):
        args = xla.AttentionArgs(kv, metadata, spec, mask, sinks, slopes, score_mod)
        grad_query, grad_k, grad_v, grad_sinks, grad_slopes, grad_arrays = xla.gradients(query, args, outputs)
        if score_mod is not None:
            grad_score_mod = score_mod.with_arrays(grad_arrays, itertools.repeat(None))
    else:
        grad_query, grad_k, grad_v = mosaic_gpu.gradients(
            query,
            kv,
            metadata,
            spec,
            out=out,
            lse=lse,
            grad_out=grad_out,
            grad_lse=grad_lse,
            mask=mask,
            alibi_slopes=slopes,
            score_mod=score_mod,
        )
        if score_mod is not None:
            zeros = map(jnp.zeros_like, score_mod.float_arrays)
            grad_score_mod = score_mod.with_arrays(zeros, itertools.repeat(None))
        grad_sinks = None if sinks is None else xla.gradient_of_sinks(sinks, outputs, metadata)
        grad_slopes = None if slopes is None else jnp.zeros_like(slopes)
    grad_kv: Any = replace(kv, k=grad_k, v=grad_v, kv_start_loc=None)
    return Inputs(grad_query, grad_kv, grad_sinks, grad_slopes, grad_score_mod), None


_attend.defvjp(_forward, _backward, symbolic_zeros=True)


def _has_backward_kernel(
    spec: AttentionSpec,
    choice: ImplementationChoice,
    inputs: Inputs,
    mask: Mask | None,
    *,
    needs_slope_gradient: bool,
    needs_score_mod_gradient: bool,
) -> bool:
    """Return whether a kernel computes the gradients; if not, XLA does.

    Raises:
        NotImplementedError: If no kernel supports the gradients and XLA is not among the requested
            implementations.
    """
    reason = mosaic_gpu.why_not_gradients(
        spec,
        {"query": inputs.query.dtype, "key": inputs.kv.k.dtype, "value": inputs.kv.v.dtype},
        mask,
        is_in_order=inputs.kv.is_in_order,
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


def reject_gradient_over_cache[Tree](arrays: Tree, implementation: str) -> Tree:
    """Return the arrays such that differentiating them raises: there is no gradient over a cache."""
    return forbid_derivative(
        arrays,
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
