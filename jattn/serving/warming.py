"""Steps without requests: executables run them before they serve.

An executable's first run loads its kernels and its second makes its CUDA graph: 33 and 14 ms for 36 layers of
8B width on an H200, which a request would wait for. A step without requests writes nothing: the caches that
it is given and gives back are the same.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.bucket import Bucket
from jattn.graphs import DecodeGraphs
from jattn.metadata.batch import BatchMetadata, build_batch_metadata
from jattn.serving.near_blocks import NearTables
from jattn.serving.step import StepTokens

RUNS = 2  # after so many an executable is as fast as it becomes


class Warming:
    """Which executables have run; and the steps without requests, by whose arguments they are compiled, too.

    Attributes:
        num_runs: Of each bucket's.
    """

    def __init__(
        self, block_size: int, rows_of: Callable[[Bucket], int], max_rows: int, *, has_near: bool
    ) -> None:
        """None has run.

        Args:
            block_size: Tokens of a block.
            rows_of: The sampler's rows behind a bucket.
            max_rows: The most of them.
            has_near: Some layers have blocks of their own.
        """
        self._block_size, self._rows_of = block_size, rows_of
        self._max_rows, self._has_near = max_rows, has_near
        self.num_runs: collections.Counter[Bucket] = collections.Counter()

    def cold(self, graphs: DecodeGraphs, max_tokens: int | None = None) -> list[Bucket]:
        """Buckets whose executables are there and have hardly run, of no more tokens; smallest first."""
        ready = graphs.executables
        is_small = lambda bucket: max_tokens is None or bucket.max_tokens <= max_tokens
        return [one for one in graphs.buckets if one in ready and is_small(one) and self.num_runs[one] < RUNS]

    def run(self, graphs: DecodeGraphs, bucket: Bucket, leaves: Any, caches: Any) -> Any:
        """The caches, donated and given back, once the bucket's executable has run on no requests.

        If it fails it is not tried again.
        """
        self.num_runs[bucket] = RUNS
        arguments = self.metadata(bucket), self.tokens(bucket)
        for _ in range(RUNS):
            _, caches = graphs(leaves, caches, *arguments)
        return jax.block_until_ready(caches)

    def metadata(self, bucket: Bucket) -> BatchMetadata:
        """Of no requests; numpy's arrays."""
        sizes: Any = {"block_size": self._block_size, "bucket": bucket}
        return build_batch_metadata([], [], [], to_device=False, **sizes)

    def inputs(self, prefix: Sequence[Any], bucket: Bucket) -> list[Any]:
        """What a step is given besides its metadata: its tokens, and what stands behind them."""
        return [self.tokens(bucket), *prefix]

    def tokens(self, bucket: Bucket) -> StepTokens:
        """All of them padding; numpy's arrays, but for what a device may have made."""
        zeros: Any = lambda count: np.zeros(count, np.int32)
        places = self._rows_of(bucket) * bucket.decode_query_len
        metadata = self.metadata(bucket) if self._has_near else None
        near = None if metadata is None else NearTables(metadata.block_table, metadata.slot_mapping)
        rows = zeros(bucket.max_tokens) - 1
        # Rows of several tokens have drafts, which a device may have made.
        ids: Any = (jnp.zeros if bucket.decode_query_len > 1 else np.zeros)(bucket.max_tokens, np.int32)
        last, num_generated = jnp.zeros(self._max_rows, jnp.int32), zeros(self._rows_of(bucket))
        return StepTokens(ids, rows, last, zeros(places), near, num_generated)
