"""Buckets: the static sizes of a step, each of which compiles once, and the requests' places in them.

The tokens of a step are `[decode tokens | prefill tokens]`, each region padded to its static size.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from pallas_kernels.checks import (
    require,
    require_int,
    require_int32s,
    require_positive,
    require_type,
    set_ints,
)

REORDER = "sort the rows with jattn.vllm.reorder_batch_to_split_decodes_and_prefills"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bucket:
    """Static sizes of a step's two regions, `[decode tokens | prefill tokens]`.

    Attributes:
        max_decodes: Number of rows in the decode region; each has `decode_query_len` tokens.
        max_prefills: Number of rows in the prefill region.
        max_prefill_tokens: Number of tokens in the prefill region, all rows together.
        decode_query_len: Number of tokens per decode row: 1, or 1 + k with k speculative tokens.
        max_blocks: Number of block table columns; None uses as many as the longest request needs.
    """

    max_decodes: int = 0
    max_prefills: int = 0
    max_prefill_tokens: int = 0
    decode_query_len: int = 1
    max_blocks: int | None = None

    def __post_init__(self) -> None:
        set_ints(self, "max_decodes", "max_prefills", "max_prefill_tokens", "decode_query_len")
        if self.max_blocks is not None:
            set_ints(self, "max_blocks")
        for name in ("max_decodes", "max_prefills", "max_prefill_tokens"):
            require(getattr(self, name) >= 0, name, "be at least 0", getattr(self, name))
        if self.max_prefill_tokens:
            require(
                self.max_prefills > 0,
                "max_prefills",
                f"be positive with {self.max_prefill_tokens} prefill tokens",
                0,
            )
        require_positive(decode_query_len=self.decode_query_len)
        require(
            self.max_blocks is None or self.max_blocks >= 0, "max_blocks", "be at least 0", self.max_blocks
        )

    @functools.cached_property
    def max_reqs(self) -> int:
        """Number of rows in both regions."""
        return self.max_decodes + self.max_prefills

    @functools.cached_property
    def max_decode_tokens(self) -> int:
        """Number of tokens in the decode region: index of the first prefill token."""
        return self.max_decodes * self.decode_query_len

    @functools.cached_property
    def max_tokens(self) -> int:
        """Number of tokens in both regions."""
        return self.max_decode_tokens + self.max_prefill_tokens


# vLLM's default limit of CUDA graph capture sizes.
DEFAULT_MAX_CAPTURE_SIZE = 512


def default_capture_sizes(
    max_num_seqs: int | None = None, max_capture_size: int | None = None
) -> tuple[int, ...]:
    """Return vLLM's default capture sizes: 1, 2, 4, every 8 up to 248, then every 16.

    Args:
        max_num_seqs: Maximum number of requests per step. The largest size is twice that, at most 512.
        max_capture_size: Largest size; overrides max_num_seqs.

    Source: vLLM `VllmConfig._set_cudagraph_sizes`.
    """
    if max_capture_size is None:
        max_num_seqs = DEFAULT_MAX_CAPTURE_SIZE if max_num_seqs is None else max_num_seqs
        require_int(max_num_seqs=max_num_seqs)
        max_capture_size = min(2 * int(max_num_seqs), DEFAULT_MAX_CAPTURE_SIZE)
    require_int(max_capture_size=max_capture_size)
    require_positive(max_capture_size=max_capture_size)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, max_capture_size + 1, 16)]
    return tuple([size for size in sizes if size <= max_capture_size])


def default_buckets(
    max_num_seqs: int,
    *,
    max_blocks: int,
    decode_query_len: int = 1,
    prefill_tokens: Sequence[int] = (),
) -> tuple[Bucket, ...]:
    """Return buckets at vLLM's capture sizes; every batch within these limits fits one of them.

    Decode-only buckets hold 1, 2, 4, 8, 16, 24, ... tokens (rounded up to whole rows), the last one
    max_num_seqs rows. Each size in `prefill_tokens` adds a bucket without decode rows and one with
    max_num_seqs of them.

    Args:
        max_num_seqs: Maximum number of requests per step.
        max_blocks: Number of block table columns: blocks of the longest request.
        decode_query_len: Number of tokens per decode row.
        prefill_tokens: Sizes of the prefill region in tokens; the largest is the step's prefill token budget.

    Raises:
        ValueError: If a size is not a positive int.

    Source: vLLM `cudagraph_capture_sizes`, where larger decode batches run eagerly.
    """
    sizes_of = {"max_num_seqs": max_num_seqs, "max_blocks": max_blocks, "decode_query_len": decode_query_len}
    require_int(**sizes_of)
    require_positive(**sizes_of)
    is_list = isinstance(prefill_tokens, Iterable)
    require(is_list, "prefill_tokens", "be a list of sizes", repr(prefill_tokens))
    for tokens in prefill_tokens:
        require_int(prefill_tokens=tokens)
        require_positive(prefill_tokens=tokens)
    sizes = default_capture_sizes(max_num_seqs)
    max_num_seqs, decode_query_len = int(max_num_seqs), int(decode_query_len)  # small numpy ints overflow
    decodes = {min(-(-size // decode_query_len), max_num_seqs) for size in sizes} | {max_num_seqs}
    bucket = functools.partial(Bucket, decode_query_len=decode_query_len, max_blocks=max_blocks)
    mixed = [
        bucket(max_decodes=rows, max_prefills=min(max_num_seqs, tokens), max_prefill_tokens=tokens)
        for tokens in prefill_tokens
        for rows in (0, max_num_seqs)
    ]
    buckets = {bucket(max_decodes=rows) for rows in decodes}.union(mixed)
    return tuple(sorted(buckets, key=operator.attrgetter("max_tokens", "max_reqs")))


def exact_bucket(
    query_lens: Sequence[int] | np.ndarray, *, decode_query_len: int = 1, max_blocks: int | None = None
) -> Bucket:
    """Return the bucket that these requests fill without padding."""
    lens = np.asarray(query_lens).reshape(-1)
    require(lens.size == 0 or lens.dtype.kind in "iu", "query_lens", "hold ints", lens.dtype)
    lens = lens.astype(np.int64)
    num_decodes = count_decodes(lens, decode_query_len)
    return Bucket(
        max_decodes=num_decodes,
        max_prefills=len(lens) - num_decodes,
        max_prefill_tokens=int(lens[num_decodes:].sum()),
        decode_query_len=decode_query_len,
        max_blocks=max_blocks,
    )


def count_decodes(query_lens: np.ndarray, decode_query_len: int) -> int:
    """Count the leading requests that have exactly `decode_query_len` new tokens."""
    prefills = np.flatnonzero(query_lens != decode_query_len)
    return int(prefills[0]) if prefills.size else len(query_lens)


class RequestPlaces(NamedTuple):
    """Places of a step's requests in a bucket.

    Attributes:
        num_decodes: Number of leading requests in the decode region.
        rows: Row of each request among the step's `bucket.max_reqs` rows.
        first_tokens: Index of each request's first token among the step's `bucket.max_tokens` tokens.
    """

    num_decodes: int
    rows: np.ndarray
    first_tokens: np.ndarray


def place_requests(query_lens: np.ndarray, bucket: Bucket) -> RequestPlaces:
    """Place requests in a bucket: leading decodes in the decode region, the rest in the prefill region.

    Args:
        query_lens: Number of new tokens per request, ints [reqs].
        bucket: Bucket of the step.

    Raises:
        ValueError: If the requests do not fit the bucket.
    """
    leading = count_decodes(query_lens, bucket.decode_query_len)
    num_decodes = min(leading, bucket.max_decodes)
    prefill_lens = query_lens[num_decodes:]
    num_late = int((prefill_lens == bucket.decode_query_len).sum())
    num_free = bucket.max_decodes - num_decodes
    hint = ""
    if num_late and num_free:
        hint = f" ({num_late} decode rows come after the first prefill row: {REORDER})"
    if leading > num_decodes:
        excess = f"{leading - num_decodes} of {leading} decode rows"
        hint = f" ({excess} exceed max_decodes={bucket.max_decodes} and count as prefills)"
    for name, count, limit in (
        ("prefill rows", len(prefill_lens), bucket.max_prefills),
        ("prefill tokens", int(prefill_lens.sum()), bucket.max_prefill_tokens),
    ):
        if count > limit:
            require(False, name, f"fit the bucket's {limit}{hint}", count)
    rows = np.arange(len(query_lens))
    first_tokens = rows * bucket.decode_query_len
    first_tokens[num_decodes:] = bucket.max_decode_tokens + np.cumsum(prefill_lens) - prefill_lens
    rows[num_decodes:] += bucket.max_decodes - num_decodes
    return RequestPlaces(num_decodes, rows, first_tokens)


def row_indices(query_lens: Sequence[int] | np.ndarray, bucket: Bucket) -> np.ndarray:
    """Return the row of each request among the step's `bucket.max_reqs` rows.

    Args:
        query_lens: Number of new tokens per request, as passed to build_batch_metadata.
        bucket: Bucket of the step.

    Returns:
        Row indices, int [reqs]: decodes from row 0, prefills from row `max_decodes`.

    Raises:
        ValueError: If query_lens are not ints, or do not fit the bucket.
    """
    require_type("bucket", bucket, Bucket, "the bucket of the step")
    query_lens = np.asarray(query_lens)
    require(
        query_lens.size == 0 or query_lens.dtype.kind in "iu", "query_lens", "hold ints", query_lens.dtype
    )
    return place_requests(query_lens, bucket).rows


def pack_tokens(tokens: Sequence[Sequence[int] | np.ndarray], bucket: Bucket, *, pad: int = 0) -> np.ndarray:
    """Concatenate the new tokens of all requests in the layout of a step.

    Args:
        tokens: New token ids of each request, in the order of the requests of build_batch_metadata.
        bucket: Bucket of the step (`metadata.bucket`).
        pad: Token id of padding tokens.

    Returns:
        Token ids, int32 [bucket.max_tokens]: decodes first, prefills from token `max_decode_tokens`.

    Raises:
        ValueError: If token ids are not int32, or the requests do not fit the bucket.
    """
    require_type("bucket", bucket, Bucket, "the bucket of the step")
    require_int(pad=pad)
    require_int32s("pad", np.asarray(pad))
    packed = np.full(bucket.max_tokens, pad, np.int32)
    for r, ids in enumerate(tokens):
        require(hasattr(ids, "__len__"), f"tokens[{r}]", "be a list of token ids", repr(ids))
    lens = np.asarray([len(ids) for ids in tokens], np.int64)
    for r, (start, ids) in enumerate(zip(place_requests(lens, bucket).first_tokens, tokens, strict=True)):
        row = np.asarray(ids)
        require(row.size == 0 or row.dtype.kind in "iu", f"tokens[{r}]", "hold ints", row.dtype)
        require(row.ndim == 1, f"tokens[{r}]", "be a list of token ids", f"shape {row.shape}")
        require_int32s(f"tokens[{r}]", row)
        packed[start : start + len(row)] = row
    return packed
