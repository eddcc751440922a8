"""Cascade attention: a prefix that all requests share is attended to once."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jattn.bucket import Bucket
from jattn.metadata.batch import BatchMetadata
from jattn.metadata.check import query_lens_on_host, row_lens_on_host
from jattn.metadata.slots import PAD_SLOT_ID
from jattn.pytree import pytree, replace
from pallas_kernels import support
from pallas_kernels.checks import require, require_int, require_type


@pytree
class CascadeMetadata:
    """A step in two parts whose attentions merge into the whole.

    Attributes:
        prefix: All tokens of the step as one request over the shared blocks; attend without causality.
        suffix: The step's requests over the rest of their keys, of which one may have none.
        is_live_token: Of the step's tokens; False for padding.
    """

    prefix: BatchMetadata
    suffix: BatchMetadata
    is_live_token: Bool[Array, " tokens"]


def build_cascade_metadata(
    metadata: BatchMetadata, common_prefix_len: int | Int[Array, ""]
) -> CascadeMetadata:
    """Splits a step at a prefix whose blocks all its requests share. Traced; jit for one executable a bucket.

    Args:
        metadata: The step. Every live row's block table begins with the same `common_prefix_len / block_size`
            blocks, and no query of it stands before the last token of these.
        common_prefix_len: Tokens of the prefix, a multiple of block_size; one on the device is not checked,
            and may be 0.

    Raises:
        ValueError: It is no step's metadata, or the prefix is empty, does not end with a block, or a query is
            seen to have fewer keys.

    Source: vLLM V1 FlashAttention's cascade fields; the prefix's blocks are the first live row's.
    """
    require_type("metadata", metadata, BatchMetadata, "build_batch_metadata makes it")
    check_prefix(metadata, common_prefix_len)
    prefix_len = jnp.asarray(common_prefix_len, jnp.int32)
    tokens, max_blocks = metadata.bucket.max_tokens, metadata.block_table.shape[1]
    is_live = metadata.seq_lens > 0
    has_rows = metadata.bucket.max_reqs > 0
    shared = metadata.block_table[jnp.argmax(is_live)] if has_rows else jnp.zeros(max_blocks, jnp.int32)
    prefix = replace(
        metadata,
        seq_lens=jnp.where(is_live.any(), prefix_len, 0)[None],
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
        seq_lens=jnp.where(is_live, metadata.seq_lens - prefix_len, 0),
        block_table=metadata.block_table[:, columns],
    )
    return CascadeMetadata(prefix=prefix, suffix=suffix, is_live_token=metadata.is_live_token)


def check_prefix(metadata: BatchMetadata, common_prefix_len: int | Int[Array, ""]) -> None:
    """Checks a prefix that is an int; one on the device is not read.

    Raises:
        ValueError: It is empty, does not end with a block, or a query is seen to have fewer keys.
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
    if not support.is_concrete(metadata):
        return
    seq_lens, has_queries = np.asarray(metadata.seq_lens), query_lens_on_host(metadata) > 0
    for r in np.flatnonzero(has_queries & (seq_lens < common_prefix_len))[:1]:
        require(False, "common_prefix_len", f"be at most row {r}'s {seq_lens[r]} keys", common_prefix_len)


def check_causal_rows(metadata: CascadeMetadata) -> None:
    """Checks that no query stands before the prefix's last token, all of which it would see; not if traced.

    Raises:
        ValueError: One is seen to: causal attention would see what comes behind it.
    """
    if not support.is_concrete(metadata):
        return
    step, prefix_len = metadata.suffix, int(np.asarray(metadata.prefix.seq_lens)[0])
    rows = np.asarray(step.token_rows)[np.asarray(metadata.is_live_token)]
    context = np.asarray(step.seq_lens) + prefix_len - row_lens_on_host(step)
    for r in rows[context[rows] < prefix_len - 1][:1]:
        rule = f"be at most row {r}'s context and one more ({context[r] + 1}) where attention is causal"
        require(False, "common_prefix_len", rule, prefix_len)
