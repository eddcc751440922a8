"""Prefill over the blocks that matter: pooled queries against pooled keys, and how much mass to keep.

Source: MInference's block-sparse pattern and XAttention's threshold, with means as the pool.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jattn.batch.bucket import Bucket
from jattn.batch.metadata import BatchMetadata
from jattn.cache import PackedKV, PagedCache, row_keys
from jattn.masks import BlockMask
from jattn.masks.blocks import max_blocks_per_tile
from jattn.masks.checks import require_ints
from jattn.spec import AttentionSpec
from pallas_kernels import block_scores as kernels
from pallas_kernels import support
from pallas_kernels.checks import require, require_number, require_type


def select_prefill_blocks(
    query: Float[Array, "tokens q_heads head_dim"],
    kv: PagedCache | PackedKV,
    metadata: BatchMetadata,
    spec: AttentionSpec,
    *,
    mass: float,
    block_size: int = 128,
    num_first: int = 1,
    num_recent: int = 1,
    implementation: str | None = None,
    interpret: Any = None,
) -> BlockMask:
    """For each head and block of queries the fewest blocks of keys that seem to hold `mass` of it all.

    A block of queries weighs blocks of keys by softmax(mean query . mean key); the request's most recent and
    first ones are always kept, and what scores NaN. Traced. Context in the cache counts as keys.

    Args:
        query: The step's queries; blocks are of those in the prefill region.
        kv: Where keys are, the step's own among them.
        metadata: The step's metadata.
        spec: The layer: heads, scale.
        mass: Static: share of the estimated attention to keep, in (0, 1].
        block_size: Static: queries and keys of a block.
        num_first: Static: blocks at a request's start that every query sees.
        num_recent: Static: blocks up to and with its own that every query sees.
        implementation: "mosaic_gpu" or "xla"; None = the best that this machine and these sizes allow.
        interpret: Static: plgpu.InterpretGPUParams to run the kernel on a CPU.

    Returns:
        A mask for `attend(mask=)`, its rows those of the metadata.

    Raises:
        ValueError: A number is out of range, or a paged cache has no block table.
        NotImplementedError: The implementation asked for has no kernel for this; the message says why.
    """
    _check_numbers(mass, block_size, num_first=num_first, num_recent=num_recent)
    require_type("metadata", metadata, BatchMetadata, "build_batch_metadata makes it")
    bucket, kv_blocks = metadata.bucket, _num_blocks(kv, metadata, block_size)
    reason = (None if interpret else support.why_not_on(query, kv)) or _why_not_least(kv_blocks)
    use_kernel = support.should_use_kernel("select_prefill_blocks", implementation, reason)
    first = metadata.num_computed_tokens // block_size
    as_mask = functools.partial(BlockMask, first_q_block=first, block_q=block_size, block_kv=block_size)
    if not (bucket.max_reqs and kv_blocks):
        q_blocks = _num_q_blocks(bucket, block_size)
        shape = (bucket.max_reqs, spec.num_q_heads, q_blocks, max(kv_blocks, 1))
        return as_mask(blocks=jnp.zeros(shape, bool))
    how = _How(spec, mass, block_size, num_first, num_recent, use_kernel, interpret)
    return as_mask(blocks=_chosen(query, kv, metadata, first, how=how))


class _How(NamedTuple):
    """What is static of a choice: arguments of select_prefill_blocks, and whether a kernel serves it."""

    spec: AttentionSpec
    mass: float
    block_size: int
    num_first: int
    num_recent: int
    use_kernel: bool
    interpret: Any


@functools.partial(jax.jit, static_argnames="how")
def _chosen(
    query: Float[Array, "tokens q_heads head_dim"],
    kv: PagedCache | PackedKV,
    metadata: BatchMetadata,
    first: Int[Array, " reqs"],
    *,
    how: _How,
) -> Bool[Array, "reqs q_heads q_blocks kv_blocks"]:
    """The blocks of every row, from its `first` block of queries on. Compiled once, called eagerly, too."""
    block_size, q_blocks = how.block_size, _num_q_blocks(metadata.bucket, how.block_size)
    q_means = _query_means(query, metadata, first, q_blocks, block_size)
    own = first[:, None] + jnp.arange(q_blocks, dtype=jnp.int32)[None, :]
    keep = functools.partial(_kept, mass=how.mass, use_kernel=how.use_kernel, interpret=how.interpret)

    def one_request(inputs: tuple[Array, Array, Array]) -> Array:
        row, q, own = inputs
        s, back = _scores(q, _key_means(kv, metadata, block_size, row), own, how.spec)
        kept = keep(s) | (back < how.num_recent) | (back > own[None, :, None] - how.num_first)
        return (back >= 0) & kept

    rows = jnp.arange(metadata.bucket.max_reqs, dtype=jnp.int32)
    blocks: Array = jax.lax.map(one_request, (rows, q_means, own))
    return blocks


def _scores(
    q: Float[Array, "q_blocks q_heads head_dim"],
    k: Float[Array, "kv_heads kv_blocks head_dim"],
    own: Int[Array, " q_blocks"],
    spec: AttentionSpec,
) -> tuple[Float[Array, "q_heads q_blocks kv_blocks"], Int[Array, "1 q_blocks kv_blocks"]]:
    """Scores, -inf of later blocks; and how many blocks back of the queries' own each block of keys is."""
    k = jnp.repeat(k, spec.q_heads_per_kv_head, axis=0)
    s = jnp.einsum("qhd,hkd->hqk", q, k, preferred_element_type=jnp.float32) * spec.softmax_scale
    back = own[None, :, None] - jnp.arange(k.shape[1], dtype=jnp.int32)[None, None, :]
    return jnp.where(back >= 0, s, -jnp.inf), back


