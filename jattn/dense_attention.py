"""The front door without requests: attention of arrays, in jax.nn's layout or packed, for training."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jattn.attending import attend
from jattn.dense_layout import Laid, lay_batch, lay_packed, segments, unpadded
from jattn.implementations.choice import Asked, asked_for
from jattn.implementations.layers import layer_of
from jattn.masks import BlockMask, Mask, Sizes, check_mask
from jattn.planning import choose_layers
from jattn.spec import AttentionSpec
from pallas_kernels import support
from pallas_kernels.checks import require, require_shape, unsupported


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
    return_lse: bool = False,
    implementation: str | Sequence[str] | None = None,
    deterministic: bool = False,
) -> Any:
    """Attention, as jax.nn.dot_product_attention has it, with a derivative whose memory is linear in tokens.

    Query i of a text stands at its key i, as in jax.nn, also where there are more of the ones than of the
    others: `causal`, `window`, ALiBi and masks count from there. Outputs and log-sum-exps have a derivative
    by q, k, v, sinks and alibi_slopes; a second one "reference" alone has, in square memory.

    Args:
        q: [batch, q_tokens, q_heads, head_dim]; or without the batch, one text or packed documents.
        k: [batch, kv_tokens, kv_heads, head_dim]; kv_heads divides q_heads.
        v: As k.
        causal: Query i sees keys up to key i.
        window: As AttentionSpec's, (left, right).
        soft_cap: As AttentionSpec's.
        scale: As AttentionSpec's; head_dim ** -0.5 when None.
        segment_ids: An id of each token [batch, tokens]: a query sees keys of its own id. The kernels take
            each run of equal ids for a segment; ids that come again, if not traced, go to XLA.
        cu_seqlens: First token of each document, and one past the last, from 0; behind is padding.
        alibi_slopes: As in `attend`.
        sinks: As in `attend`.
        mask: A mask of jattn.masks, whose rows are texts or documents; or an array of bool, for which there
            is no kernel, that broadcasts to [batch, q_heads, q_tokens, kv_tokens].
        return_lse: Return the log-sum-exp too.
        implementation: As in `attend`.
        deterministic: As AttentionSpec's.

    Returns:
        As q; rows without a key are 0. With return_lse a pair with the natural log of the softmax's
        denominator, f32 [batch, q_heads, q_tokens] or [q_heads, q_tokens]; -inf without a key.

    Raises:
        ValueError: Arguments disagree.
        NotImplementedError: No implementation asked for can serve this; the message says why.
    """
    numbers = {"window": window, "soft_cap": soft_cap, "scale": scale, "deterministic": deterministic}
    spec = _spec_of(q, k, v, causal=causal, **numbers)
    rows, asked = (
        _rows_of(q, k, segment_ids, cu_seqlens, mask, spec),
        _for_segments(segment_ids, implementation),
    )
    per_head = {"sinks": sinks, "alibi_slopes": alibi_slopes}
    out, lse = attend_arrays((q, k, v), rows, per_head, spec=spec, implementation=asked)
    return (out, lse) if return_lse else out


class Rows(NamedTuple):
    """Which tokens belong together, and what they see of each other."""

    segment_ids: Int[Array, "batch tokens"] | None
    cu_seqlens: Int[Array, " bounds"] | None
    mask: Mask | None


@functools.partial(jax.jit, static_argnames=("spec", "implementation"))
def attend_arrays(
    arrays: tuple[Array, Array, Array],
    rows: Rows,
    per_head: dict[str, Array | None],
    *,
    spec: AttentionSpec,
    implementation: Asked,
) -> tuple[Array, Array]:
    """`attention` of what belongs together, with its log-sum-exp; compiled once, called eagerly, too.

    Args:
        arrays: q, k and v.
        rows: Documents and masks.
        per_head: sinks and alibi_slopes.
        spec: Static: the layer.
        implementation: Static: a name, a tuple of them, or None.
    """
    has_batch = arrays[0].ndim == 4
    if rows.cu_seqlens is not None:
        laid = lay_packed(*arrays, rows.cu_seqlens, rows.mask)
    else:
        q, k, v = arrays if has_batch else (x[None] for x in arrays)
        laid, implementation = _laid_batch((q, k, v), rows, per_head, spec, implementation)
    how: Any = {"mask": laid.mask, "implementation": implementation, **per_head}
    out, lse = attend(laid.query, laid.kv, laid.metadata, spec, return_lse=True, **how)
    if rows.cu_seqlens is None:
        out, lse = unpadded(laid, out), jnp.moveaxis(unpadded(laid, lse.T), 1, 2)
        out, lse = (out, lse) if has_batch else (out[0], lse[0])
    return out, lse


def _laid_batch(
    arrays: tuple[Array, Array, Array],
    rows: Rows,
    per_head: dict[str, Array | None],
    spec: AttentionSpec,
    implementation: Asked,
) -> tuple[Laid, Asked]:
    """A batch's rows, and what serves them where that had to be asked to make their mask."""
    right = None if spec.window is None else spec.window[1]
    is_masked = any(x is not None for x in (spec.sparsity, rows.mask, per_head["alibi_slopes"]))
    lay = functools.partial(
        lay_batch,
        *arrays,
        last_ahead=0 if spec.causal else right,
        is_positional=is_masked or spec.causal or spec.window is not None or spec.chunk_size is not None,
    )
    if rows.segment_ids is None:
        return lay(rows.mask), implementation
    both = lambda mask: mask if rows.mask is None else mask & rows.mask
    laid = lay(both(segments(rows.segment_ids, as_runs=True)))
    layer = layer_of(spec, None, laid.query.dtype)
    chosen = choose_layers(laid.metadata, (layer,), laid.mask, implementation=implementation)[0].prefill
    if chosen is not None and chosen.implementation != "mosaic_gpu":
        laid = lay(both(segments(rows.segment_ids, as_runs=False)))
    return laid, implementation if chosen is None else chosen.implementation


