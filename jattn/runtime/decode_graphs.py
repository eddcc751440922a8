"""Decode graphs: one executable for each bucket, compiled ahead of time, in the place of CUDA graphs."""

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jattn.batch.bucket import Bucket
from jattn.batch.int_arrays import parse_int_vector, python_ints
from jattn.batch.metadata import BatchMetadata, abstract_metadata
from jattn.batch.requests import count_decodes
from jattn.runtime.executables import ExecutableCache, Lower, progress_bar
from jattn.runtime.host_transfer import TransferLayout
from jattn.runtime.parameters import ParameterLeaves
from pallas_kernels.checks import require

WASTE = 4  # a compiled bucket may be so many times as large as the one that fits: compiling takes seconds
# A decode among the prefills is a query tile of its own, over all its keys. 36 layers of 8B width on an H200:
# 248 of them, of 64 blocks, made a step of 8,192 tokens 38 ms longer, 0.15 ms each; a token took 0.022 ms.
BLOCKS_OF_A_TOKEN = 8  # blocks of a decode among the prefills that cost as much as a token more

type GraphStep = Callable[..., tuple[Any, Any]]


class DecodeGraphs:
    """Runs a step with the executable of its bucket.

    What varies inside a bucket (lengths, members, blocks) is traced, so nothing compiles after `precompile`.
    Parameters and caches must keep their shapes and dtypes; another shape is jax's TypeError, not a compile.
    Parameters may be changed in place: a step runs those that it is given as they are then.

    Source: vLLM `CudagraphDispatcher`; larger batches are an error here, not an eager step.
    """

    def __init__(
        self,
        step: GraphStep,
        buckets: Iterable[Bucket],
        *,
        from_host: bool = False,
        compiler_options: Callable[[Bucket], dict[str, Any]] = lambda bucket: {},
    ) -> None:
        """Compiles nothing yet.

        Args:
            step: `(params, caches, metadata, *inputs) -> (outputs, caches)`, jit-able. The caches, any pytree
                of PagedCache, are donated.
            buckets: The sizes to run. Each must have max_blocks.
            from_host: Metadata (`build_batch_metadata(to_device=False)`) and those inputs that are numpy's
                arrays when a bucket is compiled are sent as one array: each takes 0.2 ms of an H200's host.
            compiler_options: What XLA is told for a bucket, as in `jax.jit`.

        Raises:
            ValueError: There is no bucket, one without max_blocks, or what is none; step is no function.
        """
        require(callable(step), "step", "be a function", repr(step))
        is_list = isinstance(buckets, Iterable)
        require(is_list, "buckets", "be a list of Buckets (one: [bucket])", repr(buckets))
        buckets = tuple(buckets)
        for i, bucket in enumerate(buckets):
            require(isinstance(bucket, Bucket), f"buckets[{i}]", "be a Bucket", repr(bucket))
        ordered = sorted(set(buckets), key=_size)
        require(len(ordered) > 0, "buckets", "hold at least one Bucket", ordered)
        self.buckets = tuple(ordered)
        self._step = jax.jit(functools.partial(_on_leaves, step), static_argnums=(0, 1), donate_argnums=3)
        self._from_host = from_host
        self._layouts: dict[Bucket, TransferLayout] = {}  # of what is compiled, or being
        self._leaves: ParameterLeaves | None = None  # of the last step's parameters
        self._executables = ExecutableCache(compiler_options)

    @property
    def num_compiles(self) -> int:
        """Executables compiled so far."""
        return len(self._executables.ready)

    @property
    def executables(self) -> dict[Bucket, jax.stages.Compiled]:
        """What is compiled: to look at its memory_analysis() or as_text()."""
        return dict(self._executables.ready)

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
        executable = self._executables.ready.get(bucket)
        if executable is None:
            rule = f"be one of the buckets {named(self.buckets)}"
            require(bucket in self.buckets, "metadata.bucket", rule, bucket)
            lower = lambda _: self._lowered(leaves.structure, leaves.values, caches, metadata, *inputs)
            executable = self._executables.get(bucket, lower)
        return executable(leaves.values, caches, *self._layouts[bucket].pack((metadata, *inputs)))

    def leaves_of(self, params: Any) -> ParameterLeaves:
        """The parameters' leaves as they are now; the object of the step before where nothing has changed.

        Whoever has looked already may hand these on in the parameters' place: they are taken as they are.

        Raises:
            ValueError: They have not the structure of the first ones.
        """
        if isinstance(params, ParameterLeaves):
            return params
        last = self._leaves
        if last is not None and last.match(params):
            return last
        leaves = ParameterLeaves(params)
        if last is not None and leaves.structure != last.structure:
            require(False, "params", f"keep the structure {last.structure}", leaves.structure)
        self._leaves = leaves
        return leaves

    def precompile(
        self,
        params: Any,
        caches: Any,
        *,
        block_size: int,
        inputs: Callable[[Bucket], Sequence[Any]] = lambda bucket: (),
        progress: bool = True,
        wait: bool = True,
        serves_all: bool = True,
    ) -> None:
        """Compiles the buckets that are not compiled yet, in parallel.

        Tracing stays in this thread, so what a context manager set (mesh, precision) holds for it. Where
        `jax_compilation_cache_dir` is set, JAX keeps the executables there for the next process.

        Args:
            params: The step's, or their ShapeDtypeStructs. Nothing is run and nothing donated.
            caches: The step's, or their ShapeDtypeStructs.
            block_size: Tokens of a cache block.
            inputs: The step's other arguments for a bucket, as ShapeDtypeStructs; as numpy's arrays those
                that `from_host` is about.
            progress: Show a bar, if tqdm is installed.
            wait: False = return when every batch has some bucket that fits it; the rest are traced and
                compiled in threads behind (`wait` below waits for them), out of reach of context managers.
            serves_all: False, without wait = return at once: batches without a bucket go elsewhere meanwhile.
        """
        missing = [bucket for bucket in self.buckets if bucket not in self._executables.ready]
        lower = self._lower_with(params, caches, block_size, inputs)
        first = missing if wait else [one for one in missing if serves_all and not _is_covered(one, missing)]
        with progress_bar(len(first), progress) as moved:
            self._executables.compile_all(first, lower, workers=os.cpu_count() or 1, moved=moved)
        if rest := sorted(set(missing) - set(first), key=_usefulness):
            self._executables.compile_in_background(rest, lower, progress=progress)

    @property
    def is_compiling(self) -> bool:
        """Whether some are being compiled behind what runs."""
        return self._executables.is_compiling

    def wait(self) -> None:
        """Returns when nothing is being compiled behind; raises what went wrong there, if something did."""
        self._executables.wait()

    def _lower_with(
        self, params: Any, caches: Any, block_size: int, inputs: Callable[[Bucket], Sequence[Any]]
    ) -> Lower:
        """Lowers a bucket for arguments such as these; later, when these may have been donated."""
        leaves = self.leaves_of(params)
        structure, given = leaves.structure, jax.tree.map(_abstract, (leaves.values, caches))

        def lower(bucket: Bucket) -> jax.stages.Lowered:
            metadata = abstract_metadata(bucket, block_size)
            if self._from_host:
                metadata = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), metadata)
            return self._lowered(structure, *given, metadata, *inputs(bucket))

        return lower

    def _lowered(self, structure: Any, leaves: Any, caches: Any, *brought: Any) -> jax.stages.Lowered:
        layout = TransferLayout.of(brought, from_host=self._from_host)
        self._layouts[brought[0].bucket] = layout
        return self._step.lower(structure, layout, leaves, caches, *layout.pack(brought))

    def choose(
        self,
        query_lens: Sequence[int] | np.ndarray | None = None,
        *,
        num_decodes: int = 0,
        num_prefills: int = 0,
        num_prefill_tokens: int = 0,
        num_blocks: int = 0,
        decode_query_len: int | None = None,
    ) -> Bucket:
        """The smallest bucket that fits a batch: fewest tokens, then fewest rows, then fewest block columns.

        Decodes beyond a bucket's decode rows are prefills there, as in build_batch_metadata, and cost more:
        each counts as a token more for 8 blocks of the longest request, so that a few of them ride in a
        bucket without decode rows and many do not.

        While buckets are being compiled behind, the smallest that is ready. Else one that is up to 4 times as
        large and ready is taken before another is compiled. A batch of decodes alone takes no bucket with a
        prefill region where there is another.

        Args:
            query_lens: New tokens of each request. None: the three counts say what the batch is.
            num_decodes: Requests with decode_query_len new tokens.
            num_prefills: The other requests.
            num_prefill_tokens: New tokens of these together.
            num_blocks: Blocks of the longest request.
            decode_query_len: Tokens of a bucket's decode rows; None = any.

        Raises:
            ValueError: The batch is larger than every bucket, or there is none with such rows; the message
                lists them. Lengths are no ints of 0 and more.
        """
        able = [one for one in self.buckets if decode_query_len in (None, one.decode_query_len)]
        lens = sorted({one.decode_query_len for one in self.buckets})
        require(able != [], "decode_query_len", f"be one of the buckets' {lens}", decode_query_len)
        given = {"num_decodes": num_decodes, "num_prefills": num_prefills}
        given |= {"num_prefill_tokens": num_prefill_tokens, "num_blocks": num_blocks}
        *counts, num_blocks = python_ints(**given)
        lens_of_batch = None if query_lens is None else parse_int_vector("query_lens", query_lens)
        counted = {}  # by decode_query_len, which most buckets have in common
        fitting: list[tuple[int, Bucket]] = []
        each = max(num_blocks // BLOCKS_OF_A_TOKEN, 1)
        for bucket in able:
            if lens_of_batch is not None:
                if bucket.decode_query_len not in counted:
                    counted[bucket.decode_query_len] = _counts(lens_of_batch, bucket.decode_query_len)
                counts = list(counted[bucket.decode_query_len])
            if _fits(bucket, *counts) and num_blocks <= _max_blocks(bucket):
                fitting.append((bucket.max_tokens + each * _late(bucket, counts[0]), bucket))
        if not fitting:
            batch = f"{counts[0]}+{counts[1]}/{counts[2]}x{num_blocks}"
            raise ValueError(f"the batch must fit one of the buckets {named(able)}, got {batch}.")
        return self._ready_one([bucket for _, bucket in sorted(fitting, key=lambda one: one[0])])

    def _ready_one(self, fitting: Sequence[Bucket]) -> Bucket:
        """The first, or a compiled one behind it that is good enough."""
        best, ready = fitting[0], self._executables.ready
        if best in ready:
            return best
        most = float("inf") if self._executables.is_compiling else WASTE * best.max_tokens
        alike = (one for one in fitting if _is_mixed(one) == _is_mixed(best) and one.max_tokens <= most)
        return next((one for one in alike if one in ready), best)


def _on_leaves(
    step: GraphStep,
    structure: Any,
    layout: TransferLayout,
    leaves: Any,
    caches: Any,
    packed: Any,
    unpacked: Any,
) -> tuple[Any, Any]:
    """The step with its parameters as a flat list, and what is sent together as one array."""
    return step(jax.tree.unflatten(structure, leaves), caches, *layout.unpack(packed, unpacked))


def _size(bucket: Bucket) -> tuple[int, int, int]:
    return bucket.max_tokens, bucket.max_reqs, _max_blocks(bucket)


def _is_mixed(bucket: Bucket) -> bool:
    return bucket.max_prefill_tokens > 0


def _is_covered(one: Bucket, by: Iterable[Bucket]) -> bool:
    """Whether another bucket of its kind takes all that this one takes."""
    sizes = lambda bucket: (
        bucket.max_decodes,
        bucket.max_prefills,
        bucket.max_prefill_tokens,
        _max_blocks(bucket),
    )
    return any(
        other != one
        and (_is_mixed(other), other.decode_query_len) == (_is_mixed(one), one.decode_query_len)
        and all(most >= size for most, size in zip(sizes(other), sizes(one), strict=True))
        for other in by
    )


def _usefulness(bucket: Bucket) -> tuple[bool, int]:
    """What to compile first: powers of two, from above: they are near to everything."""
    is_between = any(size & (size - 1) for size in (bucket.max_decodes, bucket.max_prefill_tokens))
    return is_between, -bucket.max_tokens


def _abstract(leaf: Any) -> Any:
    """An array's shape, dtype and place, without the array."""
    if not isinstance(leaf, jax.Array):
        return leaf
    sharding = leaf.sharding if leaf.committed else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type)


