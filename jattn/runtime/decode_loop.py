"""Many decode steps in one jit, without synchronizing with the host between tokens."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32

from jattn.batch.int_arrays import with_namespace
from jattn.batch.metadata import BatchMetadata
from jattn.batch.transitions import advance
from jattn.pytree import pytree, replace
from pallas_kernels.checks import require, require_int, require_positive, require_shape, require_type

NO_TOKEN = -1

type Step = Callable[[Any, Any, BatchMetadata, Array], tuple[Array, Any]]
type Sample = Callable[[Array, Array], Array]


@pytree
class DecodeLoopOutput:
    """Result of `decode_loop`.

    Attributes:
        tokens: New tokens per row, a stop token included; -1 from num_tokens[r] on.
        num_tokens: Number of new tokens per row.
        num_steps: Number of steps in which some row ran; less than requested if every row stopped.
        last_tokens: Last token per row, the next step's input; 0 for rows that stopped.
        caches: Written caches.
        metadata: Metadata of the next step; rows that stopped are padding.
    """

    tokens: Int32[Array, "reqs num_steps"]
    num_tokens: Int32[Array, " reqs"]
    num_steps: Int32[Array, ""]
    last_tokens: Int32[Array, " reqs"]
    caches: Any
    metadata: BatchMetadata


def decode_loop(
    step: Step,
    params: Any,
    caches: Any,
    metadata: BatchMetadata,
    tokens: Int[Array, " reqs"] | np.ndarray,
    *,
    num_steps: int,
    sample: Sample,
    stop_ids: Sequence[int] | Int[Array, "..."] | np.ndarray = (),
    max_lens: Sequence[int] | Int[Array, " reqs"] | np.ndarray | None = None,
) -> DecodeLoopOutput:
    """Decode up to `num_steps` tokens per row in one loop on the device.

    The loop always runs num_steps iterations: ending early would synchronize with the host before every
    iteration. Iterations without a running row attend to nothing and write nothing.

    Compiles once per bucket, step, sample and num_steps. A `step` or `sample` that holds arrays should be a
    `jax.tree_util.Partial`, so that its arrays are traced; a new lambda compiles anew. May be called in jit.

    Args:
        step: Function `(params, caches, metadata, tokens [reqs]) -> (logits [reqs, vocab], caches)` that
            writes the cache, plans and attends.
        params: Parameters of the step; any pytree.
        caches: Caches of the step, any pytree of PagedCache; donated.
        metadata: Metadata of the first step, with decode rows of one token only. The block table must hold
            the blocks of all tokens to come: a row stops once its columns are full. Pass max_lens if rows
            have fewer blocks than the table has columns.
        tokens: Input token per row in the first step, int [reqs]; padding rows may hold anything.
        num_steps: Maximum number of tokens per row (static).
        sample: Function `(logits [reqs, vocab], index) -> tokens [reqs]`; index counts steps from 0, int32.
        stop_ids: Stop token ids: [stops], or [reqs, stops] padded with -1.
        max_lens: Maximum length per row, prompt included; a row that is already as long decodes nothing.

    Raises:
        ValueError: If the metadata has prefill rows or decode_query_len > 1, shapes do not match, or tokens,
            stop_ids, max_lens or sampled tokens are not ints.
    """
    require_type("metadata", metadata, BatchMetadata, "build_batch_metadata makes it")
    for name, function in (("step", step), ("sample", sample)):
        require(callable(function), name, "be a function", repr(function))
    require_int(num_steps=num_steps)
    require_positive(num_steps=num_steps)
    token_ids, stops, longest = _check_arguments(metadata, tokens, stop_ids, max_lens)
    functions = (
        function if isinstance(function, jax.tree_util.Partial) else jax.tree_util.Partial(function)
        for function in (step, sample)
    )
    return _decode_loop(*functions, params, caches, metadata, token_ids, stops, longest, num_steps=num_steps)


def _check_arguments(
    metadata: BatchMetadata, tokens: Any, stop_ids: Any, max_lens: Any
) -> tuple[Int32[Array, " reqs"], Int32[Array, "reqs stops"], Int32[Array, " reqs"]]:
    """Validate the arguments; return first tokens, stop ids and maximum length per row."""
    bucket, num_reqs = metadata.bucket, metadata.bucket.max_reqs
    require(
        bucket.decode_query_len == 1,
        "metadata.bucket.decode_query_len",
        "be 1 in decode_loop",
        bucket.decode_query_len,
    )
    require(
        bucket.max_prefills == 0,
        "metadata.bucket.max_prefills",
        "be 0 in decode_loop (advance() makes prefill rows decode rows)",
        bucket.max_prefills,
    )
    for name, value, rule in (("tokens", tokens, "be ints"), ("stop_ids", stop_ids, "be ints (() for none)")):
        require(value is not None, name, rule, None)
    _, token_ids, stops, lens = with_namespace(tokens=tokens, stop_ids=stop_ids, max_lens=max_lens)
    require_shape("tokens", token_ids.shape, (num_reqs,), "one entry per row of the metadata")
    stops = jnp.asarray(stops)
    if stops.ndim < 2:
        stops = jnp.broadcast_to(stops, (num_reqs, stops.size))
    require_shape("stop_ids", stops.shape, (num_reqs, stops.shape[-1]), "reqs, stops")
    # The token after the last slot may be sampled but not be an input, hence the 1.
    longest = jnp.full(num_reqs, metadata.block_table.shape[1] * metadata.block_size + 1, jnp.int32)
    if max_lens is not None:
        require_shape("max_lens", lens.shape, (num_reqs,), "one entry per row of the metadata")
        longest = jnp.minimum(longest, jnp.asarray(lens))
    return jnp.asarray(token_ids), stops, longest


@jax.jit(static_argnames="num_steps", donate_argnames="caches")
def _decode_loop(
    step: Step,
    sample: Sample,
    params: Any,
    caches: Any,
    metadata: BatchMetadata,
    tokens: Int32[Array, " reqs"],
    stops: Int32[Array, "reqs stops"],
    max_lens: Int32[Array, " reqs"],
    *,
    num_steps: int,
) -> DecodeLoopOutput:
    def decode(index: Array, state: DecodeLoopOutput) -> DecodeLoopOutput:
        metadata = state.metadata
        is_live = metadata.seq_lens > 0
        logits, caches = step(params, state.caches, metadata, state.last_tokens)
        new = _token_ids(sample(logits, index), metadata.bucket.max_reqs)
        stopped = jnp.any(new[:, None] == stops, axis=-1) | (metadata.seq_lens + 1 >= max_lens)
        is_running = is_live & ~stopped
        return DecodeLoopOutput(
            tokens=state.tokens.at[:, index].set(jnp.where(is_live, new, NO_TOKEN)),
            num_tokens=state.num_tokens + is_live.astype(jnp.int32),
            num_steps=state.num_steps + jnp.any(is_live).astype(jnp.int32),
            last_tokens=jnp.where(is_running, new, 0),
            caches=caches,
            metadata=advance(metadata, is_running=is_running),
        )

    starts = (metadata.seq_lens > 0) & (metadata.seq_lens < max_lens)
    first = DecodeLoopOutput(
        tokens=jnp.full((tokens.shape[0], num_steps), NO_TOKEN, jnp.int32),
        num_tokens=jnp.zeros_like(tokens),
        num_steps=jnp.zeros((), jnp.int32),
        last_tokens=jnp.where(starts, tokens, 0),
        caches=caches,
        metadata=_only_rows(metadata, starts),
    )
    return jax.lax.fori_loop(jnp.int32(0), jnp.int32(num_steps), decode, first)


def _token_ids(sampled: Any, num_reqs: int) -> Int32[Array, " reqs"]:
    """Check that `sample` returned one int token id per row."""
    name = "what sample returns"
    require(hasattr(sampled, "dtype") and hasattr(sampled, "shape"), name, "be an array", repr(sampled)[:80])
    require(jnp.issubdtype(sampled.dtype, jnp.integer), name, "hold ints", sampled.dtype)
    require_shape(name, sampled.shape, (num_reqs,), "one entry per row of the metadata")
    return jnp.asarray(sampled, jnp.int32)


def _only_rows(metadata: BatchMetadata, is_running: Bool[Array, " reqs"]) -> BatchMetadata:
    """Return the decode step's metadata (one token per row) with all other rows as padding."""
    rows = jnp.arange(is_running.shape[0] + 1, dtype=jnp.int32)
    num_rows = jnp.max(jnp.where(is_running, rows[1:], 0), initial=0)
    return replace(
        metadata,
        seq_lens=jnp.where(is_running, metadata.seq_lens, 0),
        query_start_loc=jnp.minimum(rows, num_rows),
        slot_mapping=jnp.where(is_running, metadata.slot_mapping, -1),
        num_decodes=num_rows,
    )
