"""Context-parallel attention: each rank attends to the keys it stores, and the outputs are combined.

For use inside `jax.shard_map`; all ranks have the same queries. The ranks exchange only their log-sum-exps:
from these each rank computes the weight of its output, and the sum of the weighted outputs over the ranks is
the attention output.
"""

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jattn.attending import attend_cascade, attend_regions, check_attend
from jattn.batch.context_parallel import ContextParallelAxis
from jattn.batch.metadata import REGIONS, BatchMetadata, region_batch
from jattn.cache import PagedCache
from jattn.implementations.layer_config import LayerConfig, layer_config
from jattn.implementations.selection import ImplementationArg
from jattn.planning import ContextParallelRegion, Plan, plan_of_layer, plan_on_rank
from jattn.spec import AttentionSpec
from pallas_kernels.checks import unsupported

if TYPE_CHECKING:
    from pallas_kernels.collectives import PeerMemory


def attend_on_rank(
    query: Float[Array, "tokens q_heads head_dim"],
    cache: PagedCache,
    metadata: BatchMetadata,
    spec: AttentionSpec,
    ranks: ContextParallelAxis,
    plan: Plan | None = None,
    sinks: Float[Array, " q_heads"] | None = None,
    alibi_slopes: Float[Array, " q_heads"] | None = None,
    *,
    implementation: ImplementationArg = None,
    peers: "PeerMemory | None" = None,
) -> Float[Array, "tokens q_heads head_dim"]:
    """Return this rank's contribution to attention; the sum over the ranks is the output of `attend`.

    Args:
        query: The step's queries, the same on all ranks.
        cache: This rank's shard of the cache, with this step's keys and values already written to the slots
            of `slot_mapping_on_rank`.
        metadata: The step's metadata, the same on all ranks.
        spec: The layer's attention.
        ranks: Mesh axis over which the keys are distributed.
        plan: The step's plan from `plan_on_rank`. None = plan inside this call.
        sinks: Attention sinks, f32 [q_heads]; see `attend`. Each sink counts once, not once per rank.
        alibi_slopes: ALiBi slopes, f32 [q_heads]; see `attend`.
        implementation: Kernel implementation, or several in order of preference; see `attend`.
        peers: This device's shard of the memory through which the ranks of this axis exchange log-sum-exps.
            Used if they fit into it; it has no gradient. None = use an XLA all-gather.

    Raises:
        ValueError: If `attend` rejects the arguments.
        NotImplementedError: If no implementation supports the arguments, or the ALiBi bias is not linear in
            the positions of the rank's keys.

    Source: vLLM's decode context parallelism, `cp_lse_ag_out_rs`, without the exchange of outputs.
    """
    check_alibi(spec, ranks, has_slopes=alibi_slopes is not None)
    sinks, alibi_slopes = spec.per_head(sinks, alibi_slopes).values()
    # Neighbouring keys of a rank are `ranks.size` positions apart.
    rank_slopes = None if alibi_slopes is None else alibi_slopes * ranks.size
    if plan is None:
        plan = plan_on_rank(
            metadata, (spec,), (cache,), ranks, implementation=implementation, query_dtype=query.dtype
        )
    outs, lses, tokens = [], [], metadata.bucket.max_decode_tokens
    config = layer_config(spec, cache, query.dtype)
    for name, region in zip(REGIONS, _layer_regions(plan, config), strict=True):
        if region is not None:
            q = query[:tokens] if name == "decode" else query[tokens:]
            check_attend(q, cache, region.metadata, region.spec, region.plan, alibi_slopes=rank_slopes)
            # The log-sum-exp of float64 queries is float64.
            cascade = region.plan.cascade_of(cache, region.spec, rank_slopes)
            if cascade is not None:
                out, lse = attend_cascade(
                    q, cache, region.spec, cascade, sinks=None, implementation=implementation
                )
            else:
                layer, regions = plan_of_layer(
                    region.plan,
                    region.metadata,
                    dataclasses.replace(config, spec=region.spec),
                    None,
                    implementation,
                )
                out, lse = attend_regions(
                    q, cache, region.metadata, regions, None, rank_slopes, layer=layer, return_lse=True
                )
            if alibi_slopes is not None:
                offset = _alibi_position_offset(region_batch(metadata, name).metadata, ranks)
                lse = lse + alibi_slopes[:, None] * offset[None, :].astype(lse.dtype)
            outs.append(out)
            lses.append(lse)
    if not outs:
        return query
    out, lse = jnp.concatenate(outs), jnp.concatenate(lses, axis=1)
    return scale_rank_output(out, lse, ranks, sinks=sinks, peers=peers)


