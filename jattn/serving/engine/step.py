"""What the engine compiles: a batch through the model to logits, and logits to the next token of each row."""

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
from jattn.models.kv_cache_groups import ByReach
from jattn.nn import PagedAttention
from jattn.pytree import replace
from jattn.runtime.decode_graphs import DecodeGraphs, GraphStep
from jattn.serving.engine.scheduled_step import Step
from pallas_kernels import support

# From so many tokens a step's products are cuBLAS's alone. XLA tunes Triton's beside them, which takes
# compiling from 3 to 15 CPU-seconds, and chooses by one timed run some that split columns into parts, whose
# sums are kernels of their own. 36 layers of 8B width without attention on an H200, cuBLAS alone and what XLA
# chose: 4.52 and 4.16 ms for 2 tokens, 4.39 and 4.23 for 8, 4.46 and 4.36 for 16, 4.55 and 4.59 for 32, 4.46
# and 4.77 for 48, 4.62 and 4.97 for 64, 4.97 and 5.38 for 128, 6.47 and 6.58 for 256, 20.0 and 20.2 for 1024.
CUBLAS_TOKENS = 32


class NearTables(NamedTuple):
    """Where a step's keys are in layers that have blocks of their own; the rest they share with the others.

    Attributes:
        block_table: As `BatchMetadata` has it.
        slot_mapping: Likewise.
    """

    block_table: Int32[Array, "reqs max_blocks"]
    slot_mapping: Int32[Array, " tokens"]

    def beside(self, metadata: BatchMetadata) -> ByReach:
        """The metadata of both kinds of layers."""
        return ByReach(metadata, replace(metadata, **self._asdict()))


def near_tables(
    step: Step, metadata: BatchMetadata, cache_spec: CacheSpec | None, *, checks: bool
) -> NearTables | None:
    """The tables of a step, as numpy's arrays; None where all layers share theirs.

    Args:
        step: The step.
        metadata: Of the other layers.
        cache_spec: Of these layers.
        checks: The batch goes through `check_batch`.
    """
    if step.near_tables is None:
        return None
    sizes: dict[str, Any] = {"block_size": metadata.block_size, "bucket": metadata.bucket}
    lens = step.query_lens, step.seq_lens
    near = build_batch_metadata(*lens, step.near_tables, to_device=False, **sizes)
    if checks and cache_spec is not None:
        check_batch(near, cache_spec)
    return NearTables(near.block_table, near.slot_mapping)


class StepTokens(NamedTuple):
    """A step's tokens; some of them only the device knows yet.

    Attributes:
        ids: Tokens as the host knows them.
        rows: The sampler's row in the step before whose new token stands here; -1 where `ids` has it.
        last: New tokens of the step before, by its rows.
        ends: Which tokens are the last of a request: those that the next tokens are drawn for, in the rows of
            the sampler. The rest of these rows are padding. In a step with drafts all tokens, place by place.
        near: The blocks of layers that have their own; None = all layers have the metadata's.
        num_generated: Of each row of the sampler, as in `sample`: it goes through the step, to be sent with
            the rest. None = the sampler has it from elsewhere.
    """

    ids: Int32[Array, " tokens"]
    rows: Int32[Array, " tokens"]
    last: Int32[Array, " max_rows"]
    ends: Int32[Array, " places"]
    near: NearTables | None = None
    num_generated: Int32[Array, " reqs"] | None = None


class StepOutputs(NamedTuple):
    """What a step makes besides its caches.

    Attributes:
        logits: Of the tokens that StepTokens.ends names.
        hidden: Of all tokens, behind the last norm: `model.logits` makes theirs where somebody asks.
        num_generated: StepTokens'.
    """

    logits: Float32[Array, "places vocab"]
    hidden: Float[Array, "tokens hidden"]
    num_generated: Int32[Array, " reqs"] | None


def make_step(graphdef: Any) -> GraphStep:
    """The step that is compiled for each bucket: a batch to StepOutputs and caches.

    What is given behind the tokens is the length of a prefix that all rows share: it is attended to once.

    Args:
        graphdef: Of the model, from `nnx.split`; the params are its state.
    """

    def step(
        params: Any, caches: Any, metadata: Any, tokens: StepTokens, common_prefix_len: Any = None
    ) -> tuple[Any, Any]:
        model = nnx.merge(graphdef, params)
        prefix = {} if common_prefix_len is None else {"common_prefix_len": common_prefix_len}
        metadata = metadata if tokens.near is None else tokens.near.beside(metadata)
        shared = model.plan(metadata, caches, **prefix)
        token_ids = jnp.where(tokens.rows >= 0, tokens.last[tokens.rows], tokens.ids)
        hidden, caches = model(token_ids, caches, metadata, plan=shared)
        return StepOutputs(model.logits(hidden[tokens.ends]), hidden, tokens.num_generated), caches

    return step


def step_graphs(step: GraphStep, buckets: Iterable[Bucket]) -> DecodeGraphs:
    """An engine's executables of a step."""
    return DecodeGraphs(step, buckets, from_host=True, compiler_options=_compiler_options)


def _compiler_options(bucket: Bucket) -> dict[str, Any]:
    is_gpus = jax.default_backend() == "gpu" and bucket.max_tokens >= CUBLAS_TOKENS
    return {"xla_gpu_enable_triton_gemm": False} if is_gpus else {}


def with_implementation(model: Any, implementation: str | Sequence[str] | None) -> Any:
    """The model over the same arrays, its attention by `implementation`; the given one is left as it is."""
    if implementation is None:
        return model
    # Raises now, not in the first step.
    first_supported(
        requested_implementations(implementation), {"mosaic_gpu": support.why_not_on(nnx.state(model))}
    )
    model = nnx.merge(*nnx.split(model))
    for _, module in nnx.iter_modules(model):
        if isinstance(module, PagedAttention):
            module.implementation = as_static_arg(implementation)
    return model
