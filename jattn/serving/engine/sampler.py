"""The next token of each row: vLLM's temperature, min_p, top_k and top_p, and a seed per request."""

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

GOLDEN_RATIO = 0x9E3779B9  # of 2**32: multiples of it are spread evenly


@pytree
class SamplingMetadata:
    """SamplingParams of a step's rows. Padding rows are greedy.

    The values are arrays, so others do not recompile. What the rows need of the sampler is static, four
    programs in all: a branch that the data decide would have the host ask the device in every step.

    Attributes:
        temperature: Below 1e-5 = greedy.
        top_k: 0 = off.
        top_p: 1 = off.
        min_p: 0 = off.
        seed: Seed of the row's request.
        draws: Static: some row samples. If not, all are greedy, whatever the arrays say.
        floors: Static: some row that samples has a min_p, or cuts. If not, min_p is ignored, and spares a
            pass over the logits: 42 us of an H200 for 152k tokens of 256 requests.
        cuts: Static: some row that samples has a top_k or top_p. If not, these are ignored.
    """

    temperature: Float32[Array, " reqs"]
    top_k: Int32[Array, " reqs"]
    top_p: Float32[Array, " reqs"]
    min_p: Float32[Array, " reqs"]
    seed: UInt32[Array, " reqs"]
    draws: bool = static()
    floors: bool = static()
    cuts: bool = static()


def build_sampling_metadata(
    params: Sequence[SamplingParams],
    num_rows: int | None = None,
    rows: Sequence[int] | np.ndarray | None = None,
) -> SamplingMetadata:
    """Puts the values of each request into its row.

    Args:
        params: Of each request.
        num_rows: Rows to pad to, `bucket.max_reqs`; None = one a request.
        rows: Each request's row, `jattn.row_indices(query_lens, bucket)`; None = the first ones.

    Raises:
        ValueError: The rows do not fit, or a request that samples has no seed.
    """
    num_rows = len(params) if num_rows is None else num_rows
    rows = np.arange(len(params)) if rows is None else np.asarray(rows, np.int64)
    require(len(rows) == len(params), "rows", f"have one entry per request ({len(params)})", len(rows))
    are_rows = bool(((rows >= 0) & (rows < num_rows)).all())
    require(are_rows, "rows", f"be in [0, {num_rows}), num_rows", rows.tolist())
    for r, one in enumerate(params):
        require(
            one.is_greedy or one.seed is not None, f"params[{r}]", "have a seed to sample (with_seed())", one
        )
    column = lambda values, dtype, off: in_rows(values, rows, np.full(num_rows, off, dtype))
    arrays = {
        "temperature": column([one.temperature for one in params], np.float32, 0),
        "top_k": column([min(max(one.top_k or 0, 0), 2**31 - 1) for one in params], np.int32, 0),
        "top_p": column([one.top_p for one in params], np.float32, 1),
        "min_p": column([one.min_p for one in params], np.float32, 0),
        "seed": column([one.seed or 0 for one in params], np.uint32, 0),
    }
    drawn = [one for one in params if not one.is_greedy]
    cuts = any(one.is_cut for one in drawn)
    floors = cuts or any(one.min_p > 0 for one in drawn)
    return SamplingMetadata(**jax.device_put(arrays), draws=bool(drawn), floors=floors, cuts=cuts)


def in_rows(values: Sequence[float | int], rows: np.ndarray, padded: np.ndarray) -> Any:
    """The values in their rows of `padded`, which is changed."""
    padded[rows] = values
    return padded


def sample(
    logits: Float[Array, "reqs vocab"],
    params: SamplingMetadata,
    num_generated: Int[Array, " reqs"],
) -> Int32[Array, " reqs"]:
    """Picks the next token of each row. Traced.

    Filters in vLLM's order: temperature, min_p, top_k, top_p. Of equal logits the lower token id is the
    likelier one, for greedy rows and at the edge of top_p. A batch without sampling rows costs one argmax;
    one without top_k and top_p is not sorted, one without min_p neither looks for the best of them first.
    Nothing branches on the data.

    Args:
        logits: Of each row's last token; -inf bans a token. Padding rows may hold anything.
        params: Of each row.
        num_generated: Tokens that each row's request has generated before this one. With the seed it fixes
            the row's random numbers: they depend neither on the batch nor on how the steps are run.

    Source: vLLM V1 `Sampler.sample`; differs in the random numbers (`_gumbel`).
    """
    logits = logits.astype(jnp.float32)
    samples = params.temperature >= GREEDY_BELOW
    if params.draws:
        z = _filtered(logits, params, samples)
        noise = jax.vmap(functools.partial(_gumbel, vocab=logits.shape[-1]))(params.seed, num_generated)
        logits = jnp.where(samples[:, None], z + noise, logits)  # one pass over them picks for all rows
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def make_sampler(
    params: SamplingMetadata, num_generated: Int[Array, " reqs"]
) -> Callable[[Array, Array], Array]:
    """`sample` as decode_loop wants it: `(logits, index) -> tokens`, index steps after num_generated.

    A pytree: its arrays are traced where it is passed to a jitted function.
    """
    return jax.tree_util.Partial(_sample_after, params, num_generated)


