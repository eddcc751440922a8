"""Cascade attention: the shared prefix once for all tokens, then each request's own keys, merged."""

from collections.abc import Sequence
from typing import Literal, overload

import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn.attending import attend_cascade
from jattn.cache import PagedCache
from jattn.metadata.cascade import CascadeMetadata
from jattn.planning.cascading import why_no_cascade
from jattn.spec import AttentionSpec
from pallas_kernels.checks import require_bool, require_type, unsupported


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
        sinks: As in `attend`; they join the suffix, once.
        implementation: As in `attend`.
        return_lse: As in `attend`.

    Raises:
        ValueError: Arguments disagree.
        NotImplementedError: The spec is batch-invariant, or has a window, chunks, ALiBi or sparsity:
            positions within the shared prefix mean something else in every request.

    Source: vLLM `cascade_attention`; unlike it, soft caps and sinks are served.
    """
    require_bool(return_lse=return_lse)
    require_type("metadata", metadata, CascadeMetadata, "build_cascade_metadata makes it")
    require_type("spec", spec, AttentionSpec, "the layer's")
    # Both parts would read the first keys of a PackedKV, which has no block table to tell them apart.
    require_type("cache", cache, PagedCache, "attend takes a PackedKV")
    if (found := why_no_cascade(spec)) is not None:
        raise unsupported(*found, "Use attend with the step's own metadata")
    out, lse = attend_cascade(query, cache, metadata, spec, sinks=sinks, implementation=implementation)
    return (out, lse.astype(jnp.float32)) if return_lse else out
