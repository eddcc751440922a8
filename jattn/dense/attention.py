"""The front door without requests: attention of arrays, in jax.nn's layout or packed, for training."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jattn.dense.arguments import (
    Rows,
    asked_for_documents,
    knows_names_of_jax,
    rows_of_arrays,
    spec_of_arrays,
)
from jattn.dense.auto_sharding import are_automatic
from jattn.dense.per_shard import Attended, How, Values, attend_part, attend_parts, partitions
from jattn.dense.sharding import cut_of, on_each_device
from jattn.implementations.selection import ImplementationArg, requested_implementations
from jattn.masks import Mask
from jattn.spec import AttentionSpec
from pallas_kernels.checks import require_bool


@knows_names_of_jax
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
        segment_ids: An id of each token [batch, tokens], padding (finite) its own: a query sees keys of its
            id. Kernels take runs of equal ids for segments; ids that come again, if not traced, go to XLA.
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
        denominator, f32 [batch, q_heads, q_tokens] or [q_heads, q_tokens], sinks included: where
        all keys are masked it is the sink. -inf without one, and where there are no keys at all.

    Raises:
        ValueError: Arguments disagree.
        NotImplementedError: No implementation asked for can serve this; the message says why.
    """
    require_bool(return_lse=return_lse)
    numbers = {"window": window, "soft_cap": soft_cap, "scale": scale, "deterministic": deterministic}
    spec = spec_of_arrays(q, k, v, causal=causal, **numbers)
    rows = rows_of_arrays(q, k, segment_ids, cu_seqlens, mask, spec)
    how = {"spec": spec, "implementation": asked_for_documents(segment_ids, rows.mask, implementation)}
    out, lse = attend_arrays((q, k, v), rows, spec.per_head(sinks, alibi_slopes), **how)
    return (out, lse.astype(jnp.float32)) if return_lse else out


@functools.partial(jax.jit, static_argnames=("spec", "implementation"))
def attend_arrays(
    arrays: tuple[Array, Array, Array],
    rows: Rows,
    per_head: dict[str, Array | None],
    *,
    spec: AttentionSpec,
    implementation: ImplementationArg,
) -> Attended:
    """`attention` of what belongs together, with its log-sum-exp; compiled once, called eagerly, too.

    Args:
        arrays: q, k and v.
        rows: Documents and masks.
        per_head: sinks and alibi_slopes.
        spec: Static: the layer.
        implementation: Static: a name, a tuple of them, or None.
    """
    values, how = Values(*arrays, per_head), How(spec, implementation)
    cut = cut_of(*arrays)
    if cut is not None:
        of_values, of_rows, returns = partitions(cut, values, rows)
        run = functools.partial(attend_part, cut, how)
        attended: Attended = on_each_device(cut, run, (values, rows), (of_values, of_rows), returns)
        return attended
    before_xla = itertools.takewhile(lambda name: name != "xla", requested_implementations(implementation))
    if are_automatic(arrays) and "reference" not in before_xla:  # which has second derivatives, too
        return attend_parts(how, values, rows)
    return attend_part(None, how, values, rows)
