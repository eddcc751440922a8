"""Batch metadata of a step: built on the host, then passed through jit as a pytree."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32

from jattn.batch.bucket import Bucket, exact_bucket, place_requests
from jattn.batch.int_arrays import (
    pad_columns,
    parse_block_table,
    parse_int_vector,
    python_ints,
    require_blocks,
)
from jattn.batch.slots import PAD_SLOT_ID
from jattn.pytree import construct_unchecked, pytree, replace, static
from pallas_kernels.checks import require, require_positive
from pallas_kernels.shared import ALIGNED_BYTES

type HostInts = Sequence[int] | np.ndarray | Array
type HostTable = Sequence[HostInts] | np.ndarray | Array


@pytree
class BatchMetadata:
    """Metadata of a step: which tokens belong to which request, and where its keys and values are stored.

    Rows are `[decode rows | prefill rows]`, tokens `[decode tokens | prefill tokens]`. Both regions are
    padded to `bucket`. A padding row has seq_len 0, slots -1 and block table 0; it writes nothing and its
    output is zero.

    Attributes:
        seq_lens: Number of keys per row, this step's tokens included.
        query_start_loc: Index of each row's first token, and one past the last token. Padding rows of a
            region repeat its last value. Decode row r always has the tokens from `r * decode_query_len`.
        block_table: Block ids; `block_table[r, i]` holds positions `i * block_size` onward of row r. Entries
            past `ceil(seq_lens[r] / block_size)` are never used.
        slot_mapping: Slot `block * block_size + offset` of each token's key and value; negative: not written.
        num_decodes: Number of decode rows up to the last valid one.
        num_prefills: Number of valid prefill rows.
        bucket: Static sizes of the regions.
        block_size: Number of tokens per block.

    Source: vLLM V1 `CommonAttentionMetadata`.
    """

    seq_lens: Int32[Array, " reqs"]
    query_start_loc: Int32[Array, " reqs+1"]
    block_table: Int32[Array, "reqs max_blocks"]
    slot_mapping: Int32[Array, " tokens"]
    num_decodes: Int32[Array, ""]
    num_prefills: Int32[Array, ""]
    bucket: Bucket = static()
    block_size: int = static()

    @property
    def query_lens(self) -> Int32[Array, " reqs"]:
        """Number of new tokens per row; 0 for padding rows."""
        lens = self.query_start_loc[1:] - self.query_start_loc[:-1]
        decode = jnp.arange(self.bucket.max_reqs, dtype=jnp.int32) < self.bucket.max_decodes
        return jnp.where(self.seq_lens > 0, jnp.where(decode, self.bucket.decode_query_len, lens), 0)

    @property
    def num_computed_tokens(self) -> Int32[Array, " reqs"]:
        """Context length: number of keys per row that were in the cache before this step."""
        return self.seq_lens - self.query_lens

    @property
    def token_rows(self) -> Int32[Array, " tokens"]:
        """Row of each token; padding tokens get an arbitrary row of their region."""
        bucket = self.bucket
        decode = jnp.arange(bucket.max_decode_tokens, dtype=jnp.int32) // bucket.decode_query_len
        tokens = jnp.arange(bucket.max_decode_tokens, bucket.max_tokens, dtype=jnp.int32)
        ends = self.query_start_loc[bucket.max_decodes + 1 :]
        prefill = bucket.max_decodes + jnp.searchsorted(ends, tokens, side="right").astype(jnp.int32)
        return jnp.concatenate([decode, jnp.minimum(prefill, max(bucket.max_reqs - 1, 0))])

    @property
    def is_valid_token(self) -> Bool[Array, " tokens"]:
        """Mask of the tokens that belong to a request; False for padding tokens."""
        tokens = jnp.arange(self.bucket.max_tokens, dtype=jnp.int32)
        in_prefill = tokens >= self.bucket.max_decode_tokens
        return (self.seq_lens[self.token_rows] > 0) & (~in_prefill | (tokens < self.query_start_loc[-1]))

    @property
    def positions(self) -> Int32[Array, " tokens"]:
        """Position of each token in its request; 0 for padding tokens."""
        rows = self.token_rows
        tokens = jnp.arange(self.bucket.max_tokens, dtype=jnp.int32)
        starts = self.row_starts
        return jnp.where(self.is_valid_token, self.num_computed_tokens[rows] + tokens - starts[rows], 0)

    @property
    def row_starts(self) -> Int32[Array, " reqs"]:
        """Index of each row's first token, including padding rows of the decode region."""
        rows = jnp.arange(self.bucket.max_reqs, dtype=jnp.int32)
        decode = rows * self.bucket.decode_query_len
        return jnp.where(rows < self.bucket.max_decodes, decode, self.query_start_loc[:-1])

    @property
    def last_token_indices(self) -> Int32[Array, " reqs"]:
        """Index of each row's last token, whose logits predict the next token; 0 for padding rows."""
        last = self.row_starts + self.query_lens - 1
        return jnp.where(self.query_lens > 0, last, 0)

    @property
    def decode_region(self) -> "BatchMetadata":
        """Metadata of the decode region as a separate step."""
        bucket, rows = self.bucket, self.bucket.max_decodes
        return replace(
            self,
            seq_lens=self.seq_lens[:rows],
            query_start_loc=jnp.arange(rows + 1, dtype=jnp.int32) * bucket.decode_query_len,
            block_table=self.block_table[:rows],
            slot_mapping=self.slot_mapping[: bucket.max_decode_tokens],
            num_prefills=jnp.zeros_like(self.num_prefills),
            bucket=replace(bucket, max_prefills=0, max_prefill_tokens=0),
        )

    @property
    def prefill_region(self) -> "BatchMetadata":
        """Metadata of the prefill region as a separate step."""
        bucket, first = self.bucket, self.bucket.max_decodes
        return replace(
            self,
            seq_lens=rows_from(self.seq_lens, first),
            query_start_loc=self.query_start_loc[first:] - bucket.max_decode_tokens,
            block_table=rows_from(self.block_table, first),
            slot_mapping=rows_from(self.slot_mapping, bucket.max_decode_tokens),
            num_decodes=jnp.zeros_like(self.num_decodes),
            bucket=replace(bucket, max_decodes=0),
        )