def _max_blocks(bucket: Bucket) -> int:
    require(bucket.max_blocks is not None, "bucket.max_blocks", "be set to compile ahead of time", bucket)
    assert bucket.max_blocks is not None
    return bucket.max_blocks


def _counts(lens: np.ndarray, decode_query_len: int) -> tuple[int, int, int]:
    """Decodes, prefills and prefill tokens of a batch."""
    num_decodes = count_decodes(lens, decode_query_len)
    return num_decodes, len(lens) - num_decodes, int(lens[num_decodes:].sum())


def _late(bucket: Bucket, num_decodes: int) -> int:
    """Decodes beyond the bucket's decode rows: prefills there."""
    return max(num_decodes - bucket.max_decodes, 0)


def _fits(bucket: Bucket, num_decodes: int, num_prefills: int, num_prefill_tokens: int) -> bool:
    late = _late(bucket, num_decodes)
    return (
        num_prefills + late <= bucket.max_prefills
        and num_prefill_tokens + late * bucket.decode_query_len <= bucket.max_prefill_tokens
    )


def named(buckets: Iterable[Bucket]) -> str:
    """Each as decodes+prefills/prefill tokens x block columns."""
    sizes = (f"{b.max_decodes}+{b.max_prefills}/{b.max_prefill_tokens}x{b.max_blocks}" for b in buckets)
    return f"(decodes+prefills/prefill_tokens x max_blocks) {', '.join(sizes)}"