# --------------------------------------------------------------------------------------- checking
def _spec_of(q: Any, k: Any, v: Any, **numbers: Any) -> AttentionSpec:
    """The arrays' layer; they must belong together."""
    for name, array in (("q", q), ("k", k), ("v", v)):
        is_array = hasattr(array, "dtype") and hasattr(array, "ndim")
        require(is_array, name, "be an array", type(array).__name__)
        require(
            array.ndim in (3, 4),
            name,
            "have shape [batch, tokens, heads, head_dim], or no batch",
            array.shape,
        )
        is_real = jnp.issubdtype(array.dtype, jnp.floating) and jnp.dtype(array.dtype).itemsize > 1
        require(is_real, name, "be of a floating-point type of 16 bits or more", array.dtype)
    (*batch, _, q_heads, head_dim), (kv_tokens, kv_heads) = q.shape, k.shape[-3:-1]
    require_shape("k", k.shape, (*batch, kv_tokens, kv_heads, head_dim), "q's batch and head_dim")
    require_shape("v", v.shape, k.shape, "as k")
    return AttentionSpec(num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=head_dim, **numbers)


def _rows_of(q: Array, k: Array, segment_ids: Any, cu_seqlens: Any, mask: Any, spec: AttentionSpec) -> Rows:
    """Documents and mask, checked."""
    _check_documents(q, k, segment_ids, cu_seqlens)
    if segment_ids is not None:
        segment_ids = jnp.atleast_2d(segment_ids)
    return Rows(segment_ids, cu_seqlens, _mask_of(mask, q, k, cu_seqlens, spec))


