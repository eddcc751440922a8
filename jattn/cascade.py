"""Cascade attention: the shared prefix once for all tokens, then each request's own keys, merged."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, overload

import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn.attending import attend
from jattn.cache import PagedCache
from jattn.merge import merge_attn_states
from jattn.metadata.cascade import CascadeMetadata
from jattn.spec import AttentionSpec
from pallas_kernels.checks import unsupported


@overload
def cascade_attend(
    query: Array,
    cache: PagedCache,
    metadata: CascadeMetadata,
    spec: AttentionSpec,
    *,
    sinks: Array | None = None,
    implementation: str | Sequence[str] | None = None,
    return_lse: Literal[False] = False,
) -> Array: ...
@overload
def cascade_attend(
    query: Array,
    cache: PagedCache,
    metadata: CascadeMetadata,
    spec: AttentionSpec,
    *,
    sinks: Array | None = None,
    implementation: str | Sequence[str] | None = None,
    return_lse: Literal[True],
) -> tuple[Array, Array]: ...
def cascade_attend(
    query: Float[Array, "tokens q_heads head_dim"],
    cache: PagedCache,
    metadata: CascadeMetadata,
    spec: AttentionSpec,
    *,
    sinks: Float[Array, " q_heads"] | None = None,
    implementation: str | Sequence[str] | None = None,
    return_lse: bool = False,
) -> Array | tuple[Array, Array]:
    """`attend` over a step whose requests share a prefix: the same result with the prefix read once.

    Args:
        query: As in `attend`.
        cache: As in `attend`.
        metadata: From build_cascade_metadata.
        spec: As in `attend`; causal, without what depends on the distance of query and key.
        sinks: As in `attend`; they join the prefix, once.
        implementation: As in `attend`.
        return_lse: As in `attend`.

    Raises:
        NotImplementedError: The spec is batch-invariant, or has a window, chunks, ALiBi or sparsity:
            positions within the shared prefix mean something else in every request.

    Source: vLLM `cascade_attention`; unlike it, soft caps and sinks are served.
    """
    if spec.batch_invariant:
        reason = "whether a prefix is shared, and so how it is summed, depends on the batch"
        raise unsupported("spec.batch_invariant=True", reason, "Use attend with the step's own metadata")
    for name in ("window", "chunk_size", "sparsity"):
        if getattr(spec, name) is not None:
            way_out = "Use attend with the step's own metadata"
            raise unsupported(
                f"spec.{name}={getattr(spec, name)}",
                "cascade attention needs masks that ignore distance",
                way_out,
            )
    run = lambda part, spec, sinks: attend(
        query, cache, part, spec, sinks=sinks, implementation=implementation, return_lse=True
    )
    prefix = run(metadata.prefix, dataclasses.replace(spec, causal=False), sinks)
    suffix = run(metadata.suffix, spec, None)
    out, lse = merge_attn_states(*prefix, *suffix)
    is_live = metadata.suffix.is_live_token
    out = jnp.where(is_live[:, None, None], out, jnp.zeros_like(out))
    lse = jnp.where(is_live[None, :], lse, -jnp.inf)
    return (out, lse) if return_lse else out
