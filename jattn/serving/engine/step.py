"""The compiled step: its function, the sizes it is compiled for, and its warm-up.

The first run of an executable loads its kernels and the second records its CUDA graph: 33 and 14 ms for 36
layers of an 8B model on an H200, for which a request would wait. They are run on empty batches beforehand,
which write nothing, so the caches stay unchanged.

Batch invariance: the rounding of a matrix product depends on its sizes and is the same for all of its rows.
So prompt tokens always run in one executable and generated tokens in another, whatever their step holds, and
cached keys are reused or recomputed by the executable that made them (`Scheduler`). Attention computes each
row independently (`AttentionSpec.batch_invariant`).
"""

import collections
import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache
from jaxtyping import Array, Int32

from jattn.batch.bucket import Bucket
from jattn.batch.metadata import BatchMetadata, build_batch_metadata
from jattn.implementations.selection import as_static_arg, first_supported, requested_implementations
from jattn.models.kv_cache_groups import PerKVCacheGroup
from jattn.pytree import replace
from jattn.runtime.decode_graphs import DecodeGraphs, GraphStep
from jattn.serving.engine.served_model import attention_layers
from pallas_kernels import support
from pallas_kernels.checks import require_type, unsupported

# From this number of tokens, a step's matrix products only use cuBLAS. XLA would also tune Triton kernels,
# which raises the compile time from 3 to 15 CPU-seconds, and would choose, by a single timed run, some
# split-K kernels whose sums are separate kernels. Times of 36 layers of an 8B model without attention on an
# H200, cuBLAS only and XLA's choice: 4.52 and 4.16 ms for 2 tokens, 4.39 and 4.23 for 8, 4.46 and 4.36 for
# 16, 4.55 and 4.59 for 32, 4.46 and 4.77 for 48, 4.62 and 4.97 for 64, 4.97 and 5.38 for 128, 6.47 and 6.58
# for 256, 20.0 and 20.2 for 1024.
CUBLAS_TOKENS = 32
# Autotuning runs on the GPU, one executable at a time: time the five algorithms that cuBLAS ranks highest, do
# not compare their results with each other, and keep XLA's choice of emitters for fusions.
AUTOTUNING = {
    "xla_gpu_autotune_level": 2,
    "xla_gpu_autotune_max_solutions": 5,
    "xla_gpu_experimental_enable_fusion_autotuner": False,
}
MIN_TABLE_WIDTH = 1024  # columns: 1 MB for 256 rows, a negligible transfer
# Number of tokens from which a step's matrix products take longer than reading the weights: the ratio of
# 16-bit operations to bytes per second of an H200, 990e12 / 4.8e12, at less than the full rate.
BALANCE_TOKENS = 256
RUNS = 2  # runs after which an executable reaches its full speed


class SlidingWindowTables(NamedTuple):
    """The block table and slots of layers with their own blocks. Other metadata is shared by all layers.

    Attributes:
        block_table: Block ids of each request; see `BatchMetadata`.
        slot_mapping: Cache slot of each token; see `BatchMetadata`.
    """

    block_table: Int32[Array, "reqs max_blocks"]
    slot_mapping: Int32[Array, " tokens"]


class ModelInputs(NamedTuple):
    """Inputs of a ModelStep besides the metadata. The numpy arrays are transferred to the device together.

    Attributes:
        token_ids: Token ids known to the host [tokens].
        source_rows: Sampler row of the previous step that generated a token [tokens]; -1 if `token_ids` holds
            it.
        last_tokens: New tokens of the previous step, by sampler row; on the device.
        logits_indices: Indices of the tokens whose logits are sampled, by sampler row, then padding. In a
            step with drafts: all tokens.
        num_generated: Number of generated tokens of each sampler row. It passes through the step so that it
            is transferred with the other inputs. None: the sampler gets it separately.
        window_tables: Tables of layers with their own blocks. None: all layers share the metadata's.
        common_prefix_len: Length of a prefix shared by all rows, which is read once. None: no prefix.
    """

    token_ids: Any
    source_rows: Any
    last_tokens: Any
    logits_indices: Any
    num_generated: Any = None
    window_tables: SlidingWindowTables | None = None
    common_prefix_len: Any = None


