"""Sampling of the next token with vLLM's temperature, min_p, top_k and top_p, and one seed per request."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, UInt32

from jattn.pytree import pytree, static
from jattn.serving.engine.sampling_params import GREEDY_BELOW, SamplingParams
from pallas_kernels.checks import require

GOLDEN_RATIO = 0x9E3779B9  # 2**32 / golden ratio: its multiples are evenly spread


@pytree
class SamplingMetadata:
    """The sampling parameters of a step's rows. Padding rows are greedy.

    The values are arrays, so they can change without recompilation. The features that the rows need are
    static (four programs in total), because branches on data would make the host wait for the device in every
    step.

    Attributes:
        temperature: Temperature of each row; below 1e-5: greedy.
        top_k: Number of tokens kept in each row; 0: disabled.
        top_p: Probability mass kept in each row; 1: disabled.
        min_p: Minimum relative probability in each row; 0: disabled.
        seed: Random seed of each row's request.
        has_sampling: Static. Whether any row samples. If False, all rows are greedy.
        has_filters: Static. Whether any sampling row has min_p, top_k or top_p. If False, min_p is
            ignored, which saves a pass over the logits (42 us on an H200 for 256 requests and 152k tokens).
        has_top_k_or_top_p: Static. Whether any sampling row has top_k or top_p. If False, both are ignored.
    """

    temperature: Float32[Array, " reqs"]
    top_k: Int32[Array, " reqs"]
    top_p: Float32[Array, " reqs"]
    min_p: Float32[Array, " reqs"]
    seed: UInt32[Array, " reqs"]
    has_sampling: bool = static()
    has_filters: bool = static()
    has_top_k_or_top_p: bool = static()


def build_sampling_metadata(
    params: Sequence[SamplingParams],
    num_rows: int | None = None,
    rows: Sequence[int] | np.ndarray | None = None,
) -> SamplingMetadata:
    """Arrange the sampling parameters of requests in rows.

    Args:
        params: Sampling parameters of each request.
        num_rows: Number of rows including padding (`bucket.max_reqs`). None: one row per request.
        rows: Row of each request (`jattn.row_indices(query_lens, bucket)`). None: the first rows.

    Raises:
        ValueError: If the rows do not fit, or a request that samples has no seed.
    """
    num_rows = len(params) if num_rows is None else num_rows
    rows = np.arange(len(params)) if rows is None else np.asarray(rows, np.int64)
    require(len(rows) == len(params), "rows", f"have one entry per request ({len(params)})", len(rows))
    are_rows = bool(((rows >= 0) & (rows < num_rows)).all())
    require(are_rows, "rows", f"be in [0, {num_rows})", rows.tolist())
    for i, request in enumerate(params):
        require(
            request.is_greedy or request.seed is not None,
            f"params[{i}]",
            "have a seed (see SamplingParams.with_seed)",
            request,
        )

    def column(values: Sequence[float | int], dtype: Any, padding: float | int) -> Any:
        return scatter_rows(values, rows, np.full(num_rows, padding, dtype))

    arrays = {
        "temperature": column([request.temperature for request in params], np.float32, 0),
        "top_k": column([min(max(request.top_k or 0, 0), 2**31 - 1) for request in params], np.int32, 0),
        "top_p": column([request.top_p for request in params], np.float32, 1),
        "min_p": column([request.min_p for request in params], np.float32, 0),
        "seed": column([request.seed or 0 for request in params], np.uint32, 0),
    }
    sampling = [request for request in params if not request.is_greedy]
    has_top_k_or_top_p = any(request.is_cut for request in sampling)
    has_filters = has_top_k_or_top_p or any(request.min_p > 0 for request in sampling)
    return SamplingMetadata(
        **jax.device_put(arrays),
        has_sampling=bool(sampling),
        has_filters=has_filters,
        has_top_k_or_top_p=has_top_k_or_top_p,
    )


def scatter_rows(values: Sequence[float | int], rows: np.ndarray, padded: np.ndarray) -> Any:
    """Write values to their rows of `padded` in place, and return it."""
    padded[rows] = values
    return padded


def sample(
    logits: Float[Array, "reqs vocab"],
    params: SamplingMetadata,
    num_generated: Int[Array, " reqs"],
) -> Int32[Array, " reqs"]:
    """Sample the next token of each row. Works inside jit.

    Filters apply in vLLM's order: temperature, min_p, top_k, top_p. Of equal logits, the lower token id
    counts as more likely, in greedy rows and at the boundary of top_p. Greedy batches cost one argmax,
    batches without top_k and top_p are not sorted, and batches without min_p skip the maximum. There are no
    branches on data.

    Args:
        logits: Logits of each row's last token; -inf bans a token. Padding rows may hold any values.
        params: Sampling parameters of each row.
        num_generated: Number of tokens that each row's request has generated before this one. With the seed
            it determines the random numbers, independent of the batch and of how steps are run.

    Source: vLLM V1 `Sampler.sample`, except for the random numbers (`_gumbel`).
    """
    logits = logits.astype(jnp.float32)
    samples = params.temperature >= GREEDY_BELOW
    if params.has_sampling:
        z = _filter_logits(logits, params, samples)
        noise = jax.vmap(functools.partial(_gumbel, vocab=logits.shape[-1]))(params.seed, num_generated)
        logits = jnp.where(samples[:, None], z + noise, logits)  # one argmax for all rows
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def make_sampler(
    params: SamplingMetadata, num_generated: Int[Array, " reqs"]
) -> Callable[[Array, Array], Array]:
    """Return `sample` in the form that decode_loop requires: `(logits, index) -> tokens`.

    `index` counts the steps after num_generated. The result is a pytree whose arrays are traced if it is
    passed to a jitted function.
    """
    return jax.tree_util.Partial(_sample_after, params, num_generated)


def _sample_after(params: SamplingMetadata, num_generated: Array, logits: Array, index: Array) -> Array:
    return sample(logits, params, num_generated + index)


def _gumbel(seed: Array, num_generated: Array, vocab: int) -> Float32[Array, " vocab"]:
    """Return Gumbel noise per token: a hash of the token under a threefry key of the seed and token number.

    The pass over the logits of 256 requests and 151,936 tokens takes 318 us on an H200 with threefry noise
    for every token, and 174 us with two hash rounds; reading the bytes takes 35 us (rows `engine-kernels`).
    """
    key = jax.random.key(seed, impl="threefry2x32")  # explicit, independent of jax's default
    first, second = jax.random.key_data(jax.random.fold_in(key, num_generated))
    tokens = jax.lax.iota(jnp.uint32, vocab) * jnp.uint32(GOLDEN_RATIO)
    bits = _mix_bits(_mix_bits(tokens + first) + second)
    from_1_to_2 = jax.lax.bitcast_convert_type((bits >> 9) | jnp.uint32(0x3F800000), jnp.float32)
    uniform = from_1_to_2 - np.float32(1 - 2**-24)  # odd multiples of 2**-24, never 0 or 1
    return -jnp.log(-jnp.log(uniform))


def _mix_bits(bits: UInt32[Array, " *shape"]) -> UInt32[Array, " *shape"]:
    """Apply a bijective hash round. Source: Wellons, "Prospecting for hash functions" (lowbias32)."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x21F0AAAD)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0xD35A2D97)
    return bits ^ (bits >> 15)