def build_batch_metadata(
    query_lens: HostInts,
    seq_lens: HostInts,
    block_table: HostTable | None,
    *,
    block_size: int = 16,
    bucket: Bucket | None = None,
    decode_query_len: int = 1,
    to_device: bool = True,
) -> BatchMetadata:
    """Build the metadata of a step from host integers.

    Leading requests with exactly `decode_query_len` new tokens form the decode region. All requests from the
    first other one on are prefill rows, even shorter ones, as in newer vLLM.

    Args:
        query_lens: Number of new tokens per request.
        seq_lens: Total number of tokens per request, the new ones included.
        block_table: Block ids per request, in order: lists, each at least as long as its request needs, or a
            2-D array. Pad the rows of an array with a negative id, which raises ValueError where a block is
            needed; other padding cannot be told from a block. None means no cache (encoder-only attention):
            every slot is -1, and the PackedKV passed to `attend` must hold all `seq_lens[r]` keys of a
            request, including a decode's context.
        block_size: Number of tokens per block.
        bucket: Static sizes to pad to; None uses exactly these requests. Overrides decode_query_len.
        decode_query_len: Number of tokens per decode row if `bucket` is None.
        to_device: False keeps numpy arrays, as arguments of a compiled function, which transfers them faster
            than device_put does. A traced function must not capture them.

    Raises:
        ValueError: If lengths do not match, a request has more tokens than its blocks hold, a needed block id
            is negative, an id is not an int or its slots exceed int32, or the requests do not fit `bucket`.
    """
    query_lens, seq_lens, block_size = _parse_ints(query_lens, "seq_lens", seq_lens, block_size)
    for r in np.flatnonzero(seq_lens < query_lens)[:1]:
        raise ValueError(
            f"seq_lens[{r}] is {seq_lens[r]}, but request {r} has {query_lens[r]} query tokens, which "
            "seq_lens includes."
        )
    table = _host_table(block_table, seq_lens, block_size, bucket)
    if bucket is None:
        bucket = exact_bucket(query_lens, decode_query_len=decode_query_len, max_blocks=table.shape[1])
    has_cache = block_table is not None
    metadata = arrange_batch(query_lens, seq_lens, table, bucket, block_size, has_cache=has_cache)
    return jax.device_put(metadata) if to_device else metadata


