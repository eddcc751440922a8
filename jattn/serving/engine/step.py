"""The jit-compiled step: a batch through the model to logits."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32, Int32

from jattn.batch.bucket import Bucket
from jattn.batch.check import check_batch
from jattn.batch.metadata import BatchMetadata, build_batch_metadata
from jattn.cache import CacheSpec
from jattn.implementations.selection import as_static_arg, first_supported, requested_implementations
from jattn.models.kv_cache_groups import PerKVCacheGroup
from jattn.nn import PagedAttention
from jattn.pytree import replace
from jattn.runtime.decode_graphs import DecodeGraphs, GraphStep
from jattn.serving.engine.scheduled_step import Step
from pallas_kernels import support

# From this number of tokens, a step's matrix products only use cuBLAS. XLA would also tune Triton kernels,
# which raises the compile time from 3 to 15 CPU-seconds, and would choose, by a single timed run, some
# split-K kernels whose sums are separate kernels. Times of 36 layers of an 8B model without attention on an
# H200, cuBLAS only and XLA's choice: 4.52 and 4.16 ms for 2 tokens, 4.39 and 4.23 for 8, 4.46 and 4.36 for
# 16, 4.55 and 4.59 for 32, 4.46 and 4.77 for 48, 4.62 and 4.97 for 64, 4.97 and 5.38 for 128, 6.47 and 6.58
# for 256, 20.0 and 20.2 for 1024.
CUBLAS_TOKENS = 32


class SlidingWindowTables(NamedTuple):
    """The block table and slots of layers with their own blocks. Other metadata is shared by all layers.

    Attributes:
        block_table: Block ids of each request; see `BatchMetadata`.
        slot_mapping: Cache slot of each token; see `BatchMetadata`.
    """

    block_table: Int32[Array, "reqs max_blocks"]
    slot_mapping: Int32[Array, " tokens"]

    def combine_with(self, metadata: BatchMetadata) -> PerKVCacheGroup:
        """Return the metadata of both groups of layers."""
        return PerKVCacheGroup(metadata, replace(metadata, **self._asdict()))


def sliding_window_tables(
    step: Step, metadata: BatchMetadata, cache_spec: CacheSpec | None, *, checks: bool
) -> SlidingWindowTables | None:
    """Build the tables of a step's sliding-window layers as numpy arrays; None if all layers share theirs.

    Args:
        step: Scheduled requests and tokens of the step.
        metadata: Metadata of the other layers.
        cache_spec: Cache of the sliding-window layers.
        checks: Whether to validate the metadata with `check_batch`.
    """
    if step.sliding_window_tables is None:
        return None
    window_metadata = build_batch_metadata(
        step.query_lens,
        step.seq_lens,
        step.sliding_window_tables,
        block_size=metadata.block_size,
        bucket=metadata.bucket,
        to_device=False,
    )
    if checks and cache_spec is not None:
        check_batch(window_metadata, cache_spec)
    return SlidingWindowTables(window_metadata.block_table, window_metadata.slot_mapping)


class StepTokens(NamedTuple):
    """The tokens of a step. The device takes those that the host does not know yet from the previous step.

    Attributes:
        token_ids: Token ids known to the host.
        source_rows: Sampler row of the previous step that generated this token; -1 if `token_ids` holds it.
        last_tokens: New tokens of the previous step, by sampler row.
        logits_indices: Indices of the tokens whose logits are sampled, by sampler row, then
            padding. In a step with drafts: all tokens.
        sliding_window: Tables of layers with their own blocks. None: all layers share the metadata's tables.
        num_generated: Number of generated tokens of each sampler row, as in `sample`. It passes through the
            step so that it is transferred with the other inputs. None: the sampler gets it separately.
    """

    token_ids: Int32[Array, " tokens"]
    source_rows: Int32[Array, " tokens"]
    last_tokens: Int32[Array, " max_rows"]
    logits_indices: Int32[Array, " positions"]
    sliding_window: SlidingWindowTables | None = None
    num_generated: Int32[Array, " reqs"] | None = None


class StepOutputs(NamedTuple):
    """The outputs of a step other than the KV caches.

    Attributes:
        logits: Logits of the tokens StepTokens.logits_indices.
        hidden: Hidden states of all tokens after the final norm, for `model.logits`.
        num_generated: StepTokens.num_generated, unchanged.
    """

    logits: Float32[Array, "positions vocab"]
    hidden: Float[Array, "tokens hidden"]
    num_generated: Int32[Array, " reqs"] | None


def make_step(graphdef: Any) -> GraphStep:
    """Return the step function that is compiled for each bucket.

    The function maps a batch to StepOutputs and the updated caches. Its optional last argument is the length
    of a prefix shared by all rows, which is read once.

    Args:
        graphdef: Model structure from `nnx.split`; the step's params are the model's state.
    """

    def step(
        params: Any, caches: Any, metadata: Any, tokens: StepTokens, common_prefix_len: Any = None
    ) -> tuple[Any, Any]:
        model = nnx.merge(graphdef, params)
        prefix = {} if common_prefix_len is None else {"common_prefix_len": common_prefix_len}
        metadata = metadata if tokens.sliding_window is None else tokens.sliding_window.combine_with(metadata)
        shared = model.plan(metadata, caches, **prefix)
        token_ids = jnp.where(
            tokens.source_rows >= 0, tokens.last_tokens[tokens.source_rows], tokens.token_ids
        )
        hidden, caches = model(token_ids, caches, metadata, plan=shared)
        return StepOutputs(model.logits(hidden[tokens.logits_indices]), hidden, tokens.num_generated), caches

    return step


def step_graphs(step: GraphStep, buckets: Iterable[Bucket]) -> DecodeGraphs:
    """Return the executables of a step function, one per bucket."""
    return DecodeGraphs(step, buckets, from_host=True, compiler_options=_compiler_options)


def _compiler_options(bucket: Bucket) -> dict[str, Any]:
    is_gpus = jax.default_backend() == "gpu" and bucket.max_tokens >= CUBLAS_TOKENS
    return {"xla_gpu_enable_triton_gemm": False} if is_gpus else {}


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
    for _, module in nnx.iter_modules(model):
        if isinstance(module, PagedAttention):
            module.implementation = as_static_arg(implementation)
    return model
