"""Attention of a region over keys outside a cache, with its derivative: what training runs through.

The backward pass has queries, keys, values, outputs and log-sum-exps, and computes everything else anew.
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
    """What is static.

    Attributes:
        spec: The layer.
        choice: What serves it.
        return_lse: Whether the log-sum-exp is wanted.
        is_in_order: PackedKV's, of these rows.
        max_seq_len: PackedKV's.
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
    """How the rows of a region are attended, of which the step's `first_row` is the first."""
    if isinstance(kv, PagedCache):
        return StaticArgs(spec, choice, return_lse, is_in_order=False, max_seq_len=None)
    is_in_order = kv.is_in_order and first_row == 0
    return StaticArgs(spec, choice, return_lse, is_in_order, kv.max_seq_len)


class DifferentiableArgs(NamedTuple):
    """What has a gradient."""

    query: Float[Array, "tokens q_heads head_dim"]
    k: Float[Array, "kv_tokens kv_heads head_dim"]
    v: Float[Array, "kv_tokens kv_heads head_dim"]
    sinks: Float[Array, " q_heads"] | None
    alibi_slopes: Float[Array, " q_heads"] | None


class NonDifferentiableArgs(NamedTuple):
    """What has none.

    Attributes:
        kv_start_loc: First key of each row.
        metadata: The region as a step of its own.
        mask: Which keys a query sees beyond the spec's numbers.
        tiles: XLA's tiles of the prefill region, made once a step; None = made here.
        work: What a kernel is given, where the plan has it.
    """

    kv_start_loc: Int[Array, " reqs"]
    metadata: BatchMetadata
    mask: Mask | None
    tiles: QueryTiles | None
    work: KernelPlan | None


def attend(how: StaticArgs, values: DifferentiableArgs, context: NonDifferentiableArgs) -> OutAndLse:
    """Output of a region's tokens, and their log-sum-exp or None, in the type that it was summed in."""
    values = varying_together(values)
    axes = sorted(jax.typeof(values.query).manual_axis_type.varying)
    if how.choice.kernel is not None and axes:
        reason = "kernels do not say over which axes their results vary"
        way_out = "Say jax.shard_map(check_vma=False), or implementation='xla'"
        raise unsupported(f"mosaic_gpu under shard_map over {', '.join(axes)}", reason, way_out)
    if how.choice.kernel is None and context.mask is not None:
        context = context._replace(mask=lift_captured_arrays(context.mask))
    return _attend(how, values, context)


def varying_together(values: DifferentiableArgs) -> DifferentiableArgs:
    """All values varying over every device axis that one of them varies over, under shard_map.

    What they lack is broadcast here, so that the sum over devices that its gradient needs is made here, too.
    """
    for like in values:
        values = values if like is None else match_varying_axes(like, values)
    return values


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how: StaticArgs, values: DifferentiableArgs, context: NonDifferentiableArgs) -> OutAndLse:
    query, _, _, sinks, alibi_slopes = values
    kv, metadata, spec, kernel = _kv(how, values, context), context.metadata, how.spec, how.choice.kernel
    options: dict[str, Any] = {"mask": context.mask, "sinks": sinks, "alibi_slopes": alibi_slopes}
    if kernel is not None:
        options["return_lse"] = how.return_lse
        return mosaic_gpu.attend(query, kv, metadata, spec, kernel, context.work, **options)
    out, lse = xla.attend(query, kv, metadata, spec, tiles=context.tiles, **options)
    return out, lse if how.return_lse else None


class _Residuals(NamedTuple):
    """What the backward pass gets.

    Attributes:
        values: Of the forward pass.
        context: Likewise.
        out: Its output.
        lse: Its log-sum-exp.
        wants_slopes: () where ALiBi's slopes are to have a gradient, else None: both are without arrays.
    """

    values: DifferentiableArgs
    context: NonDifferentiableArgs
    out: Array
    lse: Array
    wants_slopes: tuple[()] | None


def _forward(
    how: StaticArgs, values: DifferentiableArgs, context: NonDifferentiableArgs
) -> tuple[OutAndLse, _Residuals]:
    """Called with CustomVJPPrimal for each array."""
    wants_slopes = _wants_slopes(values)
    values, context = jax.tree.map(lambda primal: primal.value, (values, context))
    values = reject_second_derivative(values)
    out, lse = _attend(dataclasses.replace(how, return_lse=True), values, context)
    assert lse is not None
    return (out, lse if how.return_lse else None), _Residuals(values, context, out, lse, wants_slopes)


