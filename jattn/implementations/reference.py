"""Reference attention: dense, one request at a time; the other implementations are tested against it.

Computes in float64 for float64 queries, else in float32. Differentiable. Memory grows with tokens x longest
request.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jattn.batch.metadata import BatchMetadata
from jattn.cache import PackedKV, PagedCache
from jattn.cache.quantization import round_token_head
from jattn.implementations.region_inputs import RegionInputs
from jattn.masks import Mask, Pairs
from jattn.score_mod import visible_pairs
from jattn.spec import QUERY_DTYPES, AttentionSpec


def attend(
    inputs: RegionInputs,
) -> tuple[Float[Array, "tokens q_heads head_dim"], Float[Array, "q_heads tokens"]]:
    """Return output and log-sum-exp of every token, as `jattn.attend` defines them."""
    query, kv, metadata, spec = inputs.query, inputs.kv, inputs.metadata, inputs.spec
    tokens = query.shape[0]
    if tokens == 0 or has_no_keys(kv, metadata):
        return jnp.zeros_like(query), jnp.full((spec.num_q_heads, tokens), -jnp.inf, jnp.float32)
    dtype = jnp.dtype(jnp.float64 if query.dtype == jnp.float64 else jnp.float32)
    # Masked queries, keys and values are cleared before the products, too: in the gradient of a product, a
    # NaN of another request or of an invisible key times 0 is NaN in every row of the other operand.
    query = jnp.where(metadata.is_valid_token[:, None, None], query, jnp.zeros((), query.dtype))
    q = jnp.swapaxes(as_seen(query, spec), 0, 1).astype(dtype)  # [q_heads, tokens, head_dim]
    positions = metadata.num_computed_tokens[metadata.token_rows] + (
        jnp.arange(tokens, dtype=jnp.int32) - metadata.row_starts[metadata.token_rows]
    )
    is_prefill = jnp.arange(tokens, dtype=jnp.int32) >= metadata.bucket.max_decode_tokens

    def one_request(carry: tuple[Array, Array], row: Array) -> tuple[tuple[Array, Array], None]:
        k, v = keys_and_values(kv, metadata, row, dtype)  # [kv_heads, keys, head_dim]
        k, v = (jnp.repeat(x, spec.q_heads_per_kv_head, axis=0) for x in (k, v))
        k_positions = jnp.arange(k.shape[1], dtype=jnp.int32)
        visible = is_visible(
            spec, inputs.mask, row, positions, k_positions, is_prefill
        )  # [q_heads, tokens, keys]
        is_row_token = (metadata.token_rows == row) & metadata.is_valid_token
        visible &= (is_row_token[:, None] & (k_positions < metadata.seq_lens[row])[None, :])[None]
        k, v = (jnp.where(visible.any(axis=1)[..., None], x, 0.0) for x in (k, v))
        row_q = jnp.where(is_row_token[None, :, None], q, 0.0)
        s = jnp.einsum("htd,hkd->htk", row_q, k, precision="highest") * spec.softmax_scale
        if spec.soft_cap is not None:
            s = spec.soft_cap * jnp.tanh(s / spec.soft_cap)
        if inputs.alibi_slopes is not None:
            s += alibi_bias(spec, inputs.alibi_slopes.astype(dtype), positions, k_positions)
        if inputs.score_mod is not None:
            heads = jnp.arange(spec.num_q_heads, dtype=jnp.int32)[:, None, None]
            pairs = (row, heads, positions[None, :, None], k_positions[None, None, :])
            s = inputs.score_mod(jnp.where(visible, s, 0.0), *visible_pairs(visible, *pairs))
        out, lse = softmax_average(jnp.where(visible, s, -jnp.inf), v, inputs.sinks)
        outs, lses = carry
        return (
            jnp.where(is_row_token[None, :, None], out, outs),
            jnp.where(is_row_token[None, :], lse, lses),
        ), None

    nothing = jnp.zeros_like(q), jnp.full(q.shape[:2], -jnp.inf, dtype)
    (out, lse), _ = jax.lax.scan(one_request, nothing, jnp.arange(metadata.bucket.max_reqs, dtype=jnp.int32))
    return jnp.swapaxes(out, 0, 1).astype(query.dtype), lse


def has_no_keys(kv: PagedCache | PackedKV, metadata: BatchMetadata) -> bool:
    """Return whether the shapes allow no key at all."""
    return 0 in kv.k.shape or (isinstance(kv, PagedCache) and metadata.block_table.shape[1] == 0)


def as_seen(
    query: Float[Array, "tokens q_heads head_dim"], spec: AttentionSpec
) -> Float[Array, "tokens q_heads head_dim"]:
    """Return the queries, quantized and dequantized if the spec says so."""
    dtype = QUERY_DTYPES[spec.query_quantization]
    return query if dtype is None else round_token_head(query, dtype)


def softmax_average(
    s: Float[Array, "q_heads tokens keys"],
    v: Float[Array, "q_heads keys head_dim"],
    sinks: Float[Array, " q_heads"] | None,
) -> tuple[Float[Array, "q_heads tokens head_dim"], Float[Array, "q_heads tokens"]]:
    """Return softmax(s) @ v and the log-sum-exp; a sink is one more score without a value."""
    sink = jnp.full(s.shape[0], -jnp.inf, s.dtype) if sinks is None else sinks.astype(s.dtype)
    sink = jnp.broadcast_to(sink[:, None], s.shape[:2])
    row_max = jax.lax.stop_gradient(jnp.maximum(s.max(axis=-1, initial=-jnp.inf), sink))
    row_max = jnp.where(jnp.isneginf(row_max), 0.0, row_max)
    p = jnp.exp(s - row_max[..., None])
    row_sum = p.sum(axis=-1) + jnp.exp(sink - row_max)
    out = jnp.einsum("htk,hkd->htd", p, v, precision="highest")
    is_empty = row_sum == 0
    row_sum = jnp.where(is_empty, 1.0, row_sum)  # before the logarithm, whose gradient at 0 is infinite
    return out / row_sum[..., None], jnp.where(is_empty, -jnp.inf, row_max + jnp.log(row_sum))


def is_visible(
    spec: AttentionSpec,
    mask: Mask | None,
    row: Int[Array, ""],
    q_positions: Int[Array, " tokens"],
    k_positions: Int[Array, " keys"],
    is_prefill: Bool[Array, " tokens"],
) -> Bool[Array, "q_heads tokens keys"]:
    """Return which keys of request `row` are visible to each query."""
    i, j = q_positions[:, None], k_positions[None, :]
    visible = jnp.ones((q_positions.size, k_positions.size), bool)
    if spec.causal:
        visible &= j <= i
    left, right = spec.window or (None, None)
    if left is not None:
        visible &= i - j <= left
    if right is not None:
        visible &= j - i <= right
    if spec.chunk_size is not None:
        visible &= i // spec.chunk_size == j // spec.chunk_size
    visible = jnp.broadcast_to(visible, (spec.num_q_heads, *visible.shape))
    if mask is None:
        return visible
    pairs = Pairs(
        head=jnp.arange(spec.num_q_heads, dtype=jnp.int32)[:, None, None],
        row=row.reshape(1, 1, 1),
        query=i[None],
        key=j[None],
        num_heads=(spec.num_q_heads, spec.num_kv_heads),
    )
    in_decode = mask.visible(pairs._replace(is_prefill=False))
    return visible & jnp.where(is_prefill[None, :, None], mask.visible(pairs), in_decode)


def alibi_bias(
    spec: AttentionSpec,
    slopes: Float[Array, " q_heads"],
    q_positions: Int[Array, " tokens"],
    k_positions: Int[Array, " keys"],
) -> Float[Array, "q_heads tokens keys"]:
    """Return the ALiBi bias `slope * (key - query)`, or `-slope * sqrt(query - key)`, 0 for later keys."""
    distance = (q_positions[:, None] - k_positions[None, :]).astype(slopes.dtype)
    if spec.sqrt_alibi:
        distance = jnp.sqrt(jnp.maximum(distance, 0.0))
    return -slopes[:, None, None] * distance[None]


def keys_and_values(
    kv: PagedCache | PackedKV, metadata: BatchMetadata, row: Array, dtype: jnp.dtype
) -> tuple[Float[Array, "kv_heads keys head_dim"], Float[Array, "kv_heads keys head_dim"]]:
    """Return keys and values of one request from position 0 on; undefined past its end."""
    if isinstance(kv, PackedKV):
        index = kv.kv_start_loc[row] + jnp.arange(kv.k.shape[0], dtype=jnp.int32)
        rows = (jnp.take(x, index, axis=0, mode="clip") for x in (kv.k, kv.v))
        k, v = (jnp.swapaxes(x, 0, 1).astype(dtype) for x in rows)
        return k, v
    blocks = metadata.block_table[row]
    k, v = (jnp.take(x, blocks, axis=0, mode="clip").astype(dtype) for x in (kv.k, kv.v))
    if kv.layout == "NHD":  # -> [blocks, kv_heads, block_size, head_dim]
        k, v = jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)
    if kv.layout == "packed":
        k = jnp.swapaxes(k, 2, 3).reshape(*v.shape[:2], kv.block_size, kv.head_dim)
        v = jnp.swapaxes(v, 2, 3)
    k, v = (
        x if scale is None else x * block_scales(jnp.asarray(scale, dtype), blocks)
        for x, scale in ((k, kv.stored_k_scale), (v, kv.stored_v_scale))
    )
    k, v = (jnp.swapaxes(x, 0, 1).reshape(kv.num_kv_heads, -1, kv.head_dim) for x in (k, v))
    return k, v


def block_scales(scale: Float[Array, "..."], blocks: Int[Array, " blocks"]) -> Float[Array, "..."]:
    """Return a stored scale in a shape that broadcasts against [blocks, kv_heads, block_size, head_dim]."""
    if scale.ndim == 3:
        return jnp.take(scale, blocks, axis=0, mode="clip")[..., None]
    if scale.ndim == 2:
        return scale[None, :, None, :]
    return scale.reshape(1, -1, 1, 1)
