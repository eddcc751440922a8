"""Decode graphs: one executable for each bucket, compiled ahead of time, in the place of CUDA graphs."""

import concurrent.futures
import contextlib
import functools
import importlib
import importlib.util
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jattn.bucket import Bucket
from jattn.metadata.batch import BatchMetadata, abstract_metadata
from jattn.metadata.buckets import default_capture_sizes
from jattn.parameters import Leaves
from jattn.requests import count_decodes
from pallas_kernels.checks import require, require_positive

type GraphStep = Callable[..., tuple[Any, Any]]


class DecodeGraphs:
    """Runs a step with the executable of its bucket.

    What varies inside a bucket (lengths, members, blocks) is traced, so nothing compiles after `precompile`.
    Parameters and caches must keep their shapes and dtypes; another shape is jax's TypeError, not a compile.
    Parameters may be changed in place: a step runs those that it is given as they are then.

    Source: vLLM `CudagraphDispatcher`; larger batches are an error here, not an eager step.
    """

    def __init__(self, step: GraphStep, buckets: Iterable[Bucket]) -> None:
        """Compiles nothing yet.

        Args:
            step: `(params, caches, metadata, *inputs) -> (outputs, caches)`, jit-able. The caches, any pytree
                of PagedCache, are donated.
            buckets: The sizes to run. Each must have max_blocks.

        Raises:
            ValueError: There is no bucket, one without max_blocks, or what is none; step is no function.
        """
        require(callable(step), "step", "be a function", repr(step))
        buckets = tuple(buckets)
        for i, bucket in enumerate(buckets):
            require(isinstance(bucket, Bucket), f"buckets[{i}]", "be a Bucket", repr(bucket))
        ordered = sorted(set(buckets), key=_size)
        require(len(ordered) > 0, "buckets", "hold at least one Bucket", ordered)
        self.buckets = tuple(ordered)
        self._step = jax.jit(functools.partial(_on_leaves, step), static_argnums=0, donate_argnums=2)
        self._leaves: Leaves | None = None  # of the last step's parameters
        self._executables: dict[Bucket, jax.stages.Compiled] = {}
        self._lock = threading.Lock()
        self._num_compiles = 0

    @property
    def num_compiles(self) -> int:
        """Executables compiled so far."""
        return self._num_compiles

    @property
    def executables(self) -> dict[Bucket, jax.stages.Compiled]:
        """What is compiled: to look at its memory_analysis() or as_text()."""
        return dict(self._executables)

    def __call__(self, params: Any, caches: Any, metadata: BatchMetadata, *inputs: Any) -> tuple[Any, Any]:
        """Runs the step; compiles it first where its bucket was not precompiled.

        Returns:
            `(outputs, caches)`. The caches given are donated: use the ones returned.

        Raises:
            ValueError: The metadata is none, its bucket not one of `buckets`, or the parameters' structure is
                another than before.
        """
        is_metadata = isinstance(metadata, BatchMetadata)
        require(is_metadata, "metadata", "be a BatchMetadata", type(metadata).__name__)
        bucket, leaves = metadata.bucket, self.leaves_of(params)
        if bucket not in self._executables:
            require(
                bucket in self.buckets,
                "metadata.bucket",
                f"be one of the buckets {named(self.buckets)}",
                bucket,
            )
            with self._lock:  # two threads that miss the same bucket compile it once
                if bucket not in self._executables:
                    lowered = self._step.lower(leaves.structure, leaves.values, caches, metadata, *inputs)
                    self._keep(bucket, lowered.compile())
        return self._executables[bucket](leaves.values, caches, metadata, *inputs)

    def leaves_of(self, params: Any) -> Leaves:
        """The parameters' leaves as they are now; the object of the step before where nothing has changed.

        Whoever has looked already may hand these on in the parameters' place: they are taken as they are.

        Raises:
            ValueError: They have not the structure of the first ones.
        """
        if isinstance(params, Leaves):
            return params
        last = self._leaves
        if last is not None and last.are_those_of(params):
            return last
        leaves = Leaves(params)
        if last is not None and leaves.structure != last.structure:
            require(False, "params", f"keep the structure {last.structure}", leaves.structure)
        self._leaves = leaves
        return leaves

    def _keep(self, bucket: Bucket, executable: jax.stages.Compiled) -> None:
        self._executables[bucket] = executable
        self._num_compiles += 1

    def precompile(
        self,
        params: Any,
        caches: Any,
        *,
        block_size: int,
        inputs: Callable[[Bucket], Sequence[Any]] = lambda bucket: (),
        progress: bool = True,
    ) -> None:
        """Compiles the buckets that are not compiled yet, in parallel.

        Tracing stays in this thread, so what a context manager set (mesh, precision) holds for it. Where
        `jax_compilation_cache_dir` is set, JAX keeps the executables there for the next process.

        Args:
            params: The step's, or their ShapeDtypeStructs. Nothing is run and nothing donated.
            caches: The step's, or their ShapeDtypeStructs.
            block_size: Tokens of a cache block.
            inputs: The step's other arguments for a bucket, as ShapeDtypeStructs.
            progress: Show a bar, if tqdm is installed.
        """
        with self._lock:
            missing = [bucket for bucket in self.buckets if bucket not in self._executables]
            leaves = self.leaves_of(params)
            with (
                _bar(len(missing), progress) as move_bar,
                concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool,
            ):
                compiling = {}
                for bucket in missing:
                    metadata = abstract_metadata(bucket, block_size)
                    arguments = leaves.values, caches, metadata, *inputs(bucket)
                    lowered = self._step.lower(leaves.structure, *arguments)
                    compiling[pool.submit(lowered.compile)] = bucket
                for done in concurrent.futures.as_completed(compiling):
                    self._keep(compiling[done], done.result())
                    move_bar()

    def choose(
        self,
        query_lens: Sequence[int] | np.ndarray | None = None,
        *,
        num_decodes: int = 0,
        num_prefills: int = 0,
        num_prefill_tokens: int = 0,
        num_blocks: int = 0,
    ) -> Bucket:
        """The smallest bucket that fits a batch: fewest tokens, then fewest rows, then fewest block columns.

        Decodes beyond a bucket's decode rows count as prefills there, as in build_batch_metadata.

        Args:
            query_lens: New tokens of each request. None: the three counts say what the batch is.
            num_decodes: Requests with decode_query_len new tokens.
            num_prefills: The other requests.
            num_prefill_tokens: New tokens of these together.
            num_blocks: Blocks of the longest request.

        Raises:
            ValueError: The batch is larger than every bucket; the message lists them.
        """
        for bucket in self.buckets:
            counts = (num_decodes, num_prefills, num_prefill_tokens)
            if query_lens is not None:
                counts = _counts(query_lens, bucket.decode_query_len)
            if _fits(bucket, *counts) and num_blocks <= _max_blocks(bucket):
                return bucket
        batch = f"{counts[0]}+{counts[1]}/{counts[2]}x{num_blocks}"
        raise ValueError(f"the batch must fit one of the buckets {named(self.buckets)}, got {batch}.")