@dataclasses.dataclass(frozen=True)
class ModelStep:
    """The step function that is compiled for each bucket.

    Attributes:
        graphdef: Model structure from `nnx.split`; the step's params are the model's state.
    """

    graphdef: Any

    def __call__(self, params: Any, caches: Any, metadata: Any, inputs: ModelInputs) -> tuple[Any, Any]:
        """Run the model on a batch.

        Args:
            params: State of the model.
            caches: KV caches of all layers; donated.
            metadata: Metadata of the batch.
            inputs: Tokens of the batch, and what some models or steps need besides.

        Returns:
            Logits at logits_indices, hidden states of all tokens after the final norm, num_generated; and the
            updated caches.
        """
        model = nnx.merge(self.graphdef, params)
        if inputs.window_tables is not None:
            metadata = PerKVCacheGroup(metadata, replace(metadata, **inputs.window_tables._asdict()))
        if inputs.common_prefix_len is None:
            plan = model.plan(metadata, caches)
        else:
            plan = model.plan(metadata, caches, common_prefix_len=inputs.common_prefix_len)
        source_rows = inputs.source_rows
        token_ids = jnp.where(source_rows >= 0, inputs.last_tokens[source_rows], inputs.token_ids)
        hidden, caches = model(token_ids, caches, metadata, plan=plan)
        return (model.logits(hidden[inputs.logits_indices]), hidden, inputs.num_generated), caches


def step_graphs(step: GraphStep, buckets: Iterable[Bucket]) -> DecodeGraphs:
    """Return the executables of a step function, one per bucket."""
    return DecodeGraphs(step, buckets, from_host=True, compiler_options=_compiler_options)


def _compiler_options(bucket: Bucket) -> dict[str, Any]:
    if jax.default_backend() != "gpu":
        return {}
    return AUTOTUNING | ({"xla_gpu_enable_triton_gemm": False} if bucket.max_tokens >= CUBLAS_TOKENS else {})


def with_implementation(model: Any, implementation: str | Sequence[str] | None) -> Any:
    """Return the model with another attention implementation.

    The arrays are shared, the given model unchanged.
    """
    if implementation is None:
        return model
    # Check now, not in the first step.
    first_supported(
        requested_implementations(implementation), {"mosaic_gpu": support.why_not_on(nnx.state(model))}
    )
    model = nnx.merge(*nnx.split(model))
    for layer in attention_layers(model):
        layer.implementation = as_static_arg(implementation)
    return model


def make_invariant(model: Any) -> Any:
    """Return the model with batch-invariant attention. The arrays are shared, the given model unchanged.

    Raises:
        NotImplementedError: If the model has no PagedAttention layers, uses peer memory, or a layer only
            allows the reference implementation.
    """
    if getattr(model, "peers", None) is not None:
        reason = "small steps reduce in peer memory and round once, unlike XLA's all-reduce of larger steps"
        raise unsupported(
            "batch_invariant=True with peer memory",
            reason,
            "Pass a model on which use_peer_memory was not called",
        )
    model = nnx.merge(*nnx.split(model))
    layers = attention_layers(model)
    if not layers:
        reason = f"a {type(model).__name__} has no PagedAttention layers"
        fix = "Pass a model with PagedAttention layers, or batch_invariant=False"
        raise unsupported("batch_invariant=True", reason, fix)
    for layer in layers:
        if set(requested_implementations(layer.implementation)) == {"reference"}:
            reason = "its rounding depends on the bucket size"
            raise unsupported(
                'batch_invariant=True with implementation="reference"',
                reason,
                "Load the model with implementation=None",
            )
        layer.spec = dataclasses.replace(layer.spec, batch_invariant=True)
    return model


# ---------------------------------------------------------------------------------------------- sizes
def step_buckets(max_num_seqs: int, max_num_batched_tokens: int, max_blocks: int) -> list[Bucket]:
    """Return the default buckets of steps without drafts.

    No bucket has a single row: XLA would replace its matrix products by slower elementwise kernels. 32
    attention layers of Llama 3 8B took 2,251 us for one row and 1,547 us for 8.

    Args:
        max_num_seqs: Maximum number of requests per step.
        max_num_batched_tokens: Maximum number of new tokens per step.
        max_blocks: Number of blocks of the longest request.
    """
    sizes_of = cpu_step_sizes if jax.default_backend() == "cpu" else gpu_step_sizes
    sizes = sizes_of(max(max_num_seqs, 2), max_num_batched_tokens)
    widths = table_widths(max_blocks)
    return [bucket_of(*size, max_num_seqs, width) for width in widths for size in sizes]


