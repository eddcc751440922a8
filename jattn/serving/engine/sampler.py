"""Sampling after a step: vLLM's temperature, min_p, top_k and top_p with one seed per request, and drafts.

A draft is accepted if the model samples the same token.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Int32, UInt32

from jattn.batch.bucket import Bucket
from jattn.parallel import logits_sharding, replicated_sharding
from jattn.pytree import pytree, replace, static
from jattn.serving.engine.logits_processors import LogitsAdjustments, adjust_logits
from jattn.serving.engine.logprobs import TokenLogprobs, compute_logprobs
from jattn.serving.engine.sampling_params import GREEDY_BELOW, SamplingParams
from jattn.serving.engine.served_model import ServedModel
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
        padded = np.full(num_rows, padding, dtype)
        padded[rows] = values
        return padded

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
    threshold, last_id = take(descending, last), take(order, last)
    return jnp.where((z > threshold) | ((z == threshold) & (ids <= last_id)), z, -jnp.inf)


class StepOutputs(NamedTuple):
    """Results of a step, on the device until `Runner.read` fetches them.

    Attributes:
        token_ids: Sampled token of each row, padded to the sampler's maximum number of rows, as input of any
            bucket's next step. In a step with drafts, [reqs, query_len]: the token that the model samples
            after each of a row's tokens. The first `num_accepted + 1` of them are the row's new tokens: the
            accepted drafts and one more. The rest follow a rejected draft and are invalid.
        num_accepted: Number of leading drafts of each row that are accepted; None in a step without drafts.
        logprobs: Log-probabilities at the positions `row * query_len + i`, if requested.
        prompt_logprobs: Log-probabilities of the token after each token of the step, if requested.
    """

    token_ids: Int32[Array, " max_rows"] | Int32[Array, "reqs query_len"]
    num_accepted: Int32[Array, " reqs"] | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None


@functools.partial(jax.jit, static_argnames="num_logprobs")
def rejection_sample(
    logits: Float[Array, "positions vocab"],
    token_ids: Int[Array, " positions"],
    num_drafts: Int[Array, " reqs"],
    sampling: SamplingMetadata,
    num_generated: Int[Array, " reqs"],
    adjustments: LogitsAdjustments | None = None,
    *,
    num_logprobs: int | None = None,
) -> StepOutputs:
    """Sample a token after each token of the rows, and accept the drafts that match.

    A position is one of the `1 + drafts` tokens of a row. Each position samples with the noise that a step
    without drafts would use, which depends on the request's seed and its number of tokens. Drafts therefore
    change when tokens arrive but never which tokens: the result equals decoding token by token, greedy
    or not. A draft is accepted with the probability that the model samples it, p(draft), as in rejection
    sampling with a draft of probability one. A draft model that samples with the same noise agrees with
    probability >= (1 - d) / (1 + d), where d is the total-variation distance of the two distributions;
    rejection sampling by probabilities reaches 1 - d. In return, no draft probabilities [reqs, drafts, vocab]
    are stored, and a seed has the same meaning as without drafts.

    Args:
        logits: Logits of each position.
        token_ids: The step's tokens by position: a row's last token and its drafts, then any padding.
        num_drafts: Number of drafts of each row.
        sampling: Sampling parameters of the rows.
        num_generated: Number of tokens that each row's request has generated before this step.
        adjustments: Adjustments of the logits; earlier drafts count as generated.
        num_logprobs: Number of most likely tokens to report; None: no log-probabilities. Static.

    Source: vLLM V1 `RejectionSampler`, except for the noise, which follows Daliri et al., "Coupling without
    communication and drafter-invariant speculative decoding" (2024).
    """
    num_rows = num_generated.shape[0]
    query_len = logits.shape[0] // num_rows
    drafts = token_ids.reshape(num_rows, query_len)[:, 1:]

    def repeat_rows(rows: Array) -> Array:
        return jnp.repeat(rows, query_len, axis=0)

    offsets = jnp.tile(jnp.arange(query_len, dtype=jnp.int32), num_rows)
    counts = repeat_rows(num_generated) + offsets
    logits = logits.astype(jnp.float32)
    adjusted_logits = logits
    if adjustments is not None:
        adjusted_logits = adjust_logits(
            logits, _adjustments_per_position(adjustments, drafts, offsets), counts
        )
    columns = {name: repeat_rows(getattr(sampling, name)) for name in _COLUMNS}
    picked = sample(adjusted_logits, replace(sampling, **columns), counts)
    tokens = picked.reshape(num_rows, query_len)
    is_draft = jnp.arange(query_len - 1)[None, :] < num_drafts[:, None]
    agrees = (tokens[:, :-1] == drafts) & is_draft
    num_accepted = jnp.sum(jnp.cumprod(agrees.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    logprobs = None if num_logprobs is None else compute_logprobs(logits, picked, num_logprobs)
    return StepOutputs(tokens, num_accepted, logprobs)


_COLUMNS = ("temperature", "top_k", "top_p", "min_p", "seed")


def _adjustments_per_position(
    adjustments: LogitsAdjustments, drafts: Int[Array, "reqs drafts"], offsets: Int32[Array, " positions"]
) -> LogitsAdjustments:
    """Return the rows' adjustments for each position, with the drafts before it counted as generated."""
    query_len = drafts.shape[1] + 1
    repeated = jax.tree.map(lambda rows: jnp.repeat(rows, query_len, axis=0), adjustments)
    no_token = jnp.iinfo(jnp.int32).max  # outside every vocabulary, so it is dropped
    is_before = jnp.arange(query_len - 1, dtype=jnp.int32)[None, :] < offsets[:, None]
    drafted = jnp.where(is_before, jnp.repeat(drafts, query_len, axis=0).astype(jnp.int32), no_token)
    outputs = jnp.concatenate([repeated.output_ids, drafted], axis=1)
    positions = jnp.tile(jnp.arange(query_len, dtype=jnp.int32), adjustments.bias_rows.shape[0])
    bias_rows = repeated.bias_rows * query_len + positions
    return repeated._replace(output_ids=outputs, last=adjustments.last, bias_rows=bias_rows)