def _filter_logits(
    logits: Float32[Array, "reqs vocab"], params: SamplingMetadata, samples: Bool[Array, " reqs"]
) -> Float32[Array, "reqs vocab"]:
    """Return the logits divided by the temperature, with -inf for filtered tokens."""
    z = logits / jnp.where(samples, params.temperature, 1)[:, None]
    if params.has_filters:
        below_best = z - jnp.max(z, axis=-1, keepdims=True)
        z = jnp.where(below_best >= jnp.log(params.min_p)[:, None], z, -jnp.inf)
    return _top_k_top_p(z, params.top_k, params.top_p) if params.has_top_k_or_top_p else z


def _top_k_top_p(
    z: Float32[Array, "reqs vocab"], top_k: Int32[Array, " reqs"], top_p: Float32[Array, " reqs"]
) -> Float32[Array, "reqs vocab"]:
    """Apply top_k and top_p with one sort. The last kept token of the sorted row is the threshold."""
    ids = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
    ascending, order = jax.lax.sort((-z, ids), num_keys=1, is_stable=True)
    descending = -ascending
    vocab = z.shape[-1]

    def take(array: Array, index: Array) -> Array:
        return jnp.take_along_axis(array, index[:, None], axis=-1)

    kth = take(descending, jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab) - 1)
    in_top_k = descending >= kth
    probs = jax.nn.softmax(jnp.where(in_top_k, descending, -jnp.inf), axis=-1)
    probs_before = jnp.pad(jnp.cumsum(probs, axis=-1)[:, :-1], ((0, 0), (1, 0)))
    top_p = top_p[:, None]
    num_kept = jnp.sum(in_top_k & ((probs_before < top_p) | (top_p >= 1)), axis=-1, dtype=jnp.int32)
    last = jnp.maximum(num_kept, 1) - 1  # top_p can round to 0: keep the most likely token.
    edge, edge_id = take(descending, last), take(order, last)
    return jnp.where((z > edge) | ((z == edge) & (ids <= edge_id)), z, -jnp.inf)