def _wants_slopes(values: DifferentiableArgs) -> tuple[()] | None:
    """`_Kept`'s, of CustomVJPPrimal in the place of arrays."""
    slopes = values.alibi_slopes
    return () if slopes is not None and slopes.perturbed else None  # type: ignore[attr-defined]


def _backward(how: StaticArgs, kept: _Residuals, grads: tuple[Any, Any]) -> tuple[DifferentiableArgs, None]:
    (values, context, out, lse, wants_slopes) = kept
    is_zero = [isinstance(grad, SymbolicZero) for grad in grads]
    grad_out = jnp.zeros_like(out) if is_zero[0] else grads[0]
    grad_lse = None if is_zero[1] else grads[1]
    values, out, lse, grad_out, grad_lse = reject_second_derivative((values, out, lse, grad_out, grad_lse))
    saved = xla.Saved(out, lse, grad_out, grad_lse)
    if how.choice.kernel is None or not _takes_kernel(how, values, context, wants_slopes is not None):
        given = how.spec, context.mask, values.sinks, values.alibi_slopes
        problem = xla.Problem(_kv(how, values, context), context.metadata, *given)
        return DifferentiableArgs(*xla.gradients(values.query, problem, saved)), None
    options = {"mask": context.mask, "alibi_slopes": values.alibi_slopes, **saved._asdict()}
    kv, metadata = _kv(how, values, context), context.metadata
    of_arrays = mosaic_gpu.gradients(values.query, kv, metadata, how.spec, **options)
    sinks, slopes = values.sinks, values.alibi_slopes
    of_sinks = None if sinks is None else xla.gradient_of_sinks(sinks, saved, metadata)
    return DifferentiableArgs(*of_arrays, of_sinks, None if slopes is None else jnp.zeros_like(slopes)), None


def _kv(how: StaticArgs, values: DifferentiableArgs, context: NonDifferentiableArgs) -> PackedKV:
    starts, most = context.kv_start_loc, how.max_seq_len
    return PackedKV(k=values.k, v=values.v, kv_start_loc=starts, max_seq_len=most)


def _takes_kernel(
    how: StaticArgs, values: DifferentiableArgs, context: NonDifferentiableArgs, wants_slopes: bool
) -> bool:
    """Whether there is a kernel for the gradients; where there is none XLA does it, if that is allowed."""
    reason = mosaic_gpu.why_not_gradients(
        how.spec,
        {"query": values.query.dtype, "key": values.k.dtype, "value": values.v.dtype},
        context.mask,
        is_in_order=how.is_in_order,
        wants_slopes=wants_slopes,
    )
    asked = how.choice.asked
    if reason is None:
        return True
    if asked is not None and "xla" not in asked:
        way_out = "Leave implementation=None or ask for ('mosaic_gpu', 'xla')"
        raise unsupported("a derivative of attention", f"mosaic_gpu: {reason}", way_out)
    if asked is None:
        message = f"gradients of attention fall to xla on a GPU, which is slow: {reason}."
        warnings.warn(message, KernelFallbackWarning, stacklevel=2)
    return False


_attend.defvjp(_forward, _backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attach_gradient(
    how: StaticArgs, values: DifferentiableArgs, context: NonDifferentiableArgs, attended: tuple[Array, Array]
) -> tuple[Array, Array]:
    """What `attend` gave before, output and log-sum-exp, with its derivative: nothing is attended anew."""
    return attended


def _recall_forward(
    how: StaticArgs, values: DifferentiableArgs, context: NonDifferentiableArgs, attended: Any
) -> tuple[tuple[Array, Array], _Residuals]:
    """Called with CustomVJPPrimal for each array."""
    wants_slopes = _wants_slopes(values)
    values, context, (out, lse) = jax.tree.map(lambda primal: primal.value, (values, context, attended))
    return (out, lse), _Residuals(values, context, out, lse, wants_slopes)


attach_gradient.defvjp(
    _recall_forward, lambda how, kept, grads: (*_backward(how, kept, grads), None), symbolic_zeros=True
)


def reject_gradient_over_cache[Tree](arrays: Tree, implementation: str) -> Tree:
    """The same arrays, for an implementation that has no derivative over a paged cache."""
    return forbid_derivative(
        arrays,
        "a derivative of attend",
        f"{implementation} has none over a paged cache or 8-bit keys",
        "Attend to the step's own keys (PackedKV, or cache=None in a layer), or ask for "
        "implementation='reference', whose memory grows with tokens x the longest request",
    )


def reject_second_derivative[Tree](arrays: Tree) -> Tree:
    """The same arrays, in what a derivative is made of."""
    return forbid_derivative(
        arrays,
        "a derivative of a derivative of attention",
        "the backward pass has none",
        "Ask for implementation='reference', which has all of them",
    )
