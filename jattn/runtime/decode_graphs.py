"""Decode graphs: one executable per bucket, compiled ahead of time, in place of CUDA graphs."""

import functools
import itertools
import operator
import pathlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jattn.batch.bucket import Bucket, count_decodes
from jattn.batch.int_arrays import parse_int_vector, python_ints
from jattn.batch.metadata import BatchMetadata, abstract_metadata
from jattn.runtime.executable_files import ExecutableFiles
from jattn.runtime.executables import ExecutableCache, LowerOrLoad, available_cores, progress_bar
from jattn.runtime.host_transfer import TransferLayout
from jattn.runtime.lowering import AbstractStep, LoweringProcesses, PickledStep
from jattn.runtime.parameters import ParameterLeaves
from pallas_kernels.checks import require

# A compiled bucket up to this many times larger than the best one is used rather than compiling for seconds.
MAX_OVERSIZE = 4
# A decode in the prefill region is a separate query tile over all its keys. On an H200, for 36 layers of 8B
# width, 248 decodes of 64 blocks made a step of 8,192 tokens 38 ms longer, 0.15 ms each; a token took 0.022
# ms.
BLOCKS_PER_TOKEN_COST = 8  # context blocks of a decode in the prefill region that cost as much as one token

# The buckets that compile first, beside the largest, have this many times fewer prefill tokens.
PROMPT_SHARES = (8, 16)

type GraphStep = Callable[..., tuple[Any, Any]]


