"""The front door without requests: attention of arrays, in jax.nn's layout or packed, for training."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jattn.attending import attend
from jattn.dense_checks import Rows, asked_for_documents, last_ahead, rows_of_arrays, spec_of_arrays
from jattn.dense_layout import Laid, lay_batch, lay_packed, segments, unpadded
from jattn.implementations.choice import Asked
from jattn.implementations.layers import layer_of
from jattn.masks import Mask
from jattn.planning import choose_layers
from jattn.sharded_arrays import cut_of, on_each_device
from jattn.spec import AttentionSpec


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
            each run of equal ids for a segment; ids that come again, if not traced, go to XLA. Padding has
            an id of its own, and must be finite.
        cu_seqlens: First token of each document, and one past the last, from 0; behind is padding.
        alibi_slopes: As in `attend`.
        sinks: As in `attend`.
        mask: A mask of jattn.masks, whose rows are texts or documents (a row for each document, or no axis
            of rows) and reach over the longest; or an array of bool, for which there is no kernel, that
            broadcasts to [batch, q_heads, q_tokens, kv_tokens].
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
    spec = spec_of_arrays(q, k, v, causal=causal, **numbers)
    rows = rows_of_arrays(q, k, segment_ids, cu_seqlens, mask, spec)
    asked = asked_for_documents(segment_ids, rows.mask, implementation)
    per_head = {"sinks": sinks, "alibi_slopes": alibi_slopes}
    out, lse = attend_arrays((q, k, v), rows, per_head, spec=spec, implementation=asked)
    return (out, lse) if return_lse else out


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
    cut = cut_of(*arrays)
    if cut is None:
        return _attend_arrays(arrays, rows, per_head, spec, implementation)

    def attend_part(arrays: tuple[Array, Array, Array], rows: Rows, per_head: Any) -> tuple[Array, Array]:
        rows = rows._replace(mask=cut.mask_of_part(rows.mask, spec))
        return _attend_arrays(arrays, rows, per_head, cut.part_of(spec), implementation)

    of_rows: Any = rows._replace(mask=cut.of_mask(rows.mask))
    if rows.segment_ids is not None:
        of_rows = of_rows._replace(segment_ids=P(*cut.texts))
    if rows.cu_seqlens is not None:
        of_rows = of_rows._replace(cu_seqlens=P())
    of_heads = jax.tree.map(lambda _: P(cut.heads), per_head)
    specs = (cut.of_queries, cut.of_keys, cut.of_keys), of_rows, of_heads
    returns = cut.of_queries, P(*cut.texts, cut.heads, None)
    out: tuple[Array, Array] = on_each_device(cut, attend_part, (arrays, rows, per_head), specs, returns)
    return out


def _attend_arrays(
    arrays: tuple[Array, Array, Array],
    rows: Rows,
    per_head: dict[str, Array | None],
    spec: AttentionSpec,
    implementation: Asked,
) -> tuple[Array, Array]:
    """`attend_arrays` of what one device has."""
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
    layer = layer_of(spec, None, laid.query.dtype)
    chosen = choose_layers(laid.metadata, (layer,), laid.mask, implementation=implementation)[0].prefill
    if chosen is None or chosen.implementation == "mosaic_gpu":
        return laid, implementation
    return lay(both(segments(rows.segment_ids, as_runs=False))), chosen.implementation
