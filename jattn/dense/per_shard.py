"""Attention of arrays as each device has them: one device all, several a part each, however they are cut."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jattn.attending import validated_attend
from jattn.batch.metadata import region_batch
from jattn.dense.arguments import Rows, last_ahead
from jattn.dense.auto_sharding import by_partitioner, labels, sum_of_parts
from jattn.dense.layout import Laid, lay_batch, lay_packed, repadded, segments, unpadded
from jattn.dense.sharding import Cut
from jattn.implementations import differentiable_attention
from jattn.implementations.differentiable_attention import reject_second_derivative
from jattn.implementations.layer_config import layer_config
from jattn.implementations.selection import ImplementationArg, ImplementationChoice
from jattn.masks.functions import lift_captured_arrays
from jattn.planning import plan_layers
from jattn.spec import AttentionSpec


class How(NamedTuple):
    """What is static: the layer of all devices, and what is to serve it."""

    spec: AttentionSpec
    implementation: ImplementationArg


class Values(NamedTuple):
    """What has a gradient: arrays as `attention` takes them, and per_head's sinks and alibi_slopes."""

    q: Array
    k: Array
    v: Array
    per_head: dict[str, Array | None]


class Attended(NamedTuple):
    """Outputs [*batch, q_tokens, q_heads, head_dim] and log-sum-exps [*batch, q_heads, q_tokens].

    The latter are f64 of f64 queries: their derivatives need them.
    """

    out: Array
    lse: Array


def partitions(cut: Cut, values: Values, rows: Rows) -> tuple[Values, Rows, Attended]:
    """How each array, and each result, is cut."""
    of_heads = jax.tree.map(lambda _: P(cut.heads), values.per_head)
    places: Any = cut.of_queries, cut.of_keys, cut.of_keys, of_heads
    of_rows: Any = rows._replace(mask=cut.of_mask(rows.mask))
    if rows.segment_ids is not None:
        of_rows = of_rows._replace(segment_ids=P(*cut.texts))
    if rows.cu_seqlens is not None:
        of_rows = of_rows._replace(cu_seqlens=P())
    of_results: Any = cut.of_queries, P(*cut.texts, cut.heads, None)
    return Values(*places), of_rows, Attended(*of_results)


def attend_part(
    cut: Cut | None, how: How, values: Values, rows: Rows, attended: Attended | None = None
) -> Attended:
    """Attention of what one device has. Traced, on each device.

    Args:
        cut: How all is cut; None = it is whole.
        how: Of all devices.
        values: The device's.
        rows: Likewise.
        attended: What this gave before: it is given again, with its derivative, and not computed.
    """
    (spec, implementation), (q, k, v, per_head) = how, values
    if cut is not None:
        rows = rows._replace(mask=cut.mask_of_part(rows.mask, spec))
        spec, k, v = cut.part_of(spec), cut.keys_of_part(k), cut.keys_of_part(v)
    has_batch, is_packed = q.ndim == 4, rows.cu_seqlens is not None
    if rows.cu_seqlens is not None:
        laid = lay_packed(q, k, v, rows.cu_seqlens, rows.mask)
    else:
        arrays = (q, k, v) if has_batch else (q[None], k[None], v[None])
        laid, implementation = _laid_batch(arrays, rows, per_head, How(spec, implementation))
    if attended is None:
        options: Any = {"mask": laid.mask, "implementation": implementation, **per_head}
        out, lse = validated_attend(laid.query, laid.kv, laid.metadata, spec, return_lse=True, **options)()
    else:
        out, lse = attended if has_batch or is_packed else (x[None] for x in attended)
        if not is_packed:
            out, lse = repadded(laid, out, 0.0), repadded(laid, jnp.moveaxis(lse, 1, 2), -jnp.inf).T
        out, lse = _recalled(laid, How(spec, implementation), per_head, Attended(out, lse))
    if not is_packed:
        out, lse = unpadded(laid, out), jnp.moveaxis(unpadded(laid, lse.T), 1, 2)
        out, lse = (out, lse) if has_batch else (out[0], lse[0])
    return Attended(out, lse)


def _laid_batch(
    arrays: tuple[Array, Array, Array], rows: Rows, per_head: dict[str, Array | None], how: How
) -> tuple[Laid, ImplementationArg]:
    """A batch's rows, and what serves them where that had to be asked to make their mask."""
    spec, implementation = how
    is_masked = any(x is not None for x in (spec.sparsity, rows.mask, per_head["alibi_slopes"]))
    lay = functools.partial(
        lay_batch,
        *arrays,
        last_ahead=last_ahead(spec),
        is_positional=is_masked or spec.causal or spec.window is not None or spec.chunk_size is not None,
    )
    if rows.segment_ids is None:
        return lay(rows.mask), implementation
    both = lambda mask: mask if rows.mask is None else mask & rows.mask
    laid = lay(both(segments(rows.segment_ids, as_runs=True)))
    chosen = _chosen(laid, how)
    if chosen is None or chosen.implementation == "mosaic_gpu":
        return laid, implementation
    return lay(both(segments(rows.segment_ids, as_runs=False))), chosen.implementation


def _chosen(laid: Laid, how: How) -> ImplementationChoice | None:
    """What is to serve rows; None where there is no token."""
    layer = layer_config(how.spec, None, laid.query.dtype)
    asked = how.implementation
    return plan_layers(laid.metadata, (layer,), laid.mask, implementation=asked)[0].prefill


