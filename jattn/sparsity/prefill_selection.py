"""Block selection for prefill: scores of mean queries and mean keys, and a threshold on their softmax mass.

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
    """Select the fewest key blocks that hold `mass` of the estimated attention, per head and query block.

    The attention of a query block to the key blocks is estimated as softmax(mean query . mean key). The first
    and the most recent blocks of a request, and blocks that score NaN, are always selected. Cached context
    counts as keys. Works inside jit.

    Args:
        query: Queries of the step; those in the prefill region are divided into blocks.
        kv: Keys and values, including the current step's.
        metadata: Metadata of the step.
        spec: Attention of the layer; provides the heads and the scale.
        mass: Static: fraction of the estimated attention to keep, in (0, 1].
        block_size: Static: number of queries and keys per block.
        num_first: Static: number of blocks at the start of a request that every query attends to.
        num_recent: Static: number of blocks up to and including its own that every query attends to.
        implementation: "mosaic_gpu" or "xla"; None = the best one that supports these sizes on this machine.
        interpret: Static: plgpu.InterpretGPUParams to run the kernel on a CPU.

    Returns:
        A mask for `attend(mask=)` with the rows of the metadata.

    Raises:
        ValueError: If a number is out of range, or a paged cache has no block table.
        NotImplementedError: If the requested implementation does not support these arguments.
    """
    _check_numbers(mass, block_size, num_first=num_first, num_recent=num_recent)
    require_type("metadata", metadata, BatchMetadata, "see jattn.build_batch_metadata")
    bucket, kv_blocks = metadata.bucket, _num_blocks(kv, metadata, block_size)
    reason = (None if interpret else support.why_not_on(query, kv)) or _why_not_least(kv_blocks)
    use_kernel = support.should_use_kernel("select_prefill_blocks", implementation, reason)
    first = metadata.num_computed_tokens // block_size
    if bucket.max_reqs and kv_blocks:
        args = _StaticArgs(spec, mass, block_size, num_first, num_recent, use_kernel, interpret)
        blocks = _select(query, kv, metadata, first, args=args)
    else:
        q_blocks = _num_q_blocks(bucket, block_size)
        blocks = jnp.zeros((bucket.max_reqs, spec.num_q_heads, q_blocks, max(kv_blocks, 1)), bool)
    return BlockMask(blocks=blocks, first_q_block=first, block_q=block_size, block_kv=block_size)


class _StaticArgs(NamedTuple):
    """The static arguments of `select_prefill_blocks`, and whether the kernel is used."""

    spec: AttentionSpec
    mass: float
    block_size: int
    num_first: int
    num_recent: int
    use_kernel: bool
    interpret: Any


@functools.partial(jax.jit, static_argnames="args")
def _select(
    query: Float[Array, "tokens q_heads head_dim"],
    kv: PagedCache | PackedKV,
    metadata: BatchMetadata,
    first: Int[Array, " reqs"],
    *,
    args: _StaticArgs,
) -> Bool[Array, "reqs q_heads q_blocks kv_blocks"]:
    """Return the selected blocks of every row, from its query block `first` on."""
    block_size, q_blocks = args.block_size, _num_q_blocks(metadata.bucket, args.block_size)
    q_means = _query_means(query, metadata, first, q_blocks, block_size)
    query_blocks = first[:, None] + jnp.arange(q_blocks, dtype=jnp.int32)[None, :]

    def select_for_request(inputs: tuple[Array, Array, Array]) -> Array:
        row, q, query_block = inputs
        s, distance = _scores(q, _key_means(kv, metadata, block_size, row), query_block, args.spec)
        selected = _select_by_mass(s, args)
        selected |= (distance < args.num_recent) | (distance > query_block[None, :, None] - args.num_first)
        return (distance >= 0) & selected

    rows = jnp.arange(metadata.bucket.max_reqs, dtype=jnp.int32)
    blocks: Array = jax.lax.map(select_for_request, (rows, q_means, query_blocks))
    return blocks


def _scores(
    q: Float[Array, "q_blocks q_heads head_dim"],
    k: Float[Array, "kv_heads kv_blocks head_dim"],
    query_block: Int[Array, " q_blocks"],
    spec: AttentionSpec,
) -> tuple[Float[Array, "q_heads q_blocks kv_blocks"], Int[Array, "1 q_blocks kv_blocks"]]:
    """Return the scores (-inf for later blocks) and the distances in blocks from query to key blocks."""
    k = jnp.repeat(k, spec.q_heads_per_kv_head, axis=0)
    s = jnp.einsum("qhd,hkd->hqk", q, k, preferred_element_type=jnp.float32) * spec.softmax_scale
    distance = query_block[None, :, None] - jnp.arange(k.shape[1], dtype=jnp.int32)[None, None, :]
    return jnp.where(distance >= 0, s, -jnp.inf), distance


def _select_by_mass(
    s: Float[Array, "q_heads q_blocks kv_blocks"], args: _StaticArgs
) -> Bool[Array, "q_heads q_blocks kv_blocks"]:
    """Return the blocks with the largest scores for each head and query block."""
    mass = args.mass
    if mass == 1:
        return s != -jnp.inf
    s = jax.lax.stop_gradient(s)  # A selection has no gradient, and neither has the kernel.
    if args.use_kernel:
        least = kernels.top_p_threshold(s.reshape(-1, s.shape[-1]), mass, interpret=args.interpret)
        return (s >= least.reshape(*s.shape[:2], 1)) | jnp.isnan(s)
    return top_mass(jax.nn.softmax(s, axis=-1), mass)


def top_mass(weights: Float[Array, "*rows n"], mass: float) -> Bool[Array, "*rows n"]:
    """Select the fewest entries of each row whose sum is at least `mass` times the row's sum.

    Zeros are never selected. NaN always is, so that it propagates to the output as in dense attention.
    """
    ordered = -jnp.sort(-weights, axis=-1)
    sum_before = jnp.cumsum(ordered, axis=-1) - ordered
    is_needed = sum_before < mass * ordered.sum(axis=-1, keepdims=True)
    threshold = jnp.where(is_needed, ordered, jnp.inf).min(axis=-1, keepdims=True)
    return ((weights >= threshold) & (weights > 0)) | jnp.isnan(weights)


def _check_numbers(mass: float, block_size: int, **counts: int) -> None:
    require_number(mass=mass)
    require(0 < mass <= 1, "mass", "lie in (0, 1]", mass)
    require_ints(1, block_size=block_size)
    require_ints(0, **counts)


def _num_q_blocks(bucket: Bucket, block_size: int) -> int:
    """Return the maximum number of query blocks of a request, wherever in a block its queries start."""
    decode_query_len = bucket.decode_query_len if bucket.max_decodes else 1
    return max_blocks_per_tile(max(bucket.max_prefill_tokens, decode_query_len), block_size)


def _num_blocks(kv: PagedCache | PackedKV, metadata: BatchMetadata, block_size: int) -> int:
    """Return the maximum number of key blocks of a request."""
    if isinstance(kv, PackedKV):
        return -(-kv.k.shape[0] // block_size)
    shape = metadata.block_table.shape
    if shape[1] == 0 and shape[0] > 0:
        raise ValueError(
            "metadata.block_table has no columns, but selecting blocks of a paged cache needs the block "
            "table. Pass it to build_batch_metadata."
        )
    return -(-shape[1] * metadata.block_size // block_size)


def _why_not_least(blocks: int) -> str | None:
    """Return why the kernel does not support a selection; None if it does."""
    if blocks > kernels.MAX_TOP_P_LEN:
        return f"there is no kernel to choose among {blocks} blocks (at most {kernels.MAX_TOP_P_LEN})"
    return None


def _query_means(
    query: Array, metadata: BatchMetadata, first_q_block: Array, q_blocks: int, block_size: int
) -> Float[Array, "reqs q_blocks q_heads head_dim"]:
    """Return the mean query of each block of the prefill rows; 0 for blocks without queries.

    The region is cut at block and row boundaries into contiguous pieces, so that no scatter is needed.
    """
    bucket = metadata.bucket
    tokens, reqs = bucket.max_prefill_tokens, bucket.max_prefills
    if not tokens:
        return jnp.zeros((bucket.max_reqs, q_blocks, *query.shape[1:]), jnp.float32)
    context, lens = metadata.num_computed_tokens, metadata.query_lens
    is_prefill = jnp.arange(bucket.max_reqs, dtype=jnp.int32) >= bucket.max_decodes
    num_pieces = (context + lens - 1) // block_size - first_q_block + 1
    num_pieces = jnp.where(is_prefill & (lens > 0), num_pieces, 0)
    ends = jnp.cumsum(num_pieces, dtype=jnp.int32)
    starts = ends - num_pieces
    piece = jnp.arange(min(tokens // block_size + 2 * reqs, tokens), dtype=jnp.int32)
    row = jnp.searchsorted(ends, piece, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, bucket.max_reqs - 1)
    block_start = (first_q_block[row] + piece - starts[row]) * block_size  # Positions in the request.
    first = jnp.maximum(block_start, context[row])
    count = jnp.maximum(jnp.minimum(block_start + block_size, (context + lens)[row]) - first, 0)
    token = metadata.row_starts[row] + first - context[row]
    offset = jnp.arange(block_size, dtype=jnp.int32)[None, :]
    queries = jnp.take(query, token[:, None] + offset, axis=0, mode="clip").astype(jnp.float32)
    sums = jnp.where((offset < count[:, None])[..., None, None], queries, 0.0).sum(axis=1)
    # Without the barrier XLA (jax 0.11.2) recomputes the sums at each use, which is five times slower.
    means = jax.lax.optimization_barrier(sums / jnp.maximum(count, 1).astype(jnp.float32)[:, None, None])
    block = jnp.arange(q_blocks, dtype=jnp.int32)[None, :]
    block_means = jnp.take(means, starts[:, None] + block, axis=0, mode="clip")
    return jnp.where((block < num_pieces[:, None])[..., None, None], block_means, 0.0)


def _key_means(
    kv: PagedCache | PackedKV, metadata: BatchMetadata, block_size: int, row: Array
) -> Float[Array, "kv_heads kv_blocks head_dim"]:
    """Return the mean key of each block of one request; 0 beyond its end."""
    keys = row_keys(kv, metadata.block_table, row)
    is_valid = jnp.arange(keys.shape[1], dtype=jnp.int32) < metadata.seq_lens[row]
    keys = jnp.where(is_valid[None, :, None], keys, 0.0)
    padding = -keys.shape[1] % block_size

    def sum_blocks(x: Array) -> Array:
        padded = jnp.pad(x, ((0, 0), (0, padding), (0, 0)))
        return padded.reshape(x.shape[0], -1, block_size, x.shape[2]).sum(axis=2)

    counts = sum_blocks(is_valid.astype(jnp.float32)[None, :, None])
    return sum_blocks(keys) / jnp.maximum(counts, 1.0)
