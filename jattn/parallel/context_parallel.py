"""Attention over keys that lie on several ranks: each attends to its own, and they join their results.

Inside `jax.shard_map`, where all ranks have the same queries. One exchange joins them, that of log-sum-exps:
with them each rank knows what its own output counts for, and the sum over the ranks is the whole.
"""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from jattn.attending import region_queries, validated_attend
from jattn.batch.context_parallel import ContextParallelAxis
from jattn.batch.metadata import REGIONS, BatchMetadata, region_batch
from jattn.cache import PagedCache
from jattn.implementations.layer_config import LayerConfig, layer_config
from jattn.implementations.selection import ImplementationArg
from jattn.planning import ContextParallelRegion, Plan, plan_on_rank
from jattn.spec import AttentionSpec
from pallas_kernels.checks import require, unsupported

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
    """What this rank's keys bring each token of a step: the sum over the ranks is what `attend` gives.

    Args:
        query: The step's queries, the same on all ranks.
        cache: This rank's part of the cache, with its part of the step's keys in it (slot_mapping_on_rank).
        metadata: The step's, of all ranks.
        spec: The layer.
        ranks: Where keys lie.
        plan: From plan_on_rank, for layers like this one among others; None = made here.
        sinks: As in `attend`; they count once.
        alibi_slopes: As in `attend`.
        implementation: As in `attend`.
        peers: This device's part of memory that the ranks write to, made for their axis: log-sum-exps go
            through it where they fit, without a gradient. None = XLA exchanges them.

    Raises:
        ValueError: As `attend`.
        NotImplementedError: As `attend`, or ALiBi whose bias the rank's own keys do not say.

    Source: vLLM's decode context parallelism, `cp_lse_ag_out_rs`, without the exchange of outputs.
    """
    check_alibi(spec, ranks, has_slopes=alibi_slopes is not None)
    sinks, alibi_slopes = spec.per_head(sinks, alibi_slopes).values()
    if plan is None:
        options: dict[str, Any] = {"implementation": implementation, "query_dtype": query.dtype}
        plan = plan_on_rank(metadata, (spec,), (cache,), ranks, **options)
    outs, lses = [], []
    for name, region in zip(REGIONS, _regions_of(plan, layer_config(spec, cache, query.dtype)), strict=True):
        if region is not None:
            q, whole = region_queries(query, metadata, name), region_batch(metadata, name).metadata
            slopes = None if alibi_slopes is None else alibi_slopes * ranks.size
            given: Any = (q, cache, region.metadata, region.spec, region.plan)
            how: Any = {"sinks": None, "alibi_slopes": slopes, "mask": None, "implementation": implementation}
            out, lse = validated_attend(*given, **how, return_lse=True)()  # an LSE of f64 where queries are
            if alibi_slopes is not None:
                lse = lse + alibi_slopes[:, None] * _ahead(whole, ranks)[None, :].astype(lse.dtype)
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
    """A rank's output times what it counts for among all ranks': 0 where it has no key.

    Args:
        out: Attention over the rank's keys.
        lse: Its log-sum-exp, -inf where there is no key.
        ranks: The ranks.
        sinks: One more score for each head, without a value, beside the keys of all.
        peers: As in `attend_on_rank`.
    """
    mine = lse.T
    total = jax.nn.logsumexp(_of_all_ranks(mine, ranks, peers), axis=0)
    if sinks is not None:
        total = jnp.logaddexp(total, sinks.astype(total.dtype)[None, :])
    weight = jnp.where(jnp.isneginf(mine), 0.0, jnp.exp(mine - total))[..., None]
    return jnp.where(weight > 0, weight * out.astype(weight.dtype), 0.0).astype(out.dtype)


def _of_all_ranks(
    mine: Float[Array, "tokens q_heads"], ranks: ContextParallelAxis, peers: "PeerMemory | None"
) -> Float[Array, "ranks tokens q_heads"]:
    """What each rank has: by the kernel where it serves, whose latency is a fraction of NCCL's."""
    _, q_heads = mine.shape
    even = jnp.pad(mine, ((0, 0), (0, q_heads % 2)))  # what the kernel sends at once is two
    if peers is None:
        return jax.lax.all_gather(mine, ranks.axis_name)
    from pallas_kernels.collectives import all_gather, why_not_all_gather

    if why_not_all_gather(even, peers) is not None:
        return jax.lax.all_gather(mine, ranks.axis_name)
    return all_gather(even, peers, axis_name=ranks.axis_name)[:, :, :q_heads]


def check_alibi(spec: AttentionSpec, ranks: ContextParallelAxis, *, has_slopes: bool) -> None:
    """A layer's bias must follow from a line through the rank's own keys, which lie at equal distances then.

    Raises:
        NotImplementedError: It does not.
    """
    if has_slopes and spec.sqrt_alibi:
        reason = "keys that lie on several devices have a bias that is linear in their distance"
        raise unsupported("spec.sqrt_alibi=True with cp", reason, "One device a request's keys, with cp=1")
    if has_slopes and ranks.interleave > 1:
        reason = "ALiBi needs keys at equal distances on each rank"
        what = f"cp_kv_cache_interleave_size={ranks.interleave} with ALiBi"
        raise unsupported(what, reason, "Leave it 1")


def _regions_of(
    plan: Plan, layer: LayerConfig
) -> tuple[ContextParallelRegion | None, ContextParallelRegion | None]:
    """Both regions of a kind of layer."""
    require(plan.context_parallel is not None, "plan", "be made by plan_on_rank", "one of all keys")
    assert plan.context_parallel is not None
    return plan.context_parallel.regions[plan.layers.index(plan.layer_plan(layer))]


def _ahead(whole: BatchMetadata, ranks: ContextParallelAxis) -> Int32[Array, " tokens"]:
    """By how much a token's bias says too little: where it is said to stand, less where it stands.

    Its bias is linear in the rank's keys, `ranks.size` positions apart, so it is one number for all of them.
    """
    shift = (whole.seq_lens - ranks.num_keys(whole.seq_lens))[whole.token_rows]
    return ranks.size * (whole.positions - shift) + ranks.rank - whole.positions