@functools.partial(jax.jit, static_argnames=("max_rows", "num_logprobs"))
def next_tokens(
    logits: Float[Array, "reqs vocab"],
    sampling: SamplingMetadata,
    num_generated: Int32[Array, " reqs"],
    adjustments: LogitsAdjustments | None = None,
    *,
    max_rows: int,
    num_logprobs: int | None = None,
) -> StepOutputs:
    """Sample from adjusted logits, and compute the log-probabilities of the model's unmodified logits.

    This is not part of the step, so that the model is not compiled for each combination of sampling features.

    Args:
        logits: Logits of each row's last token.
        sampling: Sampling parameters of the rows.
        num_generated: Number of generated tokens of each row; see `sample`.
        adjustments: Adjustments of the logits; None: no adjustments.
        max_rows: Maximum number of sampler rows. Static.
        num_logprobs: Number of most likely tokens to report; None: no log-probabilities. Static.
    """
    logits = logits.astype(jnp.float32)
    adjusted_logits = logits if adjustments is None else adjust_logits(logits, adjustments, num_generated)
    tokens = sample(adjusted_logits, sampling, num_generated)
    logprobs = None if num_logprobs is None else compute_logprobs(logits, tokens, num_logprobs)
    return StepOutputs(jnp.pad(tokens, (0, max_rows - tokens.shape[0])), logprobs=logprobs)


def num_sampler_rows(bucket: Bucket, max_num_seqs: int) -> int:
    """Return the number of sampler rows of a bucket: a power of two, or 1.5 times one.

    These few sizes keep the compile time of all samplers at seconds. There are at least two rows, because for
    one row XLA and cuBLAS convert the whole output matrix to f32 first (0.9 ms and 2.5 GB for 152k tokens of
    an 8B model).
    """
    rows = max(min(bucket.max_reqs, max_num_seqs), 2)
    power = 1 << (rows - 1).bit_length()
    return 3 * power // 4 if power > 2 and 3 * power // 4 >= rows else power