def _check_documents(q: Array, k: Array, segment_ids: Any, cu_seqlens: Any) -> None:
    """Ids and bounds of documents must be of these tokens, and of keys as many as of queries."""
    both = segment_ids is not None and cu_seqlens is not None
    require(not both, "segment_ids", "be None with cu_seqlens", "both")
    for name, array in (("segment_ids", segment_ids), ("cu_seqlens", cu_seqlens)):
        if array is None:
            continue
        is_ints = hasattr(array, "dtype") and jnp.issubdtype(array.dtype, jnp.integer)
        require(is_ints, name, "be an array of ints", getattr(array, "dtype", type(array).__name__))
        require_shape(f"k with {name}", k.shape[:-2], q.shape[:-2], "as many keys as queries")
    if segment_ids is not None:
        require_shape("segment_ids", segment_ids.shape, q.shape[:-2], "an id of each token")
    if cu_seqlens is not None:
        require(q.ndim == 3, "q", "have shape [tokens, q_heads, head_dim] with cu_seqlens", q.shape)
        is_list = cu_seqlens.ndim == 1 and cu_seqlens.shape[0] > 1
        require(
            is_list, "cu_seqlens", "have shape [documents + 1], of one document or more", cu_seqlens.shape
        )
        _check_bounds(cu_seqlens, q.shape[0])


def _check_bounds(cu_seqlens: Array, tokens: int) -> None:
    """Where the numbers can be seen."""
    if not support.is_concrete(cu_seqlens):
        return
    bounds = np.asarray(cu_seqlens)
    is_right = bounds[0] == 0 and (np.diff(bounds) >= 0).all() and bounds[-1] <= tokens
    require(bool(is_right), "cu_seqlens", f"ascend from 0 to at most the {tokens} tokens", bounds)


def _mask_of(mask: Any, q: Array, k: Array, cu_seqlens: Array | None, spec: AttentionSpec) -> Mask | None:
    """The mask, made of an array where it is one; it must reach over the texts."""
    if mask is None:
        return None
    q_tokens, kv_tokens = q.shape[-3], k.shape[-3]
    batch = q.shape[0] if q.ndim == 4 else 1
    if hasattr(mask, "dtype"):
        require(cu_seqlens is None, "mask", "be a mask of jattn.masks with cu_seqlens", f"shape {mask.shape}")
        return mask_of_array(mask, (batch, spec.num_q_heads, q_tokens, kv_tokens))
    num_rows, is_square = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1, q_tokens == kv_tokens
    reach = q_tokens if is_square and cu_seqlens is None else None
    sizes = Sizes(spec.num_q_heads, num_rows=num_rows, max_query_len=reach, max_seq_len=reach)
    check_mask(mask, sizes, causal=spec.causal)
    return mask


def mask_of_array(array: Any, shape: tuple[int, int, int, int]) -> Mask:
    """Each pair a block of its own; axes of the batch and of heads may be 1, or missing."""
    require(array.dtype == jnp.bool_, "mask", "be of bool", array.dtype)
    given = (1,) * (4 - array.ndim) + tuple(array.shape)
    fits = array.ndim in (2, 3, 4) and all(a in (1, b) for a, b in zip(given, shape, strict=False))
    require(fits, "mask", f"broadcast to {shape} (batch, q_heads, q_tokens, kv_tokens)", array.shape)
    blocks = jnp.broadcast_to(jnp.asarray(array).reshape(given), (*given[:2], *shape[2:]))
    return BlockMask(blocks=blocks, block_q=1, block_kv=1)


def _for_segments(segment_ids: Array | None, implementation: Asked) -> Asked:
    """What may serve these ids: without the kernels where an id comes again behind another."""
    asked = asked_for(implementation)
    is_for_all = segment_ids is None or "mosaic_gpu" not in asked or support.why_not_on(segment_ids)
    if is_for_all or _come_in_runs(segment_ids):
        return implementation if isinstance(implementation, str | None) else asked
    rest = tuple(name for name in asked if name != "mosaic_gpu")
    if not rest:
        reason = "mosaic_gpu: an id comes again behind another one"
        raise unsupported("segment_ids", reason, "Leave implementation=None or ask for 'xla'")
    return rest


def _come_in_runs(segment_ids: Any) -> bool:
    """Whether equal ids stand together in each text, as far as can be seen."""
    if not support.is_concrete(segment_ids):
        return True
    ids = np.atleast_2d(np.asarray(segment_ids))
    num_runs = 1 + (ids[:, 1:] != ids[:, :-1]).sum(axis=1)
    return all(len(np.unique(row)) == runs for row, runs in zip(ids, num_runs, strict=True) if len(row))
