"""A step's metadata: built from host ints once, then arrays that travel through jit."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int32

from jattn.batch.bucket import Bucket
from jattn.batch.int_arrays import (
    pad_columns,
    parse_block_table,
    parse_int_vector,
    python_ints,
    require_blocks,
)
from jattn.batch.requests import exact_bucket, num_bucket_decodes, request_token_starts, row_indices
from jattn.batch.slots import PAD_SLOT_ID
from jattn.pytree import pytree, replace, static, unchecked
from pallas_kernels.checks import require, require_positive
from pallas_kernels.shared import ALIGNED_BYTES

type HostInts = Sequence[int] | np.ndarray | Array
type HostTable = Sequence[HostInts] | np.ndarray | Array


@pytree
class BatchMetadata:
    """Which tokens of a step belong to which request, and where their keys and values are.

    Rows: `[decode rows | prefill rows]`; tokens: `[decode tokens | prefill tokens]`; both regions padded to
    `bucket`. A padding row has seq_len 0, slots -1 and block table 0; it writes nothing and comes out as
    zeros.

    Attributes:
        seq_lens: Keys of each row, this step's tokens included.
        query_start_loc: First token of each row, and one past the last. Padding rows of a region repeat its
            last value. Decode row r owns the tokens from `r * decode_query_len` whatever stands here.
        block_table: `block_table[r, i]` is the block with positions `i * block_size` onward of row r.
            Entries past `ceil(seq_lens[r] / block_size)` are never used.
        slot_mapping: `block * block_size + offset` where each token's key and value go; < 0: not written.
        num_decodes: Decode rows up to the last live one.
        num_prefills: Live prefill rows.
        bucket: Static sizes of the regions.
        block_size: Tokens of a block.

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
        """New tokens of each row; 0 for padding rows."""
        lens = self.query_start_loc[1:] - self.query_start_loc[:-1]
        decode = jnp.arange(self.bucket.max_reqs, dtype=jnp.int32) < self.bucket.max_decodes
        return jnp.where(self.seq_lens > 0, jnp.where(decode, self.bucket.decode_query_len, lens), 0)

    @property
    def num_computed_tokens(self) -> Int32[Array, " reqs"]:
        """Context: keys of each row that were in the cache before this step."""
        return self.seq_lens - self.query_lens

    @property
    def token_rows(self) -> Int32[Array, " tokens"]:
        """The row of each token; padding tokens get some row of their region."""
        bucket = self.bucket
        decode = jnp.arange(bucket.max_decode_tokens, dtype=jnp.int32) // bucket.decode_query_len
        tokens = jnp.arange(bucket.max_decode_tokens, bucket.max_tokens, dtype=jnp.int32)
        ends = self.query_start_loc[bucket.max_decodes + 1 :]
        prefill = bucket.max_decodes + jnp.searchsorted(ends, tokens, side="right").astype(jnp.int32)
        return jnp.concatenate([decode, jnp.minimum(prefill, max(bucket.max_reqs - 1, 0))])

    @property
    def is_valid_token(self) -> Bool[Array, " tokens"]:
        """False for padding tokens."""
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
        """First token of each row, padding rows of the decode region included."""
        rows = jnp.arange(self.bucket.max_reqs, dtype=jnp.int32)
        decode = rows * self.bucket.decode_query_len
        return jnp.where(rows < self.bucket.max_decodes, decode, self.query_start_loc[:-1])

    @property
    def last_token_indices(self) -> Int32[Array, " reqs"]:
        """Index of each row's last token: where its next-token logits come from; 0 for padding rows."""
        last = self.row_starts + self.query_lens - 1
        return jnp.where(self.query_lens > 0, last, 0)

    @property
    def decode_region(self) -> "BatchMetadata":
        """The decode region as a step of its own."""
        bucket, rows = self.bucket, self.bucket.max_decodes
        return replace(
            self,
            seq_lens=self.seq_lens[:rows],
            query_start_loc=jnp.arange(rows + 1, dtype=jnp.int32) * bucket.decode_query_len,
            block_table=self.block_table[:rows],
            slot_mapping=self.slot_mapping[: bucket.max_decode_tokens],
            num_prefills=jnp.zeros_like(self.num_prefills),
            bucket=dataclasses.replace(bucket, max_prefills=0, max_prefill_tokens=0),
        )

    @property
    def prefill_region(self) -> "BatchMetadata":
        """The prefill region as a step of its own."""
        bucket, first = self.bucket, self.bucket.max_decodes
        return replace(
            self,
            seq_lens=rows_from(self.seq_lens, first),
            query_start_loc=self.query_start_loc[first:] - bucket.max_decode_tokens,
            block_table=rows_from(self.block_table, first),
            slot_mapping=rows_from(self.slot_mapping, bucket.max_decode_tokens),
            num_decodes=jnp.zeros_like(self.num_decodes),
            bucket=dataclasses.replace(bucket, max_decodes=0),
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
    """Builds a step's metadata from host numbers.

    Leading requests with exactly `decode_query_len` new tokens form the decode region. From the first other
    request on all are prefill rows, shorter ones too, as in newer vLLM.

    Args:
        query_lens: New tokens of each request.
        seq_lens: All tokens of each request, the new ones included.
        block_table: Block ids of each request, in order: ragged lists, each as long as its request's tokens
            need or longer, or a 2-D array. In an array a row that is padded looks like one with more blocks:
            that it is too short cannot be told, so pad with a negative number, which is refused where a block
            is needed. None: no cache (encoder-only attention); every slot is -1, and all `seq_lens[r]` keys
            of a request, a decode's past among them, must stand in the PackedKV that attend gets.
        block_size: Tokens of a block.
        bucket: Static sizes to pad to; None = exactly these requests. Its decode_query_len wins.
        decode_query_len: Tokens of a decode row where `bucket` is None.
        to_device: False = the arrays stay numpy's, for a compiled function that gets them as arguments: it
            sends them itself, and sooner than device_put does. A traced function must not capture them.

    Raises:
        ValueError: Lengths disagree, a request has more tokens than blocks, a needed block id is negative,
            an id is no int or makes slots beyond int32, or the requests do not fit `bucket`.
    """
    query_lens, seq_lens = parse_int_vector("query_lens", query_lens), parse_int_vector("seq_lens", seq_lens)
    (block_size,) = python_ints(block_size=block_size)
    require_positive(block_size=block_size)
    _require_one_each("seq_lens", seq_lens, query_lens)
    short = np.flatnonzero(seq_lens < query_lens)
    for r in short[:1]:
        require(False, f"seq_lens[{r}]", f"count the new tokens ({query_lens[r]})", seq_lens[r])
    table = _host_table(block_table, seq_lens, block_size, bucket)
    if bucket is None:
        bucket = exact_bucket(query_lens, decode_query_len=decode_query_len, max_blocks=table.shape[1])
    metadata = _laid_out(query_lens, seq_lens, table, bucket, block_size, has_cache=block_table is not None)
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
    """Metadata for queries that read another sequence's keys: kv_lens need not cover the queries.

    The queries own no slots (all -1). Write the encoder's keys and values with the metadata of the encoder's
    own step.

    Args:
        query_lens: New tokens of each request.
        kv_lens: Keys of each request, all of which its queries see: the other sequence's tokens.
        block_table: Where these keys are, as build_batch_metadata's; None = in a PackedKV.
        block_size: Tokens of a block.
        bucket: Static sizes to pad to; None = exactly these requests.
        decode_query_len: Tokens of a decode row where `bucket` is None.

    Raises:
        ValueError: As build_batch_metadata.
    """
    query_lens, kv_lens = parse_int_vector("query_lens", query_lens), parse_int_vector("kv_lens", kv_lens)
    (block_size,) = python_ints(block_size=block_size)
    require_positive(block_size=block_size)
    _require_one_each("kv_lens", kv_lens, query_lens)
    table = _host_table(block_table, kv_lens, block_size, bucket)
    if bucket is None:
        bucket = exact_bucket(query_lens, decode_query_len=decode_query_len, max_blocks=table.shape[1])
    return jax.device_put(_laid_out(query_lens, kv_lens, table, bucket, block_size, has_cache=False))


def _require_one_each(name: str, lens: np.ndarray, query_lens: np.ndarray) -> None:
    num_reqs = len(query_lens)
    require(len(lens) == num_reqs, name, f"have one entry per request ({num_reqs})", len(lens))


def _host_table(
    block_table: HostTable | None, seq_lens: np.ndarray, block_size: int, bucket: Bucket | None
) -> np.ndarray:
    """The block table as numpy, as wide as the bucket says; every request has the blocks that it needs."""
    is_bucket = bucket is None or isinstance(bucket, Bucket)
    require(is_bucket, "bucket", "be a Bucket or None", repr(bucket))
    max_blocks = None if bucket is None else bucket.max_blocks
    if block_table is None:
        return np.zeros((len(seq_lens), max_blocks or 0), np.int64)
    table = parse_block_table(block_table, len(seq_lens), block_size=block_size)
    require_blocks(table, seq_lens, block_size)
    return pad_columns(table, max_blocks, seq_lens, block_size)


def _laid_out(
    query_lens: np.ndarray,
    seq_lens: np.ndarray,
    table: np.ndarray,
    bucket: Bucket,
    block_size: int,
    *,
    has_cache: bool,
) -> BatchMetadata:
    """Puts each request into its row and its tokens, in numpy."""
    num_decodes = num_bucket_decodes(query_lens, bucket)
    rows, first_tokens = row_indices(query_lens, bucket), request_token_starts(query_lens, bucket)
    starts = np.full(bucket.max_reqs + 1, num_decodes * bucket.decode_query_len, np.int32)
    starts[:num_decodes] = np.arange(num_decodes) * bucket.decode_query_len
    if bucket.max_prefills:
        starts[bucket.max_decodes :] = bucket.max_decode_tokens
        ends = first_tokens[num_decodes:] + query_lens[num_decodes:]
        starts[bucket.max_decodes + 1 :] = ends[-1] if ends.size else bucket.max_decode_tokens
        starts[rows[num_decodes:] + 1] = ends
    padded_lens = np.zeros(bucket.max_reqs, np.int32)
    padded_table = np.zeros((bucket.max_reqs, table.shape[1]), np.int32)
    padded_lens[rows], padded_table[rows] = seq_lens, table
    slots = np.full(bucket.max_tokens, PAD_SLOT_ID, np.int32)
    if has_cache:
        reqs = np.repeat(np.arange(len(query_lens)), query_lens)
        nth = np.arange(len(reqs)) - np.repeat(np.cumsum(query_lens) - query_lens, query_lens)
        positions = (seq_lens - query_lens)[reqs] + nth
        blocks = table[reqs, positions // block_size]
        slots[first_tokens[reqs] + nth] = blocks * block_size + positions % block_size
    return unchecked(
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
    """The shapes of a bucket's metadata, without arrays: to compile a step ahead of time.

    Raises:
        ValueError: `bucket.max_blocks` is None, so the block table has no width yet.
    """
    (block_size,) = python_ints(block_size=block_size)
    require_positive(block_size=block_size)
    require(bucket.max_blocks is not None, "bucket.max_blocks", "be set to compile ahead of time", bucket)
    zeros = lambda *shape: jnp.zeros(shape, jnp.int32)
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
    """A region as a step of its own.

    Attributes:
        metadata: Its rows and tokens alone.
        first_row: Where they begin among the whole step's rows.
        first_token: Where they begin among its tokens.
    """

    metadata: BatchMetadata
    first_row: int
    first_token: int


def region_batch(metadata: BatchMetadata, region: str) -> RegionBatch:
    """One of REGIONS of a step. Traced."""
    if region == "decode":
        return RegionBatch(metadata.decode_region, 0, 0)
    return RegionBatch(
        metadata.prefill_region, metadata.bucket.max_decodes, metadata.bucket.max_decode_tokens
    )


def rows_from(array: Any, first: int, end: int | None = None) -> Any:
    """`array[first:end]`, a copy where it does not begin at a multiple of ALIGNED_BYTES.

    Kernels cannot read others in place: see pallas_kernels.shared.memory.

    Args:
        array: Traced, numpy's, or JAX's; traced, it begins at such a multiple itself.
        first: Static.
        end: Static.
    """
    rows = array[first:end]
    offset = first * math.prod(array.shape[1:]) * array.dtype.itemsize
    if offset % ALIGNED_BYTES == 0 or not isinstance(array, jax.core.Tracer):
        return rows
    return lax.optimization_barrier(rows)
