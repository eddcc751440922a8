"""Many decode steps inside one jit: the host is asked nothing between two tokens."""

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
    """What `decode_loop` made.

    Attributes:
        tokens: The new tokens of each row, a stop token included; -1 from num_tokens[r] on.
        num_tokens: How many each row made.
        num_steps: Steps that some row ran in; fewer than asked for where every row stopped.
        last_tokens: Each row's newest token, the next step's input; 0 for rows that stopped.
        caches: The caches, written.
        metadata: The next step's; rows that stopped are padding.
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
    """Decodes up to `num_steps` tokens of each row in one loop on the device.

    The loop always takes num_steps rounds: one that ended with its last row would have the host ask the
    device before every round. Rounds without a row attend to nothing and write nothing.

    Compiled once for each bucket, step, sample and num_steps. A `step` or `sample` that holds arrays should
    be a `jax.tree_util.Partial` (its arrays are traced), as `serving.sampler.make_sampler` returns; a new
    lambda each time compiles each time. May be called inside jit.

    Args:
        step: `(params, caches, metadata, tokens [reqs]) -> (logits [reqs, vocab], caches)`. It writes, plans
            and attends.
        params: Any pytree.
        caches: Any pytree of PagedCache; donated.
        metadata: The first step's; only decode rows of one token each. The block table must hold blocks for
            all tokens to come: a row stops once its columns are full, but a column that holds no block of
            the row is written like any other. Give max_lens where rows own fewer blocks than columns.
        tokens: The first step's tokens, one a row; padding rows may hold anything.
        num_steps: Static.
        sample: `(logits [reqs, vocab], index) -> tokens [reqs]`; index int32 counts steps from 0.
        stop_ids: Token ids that end a row: [stops], or [reqs, stops] padded with -1.
        max_lens: A row stops when prompt and new tokens are this many; a row as long already makes none.

    Raises:
        ValueError: The metadata has prefill rows or decode_query_len > 1, shapes disagree, or tokens,
            stop_ids, max_lens or what sample returns are no ints.
    """
    require_type("metadata", metadata, BatchMetadata, "build_batch_metadata makes it")
    for name, function in (("step", step), ("sample", sample)):
        require(callable(function), name, "be a function", repr(function))
    require_int(num_steps=num_steps)
    require_positive(num_steps=num_steps)
    token_ids, stops, longest = _checked(metadata, tokens, stop_ids, max_lens)
    as_partial = lambda fn: fn if isinstance(fn, jax.tree_util.Partial) else jax.tree_util.Partial(fn)
    functions = as_partial(step), as_partial(sample)
    return _decode_loop(*functions, params, caches, metadata, token_ids, stops, longest, num_steps=num_steps)


def _checked(
    metadata: BatchMetadata, tokens: Any, stop_ids: Any, max_lens: Any
) -> tuple[Int32[Array, " reqs"], Int32[Array, "reqs stops"], Int32[Array, " reqs"]]:
    """The first tokens, the stops of each row and where it ends at the latest."""
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
    require_shape("tokens", token_ids.shape, (num_reqs,), "rows of the metadata")
    stops = jnp.asarray(stops)
    if stops.ndim < 2:
        stops = jnp.broadcast_to(stops, (num_reqs, stops.size))
    require_shape("stop_ids", stops.shape, (num_reqs, stops.shape[-1]), "reqs, stops")
    # A token past the last column has no slot, so it may be made but not fed: hence the 1.
    longest = jnp.full(num_reqs, metadata.block_table.shape[1] * metadata.block_size + 1, jnp.int32)
    if max_lens is not None:
        require_shape("max_lens", lens.shape, (num_reqs,), "rows of the metadata")
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
    """What `sample` returned, which must be a token id a row: of floats fractions would be cut off."""
    name = "what sample returns"
    require(hasattr(sampled, "dtype") and hasattr(sampled, "shape"), name, "be an array", repr(sampled)[:80])
    require(jnp.issubdtype(sampled.dtype, jnp.integer), name, "hold ints", sampled.dtype)
    require_shape(name, sampled.shape, (num_reqs,), "rows of the metadata")
    return jnp.asarray(sampled, jnp.int32)


def _only_rows(metadata: BatchMetadata, is_kept: Bool[Array, " reqs"]) -> BatchMetadata:
    """The same decode step (one token a row) with the other rows made padding."""
    rows = jnp.arange(is_kept.shape[0] + 1, dtype=jnp.int32)
    num_rows = jnp.max(jnp.where(is_kept, rows[1:], 0), initial=0)
    return replace(
        metadata,
        seq_lens=jnp.where(is_kept, metadata.seq_lens, 0),
        query_start_loc=jnp.minimum(rows, num_rows),
        slot_mapping=jnp.where(is_kept, metadata.slot_mapping, -1),
        num_decodes=num_rows,
    )
