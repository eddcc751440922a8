"""Differentiable attention over keys and values outside a cache, as used in training.

The residuals are queries, keys, values, outputs and log-sum-exps; the backward pass recomputes the rest.
"""

import dataclasses
import functools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from jattn.batch.metadata import BatchMetadata
from jattn.cache import PackedKV, PagedCache
from jattn.implementations import mosaic_gpu, xla
from jattn.implementations.mosaic_gpu import KernelPlan
from jattn.implementations.selection import ImplementationChoice, KernelFallbackWarning
from jattn.implementations.xla import QueryTiles, match_varying_axes
from jattn.masks import Mask
from jattn.masks.functions import lift_captured_arrays
from jattn.spec import AttentionSpec
from pallas_kernels.checks import unsupported
from pallas_kernels.derivatives import forbid_derivative

type OutAndLse = tuple[Array, Array | None]


@dataclasses.dataclass(frozen=True)
class StaticArgs:
    """Static arguments of the forward and backward pass.

    Attributes:
        spec: Attention of the layer.
        choice: Implementation of the region.
        return_lse: Whether to return the log-sum-exp.
        is_in_order: `PackedKV.is_in_order` of the region's rows.
        max_seq_len: `PackedKV.max_seq_len`.
    """

    spec: AttentionSpec
    choice: ImplementationChoice
    return_lse: bool
    is_in_order: bool
    max_seq_len: int | None


def make_static_args(
    spec: AttentionSpec,
    choice: ImplementationChoice,
    kv: PagedCache | PackedKV,
    first_row: int,
    *,
    return_lse: bool,
) -> StaticArgs:
    """Return the static arguments of a region that starts at row `first_row` of the step."""
    if isinstance(kv, PagedCache):
        return StaticArgs(spec, choice, return_lse, is_in_order=False, max_seq_len=None)
    is_in_order = kv.is_in_order and first_row == 0
    return StaticArgs(spec, choice, return_lse, is_in_order, kv.max_seq_len)


class DifferentiableArgs(NamedTuple):
    """Arguments that have a gradient."""

    query: Float[Array, "tokens q_heads head_dim"]
    k: Float[Array, "kv_tokens kv_heads head_dim"]
    v: Float[Array, "kv_tokens kv_heads head_dim"]
    sinks: Float[Array, " q_heads"] | None
    alibi_slopes: Float[Array, " q_heads"] | None


class NonDifferentiableArgs(NamedTuple):
    """Arguments without a gradient.

    Attributes:
        kv_start_loc: Index of the first key of each row.
        metadata: Metadata of the region as a separate step.
        mask: Mask in addition to the spec's window, chunk size and causality; None adds none.
        tiles: Query tiles of the prefill region for XLA; None computes them here.
        kernel_plan: Kernel plan of the region; None computes it here.
    """

    kv_start_loc: Int[Array, " reqs"]
    metadata: BatchMetadata
    mask: Mask | None
    tiles: QueryTiles | None
    kernel_plan: KernelPlan | None


def attend(static_args: StaticArgs, values: DifferentiableArgs, context: NonDifferentiableArgs) -> OutAndLse:
    """Attend in a region; return the output and the log-sum-exp, in its accumulation dtype, or None."""
    values = varying_together(values)
    axes = sorted(jax.typeof(values.query).manual_axis_type.varying)
    if static_args.choice.kernel is not None and axes:
        reason = "the kernels do not support shard_map's check of varying axes"
        fix = "Pass check_vma=False to jax.shard_map, or implementation='xla'"
        feature = f'implementation="mosaic_gpu" under shard_map over {", ".join(axes)}'
        raise unsupported(feature, reason, fix)
    if static_args.choice.kernel is None and context.mask is not None:
        context = context._replace(mask=lift_captured_arrays(context.mask))
    return _attend(static_args, values, context)


def varying_together(values: DifferentiableArgs) -> DifferentiableArgs:
    """Make all arguments vary over every device axis that one of them varies over, under shard_map.

    The broadcast happens here, so that its gradient's sum over devices does, too.
    """
    for like in values:
        values = values if like is None else match_varying_axes(like, values)
    return values


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static_args: StaticArgs, values: DifferentiableArgs, context: NonDifferentiableArgs) -> OutAndLse:
    query, _, _, sinks, alibi_slopes = values
    kv, metadata = _kv(static_args, values, context), context.metadata
    spec, kernel = static_args.spec, static_args.choice.kernel
    options: dict[str, Any] = {"mask": context.mask, "sinks": sinks, "alibi_slopes": alibi_slopes}
    if kernel is not None:
        options["return_lse"] = static_args.return_lse
        return mosaic_gpu.attend(query, kv, metadata, spec, kernel, context.kernel_plan, **options)
    out, lse = xla.attend(query, kv, metadata, spec, tiles=context.tiles, **options)
    return out, lse if static_args.return_lse else None


class _Residuals(NamedTuple):
    """Residuals of the forward pass.

    Attributes:
        values: Differentiable arguments.
        context: Arguments without a gradient.
        out: Output.
        lse: Log-sum-exp.
        needs_slope_gradient: () if ALiBi slopes need a gradient, else None: pytrees without leaves.
    """

    values: DifferentiableArgs
    context: NonDifferentiableArgs
    out: Array
    lse: Array
    needs_slope_gradient: tuple[()] | None


