"""Warm-up of executables with empty batches, and JAX's compilation cache.

The first run of an executable loads its kernels and the second records its CUDA graph: 33 and 14 ms for 36
layers of an 8B model on an H200, for which a request would wait. An empty batch writes nothing, so the caches
stay unchanged.
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
from jattn.serving.engine.step import SlidingWindowTables, StepTokens
from pallas_kernels.checks import require_type

RUNS = 2  # runs after which an executable reaches its full speed


class ColdExecutable(NamedTuple):
    """An executable that has hardly run: a bucket of the graphs at index `graph_index` of a Runner's list."""

    graph_index: int
    bucket: Bucket


class WarmupRuns:
    """A record of which executables have run.

    Attributes:
        graphs: Compiled steps of the engine.
        inputs: Function that returns a bucket's step inputs after the metadata, for an empty batch.
        num_runs: Number of runs of each bucket's executable.
    """

    def __init__(
        self, graphs: DecodeGraphs, block_size: int, inputs: Callable[[Bucket], Sequence[Any]]
    ) -> None:
        """Start without runs."""
        self.graphs, self._block_size, self.inputs = graphs, block_size, inputs
        self.num_runs: collections.Counter[Bucket] = collections.Counter()

    def cold_executables(self, max_tokens: int | None = None) -> list[Bucket]:
        """Return the compiled buckets that have hardly run, smallest first.

        Buckets with more than `max_tokens` tokens are excluded.
        """
        graphs, ready = self.graphs, self.graphs.executables
        return [
            bucket
            for bucket in graphs.buckets
            if bucket in ready
            and (max_tokens is None or bucket.max_tokens <= max_tokens)
            and self.num_runs[bucket] < RUNS
        ]

    def run(self, bucket: Bucket, params: Any, caches: Any) -> Any:
        """Run a bucket's executable on an empty batch, and return the caches, which are donated.

        A failed run is not repeated.
        """
        self.num_runs[bucket] = RUNS
        arguments = empty_metadata(bucket, self._block_size), *self.inputs(bucket)
        for _ in range(RUNS):
            _, caches = self.graphs(params, caches, *arguments)
        return jax.block_until_ready(caches)


def empty_metadata(bucket: Bucket, block_size: int) -> BatchMetadata:
    """Return the metadata of an empty batch as numpy arrays."""
    sizes: Any = {"block_size": block_size, "bucket": bucket}
    return build_batch_metadata([], [], [], to_device=False, **sizes)


class EmptyStepInputs:
    """The inputs of a step without requests other than the metadata, for compiling and warming up."""

    def __init__(
        self,
        block_size: int,
        rows_of: Callable[[Bucket], int],
        max_rows: int,
        *,
        has_sliding_window_blocks: bool,
    ) -> None:
        """Store the sizes.

        Args:
            block_size: Number of tokens per block.
            rows_of: Function that returns the number of sampler rows of a bucket.
            max_rows: Maximum number of sampler rows.
            has_sliding_window_blocks: Whether some layers have their own blocks.
        """
        self._block_size, self._rows_of = block_size, rows_of
        self._max_rows, self._has_near = max_rows, has_sliding_window_blocks

    def inputs(self, prefix: Sequence[Any], bucket: Bucket) -> list[Any]:
        """Return a step's tokens, followed by the prefix arguments."""
        return [self.tokens(bucket), *prefix]

    def tokens(self, bucket: Bucket) -> StepTokens:
        """Return padding tokens as numpy arrays, except for arrays that the device computes in real steps."""

        def zeros(count: int) -> Any:
            return np.zeros(count, np.int32)

        num_positions = self._rows_of(bucket) * bucket.decode_query_len
        metadata = empty_metadata(bucket, self._block_size) if self._has_near else None
        window_tables = None
        if metadata is not None:
            window_tables = SlidingWindowTables(metadata.block_table, metadata.slot_mapping)
        rows = zeros(bucket.max_tokens) - 1
        # Rows of several tokens have drafts, which may come from the device.
        ids: Any = (jnp.zeros if bucket.decode_query_len > 1 else np.zeros)(bucket.max_tokens, np.int32)
        last, num_generated = jnp.zeros(self._max_rows, jnp.int32), zeros(self._rows_of(bucket))
        return StepTokens(ids, rows, last, zeros(num_positions), window_tables, num_generated)


def use_compilation_cache(folder: str | os.PathLike[str] | None) -> None:
    """Make JAX store and look up this process's executables, and XLA's autotuning results, in a folder.

    JAX has one such folder per process (`jax_compilation_cache_dir`). None: leave it unchanged.

    Raises:
        ValueError: If the value is not a path.
        NotADirectoryError: If the path is a file.
    """
    if folder is None:
        return
    require_type("cache_dir", folder, (str, os.PathLike), "a folder, or None")
    path = pathlib.Path(folder).expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"cache_dir must be a folder, got the file {path}.")
    path.mkdir(parents=True, exist_ok=True)
    compilation_cache.reset_cache()  # Otherwise JAX keeps using its previous folder.
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