class DecodeGraphs:
    """Executables of a step function, one per bucket.

    Everything that varies within a bucket (lengths, requests, blocks) is traced, so nothing compiles after
    `precompile`. Parameters and caches must keep their shapes and dtypes; other shapes raise a TypeError
    instead of compiling. Parameters may be changed in place between steps.

    Source: vLLM `CudagraphDispatcher`; batches larger than all buckets are an error, not an eager step.
    """

    def __init__(
        self,
        step: GraphStep,
        buckets: Iterable[Bucket],
        *,
        from_host: bool = False,
        compiler_options: Callable[[Bucket], dict[str, Any]] = lambda bucket: {},
    ) -> None:
        """Create the graphs without compiling.

        Args:
            step: Jit-able function `(params, caches, metadata, *inputs) -> (outputs, caches)`. The caches,
                any pytree of PagedCache, are donated.
            buckets: Buckets to run; each must have max_blocks.
            from_host: Transfer metadata (`build_batch_metadata(to_device=False)`) and the inputs that are
                numpy arrays at compilation as one array: each transfer takes 0.2 ms of an H200's host.
            compiler_options: Function that returns the XLA compiler options of a bucket, as in `jax.jit`.

        Raises:
            ValueError: If buckets is empty or has a bucket without max_blocks, or step is not callable.
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
        self._sizes = [(bucket, _max_blocks(bucket), bucket.decode_query_len) for bucket in ordered]
        self._step = jax.jit(functools.partial(_on_leaves, step), static_argnums=(0, 1), donate_argnums=3)
        self._graph_step, self._from_host = step, from_host
        self._layouts: dict[Bucket, TransferLayout] = {}  # of what is compiled, or being
        self._block_sizes: dict[Bucket, int] = {}
        self._cache_shapes: dict[Bucket, Any] = {}
        self._leaves: ParameterLeaves | None = None  # of the last step's parameters
        self._executables = ExecutableCache(compiler_options)
        self._files: ExecutableFiles | None = None
        self._unwritten: dict[Bucket, tuple[pathlib.Path, Any]] = {}  # files, and results of the steps

    @property
    def num_compiles(self) -> int:
        """Number of executables compiled so far."""
        return len(self._executables.ready)

    @property
    def executables(self) -> dict[Bucket, jax.stages.Compiled]:
        """Compiled executables by bucket, for memory_analysis() or as_text()."""
        return dict(self._executables.ready)

    def __call__(self, params: Any, caches: Any, metadata: BatchMetadata, *inputs: Any) -> tuple[Any, Any]:
        """Run the step; compile it first if its bucket was not precompiled.

        Returns:
            `(outputs, caches)`. The caches passed in are donated: use the returned ones.

        Raises:
            ValueError: If the metadata's bucket is not one of `buckets`, its block_size or the caches differ
                from those at compilation, the structure of the parameters has changed, the caches were
                donated to an earlier step, or the step does not return (outputs, caches).
            TypeError: If another argument has another shape or dtype than at compilation.
        """
        if not isinstance(metadata, BatchMetadata):
            require(False, "metadata", "be a BatchMetadata", type(metadata).__name__)
        bucket, leaves = metadata.bucket, self.leaves_of(params)
        executable = self._executables.ready.get(bucket)
        if executable is None:
            rule = f"be one of the buckets {format_buckets(self.buckets)}"
            require(bucket in self.buckets, "metadata.bucket", rule, bucket)

            def lower(_: Bucket) -> jax.stages.Lowered:
                return self._lower(leaves.structure, leaves.values, caches, metadata, *inputs)

            executable = self._executables.get(bucket, lower)
        if metadata.block_size != (block_size := self._block_sizes[bucket]):
            raise ValueError(
                f"The batch has block_size={metadata.block_size}, but the step was compiled for block_size="
                f"{block_size}. Build the batch with block_size={block_size}."
            )
        if self._files is not None:
            self._files.last_step = time.monotonic()
        try:
            return executable(leaves.values, caches, *self._layouts[bucket].pack((metadata, *inputs)))
        except (TypeError, RuntimeError) as error:
            if "has been deleted" in str(error):
                raise ValueError(
                    "The caches were donated to an earlier step. Pass the caches that it returned: "
                    "outputs, caches = graphs(params, caches, metadata, ...)."
                ) from error
            if isinstance(error, TypeError):
                _require_same_caches(caches, self._cache_shapes[bucket])
                raise TypeError(
                    "An argument has another shape or dtype than those for which the bucket's step was "
                    "compiled. Lay out tokens with jattn.pack_tokens(tokens, metadata.bucket), and other "
                    f"inputs by the bucket's sizes. {error}"
                ) from error
            raise

    def leaves_of(self, params: Any) -> ParameterLeaves:
        """Return the current leaves of the parameters; the previous object if nothing has changed.

        A ParameterLeaves may be passed in place of the parameters and is returned unchanged.

        Raises:
            ValueError: If the structure of the parameters has changed.
        """
        if isinstance(params, ParameterLeaves):
            return params
        last = self._leaves
        if last is not None and last.match(params):
            return last
        leaves = ParameterLeaves(params)
        if last is not None and leaves.structure != last.structure:
            raise ValueError(
                "The structure of params has changed. Create a new DecodeGraphs for other parameters."
            )
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
        processes: LoweringProcesses | None = None,
        files: ExecutableFiles | None = None,
    ) -> None:
        """Compile the buckets that are not compiled yet, in parallel.

        Tracing happens in this thread, so context managers (mesh, precision) apply. If
        `jax_compilation_cache_dir` is set, JAX caches the executables for later processes.

        Args:
            params: Parameters of the step, or their ShapeDtypeStructs. Nothing is run or donated.
            caches: Caches of the step, or their ShapeDtypeStructs.
            block_size: Number of tokens per cache block.
            inputs: Function that returns the step's other arguments for a bucket: ShapeDtypeStructs, or numpy
                arrays for inputs that `from_host` transfers.
            progress: Show a progress bar, if tqdm is installed.
            wait: False returns as soon as every batch fits a compiled bucket; with `processes`, also one with
                few prompt tokens. The remaining buckets are traced and compiled in background threads, where
                context managers do not apply; see the method `wait`.
            serves_all: False, with wait=False, returns at once: batches without a compiled bucket must run
                elsewhere.
            processes: Processes that lower steps, where context managers do not apply. All are lowered at
                once, and their kernels compiled before them. None: this process lowers them.
            files: With `processes`, files in which later processes find the executables. None: no files.
        """
        missing = [bucket for bucket in self.buckets if bucket not in self._executables.ready]
        self._files = files
        step_inputs = functools.partial(self._abstract_inputs, block_size, inputs)
        structure, arguments = self._abstract_arguments(params, caches)
        first = (
            missing
            if wait
            else [bucket for bucket in missing if serves_all and not _is_covered(bucket, missing)]
        )
        if processes is not None and not wait:
            first += _with_few_prompt_tokens(first, missing)
        remaining = [bucket for bucket in missing if bucket not in first]
        if processes is not None:
            self._executables.compile_groups_in_background(
                [first, remaining],
                self._load_or_lower_with(structure, arguments, step_inputs, processes),
                lowering_threads=processes.num_processes,
                progress=progress,
                on_compiled=self._write_later,
                kept=self._unwritten,
            )
            self._executables.wait_for(first)
            return

        def lower(bucket: Bucket) -> jax.stages.Lowered:
            return self._lower(structure, *arguments, *step_inputs(bucket))

        with progress_bar(len(first), progress) as on_ready:
            self._executables.compile_all(first, lower, workers=available_cores(), on_ready=on_ready)
        if remaining:
            remaining.sort(key=_usefulness)
            self._executables.compile_in_background(remaining, lower, progress=progress)

    @property
    def is_compiling(self) -> bool:
        """Whether buckets are being compiled in the background."""
        return self._executables.is_compiling

    def wait(self) -> None:
        """Wait for background compilation; raise its error, if any."""
        self._executables.wait()

    def _abstract_inputs(
        self, block_size: int, inputs: Callable[[Bucket], Sequence[Any]], bucket: Bucket
    ) -> tuple[Any, ...]:
        """Return the metadata of a bucket and the step's other inputs, as `precompile` takes them."""
        metadata = abstract_metadata(bucket, block_size)
        if self._from_host:
            metadata = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), metadata)
        return metadata, *inputs(bucket)

    def _abstract_arguments(self, params: Any, caches: Any) -> tuple[Any, tuple[Any, Any]]:
        """Return the structure of the parameters, and their leaves and the caches as ShapeDtypeStructs.

        What lowers for these also works after `params` and `caches` were donated.
        """
        leaves = self.leaves_of(params)
        return leaves.structure, jax.tree.map(_abstract, (leaves.values, caches))

    def _load_or_lower_with(
        self,
        structure: Any,
        arguments: tuple[Any, Any],
        step_inputs: Callable[[Bucket], tuple[Any, ...]],
        processes: LoweringProcesses,
    ) -> LowerOrLoad:
        """Return a function that finds a bucket's step in its file or has it lowered, here if it must be.

        Args:
            structure: Structure of the parameters.
            arguments: Leaves of the parameters and caches, as ShapeDtypeStructs.
            step_inputs: Function that returns a bucket's metadata and other inputs.
            processes: Processes that lower steps.
        """
        params, caches = jax.tree.unflatten(structure, arguments[0]), arguments[1]
        step = PickledStep.of(AbstractStep(self._graph_step, params, caches, self._from_host))

        def lower(bucket: Bucket) -> jax.stages.Lowered | jax.stages.Compiled:
            inputs, found = step_inputs(bucket), None
            if step is not None:
                found = self._load_or_lower_elsewhere(step, arguments, inputs, processes)
            return self._lower(structure, *arguments, *inputs) if found is None else found

        return lower

    def _load_or_lower_elsewhere(
        self,
        step: PickledStep,
        arguments: tuple[Any, Any],
        inputs: tuple[Any, ...],
        processes: LoweringProcesses,
    ) -> jax.stages.Lowered | jax.stages.Compiled | None:
        """Return a bucket's step from its file or from a process; None if this process must lower it.

        Args:
            step: Step to lower.
            arguments: Leaves of the parameters and caches, as ShapeDtypeStructs.
            inputs: The bucket's metadata and other inputs.
            processes: Processes that lower steps.
        """
        if (request := step.request(inputs)) is None:
            return None
        bucket = inputs[0].bucket
        self._cache_shapes[bucket] = arguments[1]
        step_arguments = (*arguments, *self._layout_of(inputs).pack(inputs))
        if (files := self._files) is not None:
            file = files.file_of(request, self._executables.options(bucket))
            if (executable := files.load(file, step.device, step_arguments)) is not None:
                return executable
        if (module := processes.lower(request)) is None:
            return None
        if files is not None:
            self._unwritten[bucket] = file, module.results
        return module.lower(*step_arguments)

    def _write_later(self, bucket: Bucket, executable: jax.stages.Compiled) -> None:
        """Write a compiled executable to its file, if it has one."""
        if self._files is not None and bucket in self._unwritten:
            file, results = self._unwritten.pop(bucket)
            self._files.write_later(file, executable, results)

    def _lower(self, structure: Any, leaves: Any, caches: Any, *step_inputs: Any) -> jax.stages.Lowered:
        layout = self._layout_of(step_inputs)
        self._cache_shapes[step_inputs[0].bucket] = jax.tree.map(_abstract, caches)
        return self._step.lower(structure, layout, leaves, caches, *layout.pack(step_inputs))

    def _layout_of(self, step_inputs: Sequence[Any]) -> TransferLayout:
        """Return the layout of a step's metadata and inputs, and keep it for the bucket's calls."""
        layout = TransferLayout.of(step_inputs, from_host=self._from_host)
        metadata = step_inputs[0]
        self._layouts[metadata.bucket] = layout
        self._block_sizes[metadata.bucket] = metadata.block_size
        return layout

    def choose(
        self,
        query_lens: Sequence[int] | np.ndarray | None = None,
        *,
        num_decodes: int = 0,
        num_prefills: int = 0,
        num_prefill_tokens: int = 0,
        num_blocks: int | None = None,
        decode_query_len: int | None = None,
    ) -> Bucket:
        """Return the smallest bucket that fits a batch: fewest tokens, then rows, then block columns.

        Decodes beyond a bucket's decode rows become prefills, as in build_batch_metadata, which cost more:
        each counts as one more token per 8 blocks of the longest request. So a bucket without decode rows is
        chosen for a few of them, but not for many.

        During background compilation the smallest compiled bucket is chosen. Otherwise a compiled bucket up
        to 4 times as large is preferred to compiling another. A batch of decodes only uses a bucket with a
        prefill region only if there is no other.

        Args:
            query_lens: Number of new tokens per request; None uses the three counts below.
            num_decodes: Number of requests with decode_query_len new tokens.
            num_prefills: Number of the other requests.
            num_prefill_tokens: Total number of new tokens of the prefills.
            num_blocks: Number of blocks of the longest request; required if the buckets have different
                max_blocks.
            decode_query_len: Number of tokens per decode row of the bucket; None allows any.

        Raises:
            ValueError: If no bucket fits the batch (the message lists the buckets), lengths are not ints of
                at least 0, or num_blocks is missing.
        """
        if num_blocks is None:
            widths = sorted({bucket.max_blocks or 0 for bucket in self.buckets})
            require(len(widths) == 1, "num_blocks", f"be given for buckets with max_blocks {widths}", None)
            num_blocks = 0
        lens = sorted({bucket.decode_query_len for bucket in self.buckets})
        is_available = decode_query_len is None or decode_query_len in lens
        rule = f"be the decode_query_len of a bucket, one of {lens}"
        require(is_available, "decode_query_len", rule, decode_query_len)
        *counts, num_blocks = python_ints(
            num_decodes=num_decodes,
            num_prefills=num_prefills,
            num_prefill_tokens=num_prefill_tokens,
            num_blocks=num_blocks,
        )
        sizes = {
            "num_decodes": counts[0],
            "num_prefills": counts[1],
            "num_prefill_tokens": counts[2],
            "num_blocks": num_blocks,
        }
        for name, size in sizes.items():
            require(size >= 0, name, "be at least 0", size)
        if query_lens is not None:
            return self.choose_for(parse_int_vector("query_lens", query_lens), num_blocks, decode_query_len)
        return self._choose(dict.fromkeys(lens, tuple(counts)), num_blocks, decode_query_len)

    def choose_for(
        self, query_lens: np.ndarray, num_blocks: int, decode_query_len: int | None = None
    ) -> Bucket:
        """Return the smallest bucket that fits these requests; as `choose`, with arguments that are valid.

        Args:
            query_lens: Number of new tokens per request.
            num_blocks: Number of blocks of the longest request.
            decode_query_len: Number of tokens per decode row of the bucket; None allows any.
        """
        counts = {}
        for length in {size for *_, size in self._sizes}:  # which most buckets have in common
            num_decodes = count_decodes(query_lens, length)
            num_prefill_tokens = int(query_lens[num_decodes:].sum())
            counts[length] = num_decodes, len(query_lens) - num_decodes, num_prefill_tokens
        return self._choose(counts, num_blocks, decode_query_len)

    def _choose(
        self, counts: Mapping[int, tuple[int, ...]], num_blocks: int, decode_query_len: int | None
    ) -> Bucket:
        """Choose a bucket, given the numbers of decodes, prefills and prefill tokens by decode_query_len."""
        fitting: list[tuple[int, Bucket]] = []
        cost_per_decode = max(num_blocks // BLOCKS_PER_TOKEN_COST, 1)
        for bucket, max_blocks, length in self._sizes:
            if num_blocks > max_blocks or (decode_query_len is not None and length != decode_query_len):
                continue
            num_decodes, num_prefills, num_prefill_tokens = counts[length]
            num_late = max(num_decodes - bucket.max_decodes, 0)  # These decodes become prefills.
            if (
                num_prefills + num_late <= bucket.max_prefills
                and num_prefill_tokens + num_late * length <= bucket.max_prefill_tokens
            ):
                fitting.append((bucket.max_tokens + cost_per_decode * num_late, bucket))
        if not fitting:
            candidates = [bucket for bucket, _, length in self._sizes if decode_query_len in (None, length)]
            num_decodes, num_prefills, num_prefill_tokens = counts[candidates[-1].decode_query_len]
            batch = f"{num_decodes}+{num_prefills}/{num_prefill_tokens}x{num_blocks}"
            raise ValueError(
                f"The batch {batch} does not fit any of the buckets {format_buckets(candidates)}. "
                "Add a larger bucket."
            )
        fitting.sort(key=operator.itemgetter(0))
        return self._ready_one([bucket for _, bucket in fitting])

    def _ready_one(self, fitting: Sequence[Bucket]) -> Bucket:
        """Return the best fitting bucket, or a compiled one that is good enough."""
        best, ready = fitting[0], self._executables.ready
        if best in ready:
            return best
        max_tokens = float("inf") if self._executables.is_compiling else MAX_OVERSIZE * best.max_tokens
        candidates = (
            bucket
            for bucket in fitting
            if _is_mixed(bucket) == _is_mixed(best) and bucket.max_tokens <= max_tokens
        )
        return next((bucket for bucket in candidates if bucket in ready), best)


def _on_leaves(
    step: GraphStep,
    structure: Any,
    layout: TransferLayout,
    leaves: Any,
    caches: Any,
    packed: Any,
    remaining: Any,
) -> tuple[Any, Any]:
    """Call the step with its parameters as a flat list and the host arrays packed into one."""
    result = step(jax.tree.unflatten(structure, leaves), caches, *layout.unpack(packed, remaining))
    _require_outputs_and_caches(result, caches)
    return result


def _require_outputs_and_caches(result: Any, caches: Any) -> None:
    """Raise ValueError unless a step returned outputs, and caches like those that it received."""
    if not isinstance(result, tuple) or len(result) != 2:
        got = f"a tuple of {len(result)}" if isinstance(result, tuple) else f"a {type(result).__name__}"
        raise ValueError(f"step must return a tuple (outputs, caches), got {got}.")
    returned, received = (
        [f"{leaf.dtype}{list(leaf.shape)}" for leaf in map(jax.typeof, jax.tree.leaves(tree))]
        for tree in (result[1], caches)
    )
    if returned != received:
        differences = (pair for pair in zip(received, returned, strict=False) if pair[0] != pair[1])
        counts = f"{len(received)} arrays", f"{len(returned)}"
        expected, got = counts if len(returned) != len(received) else next(differences)
        raise ValueError(
            "step must return (outputs, caches) with caches like those that it received, "
            f"{expected}, got {got}."
        )


def _require_same_caches(caches: Any, compiled: Any) -> None:
    """Raise ValueError if caches have another structure, shape or dtype than those of a compiled step."""
    fix = "Pass caches like those, or create a new DecodeGraphs for other caches."
    structure: Any = jax.tree.structure(caches)
    compiled_structure = jax.tree.structure(compiled)
    if structure != compiled_structure:
        raise ValueError(
            f"The caches are {structure}, but the step was compiled for {compiled_structure}. {fix}"
        )
    for (path, leaf), expected in zip(
        jax.tree.leaves_with_path(caches), jax.tree.leaves(compiled), strict=True
    ):
        if (leaf.shape, leaf.dtype) != (expected.shape, expected.dtype):
            raise ValueError(
                f"caches{jax.tree_util.keystr(path)} is {leaf.dtype}{list(leaf.shape)}, but the step was "
                f"compiled for {expected.dtype}{list(expected.shape)}. {fix}"
            )


def _size(bucket: Bucket) -> tuple[int, int, int]:
    return bucket.max_tokens, bucket.max_reqs, _max_blocks(bucket)


def _is_mixed(bucket: Bucket) -> bool:
    return bucket.max_prefill_tokens > 0


def _is_covered(bucket: Bucket, by: Iterable[Bucket]) -> bool:
    """Return whether another bucket of the same kind fits every batch that this one fits."""
    return any(
        larger != bucket
        and (_is_mixed(larger), larger.decode_query_len) == (_is_mixed(bucket), bucket.decode_query_len)
        and all(bound >= size for bound, size in zip(_sizes(larger), _sizes(bucket), strict=True))
        for larger in by
    )


def _with_few_prompt_tokens(first: Iterable[Bucket], others: Iterable[Bucket]) -> list[Bucket]:
    """Return the largest buckets with shares of the prefill tokens, for each mixed bucket of `first`.

    Until all buckets are compiled, the prompts that arrive one by one beside decodes use them.
    """
    found = []
    for large, share in itertools.product(filter(_is_mixed, first), PROMPT_SHARES):
        small = [
            bucket
            for bucket in others
            if _is_mixed(bucket)
            and bucket.max_prefill_tokens * share <= large.max_prefill_tokens
            and (bucket.max_decodes, bucket.decode_query_len, bucket.max_blocks)
            == (large.max_decodes, large.decode_query_len, large.max_blocks)
        ]
        found += sorted(small, key=_size)[-1:]
    return list(dict.fromkeys(found))


def _sizes(bucket: Bucket) -> tuple[int, int, int, int]:
    """Return the sizes of a batch that a bucket bounds."""
    return bucket.max_decodes, bucket.max_prefills, bucket.max_prefill_tokens, _max_blocks(bucket)


def _usefulness(bucket: Bucket) -> tuple[bool, int]:
    """Return the sort key of compilation: powers of two first, from the largest down."""
    is_between = any(size & (size - 1) for size in (bucket.max_decodes, bucket.max_prefill_tokens))
    return is_between, -bucket.max_tokens


def _abstract(leaf: Any) -> Any:
    """Return the shape, dtype and sharding of an array as a ShapeDtypeStruct."""
    if not isinstance(leaf, jax.Array):
        return leaf
    sharding = leaf.sharding if leaf.committed else None
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type)


def _max_blocks(bucket: Bucket) -> int:
    require(bucket.max_blocks is not None, "bucket.max_blocks", "be set to compile ahead of time", bucket)
    assert bucket.max_blocks is not None
    return bucket.max_blocks


def format_buckets(buckets: Iterable[Bucket]) -> str:
    """Format buckets as decodes+prefills/prefill_tokens x max_blocks."""
    sizes = (f"{b.max_decodes}+{b.max_prefills}/{b.max_prefill_tokens}x{b.max_blocks}" for b in buckets)
    return f"(decodes+prefills/prefill_tokens x max_blocks) {', '.join(sizes)}"
