"""Dense attention on one device's shard, and the custom derivative of attention over Auto mesh axes."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from jattn.attending import attend_regions
from jattn.dense.arguments import MaskInputs, max_lookahead
from jattn.dense.auto_sharding import call_partitioned, sum_over_shards, symbolic_sharding
from jattn.dense.layout import DenseLayout, layout_batch, layout_packed, repad, unpad
from jattn.dense.sharding import AttentionSharding
from jattn.implementations.differentiable_attention import reject_second_derivative
from jattn.implementations.layer_config import layer_config
from jattn.implementations.selection import ImplementationArg
from jattn.masks import Document, Mask
from jattn.masks.documents import document_runs
from jattn.masks.functions import lift_captured_arrays
from jattn.planning import plan_layers, plan_of_layer
from jattn.score_mod import ScoreMod
from jattn.spec import AttentionSpec


class DenseStaticArgs(NamedTuple):
    """The static arguments of dense attention: the spec with global heads, and the implementation."""

    spec: AttentionSpec
    implementation: ImplementationArg


class AttentionInputs(NamedTuple):
    """The differentiable arguments of `attention`; `per_head` holds sinks and alibi_slopes."""

    q: Array
    k: Array
    v: Array
    per_head: dict[str, Array | None]
    score_mod: ScoreMod | None = None


class AttentionOutput(NamedTuple):
    """Output [*batch, q_tokens, q_heads, head_dim] and log-sum-exp [*batch, q_heads, q_tokens].

    The log-sum-exp is f64 for f64 queries, because the derivative needs that precision.
    """

    out: Array
    lse: Array


def partition_specs(
    sharding: AttentionSharding, inputs: AttentionInputs, mask_inputs: MaskInputs
) -> tuple[AttentionInputs, MaskInputs, AttentionOutput]:
    """Return the partition specs of the inputs, the mask inputs and the output."""
    head_specs = jax.tree.map(lambda _: P(sharding.heads), inputs.per_head)
    specs: Any = sharding.query_spec, sharding.kv_spec, sharding.kv_spec, head_specs
    mask_specs: Any = mask_inputs._replace(mask=sharding.mask_specs(mask_inputs.mask))
    if mask_inputs.segment_ids is not None:
        mask_specs = mask_specs._replace(segment_ids=P(*sharding.batch_axes))
    if mask_inputs.cu_seqlens is not None:
        mask_specs = mask_specs._replace(cu_seqlens=P())
    output_specs: Any = sharding.query_spec, P(*sharding.batch_axes, sharding.heads, None)
    return AttentionInputs(*specs), mask_specs, AttentionOutput(*output_specs)


def attend_shard(
    sharding: AttentionSharding | None,
    args: DenseStaticArgs,
    inputs: AttentionInputs,
    mask_inputs: MaskInputs,
    outputs: AttentionOutput | None = None,
) -> AttentionOutput:
    """Compute attention on one device's shard. Runs inside shard_map, on each device.

    Args:
        sharding: How attention is sharded; None = not sharded.
        args: Static arguments, with global heads.
        inputs: Local queries, keys, values and parameters per head.
        mask_inputs: Local segment ids and mask.
        outputs: Known output, which is returned with its derivative instead of being computed.
    """
    (spec, implementation), (q, k, v, per_head, score_mod) = args, inputs
    if sharding is not None:
        mask_inputs = mask_inputs._replace(mask=sharding.local_mask(mask_inputs.mask, spec))
        spec, k, v = sharding.local_spec(spec), sharding.local_kv_heads(k), sharding.local_kv_heads(v)
    has_batch, is_packed = q.ndim == 4, mask_inputs.cu_seqlens is not None
    if mask_inputs.cu_seqlens is not None:
        layout = layout_packed(q, k, v, mask_inputs.cu_seqlens, mask_inputs.mask)
    else:
        arrays = (q, k, v) if has_batch else (q[None], k[None], v[None])
        layout, implementation = _layout_batch(
            arrays, mask_inputs, inputs, DenseStaticArgs(spec, implementation)
        )
    if outputs is not None and not is_packed:
        out, lse = outputs if has_batch else (x[None] for x in outputs)
        outputs = AttentionOutput(repad(layout, out, 0.0), repad(layout, jnp.moveaxis(lse, 1, 2), -jnp.inf).T)
    if score_mod is not None and not is_packed and layout.q_tokens < layout.row_tokens:
        score_mod = score_mod.limit_queries(layout.q_tokens)
    config = layer_config(spec, layout.kv, q.dtype, score_mod)
    layer, regions = plan_of_layer(None, layout.metadata, config, layout.mask, implementation)
    out, lse = attend_regions(
        layout.query,
        layout.kv,
        layout.metadata,
        regions,
        per_head["sinks"],
        per_head["alibi_slopes"],
        score_mod,
        outputs,
        layer=layer,
        return_lse=True,
    )
    if not is_packed:
        out, lse = unpad(layout, out), jnp.moveaxis(unpad(layout, lse.T), 1, 2)
        out, lse = (out, lse) if has_batch else (out[0], lse[0])
    return AttentionOutput(out, lse)


def _layout_batch(
    arrays: tuple[Array, Array, Array],
    mask_inputs: MaskInputs,
    inputs: AttentionInputs,
    args: DenseStaticArgs,
) -> tuple[DenseLayout, ImplementationArg]:
    """Lay out a batch; return its implementation too, if segment ids required selecting it here."""
    spec, implementation = args
    positional = (spec.sparsity, mask_inputs.mask, inputs.per_head["alibi_slopes"], inputs.score_mod)
    is_masked = any(x is not None for x in positional)
    lay = functools.partial(
        layout_batch,
        *arrays,
        max_lookahead=max_lookahead(spec),
        is_positional=is_masked or spec.causal or spec.window is not None or spec.chunk_size is not None,
    )
    segment_ids = mask_inputs.segment_ids
    if segment_ids is None:
        return lay(mask_inputs.mask), implementation

    def layout_with_segments(segments: Document) -> DenseLayout:
        mask: Mask = segments if mask_inputs.mask is None else segments & mask_inputs.mask
        return lay(mask)

    # The kernels get runs of equal ids, whose numbers ascend, so that tiles can be skipped exactly.
    layout = layout_with_segments(document_runs(segment_ids))
    config = layer_config(spec, layout.kv, layout.query.dtype, inputs.score_mod)
    (layer,) = plan_layers(layout.metadata, (config,), layout.mask, implementation=implementation)
    if layer.prefill is None or layer.prefill.implementation == "mosaic_gpu":
        return layout, implementation
    return layout_with_segments(Document(ids=segment_ids)), layer.prefill.implementation


def attend_auto_sharded(
    args: DenseStaticArgs, inputs: AttentionInputs, mask_inputs: MaskInputs
) -> AttentionOutput:
    """Compute attention of arrays that XLA's partitioner may shard by batch and heads. Works inside jit."""
    per_head = jax.tree.map(
        lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32), inputs.per_head
    )
    if mask_inputs.mask is not None:
        mask_inputs = mask_inputs._replace(mask=lift_captured_arrays(mask_inputs.mask))
    return _attend_auto_sharded(args, inputs._replace(per_head=per_head), mask_inputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_auto_sharded(
    args: DenseStaticArgs, inputs: AttentionInputs, mask_inputs: MaskInputs
) -> AttentionOutput:
    input_specs, mask_specs, output_specs = partition_specs(
        symbolic_sharding(inputs.q.ndim == 4), inputs, mask_inputs
    )

    def attend_local(sharding: AttentionSharding | None, shard: Any) -> AttentionOutput:
        return attend_shard(sharding, args, *shard)

    outputs: AttentionOutput = call_partitioned(
        attend_local, (inputs, mask_inputs), (input_specs, mask_specs), output_specs
    )
    return outputs


class Residuals(NamedTuple):
    """Residuals of the forward pass.

    Attributes:
        inputs: Differentiable arguments.
        mask_inputs: Segment ids and mask.
        outputs: Output of the forward pass.
        has_grad: The tree of `inputs` with () for leaves that need a gradient, else None.
    """

    inputs: AttentionInputs
    mask_inputs: MaskInputs
    outputs: AttentionOutput
    has_grad: Any


def _forward(
    args: DenseStaticArgs, inputs: AttentionInputs, mask_inputs: MaskInputs
) -> tuple[AttentionOutput, Residuals]:
    """Run the forward pass; each array is a CustomVJPPrimal."""
    has_grad: Any = jax.tree.map(lambda primal: () if primal.perturbed else None, inputs)
    inputs, mask_inputs = jax.tree.map(lambda primal: primal.value, (inputs, mask_inputs))
    outputs = _attend_auto_sharded(args, reject_second_derivative(inputs), mask_inputs)
    return outputs, Residuals(inputs, mask_inputs, outputs, has_grad)


def _backward(args: DenseStaticArgs, residuals: Residuals, grads: Any) -> tuple[AttentionInputs, None]:
    inputs, mask_inputs, outputs, has_grad = residuals
    grads = tuple(None if isinstance(grad, SymbolicZero) else grad for grad in grads)
    inputs, outputs, grads = reject_second_derivative((inputs, outputs, grads))
    input_specs, mask_specs, output_specs = partition_specs(
        symbolic_sharding(inputs.q.ndim == 4), inputs, mask_inputs
    )
    grad_specs = tuple(None if grad is None else spec for grad, spec in zip(grads, output_specs, strict=True))

    def local_gradients(
        sharding: AttentionSharding | None, shard: tuple[AttentionInputs, MaskInputs, AttentionOutput, Any]
    ) -> list[Array]:
        inputs, mask_inputs, outputs, grads = shard
        grads_of_inputs = _gradients(sharding, args, Residuals(inputs, mask_inputs, outputs, has_grad), grads)
        if sharding is None:
            return grads_of_inputs
        specs = _select_leaves(partition_specs(sharding, inputs, mask_inputs)[0], has_grad)
        return [sum_over_shards(sharding, spec, x) for spec, x in zip(specs, grads_of_inputs, strict=True)]

    arrays = (inputs, mask_inputs, outputs, grads)
    specs = (input_specs, mask_specs, output_specs, grad_specs)
    grads_of_inputs = call_partitioned(local_gradients, arrays, specs, _select_leaves(input_specs, has_grad))
    zeros = jax.tree.map(jnp.zeros_like, inputs)
    return _replace_leaves(zeros, has_grad, grads_of_inputs), None


def _gradients(
    sharding: AttentionSharding | None,
    args: DenseStaticArgs,
    residuals: Residuals,
    grads: tuple[Array | None, ...],
) -> list[Array]:
    """Return the gradients of the inputs that need one, on one device."""

    def results(*leaves: Array) -> list[Array]:
        inputs = _replace_leaves(residuals.inputs, residuals.has_grad, leaves)
        recomputed = attend_shard(sharding, args, inputs, residuals.mask_inputs, residuals.outputs)
        return [x for x, grad in zip(recomputed, grads, strict=True) if grad is not None]

    _, vjp = jax.vjp(results, *_select_leaves(residuals.inputs, residuals.has_grad))
    return list(vjp([grad for grad in grads if grad is not None]))


def _select_leaves(tree: AttentionInputs, has_grad: Any) -> list[Any]:
    """Return the leaves that need a gradient."""
    structure: Any = jax.tree.structure(tree)
    flags = structure.flatten_up_to(has_grad)
    return [leaf for leaf, flag in zip(jax.tree.leaves(tree), flags, strict=True) if flag is not None]


def _replace_leaves(tree: AttentionInputs, has_grad: Any, leaves: Sequence[Array]) -> AttentionInputs:
    """Return the tree with the leaves that need a gradient replaced."""
    structure: Any = jax.tree.structure(tree)
    flags, new_leaves = structure.flatten_up_to(has_grad), iter(leaves)
    pairs = zip(jax.tree.leaves(tree), flags, strict=True)
    inputs: AttentionInputs = structure.unflatten(
        [leaf if flag is None else next(new_leaves) for leaf, flag in pairs]
    )
    return inputs


_attend_auto_sharded.defvjp(_forward, _backward, symbolic_zeros=True)