def default_buckets(
    max_num_seqs: int,
    *,
    max_blocks: int,
    decode_query_len: int = 1,
    prefill_tokens: Sequence[int] = (),
) -> tuple[Bucket, ...]:
    """Buckets at vLLM's capture sizes, so that every batch of a scheduler with these limits fits one.

    Decode-only buckets hold 1, 2, 4, 8, 16, 24, ... tokens (rounded up to whole rows), the last one
    max_num_seqs rows. Each size in `prefill_tokens` adds a bucket without decode rows and one with
    max_num_seqs of them.

    Args:
        max_num_seqs: Most requests of a step.
        max_blocks: Block-table columns: blocks of the longest request.
        decode_query_len: Tokens of a decode row.
        prefill_tokens: Sizes of the prefill region; the largest is the step's token budget for prompts.

    Raises:
        ValueError: A size is not positive.

    Source: vLLM `cudagraph_capture_sizes`; there, larger decode batches run eager.
    """
    require_positive(max_num_seqs=max_num_seqs, max_blocks=max_blocks, decode_query_len=decode_query_len)
    for tokens in prefill_tokens:
        require_positive(prefill_tokens=tokens)
    sizes = default_capture_sizes(max_num_seqs)
    decodes = {min(-(-size // decode_query_len), max_num_seqs) for size in sizes} | {max_num_seqs}
    bucket = functools.partial(Bucket, decode_query_len=decode_query_len, max_blocks=max_blocks)
    mixed = [
        bucket(max_decodes=rows, max_prefills=min(max_num_seqs, tokens), max_prefill_tokens=tokens)
        for tokens in prefill_tokens
        for rows in (0, max_num_seqs)
    ]
    return tuple(sorted({bucket(max_decodes=rows) for rows in decodes}.union(mixed), key=_size))


def _on_leaves(step: GraphStep, structure: Any, leaves: Sequence[Any], *arguments: Any) -> tuple[Any, Any]:
    """The step with its parameters as a flat list."""
    return step(jax.tree.unflatten(structure, leaves), *arguments)


def _size(bucket: Bucket) -> tuple[int, int, int]:
    return bucket.max_tokens, bucket.max_reqs, _max_blocks(bucket)


def _max_blocks(bucket: Bucket) -> int:
    require(bucket.max_blocks is not None, "bucket.max_blocks", "be set to compile ahead of time", bucket)
    assert bucket.max_blocks is not None
    return bucket.max_blocks


def _counts(query_lens: Sequence[int] | np.ndarray, decode_query_len: int) -> tuple[int, int, int]:
    """Decodes, prefills and prefill tokens of a batch."""
    lens = np.asarray(query_lens, np.int64)
    num_decodes = count_decodes(lens, decode_query_len)
    return num_decodes, len(lens) - num_decodes, int(lens[num_decodes:].sum())


def _fits(bucket: Bucket, num_decodes: int, num_prefills: int, num_prefill_tokens: int) -> bool:
    late = max(num_decodes - bucket.max_decodes, 0)
    return (
        num_prefills + late <= bucket.max_prefills
        and num_prefill_tokens + late * bucket.decode_query_len <= bucket.max_prefill_tokens
    )


def named(buckets: Iterable[Bucket]) -> str:
    """Each as decodes+prefills/prefill tokens x block columns."""
    sizes = (f"{b.max_decodes}+{b.max_prefills}/{b.max_prefill_tokens}x{b.max_blocks}" for b in buckets)
    return f"(decodes+prefills/prefill_tokens x max_blocks) {', '.join(sizes)}"


@contextlib.contextmanager
def _bar(total: int, is_shown: bool) -> Iterator[Callable[[], Any]]:
    """A tqdm bar as the function that moves it on by one; nothing where there is no tqdm."""
    if not (is_shown and total and importlib.util.find_spec("tqdm")):
        yield lambda: None
        return
    with importlib.import_module("tqdm").tqdm(
        total=total, desc="Compiling decode graphs", unit="bucket"
    ) as bar:
        yield bar.update
