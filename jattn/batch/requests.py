"""Requests on the host: ints and numpy, no jax. How a step's requests are laid out in its two regions.

A step's tokens are `[decode tokens | prefill tokens]`, each region padded to its static size (Bucket).
"""

from collections.abc import Sequence

import numpy as np

from jattn.batch.bucket import Bucket
from pallas_kernels.checks import require, require_int, require_int32s, require_type

REORDER = "sort the rows with jattn.vllm.reorder_batch_to_split_decodes_and_prefills"


def count_decodes(query_lens: np.ndarray, decode_query_len: int) -> int:
    """How many leading requests have exactly `decode_query_len` new tokens."""
    others = np.flatnonzero(query_lens != decode_query_len)
    return int(others[0]) if others.size else len(query_lens)


def exact_bucket(
    query_lens: Sequence[int] | np.ndarray, *, decode_query_len: int = 1, max_blocks: int | None = None
) -> Bucket:
    """The bucket that these requests fill without padding."""
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
    """How many leading requests the decode region of `bucket` takes; the rest go to the prefill region.

    Raises:
        ValueError: The rest do not fit the prefill region.
    """
    leading = count_decodes(query_lens, bucket.decode_query_len)
    num_decodes = min(leading, bucket.max_decodes)
    rest = query_lens[num_decodes:]
    late = int((rest == bucket.decode_query_len).sum())
    free = bucket.max_decodes - num_decodes
    hint = f" ({late} decode rows stand behind the first prefill row: {REORDER})" if late and free else ""
    if leading > num_decodes:
        over = f"{leading - num_decodes} of {leading} decode rows"
        hint = f" ({over} stand beyond its max_decodes, {bucket.max_decodes}, and count here)"
    for what, got, room in (
        ("prefill rows", len(rest), bucket.max_prefills),
        ("prefill tokens", int(rest.sum()), bucket.max_prefill_tokens),
    ):
        require(got <= room, what, f"fit the bucket's {room}{hint}", got)
    return num_decodes


def request_token_starts(query_lens: np.ndarray, bucket: Bucket) -> np.ndarray:
    """Where the first token of each request stands among the step's `bucket.max_tokens` tokens."""
    num_decodes = num_bucket_decodes(query_lens, bucket)
    starts = np.arange(len(query_lens)) * bucket.decode_query_len
    rest = query_lens[num_decodes:]
    starts[num_decodes:] = bucket.max_decode_tokens + np.cumsum(rest) - rest
    return starts


def row_indices(query_lens: np.ndarray, bucket: Bucket) -> np.ndarray:
    """Which of the step's `bucket.max_reqs` rows each request has.

    Args:
        query_lens: New tokens of each request, as build_batch_metadata was given them.
        bucket: The step's.

    Returns:
        An int a request [reqs]: decodes first, prefills from row `max_decodes` on.

    Raises:
        ValueError: query_lens are no ints, or do not fit the bucket.
    """
    require_type("bucket", bucket, Bucket, "the step's")
    query_lens = np.asarray(query_lens)
    _require_ints("query_lens", query_lens)
    num_decodes = num_bucket_decodes(query_lens, bucket)
    rows = np.arange(len(query_lens))
    return np.where(rows < num_decodes, rows, bucket.max_decodes + rows - num_decodes)


def pack_tokens(tokens: Sequence[Sequence[int] | np.ndarray], bucket: Bucket, *, pad: int = 0) -> np.ndarray:
    """Lays the new tokens of each request out as the step wants them.

    Args:
        tokens: Token ids of each request, the new ones alone, in the order of build_batch_metadata's.
        bucket: The step's (`metadata.bucket`).
        pad: What stands where no token is.

    Returns:
        int32 [bucket.max_tokens], decodes first, prefills from token `max_decode_tokens` on.

    Raises:
        ValueError: Something is no list of int32s, or the requests do not fit the bucket.
    """
    require_type("bucket", bucket, Bucket, "the step's")
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
    """Numpy would cut fractions off, and take bools."""
    require(array.size == 0 or array.dtype.kind in "iu", name, "hold ints", array.dtype)
