"""Steps without requests: executables run them before they serve.

An executable's first run loads its kernels and its second makes its CUDA graph: 33 and 14 ms for 36 layers of
8B width on an H200, which a request would wait for. A step without requests writes nothing: the caches that
it is given and gives back are the same.
"""

import collections
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from jattn.batch.bucket import Bucket
from jattn.batch.metadata import BatchMetadata, build_batch_metadata
from jattn.runtime.decode_graphs import DecodeGraphs
from jattn.serving.engine.step import NearTables, StepTokens
from pallas_kernels.checks import require_type

RUNS = 2  # after so many an executable is as fast as it becomes


class Cold(NamedTuple):
    """An executable that has hardly run: a bucket's, of the graphs at `place` in a Runner's list."""

    place: int
    bucket: Bucket


class Runs:
    """Which executables of some graphs have run.

    Attributes:
        graphs: These.
        inputs: What their step is given behind its metadata where a bucket has no requests.
        num_runs: Of each bucket's.
    """

    def __init__(
        self, graphs: DecodeGraphs, block_size: int, inputs: Callable[[Bucket], Sequence[Any]]
    ) -> None:
        """None has run; arguments as attributes, and the tokens of a block."""
        self.graphs, self._block_size, self.inputs = graphs, block_size, inputs
        self.num_runs: collections.Counter[Bucket] = collections.Counter()

    def cold(self, max_tokens: int | None = None) -> list[Bucket]:
        """Buckets whose executables are there and have hardly run, of no more tokens; smallest first."""
        graphs, ready = self.graphs, self.graphs.executables
        is_small = lambda bucket: max_tokens is None or bucket.max_tokens <= max_tokens
        return [one for one in graphs.buckets if one in ready and is_small(one) and self.num_runs[one] < RUNS]

    def run(self, bucket: Bucket, params: Any, caches: Any) -> Any:
        """The caches, donated and given back, once the bucket's executable has run on no requests.

        If it fails it is not tried again.
        """
        self.num_runs[bucket] = RUNS
        arguments = no_requests(bucket, self._block_size), *self.inputs(bucket)
        for _ in range(RUNS):
            _, caches = self.graphs(params, caches, *arguments)
        return jax.block_until_ready(caches)


def no_requests(bucket: Bucket, block_size: int) -> BatchMetadata:
    """Metadata of none; numpy's arrays."""
    sizes: Any = {"block_size": block_size, "bucket": bucket}
    return build_batch_metadata([], [], [], to_device=False, **sizes)


class EmptySteps:
    """What steps without requests are given besides their metadata; executables are compiled by it, too."""

    def __init__(
        self, block_size: int, rows_of: Callable[[Bucket], int], max_rows: int, *, has_near: bool
    ) -> None:
        """Holds nothing.

        Args:
            block_size: Tokens of a block.
            rows_of: The sampler's rows behind a bucket.
            max_rows: The most of them.
            has_near: Some layers have blocks of their own.
        """
        self._block_size, self._rows_of = block_size, rows_of
        self._max_rows, self._has_near = max_rows, has_near

    def inputs(self, prefix: Sequence[Any], bucket: Bucket) -> list[Any]:
        """A step's tokens, and what stands behind them."""
        return [self.tokens(bucket), *prefix]

    def tokens(self, bucket: Bucket) -> StepTokens:
        """All of them padding; numpy's arrays, but for what a device may have made."""
        zeros: Any = lambda count: np.zeros(count, np.int32)
        places = self._rows_of(bucket) * bucket.decode_query_len
        metadata = no_requests(bucket, self._block_size) if self._has_near else None
        near = None if metadata is None else NearTables(metadata.block_table, metadata.slot_mapping)
        rows = zeros(bucket.max_tokens) - 1
        # Rows of several tokens have drafts, which a device may have made.
        ids: Any = (jnp.zeros if bucket.decode_query_len > 1 else np.zeros)(bucket.max_tokens, np.int32)
        last, num_generated = jnp.zeros(self._max_rows, jnp.int32), zeros(self._rows_of(bucket))
        return StepTokens(ids, rows, last, zeros(places), near, num_generated)


def keep_executables_in(folder: str | os.PathLike[str] | None) -> None:
    """Has JAX keep in a folder all that this process compiles from now on, and find there what others kept.

    XLA's choices of matrix products are kept in it, too. JAX has one such folder for a process
    (`jax_compilation_cache_dir`); None leaves it as it is.

    Raises:
        ValueError: It is no name of a folder.
        NotADirectoryError: There is a file of that name.
    """
    if folder is None:
        return
    require_type("cache_dir", folder, (str, os.PathLike), "a folder, or None")
    path = pathlib.Path(folder).expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"cache_dir must be a folder, got the file {path}.")
    path.mkdir(parents=True, exist_ok=True)
    compilation_cache.reset_cache()  # else JAX stays with the folder that it used before, if it did
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