def bucket_of(rows: int, tokens: int, max_num_seqs: int, max_blocks: int) -> Bucket:
    """Return the bucket with some decode rows and prefill tokens, for at most `max_num_seqs` prompts."""
    return Bucket(
        max_decodes=rows,
        max_prefills=min(max_num_seqs, tokens),
        max_prefill_tokens=tokens,
        max_blocks=max_blocks,
    )


def gpu_step_sizes(max_rows: int, max_tokens: int) -> list[tuple[int, int]]:
    """Return the default sizes on a GPU as (decode rows, prefill tokens).

    Each size takes seconds to compile, so there are only as many as keep nano-vllm's workload within 1 % of
    its time with 73 sizes (`benchmarks engine-model`). Up to 64 rows the time of a decode step is that of
    reading the weights; above, 32 rows of padding cost 0.3 ms of about 8 ms. Prompts run without decodes,
    with up to `max_rows`, and, if they are short, with up to a quarter of that. A prompt whose length lies
    between two sizes is split (`Scheduler`).
    """
    tokens = [max_tokens]
    while tokens[-1] > BALANCE_TOKENS:
        tokens.append(tokens[-1] // 2)
    tokens += [tokens[-1] // 4] if tokens[-1] >= 64 else []
    between = [3 * size // 4 for size in tokens if size > 2048]
    quarter = max_rows // 4
    few_rows_tokens = [size for size in tokens if BALANCE_TOKENS <= size <= 1024] if quarter > 1 else []
    decode_rows = [rows for rows in (2, 8, 16, *range(32, max_rows, 32)) if rows < max_rows]
    return [
        *((rows, 0) for rows in (*decode_rows, max_rows)),
        *((0, size) for size in (*tokens, *between)),
        *((quarter, size) for size in few_rows_tokens),
        *((max_rows, size) for size in tokens),
    ]


def cpu_step_sizes(max_rows: int, max_tokens: int) -> list[tuple[int, int]]:
    """Return the default sizes on a CPU as (decode rows, prefill tokens).

    The time of XLA's CPU compiler grows with the number of different fusions of a step: 53 of a decode step,
    82 of a prefill step and 107 of a step with both regions, for any number of equal layers. So no step has
    both regions, and decodes beside prompts run in the prefill region. Padding is cheap: a decode step of
    SmolLM2-135M takes 5 % longer with 16 rows than with 4.
    """
    decode_rows, tokens = [max_rows], [max_tokens]
    while decode_rows[-1] > 16:
        decode_rows.append(decode_rows[-1] // 4)
    while tokens[-1] >= 128:
        tokens.append(tokens[-1] // 8)
    return [(rows, 0) for rows in decode_rows] + [(0, size) for size in tokens]


def prefill_sizes(max_num_batched_tokens: int) -> list[int]:
    """Return the budget, then repeatedly a quarter of the previous size, down to 16."""
    sizes = [max_num_batched_tokens]
    while sizes[-1] >= 64:
        sizes.append(sizes[-1] // 4)
    return sizes


def table_widths(max_blocks: int) -> list[int]:
    """Return the widths of block tables: `max_blocks`, then repeatedly an eighth of the previous width.

    The smallest width is at least MIN_TABLE_WIDTH, unless max_blocks is smaller. A step transfers its table
    (rows x columns) to the device, and the maximum request length affects the kernel choice, so short
    requests should not use the widest table.
    """
    widths = [max_blocks]
    while widths[-1] > MIN_TABLE_WIDTH:
        widths.append(max(widths[-1] // 8, MIN_TABLE_WIDTH))
    return widths


def invariant_buckets(max_num_seqs: int, max_num_batched_tokens: int, max_blocks: int) -> list[Bucket]:
    """Return the two buckets of a batch-invariant engine: generated tokens only, and prompt tokens only.

    A single row would round differently, so there are two at least. Arguments: see `step_buckets`.
    """
    return [
        Bucket(max_decodes=max(max_num_seqs, 2), max_blocks=max_blocks),
        Bucket(
            max_prefills=min(max_num_seqs, max_num_batched_tokens),
            max_prefill_tokens=max_num_batched_tokens,
            max_blocks=max_blocks,
        ),
    ]


def draft_buckets(max_num_seqs: int, num_tokens: int, max_blocks: int) -> list[Bucket]:
    """Return the buckets of steps with drafts: powers of two rows, as long as drafts can pay off.

    Args:
        max_num_seqs: Maximum number of requests per step.
        num_tokens: Number of drafts per row.
        max_blocks: Number of blocks of the longest request.
    """
    max_rows = min(max_num_seqs, BALANCE_TOKENS)
    rows = [1 << i for i in range((max_rows - 1).bit_length() + 1)]
    return [
        Bucket(max_decodes=n, decode_query_len=1 + num_tokens, max_blocks=width)
        for width in table_widths(max_blocks)
        for n in rows
    ]


def draft_prefill_buckets(max_num_seqs: int, max_num_batched_tokens: int, max_blocks: int) -> list[Bucket]:
    """Return the buckets of a draft model's prefill steps, the largest last; see `step_buckets`."""
    return [
        Bucket(max_prefills=min(max_num_seqs, size), max_prefill_tokens=size, max_blocks=width)
        for width in sorted(table_widths(max_blocks))
        for size in sorted(prefill_sizes(max_num_batched_tokens))
    ]


# -------------------------------------------------------------------------------------------- warm-up
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

    def cold_buckets(self, max_tokens: int | None = None) -> list[Bucket]:
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
    return build_batch_metadata([], [], [], block_size=block_size, bucket=bucket, to_device=False)


def empty_step_inputs(
    bucket: Bucket,
    *,
    block_size: int,
    num_rows: Mapping[Bucket, int],
    max_rows: int,
    has_window_tables: bool,
    has_prefix: bool,
) -> tuple[ModelInputs]:
    """Return a ModelStep's inputs after the metadata, for an empty batch.

    They are numpy arrays, except for arrays that the device computes in real steps.

    Args:
        bucket: Bucket of the step.
        block_size: Number of tokens per block.
        num_rows: Number of sampler rows of each bucket.
        max_rows: Maximum number of sampler rows of any bucket.
        has_window_tables: Whether some layers have their own blocks.
        has_prefix: Whether the step reads a shared prefix once.
    """
    window_tables = None
    if has_window_tables:
        metadata = empty_metadata(bucket, block_size)
        window_tables = SlidingWindowTables(metadata.block_table, metadata.slot_mapping)
    # Rows of several tokens have drafts, which may come from the device.
    make_token_ids: Any = jnp.zeros if bucket.decode_query_len > 1 else np.zeros
    inputs = ModelInputs(
        token_ids=make_token_ids(bucket.max_tokens, np.int32),
        source_rows=np.full(bucket.max_tokens, -1, np.int32),
        last_tokens=jnp.zeros(max_rows, jnp.int32),
        logits_indices=np.zeros(num_rows[bucket] * bucket.decode_query_len, np.int32),
        num_generated=np.zeros(num_rows[bucket], np.int32),
        window_tables=window_tables,
        common_prefix_len=np.zeros((), np.int32) if has_prefix else None,
    )
    return (inputs,)


def use_compilation_cache(folder: str | os.PathLike[str]) -> None:
    """Make JAX store and look up this process's executables, and XLA's autotuning results, in a folder.

    JAX has one such folder per process (`jax_compilation_cache_dir`).

    Raises:
        ValueError: If the value is not a path.
        NotADirectoryError: If the path is a file.
    """
    require_type("cache_dir", folder, (str, os.PathLike), "a folder, or None")
    path = pathlib.Path(folder).expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"cache_dir must be a folder, got the file {path}.")
    path.mkdir(parents=True, exist_ok=True)
    compilation_cache.reset_cache()  # Otherwise JAX keeps using its previous folder.
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