def _kept(
    s: Float[Array, "q_heads q_blocks kv_blocks"], *, mass: float, use_kernel: bool, interpret: Any
) -> Bool[Array, "q_heads q_blocks kv_blocks"]:
    """The blocks with the largest scores, of each head and block of queries."""
    if mass == 1:
        return s != -jnp.inf
    s = jax.lax.stop_gradient(s)  # what is chosen has no gradient, and neither has the kernel
    if use_kernel:
        least = kernels.top_p_threshold(s.reshape(-1, s.shape[-1]), mass, interpret=interpret)
        return (s >= least.reshape(*s.shape[:2], 1)) | jnp.isnan(s)
    return top_mass(jax.nn.softmax(s, axis=-1), mass)


def top_mass(weights: Float[Array, "*rows n"], mass: float) -> Bool[Array, "*rows n"]:
    """The fewest entries of each row that together have `mass` of its sum; zeros are never among them.

    NaN always is, so that it comes out of attention, as it does of dense attention.
    """
    ordered = -jnp.sort(-weights, axis=-1)
    before = jnp.cumsum(ordered, axis=-1) - ordered
    is_needed = before < mass * ordered.sum(axis=-1, keepdims=True)
    least = jnp.where(is_needed, ordered, jnp.inf).min(axis=-1, keepdims=True)
    return ((weights >= least) & (weights > 0)) | jnp.isnan(weights)


def _check_numbers(mass: float, block_size: int, **counts: int) -> None:
    require_number(mass=mass)
    require(0 < mass <= 1, "mass", "lie in (0, 1]", mass)
    require_ints(1, block_size=block_size)
    require_ints(0, **counts)


def _num_q_blocks(bucket: Bucket, block_size: int) -> int:
    """Blocks of queries that a request may touch, wherever they begin."""
    of_decodes = bucket.decode_query_len if bucket.max_decodes else 1
    return max_blocks_per_tile(max(bucket.max_prefill_tokens, of_decodes), block_size)


