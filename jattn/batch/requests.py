"""Layout of a step's requests in its two regions, in numpy on the host.

The tokens of a step are `[decode tokens | prefill tokens]`, each region padded to its static size (Bucket).
"""

from collections.abc import Sequence

import numpy as np

from jattn.batch.bucket import Bucket
from pallas_kernels.checks import require, require_int, require_int32s, require_type

REORDER = "sort the rows with jattn.vllm.reorder_batch_to_split_decodes_and_prefills"


def count_decodes(query_lens: np.ndarray, decode_query_len: int) -> int:
    """Count the leading requests that have exactly `decode_query_len` new tokens."""
    prefills = np.flatnonzero(query_lens != decode_query_len)
    return int(prefills[0]) if prefills.size else len(query_lens)


def exact_bucket(
    query_lens: Sequence[int] | np.ndarray, *, decode_query_len: int = 1, max_blocks: int | None = None
) -> Bucket:
    """Return the bucket that these requests fill without padding."""
    lens = np.asarray(query_lens).reshape(-1)
    _require_ints("query_lens", lens)
    lens = lens.astype(np.int64)
    num_decodes = count_decodes(lens, decode_query_len)
    return Bucket(
        max_decodes=num_decodes,
        max_prefills=len(lens) - num_decodes,
        max_prefill_tokens=int(lens[num_decodes:].sum()),
        decode_query_len=decode_query_len,
        max_blocks=max_blocks,
    )


def num_bucket_decodes(query_lens: np.ndarray, bucket: Bucket) -> int:
    """Count the leading requests that go to the decode region of `bucket`; the rest go to prefill.

    Raises:
        ValueError: If the remaining requests do not fit the prefill region.
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
    return num_decodes


def request_token_starts(query_lens: np.ndarray, bucket: Bucket) -> np.ndarray:
    """Return the index of each request's first token among the step's `bucket.max_tokens` tokens."""
    num_decodes = num_bucket_decodes(query_lens, bucket)
    starts = np.arange(len(query_lens)) * bucket.decode_query_len
    prefill_lens = query_lens[num_decodes:]
    starts[num_decodes:] = bucket.max_decode_tokens + np.cumsum(prefill_lens) - prefill_lens
    return starts


def row_indices(query_lens: np.ndarray, bucket: Bucket) -> np.ndarray:
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
    _require_ints("query_lens", query_lens)
    num_decodes = num_bucket_decodes(query_lens, bucket)
    rows = np.arange(len(query_lens))
    return np.where(rows < num_decodes, rows, bucket.max_decodes + rows - num_decodes)


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
    for r, (start, ids) in enumerate(zip(request_token_starts(lens, bucket), tokens, strict=True)):
        row = np.asarray(ids)
        _require_ints(f"tokens[{r}]", row)
        require(row.ndim == 1, f"tokens[{r}]", "be a list of token ids", f"shape {row.shape}")
        require_int32s(f"tokens[{r}]", row)
        packed[start : start + len(row)] = row
    return packed


def _require_ints(name: str, array: np.ndarray) -> None:
    """Check that an array holds ints: numpy would truncate floats and accept bools."""
    require(array.size == 0 or array.dtype.kind in "iu", name, "hold ints", array.dtype)
