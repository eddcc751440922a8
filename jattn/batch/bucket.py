"""Buckets: the static sizes of a step, each of which compiles once."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence

from jattn.batch.int_arrays import python_ints
from jattn.pytree import set_ints
from pallas_kernels.checks import require, require_positive


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
        (max_reqs,) = python_ints(
            max_num_seqs=DEFAULT_MAX_CAPTURE_SIZE if max_num_seqs is None else max_num_seqs
        )
        max_capture_size = min(2 * max_reqs, DEFAULT_MAX_CAPTURE_SIZE)
    (largest,) = python_ints(max_capture_size=max_capture_size)
    require_positive(max_capture_size=largest)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)]
    return tuple([size for size in sizes if size <= largest])


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
    max_num_seqs, max_blocks, decode_query_len = python_ints(**sizes_of)
    require_positive(**sizes_of)
    is_list = isinstance(prefill_tokens, Iterable)
    require(is_list, "prefill_tokens", "be a list of sizes", repr(prefill_tokens))
    for tokens in prefill_tokens:
        python_ints(prefill_tokens=tokens)
        require_positive(prefill_tokens=tokens)
    sizes = default_capture_sizes(max_num_seqs)
    decodes = {min(-(-size // decode_query_len), max_num_seqs) for size in sizes} | {max_num_seqs}
    bucket = functools.partial(Bucket, decode_query_len=decode_query_len, max_blocks=max_blocks)
    mixed = [
        bucket(max_decodes=rows, max_prefills=min(max_num_seqs, tokens), max_prefill_tokens=tokens)
        for tokens in prefill_tokens
        for rows in (0, max_num_seqs)
    ]
    buckets = {bucket(max_decodes=rows) for rows in decodes}.union(mixed)
    return tuple(sorted(buckets, key=lambda bucket: (bucket.max_tokens, bucket.max_reqs)))
