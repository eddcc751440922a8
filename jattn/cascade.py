"""Cascade attention: its metadata, which layers support it, and vLLM's heuristic for when it pays."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jattn.batch.bucket import Bucket
from jattn.batch.check import query_lens_on_host, row_lens_on_host
from jattn.batch.int_arrays import IntVector, python_ints, with_namespace
from jattn.batch.metadata import BatchMetadata
from jattn.batch.slots import PAD_SLOT_ID
from jattn.pytree import pytree, replace
from jattn.spec import AttentionSpec
from pallas_kernels import architectures
from pallas_kernels.checks import require, require_int, require_positive, require_type


@pytree
class CascadeMetadata:
    """A step split at a prefix that all its requests share.

    Attributes:
        prefix: All tokens of the step as one request over the shared blocks; attended without causality.
        suffix: The requests of the step over their remaining keys; a request may have none.
        is_valid_token: Mask of the step's tokens, bool [tokens]; False for padding.
    """

    prefix: BatchMetadata
    suffix: BatchMetadata
    is_valid_token: Bool[Array, " tokens"]


def build_cascade_metadata(
    metadata: BatchMetadata, common_prefix_len: int | Int[Array, ""]
) -> CascadeMetadata:
    """Split a step at a prefix whose blocks all its requests share.

    Works inside jit; jit it to compile once per bucket.

    Args:
        metadata: Metadata of the step. The block table of every valid row begins with the same
            `common_prefix_len / block_size` blocks, and no query stands before the prefix's last token.
        common_prefix_len: Number of tokens in the prefix, a positive multiple of block_size. A value on the
            device is not checked and may be 0.

    Raises:
        ValueError: If the prefix is empty, is not a multiple of block_size, or is longer than a request.

    Source: vLLM V1 FlashAttention's cascade fields; the prefix's blocks are the first valid row's.
    """
    require_type("metadata", metadata, BatchMetadata, "build_batch_metadata makes it")
    check_prefix(metadata, common_prefix_len)
    prefix_len = jnp.asarray(common_prefix_len, jnp.int32)
    tokens, max_blocks = metadata.bucket.max_tokens, metadata.block_table.shape[1]
    is_valid = metadata.seq_lens > 0
    has_rows = metadata.bucket.max_reqs > 0
    shared = metadata.block_table[jnp.argmax(is_valid)] if has_rows else jnp.zeros(max_blocks, jnp.int32)
    prefix = replace(
        metadata,
        seq_lens=jnp.where(is_valid.any(), prefix_len, 0)[None],
        query_start_loc=jnp.asarray([0, tokens], jnp.int32),
        block_table=shared[None],
        slot_mapping=jnp.full_like(metadata.slot_mapping, PAD_SLOT_ID),
        num_decodes=jnp.zeros_like(metadata.num_decodes),
        num_prefills=jnp.ones_like(metadata.num_prefills),
        bucket=Bucket(max_prefills=1, max_prefill_tokens=tokens, max_blocks=max_blocks),
    )
    columns = jnp.minimum(
        jnp.arange(max_blocks, dtype=jnp.int32) + prefix_len // metadata.block_size, max_blocks - 1
    )
    suffix = replace(
        metadata,
        seq_lens=jnp.where(is_valid, metadata.seq_lens - prefix_len, 0),
        block_table=metadata.block_table[:, columns],
    )
    return CascadeMetadata(prefix=prefix, suffix=suffix, is_valid_token=metadata.is_valid_token)


def check_prefix(metadata: BatchMetadata, common_prefix_len: int | Int[Array, ""]) -> None:
    """Check the length of a common prefix; a value on the device is not read.

    Raises:
        ValueError: If the prefix is empty, is not a multiple of block_size, or is longer than a request.
    """
    if isinstance(common_prefix_len, jax.Array):
        is_int = common_prefix_len.ndim == 0 and jnp.issubdtype(common_prefix_len.dtype, jnp.integer)
        got = f"{common_prefix_len.dtype} of shape {common_prefix_len.shape}"
        require(is_int, "common_prefix_len", "be an int", got)
        return
    require_int(common_prefix_len=common_prefix_len)
    rule = f"be a positive multiple of block_size ({metadata.block_size})"
    is_whole = common_prefix_len > 0 and common_prefix_len % metadata.block_size == 0
    require(is_whole, "common_prefix_len", rule, common_prefix_len)
    if not architectures.is_concrete(metadata):
        return
    seq_lens, has_queries = np.asarray(metadata.seq_lens), query_lens_on_host(metadata) > 0
    for r in np.flatnonzero(has_queries & (seq_lens < common_prefix_len))[:1]:
        require(False, "common_prefix_len", f"be at most row {r}'s {seq_lens[r]} keys", common_prefix_len)


def check_causal_rows(metadata: CascadeMetadata) -> None:
    """Check that every query stands at or after the prefix's last token; not if traced.

    Raises:
        ValueError: If one stands before it: causal attention would attend to later keys.
    """
    if not architectures.is_concrete(metadata):
        return
    step, prefix_len = metadata.suffix, int(np.asarray(metadata.prefix.seq_lens)[0])
    rows = np.asarray(step.token_rows)[np.asarray(metadata.is_valid_token)]
    context = np.asarray(step.seq_lens) + prefix_len - row_lens_on_host(step)
    for r in rows[context[rows] < prefix_len - 1][:1]:
        rule = f"be at most {context[r] + 1} (the context length of row {r} plus 1) for causal attention"
        require(False, "common_prefix_len", rule, prefix_len)


def why_not_cascade(spec: AttentionSpec) -> tuple[str, str] | None:
    """Return the spec's field that rules out cascade attention, and the reason; None if supported."""
    if spec.batch_invariant:
        reason = "the order of summation would depend on the other requests of the batch"
        return "spec.batch_invariant=True", reason
    for name in ("window", "chunk_size", "sparsity"):
        if getattr(spec, name) is not None:
            return f"spec.{name}={getattr(spec, name)}", "cascade attention needs masks that ignore distance"
    return None