def _forward(
    static_args: StaticArgs, values: DifferentiableArgs, context: NonDifferentiableArgs
) -> tuple[OutAndLse, _Residuals]:
    """Run the forward pass; each array is a CustomVJPPrimal."""
    needs_slope_gradient = _needs_slope_gradient(values)
    values, context = jax.tree.map(lambda primal: primal.value, (values, context))
    values = reject_second_derivative(values)
    out, lse = _attend(dataclasses.replace(static_args, return_lse=True), values, context)
    assert lse is not None
    return (out, lse if static_args.return_lse else None), _Residuals(
        values, context, out, lse, needs_slope_gradient
    )


def _needs_slope_gradient(values: DifferentiableArgs) -> tuple[()] | None:
    """Return `_Residuals.needs_slope_gradient`; arrays are CustomVJPPrimal."""
    slopes = values.alibi_slopes
    return () if slopes is not None and slopes.perturbed else None  # type: ignore[attr-defined]


def _backward(
    static_args: StaticArgs, residuals: _Residuals, grads: tuple[Any, Any]
) -> tuple[DifferentiableArgs, None]:
    (values, context, out, lse, needs_slope_gradient) = residuals
    is_zero = [isinstance(grad, SymbolicZero) for grad in grads]
    grad_out = jnp.zeros_like(out) if is_zero[0] else grads[0]
    grad_lse = None if is_zero[1] else grads[1]
    values, out, lse, grad_out, grad_lse = reject_second_derivative((values, out, lse, grad_out, grad_lse))
    outputs = xla.OutputGradients(out, lse, grad_out, grad_lse)
    if static_args.choice.kernel is None or not _has_backward_kernel(
        static_args, values, context, needs_slope_gradient is not None
    ):
        args = xla.AttentionArgs(
            _kv(static_args, values, context),
            context.metadata,
            static_args.spec,
            context.mask,
            values.sinks,
            values.alibi_slopes,
        )
        return DifferentiableArgs(*xla.gradients(values.query, args, outputs)), None
    options = {"mask": context.mask, "alibi_slopes": values.alibi_slopes, **outputs._asdict()}
    kv, metadata = _kv(static_args, values, context), context.metadata
    dq, dk, dv = mosaic_gpu.gradients(values.query, kv, metadata, static_args.spec, **options)
    sinks, slopes = values.sinks, values.alibi_slopes
    grad_sinks = None if sinks is None else xla.gradient_of_sinks(sinks, outputs, metadata)
    grad_slopes = None if slopes is None else jnp.zeros_like(slopes)
    return DifferentiableArgs(dq, dk, dv, grad_sinks, grad_slopes), None


def _kv(static_args: StaticArgs, values: DifferentiableArgs, context: NonDifferentiableArgs) -> PackedKV:
    return PackedKV(
        k=values.k, v=values.v, kv_start_loc=context.kv_start_loc, max_seq_len=static_args.max_seq_len
    )


def _has_backward_kernel(
    static_args: StaticArgs,
    values: DifferentiableArgs,
    context: NonDifferentiableArgs,
    needs_slope_gradient: bool,
) -> bool:
    """Return whether a kernel computes the gradients; if not, XLA does.

    Raises:
        NotImplementedError: If no kernel supports the gradients and XLA is not among the requested
            implementations.
    """
    reason = mosaic_gpu.why_not_gradients(
        static_args.spec,
        {"query": values.query.dtype, "key": values.k.dtype, "value": values.v.dtype},
        context.mask,
        is_in_order=static_args.is_in_order,
        needs_slope_gradient=needs_slope_gradient,
    )
    requested = static_args.choice.requested
    if reason is None:
        return True
    if requested is not None and "xla" not in requested:
        fix = "Pass implementation=None or ('mosaic_gpu', 'xla')"
        feature = 'Gradients of attention with implementation="mosaic_gpu"'
        raise unsupported(feature, reason, fix)
    if requested is None:
        message = f"Gradients of attention fall back to xla on a GPU, which is slow: {reason}."
        warnings.warn(message, KernelFallbackWarning, stacklevel=2)
    return False


_attend.defvjp(_forward, _backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attach_gradient(
    static_args: StaticArgs,
    values: DifferentiableArgs,
    context: NonDifferentiableArgs,
    attended: tuple[Array, Array],
) -> tuple[Array, Array]:
    """Return a precomputed output and log-sum-exp with `attend`'s gradient."""
    return attended


def _recall_forward(
    static_args: StaticArgs, values: DifferentiableArgs, context: NonDifferentiableArgs, attended: Any
) -> tuple[tuple[Array, Array], _Residuals]:
    """Run the forward pass; each array is a CustomVJPPrimal."""
    needs_slope_gradient = _needs_slope_gradient(values)
    values, context, (out, lse) = jax.tree.map(lambda primal: primal.value, (values, context, attended))
    return (out, lse), _Residuals(values, context, out, lse, needs_slope_gradient)


attach_gradient.defvjp(
    _recall_forward,
    lambda static_args, residuals, grads: (*_backward(static_args, residuals, grads), None),
    symbolic_zeros=True,
)


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