def build_cross_attention_metadata(
    query_lens: HostInts,
    kv_lens: HostInts,
    block_table: HostTable | None,
    *,
    block_size: int = 16,
    bucket: Bucket | None = None,
    decode_query_len: int = 1,
) -> BatchMetadata:
    """Build the metadata of a cross-attention step, whose keys belong to another sequence.

    The queries have no slots (all -1). Write the encoder's keys and values with the metadata of the encoder's
    step.

    Args:
        query_lens: Number of new tokens per request.
        kv_lens: Number of keys per request: the length of the other sequence, all of which is visible.
        block_table: Block ids of these keys; see build_batch_metadata. None if they are in a PackedKV.
        block_size: Number of tokens per block.
        bucket: Static sizes to pad to; None uses exactly these requests.
        decode_query_len: Number of tokens per decode row if `bucket` is None.

    Raises:
        ValueError: If arguments do not match; see build_batch_metadata.
    """
    query_lens, kv_lens, block_size = _parse_ints(query_lens, "kv_lens", kv_lens, block_size)
    table = _host_table(block_table, kv_lens, block_size, bucket)
    if bucket is None:
        bucket = exact_bucket(query_lens, decode_query_len=decode_query_len, max_blocks=table.shape[1])
    return jax.device_put(arrange_batch(query_lens, kv_lens, table, bucket, block_size, has_cache=False))


def _parse_ints(
    query_lens: HostInts, name: str, seq_lens: HostInts, block_size: int
) -> tuple[np.ndarray, np.ndarray, int]:
    """Return query_lens, the lengths that the caller knows as `name`, and block_size, after checking them."""
    query_lens, seq_lens = parse_int_vector("query_lens", query_lens), parse_int_vector(name, seq_lens)
    (block_size,) = python_ints(block_size=block_size)
    require_positive(block_size=block_size)
    num_reqs = len(query_lens)
    require(len(seq_lens) == num_reqs, name, f"have one entry per request ({num_reqs})", len(seq_lens))
    return query_lens, seq_lens, block_size


def _host_table(
    block_table: HostTable | None, seq_lens: np.ndarray, block_size: int, bucket: Bucket | None
) -> np.ndarray:
    """Return the block table as numpy with the bucket's number of columns, after checking its ids."""
    is_bucket = bucket is None or isinstance(bucket, Bucket)
    require(is_bucket, "bucket", "be a Bucket or None", repr(bucket))
    max_blocks = None if bucket is None else bucket.max_blocks
    if block_table is None:
        return np.zeros((len(seq_lens), max_blocks or 0), np.int64)
    table = parse_block_table(block_table, len(seq_lens), block_size=block_size)
    require_blocks(table, seq_lens, block_size)
    return pad_columns(table, max_blocks, seq_lens, block_size)