def can_cascade(spec: AttentionSpec, alibi_slopes: Array | None = None) -> bool:
    """Return whether a layer supports cascade attention."""
    return why_not_cascade(spec) is None and alibi_slopes is None


# vLLM's thresholds below which cascade attention never pays, and the tiles of FlashAttention's kernels.
MIN_PREFIX_LEN = 256
MIN_REQS = 8
TILE_Q = 128
TILE_KV = 128


def use_cascade_attention(
    common_prefix_len: int,
    query_lens: IntVector,
    num_query_heads: int,
    num_kv_heads: int,
    use_alibi: bool,
    use_sliding_window: bool,
    use_local_attention: bool,
    num_sms: int,
    dcp_world_size: int = 1,
) -> bool:
    """Return whether cascade attention should be faster than attending to the prefix per request.

    Host only. If grouped decode could run as FlashDecoding, the waves of thread blocks are compared.

    Args:
        common_prefix_len: Number of tokens that all requests share.
        query_lens: Number of new tokens per request.
        num_query_heads: Number of query heads on this device.
        num_kv_heads: Number of KV heads on this device.
        use_alibi: Whether the layer uses ALiBi, which cascade attention does not support.
        use_sliding_window: Whether the layer has a sliding window, which it does not support.
        use_local_attention: Whether the layer uses chunked local attention, which it does not support.
        num_sms: Number of multiprocessors of the GPU.
        dcp_world_size: Number of decode context parallel ranks; cascade attention needs 1.

    Raises:
        ValueError: If a number is not positive, or num_query_heads is not a multiple of num_kv_heads.

    Source: vLLM V1 FlashAttention `use_cascade_attention`.
    """
    common_prefix_len, num_query_heads, num_kv_heads, num_sms = python_ints(
        common_prefix_len=common_prefix_len,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        num_sms=num_sms,
    )
    require_positive(num_query_heads=num_query_heads, num_kv_heads=num_kv_heads, num_sms=num_sms)
    rule = f"be a multiple of num_kv_heads ({num_kv_heads})"
    require(num_query_heads % num_kv_heads == 0, "num_query_heads", rule, num_query_heads)
    lens = np.asarray(with_namespace(query_lens=query_lens)[1])
    if common_prefix_len < MIN_PREFIX_LEN or len(lens) < MIN_REQS or dcp_world_size > 1:
        return False
    if use_alibi or use_sliding_window or use_local_attention:
        return False
    q_heads_per_kv_head = num_query_heads // num_kv_heads
    if q_heads_per_kv_head == 1 or not (lens == 1).all():
        return True
    kv_tiles = _cdiv(common_prefix_len, TILE_KV)
    cascade_waves = _cdiv(num_query_heads * _cdiv(len(lens), TILE_Q), num_sms) * kv_tiles
    decode_waves = _cdiv(len(lens) * num_kv_heads * _cdiv(q_heads_per_kv_head, TILE_Q) * kv_tiles, num_sms)
    return cascade_waves < decode_waves


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
