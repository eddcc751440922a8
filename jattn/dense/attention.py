"""`jattn.attention`: attention of dense or packed arrays, for training."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn.dense.arguments import (
    ARGUMENT_HINTS,
    MaskInputs,
    check_mask_inputs,
    implementations_for_documents,
    infer_spec,
)
from jattn.dense.auto_sharding import has_auto_sharding
from jattn.dense.per_shard import (
    AttentionInputs,
    AttentionOutput,
    DenseStaticArgs,
    attend_auto_sharded,
    attend_shard,
    partition_specs,
)
from jattn.dense.sharding import explicit_sharding, run_sharded
from jattn.implementations.selection import ImplementationArg, requested_implementations
from jattn.masks import Mask
from jattn.score_mod import ScoreFunction, ScoreMod, as_score_mod
from jattn.spec import AttentionSpec
from pallas_kernels.checks import require_bool, suggest_argument_names, unsupported


@suggest_argument_names("attention", ARGUMENT_HINTS)
def attention(
    q: Float[Array, "..."],
    k: Float[Array, "..."],
    v: Float[Array, "..."],
    *,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    soft_cap: float | None = None,
    scale: float | None = None,
    segment_ids: Int[Array, "..."] | None = None,
    cu_seqlens: Int[Array, " bounds"] | None = None,
    alibi_slopes: Float[Array, " q_heads"] | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    mask: Mask | Array | None = None,
    score_mod: ScoreMod | ScoreFunction | None = None,
    return_lse: bool = False,
    implementation: str | Sequence[str] | None = None,
    deterministic: bool = False,
) -> Any:
    """Compute attention of arrays, as `jax.nn.dot_product_attention`, with memory linear in tokens.

    Query i has the position of key i, as in jax.nn, also if the numbers of queries and keys differ: `causal`,
    `window`, ALiBi and masks count from there. Output and log-sum-exp are differentiable with respect to q,
    k, v, sinks, alibi_slopes and the float arrays of score_mod. Second derivatives require
    implementation="reference", whose memory is quadratic in tokens.

    Args:
        q: Queries [batch, q_tokens, q_heads, head_dim]; or [tokens, q_heads, head_dim] for a single sequence
            or packed documents.
        k: Keys [batch, kv_tokens, kv_heads, head_dim], or without batch; kv_heads divides q_heads.
        v: Values with the shape of k.
        causal: Whether query i attends to keys up to key i only.
        window: Sliding window (left, right): number of visible neighbors on each side, not counting the
            token itself; None = unlimited.
        soft_cap: Cap on the scores: `soft_cap * tanh(score / soft_cap)`; None = no cap.
        scale: Scale of the scores; None = head_dim ** -0.5.
        segment_ids: Segment id of each token [batch, tokens]; queries attend to keys with the same id. Give
            padding an id of its own; the values of padding must be finite. The kernels treat each run of
            equal ids as a segment, so XLA computes ids that recur after others. Traced ids cannot be
            inspected: if they may recur, pass implementation="xla".
        cu_seqlens: First token of each packed document, and one past the last, starting at 0; tokens after
            the last document are padding.
        alibi_slopes: ALiBi slopes [q_heads].
        sinks: Attention sinks [q_heads]: scores that join the softmax denominator.
        mask: Mask of `jattn.masks` with one row per batch element or document, or one for all, that covers
            the longest of them; or a bool array that broadcasts to [batch, q_heads, q_tokens, kv_tokens].
        score_mod: Function `f(score, batch, head, q_idx, kv_idx)` that returns the new score of a pair,
            applied after the soft cap and ALiBi; or a `jattn.ScoreMod` with arrays to look up, which have
            gradients, too. The kernels support elementwise functions with lookups.
        return_lse: Whether to return the log-sum-exp too.
        implementation: "mosaic_gpu", "xla" or "reference", or a sequence of them in order of preference; None
            = the best one that supports the call on this machine.
        deterministic: Whether gradients are bitwise reproducible.

    Returns:
        Output with the shape of q; rows without a visible key are 0. With return_lse, a pair of the output
        and the natural logarithm of the softmax denominator including sinks, f32 [batch, q_heads, q_tokens]
        or [q_heads, q_tokens]. For rows without a visible key it is the sink, or -inf without sinks or keys.

    Raises:
        ValueError: If the arguments do not match.
        NotImplementedError: If no requested implementation supports the call.
    """
    require_bool(return_lse=return_lse)
    spec = infer_spec(
        q,
        k,
        v,
        causal=causal,
        window=window,
        soft_cap=soft_cap,
        scale=scale,
        deterministic=deterministic,
    )
    mask_inputs = check_mask_inputs(q, k, segment_ids, cu_seqlens, mask, spec)
    requested = implementations_for_documents(segment_ids, mask_inputs.mask, implementation)
    per_head = spec.per_head(sinks, alibi_slopes)
    mod = as_score_mod(score_mod)
    out, lse = attend_arrays((q, k, v), mask_inputs, per_head, mod, spec=spec, implementation=requested)
    return (out, lse.astype(jnp.float32)) if return_lse else out


@functools.partial(jax.jit, static_argnames=("spec", "implementation"))
def attend_arrays(
    arrays: tuple[Array, Array, Array],
    mask_inputs: MaskInputs,
    per_head: dict[str, Array | None],
    score_mod: ScoreMod | None = None,
    *,
    spec: AttentionSpec,
    implementation: ImplementationArg,
) -> AttentionOutput:
    """Compute `attention` of validated arguments, with its log-sum-exp; compiled in eager calls too.

    Args:
        arrays: Queries, keys and values.
        mask_inputs: Segment ids, document boundaries and mask.
        per_head: Parameters per head: sinks and alibi_slopes.
        score_mod: Score function; None without one.
        spec: Static: attention spec.
        implementation: Static: implementation name, tuple of names, or None.
    """
    inputs, args = AttentionInputs(*arrays, per_head, score_mod), DenseStaticArgs(spec, implementation)
    sharding = explicit_sharding(*arrays)
    if score_mod is not None:
        if sharding is not None or has_auto_sharding(arrays):
            reason = "a score function gets the global batch element and head"
            fix = "Call attention inside jax.shard_map, whose function knows its device's batch and heads"
            raise unsupported("score_mod with sharded arrays", reason, fix)
        return attend_shard(None, args, inputs, mask_inputs)
    if sharding is not None:
        input_specs, mask_specs, output_specs = partition_specs(sharding, inputs, mask_inputs)
        attend_local = functools.partial(attend_shard, sharding, args)
        outputs: AttentionOutput = run_sharded(
            sharding, attend_local, (inputs, mask_inputs), (input_specs, mask_specs), output_specs
        )
        return outputs
    before_xla = itertools.takewhile(lambda name: name != "xla", requested_implementations(implementation))
    if has_auto_sharding(arrays) and "reference" not in before_xla:
        # The reference also has second derivatives, which the custom VJP does not support.
        return attend_auto_sharded(args, inputs, mask_inputs)
    return attend_shard(None, args, inputs, mask_inputs)