def scale_rank_output(
    out: Float[Array, "tokens q_heads head_dim"],
    lse: Float[Array, "q_heads tokens"],
    ranks: ContextParallelAxis,
    *,
    sinks: Float[Array, " q_heads"] | None = None,
    peers: "PeerMemory | None" = None,
) -> Float[Array, "tokens q_heads head_dim"]:
    """Multiply a rank's output by its softmax weight among all ranks; 0 for tokens without keys on this rank.

    Args:
        out: Attention output over this rank's keys.
        lse: Log-sum-exp of the scores of this rank's keys; -inf for tokens without keys on this rank.
        ranks: Mesh axis over which the keys are distributed.
        sinks: Attention sinks, f32 [q_heads], added once to the softmax over the keys of all ranks.
        peers: Memory for the exchange of log-sum-exps; see `attend_on_rank`.
    """
    rank_lse = lse.T
    global_lse = jax.nn.logsumexp(_all_gather_lse(rank_lse, ranks, peers), axis=0)
    if sinks is not None:
        global_lse = jnp.logaddexp(global_lse, sinks.astype(global_lse.dtype)[None, :])
    weight = jnp.where(jnp.isneginf(rank_lse), 0.0, jnp.exp(rank_lse - global_lse))[..., None]
    return jnp.where(weight > 0, weight * out.astype(weight.dtype), 0.0).astype(out.dtype)


def _all_gather_lse(
    rank_lse: Float[Array, "tokens q_heads"], ranks: ContextParallelAxis, peers: "PeerMemory | None"
) -> Float[Array, "ranks tokens q_heads"]:
    """Gather the log-sum-exps of all ranks.

    The peer-memory kernel, whose latency is a fraction of NCCL's, is used where it supports the arrays.
    """
    _, q_heads = rank_lse.shape
    padded = jnp.pad(rank_lse, ((0, 0), (0, q_heads % 2)))  # the kernel sends pairs of values
    if peers is None:
        return jax.lax.all_gather(rank_lse, ranks.axis_name)
    from pallas_kernels.collectives import all_gather, why_not_all_gather

    if why_not_all_gather(padded, peers) is not None:
        return jax.lax.all_gather(rank_lse, ranks.axis_name)
    return all_gather(padded, peers, axis_name=ranks.axis_name)[:, :, :q_heads]


def check_alibi(spec: AttentionSpec, ranks: ContextParallelAxis, *, has_slopes: bool) -> None:
    """Require that a layer's ALiBi bias is linear in the indices of the keys on each rank.

    Raises:
        NotImplementedError: If the bias is not linear in the distance, or the keys of a rank are not equally
            spaced.
    """
    if has_slopes and spec.sqrt_alibi:
        raise unsupported(
            "spec.sqrt_alibi=True with cp > 1",
            "context parallelism supports only ALiBi biases that are linear in the distance",
            "Use a mesh with cp=1",
        )
    if has_slopes and ranks.interleave > 1:
        raise unsupported(
            f"cp_kv_cache_interleave_size={ranks.interleave} with ALiBi",
            "ALiBi requires equally spaced keys on each rank",
            "Use cp_kv_cache_interleave_size=1",
        )


def _layer_regions(
    plan: Plan, layer: LayerConfig
) -> tuple[ContextParallelRegion | None, ContextParallelRegion | None]:
    """Return the plans of a layer's two regions, in the order of REGIONS."""
    if plan.context_parallel is None:
        raise ValueError("plan covers the keys of all ranks. Build it with plan_on_rank.")
    return plan.context_parallel.regions[plan.layers.index(plan.layer_plan(layer))]


def _alibi_position_offset(metadata: BatchMetadata, ranks: ContextParallelAxis) -> Int32[Array, " tokens"]:
    """Return, for each token, the position that the rank's ALiBi bias assumes minus its true position.

    The bias is linear in the rank's keys, which are `ranks.size` positions apart, so the error of a token's
    bias is the same for all keys, and adding `slope * offset` to the log-sum-exp corrects it.
    """
    shift = (metadata.seq_lens - ranks.num_keys(metadata.seq_lens))[metadata.token_rows]
    return ranks.size * (metadata.positions - shift) + ranks.rank - metadata.positions