def arrange_batch(
    query_lens: np.ndarray,
    seq_lens: np.ndarray,
    table: np.ndarray,
    bucket: Bucket,
    block_size: int,
    *,
    has_cache: bool = True,
) -> BatchMetadata:
    """Place each request in its row and tokens, in numpy arrays that are not validated.

    Args:
        query_lens: Number of new tokens per request.
        seq_lens: Total number of tokens per request.
        table: Block ids [reqs, columns], with at most the bucket's number of columns.
        bucket: Static sizes to pad to.
        block_size: Number of tokens per block.
        has_cache: Whether tokens have slots; see `build_batch_metadata`.
    """
    num_decodes, rows, first_tokens = place_requests(query_lens, bucket)
    starts = np.full(bucket.max_reqs + 1, num_decodes * bucket.decode_query_len, np.int32)
    starts[:num_decodes] = np.arange(num_decodes) * bucket.decode_query_len
    if bucket.max_prefills:
        starts[bucket.max_decodes :] = bucket.max_decode_tokens
        ends = first_tokens[num_decodes:] + query_lens[num_decodes:]
        starts[bucket.max_decodes + 1 :] = ends[-1] if ends.size else bucket.max_decode_tokens
        starts[rows[num_decodes:] + 1] = ends
    padded_lens = np.zeros(bucket.max_reqs, np.int32)
    width = table.shape[1]
    padded_table = np.zeros(
        (bucket.max_reqs, width if bucket.max_blocks is None else bucket.max_blocks), np.int32
    )
    padded_lens[rows], padded_table[rows, :width] = seq_lens, table
    slots = np.full(bucket.max_tokens, PAD_SLOT_ID, np.int32)
    if has_cache:
        reqs = np.repeat(np.arange(len(query_lens)), query_lens)
        index = np.arange(len(reqs)) - np.repeat(np.cumsum(query_lens) - query_lens, query_lens)
        positions = (seq_lens - query_lens)[reqs] + index
        blocks = table[reqs, positions // block_size]
        slots[first_tokens[reqs] + index] = blocks * block_size + positions % block_size
    return construct_unchecked(
        BatchMetadata,
        query_start_loc=starts,
        seq_lens=padded_lens,
        block_table=padded_table,
        slot_mapping=slots,
        num_decodes=np.asarray(num_decodes, np.int32),
        num_prefills=np.asarray(len(query_lens) - num_decodes, np.int32),
        bucket=bucket,
        block_size=block_size,
    )


def abstract_metadata(bucket: Bucket, block_size: int) -> BatchMetadata:
    """Return the metadata of a bucket as ShapeDtypeStructs, to compile a step ahead of time.

    Raises:
        ValueError: If `bucket.max_blocks` is None.
    """
    (block_size,) = python_ints(block_size=block_size)
    require_positive(block_size=block_size)
    require(bucket.max_blocks is not None, "bucket.max_blocks", "be set to compile ahead of time", bucket)

    def zeros(*shape: Any) -> Array:
        return jnp.zeros(shape, jnp.int32)

    return jax.eval_shape(
        lambda: BatchMetadata(
            seq_lens=zeros(bucket.max_reqs),
            query_start_loc=zeros(bucket.max_reqs + 1),
            block_table=zeros(bucket.max_reqs, bucket.max_blocks),
            slot_mapping=zeros(bucket.max_tokens),
            num_decodes=zeros(),
            num_prefills=zeros(),
            bucket=bucket,
            block_size=block_size,
        )
    )


REGIONS = ("decode", "prefill")


class RegionBatch(NamedTuple):
    """One region of a step as a separate step.

    Attributes:
        metadata: Metadata of the region's rows and tokens.
        first_row: Index of the region's first row in the step.
    """

    metadata: BatchMetadata
    first_row: int


def region_batch(metadata: BatchMetadata, region: str) -> RegionBatch:
    """Return a region of a step, one of REGIONS. Works inside jit."""
    if region == "decode":
        return RegionBatch(metadata.decode_region, 0)
    return RegionBatch(metadata.prefill_region, metadata.bucket.max_decodes)


def rows_from(array: Any, first: int, end: int | None = None) -> Any:
    """Return `array[first:end]`, copied if it does not start at a multiple of ALIGNED_BYTES.

    Kernels cannot read others in place: see pallas_kernels.shared.memory.

    Args:
        array: Array to slice, traced or not. A traced array itself starts at such a multiple.
        first: Index of the first row (static).
        end: Index one past the last row (static); None means the end of the array.
    """
    rows = array[first:end]
    offset = first * math.prod(array.shape[1:]) * array.dtype.itemsize
    if offset % ALIGNED_BYTES == 0 or not isinstance(array, jax.core.Tracer):
        return rows
    return lax.optimization_barrier(rows)
