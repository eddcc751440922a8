"""Gradients of attention over packed keys by the Mosaic GPU kernels, and why there are none."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jattn.batch.metadata import BatchMetadata
from jattn.cache import PackedKV
from jattn.implementations.mosaic_gpu.backward_tile_lists import (
    PackedLens,
    backward_lists,
    backward_mask,
    backward_sizes,
    why_not_backward_lists,
)
from jattn.implementations.mosaic_gpu.gathered_columns import (
    add_gathered_gradients,
    gather_kv,
    gathered_columns_layer,
)
from jattn.implementations.mosaic_gpu.kernel_config import score_of
from jattn.implementations.mosaic_gpu.slash_masks import gathers
from jattn.masks import Mask, split_gathered
from jattn.spec import AttentionSpec
from pallas_kernels import support
from pallas_kernels import varlen_backward as kernel
from pallas_kernels.shared import Interpret


def why_not_gradients(
    spec: AttentionSpec,
    dtypes: dict[str, DTypeLike],
    mask: Mask | None,
    *,
    is_in_order: bool,
    wants_slopes: bool,
) -> str | None:
    """Why varlen_backward has no kernel for a region; None if it has. Looks at shapes alone.

    Args:
        spec: The layer.
        dtypes: Of query, key, value.
        mask: What it masks beyond the spec's numbers.
        is_in_order: Whether the rows' keys follow each other from the first key on.
        wants_slopes: Whether slopes of ALiBi have a gradient.
    """
    reason = support.why_not_backward(dtypes=dtypes, head_dim=spec.head_dim)
    if reason is not None:
        return reason
    if not is_in_order:
        return "gradients of keys whose rows are not said to follow each other (PackedKV(is_in_order=True))"
    if wants_slopes:
        return "gradients of ALiBi's slopes have no kernel"
    if mask is None:
        return None
    return why_not_backward_lists(mask, kernel.default_sizes(spec.head_dim, deterministic=spec.deterministic))


def gradients(
    query: Float[Array, "tokens q_heads head_dim"],
    kv: PackedKV,
    metadata: BatchMetadata,
    spec: AttentionSpec,
    *,
    out: Float[Array, "tokens q_heads head_dim"],
    lse: Float[Array, "q_heads tokens"],
    grad_out: Float[Array, "tokens q_heads head_dim"],
    grad_lse: Float[Array, "q_heads tokens"] | None,
    mask: Mask | None,
    alibi_slopes: Float[Array, " q_heads"] | None,
    interpret: Interpret = None,
) -> tuple[Array, Array, Array]:
    """Gradients of query, keys and values; those of sinks follow from the same, without a kernel.

    Args:
        query: The region's queries.
        kv: Its keys and values.
        metadata: The region as a step of its own.
        spec: The layer; why_not_gradients is None.
        out: Of the forward pass.
        lse: Of the forward pass.
        grad_out: Gradient of out.
        grad_lse: Gradient of lse; None = 0.
        mask: Which keys a query sees beyond the spec's numbers.
        alibi_slopes: Slope per head.
        interpret: plgpu.InterpretGPUParams to run the kernel on a CPU, for tests.
    """
    saved: dict[str, Any] = {"out": out, "lse": lse, "grad_out": grad_out, "grad_lse": grad_lse}
    saved |= {"alibi_slopes": alibi_slopes, "interpret": interpret}
    of: Callable[..., tuple[Array, Array, Array]] = functools.partial(_over_keys, query, **saved)
    if not gathers(mask, spec) or alibi_slopes is not None:
        return of(kv, metadata, spec, mask=mask)
    columns, rest = split_gathered(mask)
    gathered, places = gather_kv(kv, metadata, columns)
    # `out` and `lse` are of all that a query sees, so either part's gradients are what they are in the whole.
    of_query, *of_kv = of(kv, metadata, spec, mask=rest)
    by_columns, *of_gathered = of(
        gathered, metadata, gathered_columns_layer(spec, columns).spec, mask=columns
    )
    of_query = (of_query.astype(jnp.float32) + by_columns.astype(jnp.float32)).astype(of_query.dtype)
    pairs = zip(of_kv, of_gathered, strict=True)
    of_key, of_value = (add_gathered_gradients(*pair, places, kv.kv_start_loc) for pair in pairs)
    return of_query, of_key, of_value


def _over_keys(
    query: Array,
    kv: PackedKV,
    metadata: BatchMetadata,
    spec: AttentionSpec,
    *,
    out: Array,
    lse: Array,
    grad_out: Array,
    grad_lse: Array | None,
    mask: Mask | None,
    alibi_slopes: Array | None,
    interpret: Interpret,
) -> tuple[Array, Array, Array]:
    """One call of varlen_backward."""
    lens = PackedLens(metadata.query_start_loc, metadata.seq_lens, kv.kv_start_loc)
    score = score_of(spec)
    mean_len = query.shape[0] // max(lens.seq_lens.shape[0], 1)
    sizes = backward_sizes(mask, spec, mean_len=mean_len)
    kv_tokens, kv_heads, head_dim = kv.k.shape
    schedule = kernel.make_schedule(
        *lens, kv_tokens=kv_tokens, kv_heads=kv_heads, head_dim=head_dim, score=score, sizes=sizes,
        num_tokens=query.shape[0],
    )  # fmt: skip
    listed: dict[str, Any] = {}
    if mask is not None:
        most = kv.max_keys_per_row
        bounds = {"num_tokens": query.shape[0], "max_seq_len": most}
        lists = backward_lists(mask, spec, lens, schedule, sizes=sizes, **bounds)
        listed = {"lists": lists, "mask": backward_mask(mask, spec, sizes, max_seq_len=most)}
    if grad_lse is not None:  # what comes down to a row without keys may be anything
        grad_lse = jnp.where(jnp.isneginf(lse), 0.0, grad_lse)
    return kernel.varlen_backward(
        query, kv.k, kv.v, out, lse, grad_out,
        **lens._asdict(), score=score, grad_lse=grad_lse, alibi_slopes=alibi_slopes, schedule=schedule,
        deterministic=spec.deterministic, sizes=sizes, interpret=interpret, **listed,
    )  # fmt: skip