def _recalled(laid: Laid, how: How, per_head: dict[str, Array | None], attended: Attended) -> Attended:
    """Outputs and log-sum-exps of all rows, known already, with the derivative of what serves these."""
    spec, chosen = how.spec, _chosen(laid, how)
    if chosen is None:  # there is no token
        return attended
    part, mask = region_batch(laid.metadata, "prefill"), spec.mask_with(laid.mask)
    served = differentiable_attention.make_static_args(spec, chosen, laid.kv, part.first_row, return_lse=True)
    context = differentiable_attention.NonDifferentiableArgs(
        laid.kv.kv_start_loc, part.metadata, mask, None, None
    )
    values = differentiable_attention.DifferentiableArgs(laid.query, laid.kv.k, laid.kv.v, **per_head)
    return Attended(*differentiable_attention.attach_gradient(served, values, context, tuple(attended)))


def attend_parts(how: How, values: Values, rows: Rows) -> Attended:
    """Attention of arrays that XLA's partitioner may cut: texts and heads stay where they lie. Traced."""
    is_real = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    of_heads = jax.tree.map(lambda x: x if is_real(x) else x.astype(jnp.float32), values.per_head)
    rows = rows if rows.mask is None else rows._replace(mask=lift_captured_arrays(rows.mask))
    return _attend_parts(how, values._replace(per_head=of_heads), rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_parts(how: How, values: Values, rows: Rows) -> Attended:
    of_values, of_rows, returns = partitions(labels(values.q.ndim == 4), values, rows)
    run = lambda cut, given: attend_part(cut, how, *given)
    attended: Attended = by_partitioner(run, (values, rows), (of_values, of_rows), returns)
    return attended


class _Kept(NamedTuple):
    """What the backward pass gets.

    Attributes:
        values: Of the forward pass.
        rows: Likewise.
        attended: Its results.
        is_wanted: As values: () where a gradient is wanted, else None, both without arrays.
    """

    values: Values
    rows: Rows
    attended: Attended
    is_wanted: Any


def _forward(how: How, values: Values, rows: Rows) -> tuple[Attended, _Kept]:
    """Called with CustomVJPPrimal for each array."""
    is_wanted: Any = jax.tree.map(lambda primal: () if primal.perturbed else None, values)
    values, rows = jax.tree.map(lambda primal: primal.value, (values, rows))
    attended = _attend_parts(how, reject_second_derivative(values), rows)
    return attended, _Kept(values, rows, attended, is_wanted)


def _backward(how: How, kept: _Kept, grads: Any) -> tuple[Values, None]:
    values, rows, attended, is_wanted = kept
    grads = tuple(None if isinstance(grad, SymbolicZero) else grad for grad in grads)
    values, attended, grads = reject_second_derivative((values, attended, grads))
    of_values, of_rows, returns = partitions(labels(values.q.ndim == 4), values, rows)
    of_grads = tuple(None if grad is None else of for grad, of in zip(grads, returns, strict=True))

    def run(cut: Cut | None, given: tuple[Values, Rows, Attended, Any]) -> list[Array]:
        values, rows, attended, grads = given
        found = _gradients(cut, how, _Kept(values, rows, attended, is_wanted), grads)
        if cut is None:
            return found
        places = _wanted(partitions(cut, values, rows)[0], is_wanted)
        return [sum_of_parts(cut, of, x) for of, x in zip(places, found, strict=True)]

    given, places = (values, rows, attended, grads), (of_values, of_rows, returns, of_grads)
    found = by_partitioner(run, given, places, _wanted(of_values, is_wanted))
    nothing = jax.tree.map(jnp.zeros_like, values)
    return _with_wanted(nothing, is_wanted, found), None


def _gradients(cut: Cut | None, how: How, kept: _Kept, grads: tuple[Array | None, ...]) -> list[Array]:
    """Of the values that are wanted, by what one device has."""

    def results(*wanted: Array) -> list[Array]:
        values = _with_wanted(kept.values, kept.is_wanted, wanted)
        again = attend_part(cut, how, values, kept.rows, kept.attended)
        return [x for x, grad in zip(again, grads, strict=True) if grad is not None]

    _, pull_back = jax.vjp(results, *_wanted(kept.values, kept.is_wanted))
    return list(pull_back([grad for grad in grads if grad is not None]))


def _wanted(tree: Values, is_wanted: Any) -> list[Any]:
    """The leaves of which a gradient is wanted."""
    structure: Any = jax.tree.structure(tree)
    flags = structure.flatten_up_to(is_wanted)
    return [leaf for leaf, flag in zip(jax.tree.leaves(tree), flags, strict=True) if flag is not None]


def _with_wanted(tree: Values, is_wanted: Any, wanted: Sequence[Array]) -> Values:
    """The tree with others in the places of these leaves."""
    structure: Any = jax.tree.structure(tree)
    flags, coming = structure.flatten_up_to(is_wanted), iter(wanted)
    pairs = zip(jax.tree.leaves(tree), flags, strict=True)
    values: Values = structure.unflatten([leaf if flag is None else next(coming) for leaf, flag in pairs])
    return values


_attend_parts.defvjp(_forward, _backward, symbolic_zeros=True)