def _sample_after(params: SamplingMetadata, num_generated: Array, logits: Array, index: Array) -> Array:
    return sample(logits, params, num_generated + index)


def _gumbel(seed: Array, num_generated: Array, vocab: int) -> Float32[Array, " vocab"]:
    """Noise of each token: a hash of it, under a key that threefry makes of the seed and the token's number.

    With noise for 151,936 tokens of 256 requests by threefry alone the pass over their logits took an H200
    318 us, where their bytes take 35. With a hash of two rounds it takes 174 (rows `engine-kernels`).
    """
    key = jax.random.key(seed, impl="threefry2x32")  # named: others may draw by place in the batch
    first, second = jax.random.key_data(jax.random.fold_in(key, num_generated))
    tokens = jax.lax.iota(jnp.uint32, vocab) * jnp.uint32(GOLDEN_RATIO)
    bits = _mixed(_mixed(tokens + first) + second)
    from_1_to_2 = jax.lax.bitcast_convert_type((bits >> 9) | jnp.uint32(0x3F800000), jnp.float32)
    uniform = from_1_to_2 - np.float32(1 - 2**-24)  # odd multiples of 2**-24: never 0 or 1
    return -jnp.log(-jnp.log(uniform))


def _mixed(bits: UInt32[Array, " *shape"]) -> UInt32[Array, " *shape"]:
    """One to one; each bit depends on all. Source: Wellons, "Prospecting for hash functions" (lowbias32)."""
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x21F0AAAD)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0xD35A2D97)
    return bits ^ (bits >> 15)


def _filtered(
    logits: Float32[Array, "reqs vocab"], params: SamplingMetadata, samples: Bool[Array, " reqs"]
) -> Float32[Array, "reqs vocab"]:
    """Logits over temperature; -inf for tokens that a filter takes out."""
    z = logits / jnp.where(samples, params.temperature, 1)[:, None]
    if params.floors:
        below_best = z - jnp.max(z, axis=-1, keepdims=True)
        z = jnp.where(below_best >= jnp.log(params.min_p)[:, None], z, -jnp.inf)
    return _top_k_top_p(z, params.top_k, params.top_p) if params.cuts else z


def _top_k_top_p(
    z: Float32[Array, "reqs vocab"], top_k: Int32[Array, " reqs"], top_p: Float32[Array, " reqs"]
) -> Float32[Array, "reqs vocab"]:
    """Both filters over one sort: what they keep is a prefix of it, so its last member is the threshold."""
    ids = jax.lax.broadcasted_iota(jnp.int32, z.shape, 1)
    ascending, order = jax.lax.sort((-z, ids), num_keys=1, is_stable=True)
    descending = -ascending
    vocab = z.shape[-1]
    nth = lambda array, n: jnp.take_along_axis(array, n[:, None], axis=-1)
    kth = nth(descending, jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab) - 1)
    in_top_k = descending >= kth
    probs = jax.nn.softmax(jnp.where(in_top_k, descending, -jnp.inf), axis=-1)
    before = jnp.pad(jnp.cumsum(probs, axis=-1)[:, :-1], ((0, 0), (1, 0)))
    top_p = top_p[:, None]
    num_kept = jnp.sum(in_top_k & ((before < top_p) | (top_p >= 1)), axis=-1, dtype=jnp.int32)
    last = jnp.maximum(num_kept, 1) - 1  # top_p may be 0 in float32: the likeliest stays
    edge, edge_id = nth(descending, last), nth(order, last)
    return jnp.where((z > edge) | ((z == edge) & (ids <= edge_id)), z, -jnp.inf)