def _num_blocks(kv: PagedCache | PackedKV, metadata: BatchMetadata, block_size: int) -> int:
    """Blocks of keys that a request may have."""
    if isinstance(kv, PackedKV):
        return -(-kv.k.shape[0] // block_size)
    shape = metadata.block_table.shape
    rule = "have columns to choose among a paged cache's blocks"
    require(shape[1] > 0 or shape[0] == 0, "metadata.block_table", rule, shape)
    return -(-shape[1] * metadata.block_size // block_size)


def _why_not_least(blocks: int) -> str | None:
    """Why there is no kernel for a selection on a GPU that has some; None if there is."""
    if blocks > kernels.MAX_TOP_P_LEN:
        return f"there is no kernel to choose among {blocks} blocks (at most {kernels.MAX_TOP_P_LEN})"
    return None


def _query_means(
    query: Array, metadata: BatchMetadata, first_q_block: Array, q_blocks: int, block_size: int
) -> Float[Array, "reqs q_blocks q_heads head_dim"]:
    """Mean query of each row's blocks of the prefill region; 0 where a block has none.

    The region is cut where a block or a row begins, so that neighbours are summed and nothing is scattered.
    """
    bucket = metadata.bucket
    tokens, reqs = bucket.max_prefill_tokens, bucket.max_prefills
    if not tokens:
        return jnp.zeros((bucket.max_reqs, q_blocks, *query.shape[1:]), jnp.float32)
    context, lens = metadata.num_computed_tokens, metadata.query_lens
    is_prefill = jnp.arange(bucket.max_reqs, dtype=jnp.int32) >= bucket.max_decodes
    pieces = (context + lens - 1) // block_size - first_q_block + 1
    pieces = jnp.where(is_prefill & (lens > 0), pieces, 0)
    ends = jnp.cumsum(pieces, dtype=jnp.int32)
    starts = ends - pieces
    number = jnp.arange(min(tokens // block_size + 2 * reqs, tokens), dtype=jnp.int32)
    row = jnp.searchsorted(ends, number, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, bucket.max_reqs - 1)
    begin = (first_q_block[row] + number - starts[row]) * block_size  # positions
    first = jnp.maximum(begin, context[row])
    count = jnp.maximum(jnp.minimum(begin + block_size, (context + lens)[row]) - first, 0)
    token = metadata.row_starts[row] + first - context[row]
    ahead = jnp.arange(block_size, dtype=jnp.int32)[None, :]
    queries = jnp.take(query, token[:, None] + ahead, axis=0, mode="clip").astype(jnp.float32)
    sums = jnp.where((ahead < count[:, None])[..., None, None], queries, 0.0).sum(axis=1)
    # XLA (jax 0.11.2) would sum each element by itself where its mean is used, at a fifth of the speed.
    means = jax.lax.optimization_barrier(sums / jnp.maximum(count, 1).astype(jnp.float32)[:, None, None])
    block = jnp.arange(q_blocks, dtype=jnp.int32)[None, :]
    of_block = jnp.take(means, starts[:, None] + block, axis=0, mode="clip")
    return jnp.where((block < pieces[:, None])[..., None, None], of_block, 0.0)


def _key_means(
    kv: PagedCache | PackedKV, metadata: BatchMetadata, block_size: int, row: Array
) -> Float[Array, "kv_heads kv_blocks head_dim"]:
    """Mean key of each block of one request; 0 past its end."""
    keys = row_keys(kv, metadata.block_table, row)
    is_live = jnp.arange(keys.shape[1], dtype=jnp.int32) < metadata.seq_lens[row]
    keys = jnp.where(is_live[None, :, None], keys, 0.0)
    missing = -keys.shape[1] % block_size
    blocks = lambda x: jnp.pad(x, ((0, 0), (0, missing), (0, 0))).reshape(
        x.shape[0], -1, block_size, x.shape[2]
    )
    counts = blocks(is_live.astype(jnp.float32)[None, :, None]).sum(axis=2)
    return blocks(keys).sum(axis=2) / jnp.maximum(counts, 1.0)