class Sampler:
    """The samplers of an engine, in few sizes for many buckets.

    Attributes:
        num_rows: Number of sampler rows of each bucket. Steps with drafts have one per decode row; other
            steps have one per request.
        max_rows: Maximum number of rows of any bucket.
    """

    def __init__(
        self, buckets: Sequence[Bucket], max_num_seqs: int, model: ServedModel, *, is_on_mesh: bool
    ) -> None:
        """Prepare the samplers. Nothing is compiled yet.

        Args:
            buckets: Buckets of all steps.
            max_num_seqs: Maximum number of requests per step.
            model: Model that computes the logits.
            is_on_mesh: Whether sampling metadata is placed on the model's mesh. False with several processes,
                where that would be a collective operation: each step's message contains the metadata.
        """
        self._vocab_size = model.config.vocab_size
        self._by_vocabulary, self._replicated = logits_sharding(model), replicated_sharding(model)
        self._metadata_sharding = self._replicated if is_on_mesh else None
        self._gather = jax.jit(lambda logits: logits, out_shardings=self._replicated)
        self.num_rows = {
            bucket: bucket.max_decodes
            if bucket.decode_query_len > 1
            else num_sampler_rows(bucket, max_num_seqs)
            for bucket in buckets
        }
        self.max_rows = max(self.num_rows.values())
        self._last_requests: tuple[tuple[int, ...], int] | None = None  # of _last_metadata
        self._last_metadata: SamplingMetadata

    def metadata(
        self, request_ids: tuple[int, ...], params: Sequence[SamplingParams], num_rows: int
    ) -> SamplingMetadata:
        """Return the sampling metadata of a step, rebuilt only if the requests have changed.

        Args:
            request_ids: Request of each row.
            params: Sampling parameters of each row.
            num_rows: Number of sampler rows.
        """
        if self._last_requests != (request_ids, num_rows):
            metadata = build_sampling_metadata(params, num_rows)
            if self._metadata_sharding is not None:
                metadata = jax.device_put(metadata, self._metadata_sharding)
            self._last_requests, self._last_metadata = (request_ids, num_rows), metadata
        return self._last_metadata

    def compile(self, rows: int, query_len: int) -> None:
        """Compile the samplers of one size, one executable for each combination of features.

        Nothing runs: on several devices, this thread and the engine would have to start work in the same
        order everywhere. jit caches the executables for later calls.
        """
        greedy, sampled_params = SamplingParams(), SamplingParams(temperature=1.0, seed=0)
        filtered = (
            dataclasses.replace(sampled_params, min_p=0.5),
            dataclasses.replace(sampled_params, top_k=1),
        )

        def abstract(shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        logits = abstract((rows * query_len, self._vocab_size), jnp.float32, self._by_vocabulary)
        counts = abstract((rows,), jnp.int32, self._replicated)
        ids = abstract((rows * query_len,), jnp.int32, self._replicated)
        num_drafts = abstract((rows,), jnp.int32, None)
        for params in (greedy, sampled_params, *filtered):
            sampling = jax.tree.map(
                lambda array: abstract(array.shape, array.dtype, self._metadata_sharding),
                build_sampling_metadata([params], rows),
            )
            has_drafts, rows_logits = query_len > 1, logits
            if self._replicated is not None and _needs_full_rows(sampling, has_other_features=has_drafts):
                self._gather.lower(logits).compile()
                rows_logits = abstract(logits.shape, logits.dtype, self._replicated)
            if has_drafts:
                lowered = rejection_sample.lower(
                    rows_logits, ids, num_drafts, sampling, counts, None, num_logprobs=None
                )
            else:
                lowered = next_tokens.lower(
                    rows_logits, sampling, counts, None, max_rows=self.max_rows, num_logprobs=None
                )
            lowered.compile()

    def __call__(
        self,
        logits: jax.Array,
        sampling: SamplingMetadata,
        num_generated: Any,
        adjustments: LogitsAdjustments | None = None,
        *,
        num_logprobs: int | None = None,
        draft_ids: Any = None,
        num_drafts: Any = None,
    ) -> StepOutputs:
        """Sample the next token of each row.

        Args:
            logits: Logits of each row's last token, or of all tokens of a step with drafts.
            sampling: Sampling parameters of the rows.
            num_generated: Number of generated tokens of each row; see `sample`.
            adjustments: Adjustments of the logits; None: no adjustments.
            num_logprobs: Number of most likely tokens to report; None: no log-probabilities.
            draft_ids: Tokens of a step with drafts, which are verified; None without drafts.
            num_drafts: Number of drafts of each row; None without drafts.
        """
        has_other_features = draft_ids is not None or adjustments is not None or num_logprobs is not None
        if self._replicated is not None and _needs_full_rows(sampling, has_other_features=has_other_features):
            logits = self._gather(logits)
        outputs: StepOutputs
        if draft_ids is None:
            outputs = next_tokens(
                logits,
                sampling,
                num_generated,
                adjustments,
                max_rows=self.max_rows,
                num_logprobs=num_logprobs,
            )
        else:
            outputs = rejection_sample(
                logits,
                draft_ids,
                num_drafts,
                sampling,
                num_generated,
                adjustments,
                num_logprobs=num_logprobs,
            )
        return outputs


def _needs_full_rows(sampling: SamplingMetadata, *, has_other_features: bool) -> bool:
    """Return whether the sampler reduces over rows that are sharded by vocabulary.

    Such sums must run in the order of a single device, so the rows are gathered. Without them (drafts,
    adjustments, log-probabilities, top_k or top_p), only the maximum of a row is needed, which the devices
    compute together.
    """
    return sampling.has_top_k_or_top_p or has_other_features
