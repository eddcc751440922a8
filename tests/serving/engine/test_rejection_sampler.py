"""Drafts change when tokens arrive, but not which: compared with a loop that samples one token at a time."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.serving.engine.logits_processors import RequestAdjustments, adjust_logits, build_logits_adjustments
from jattn.serving.engine.logprobs import compute_logprobs
from jattn.serving.engine.sampler import build_sampling_metadata, rejection_sample, sample
from jattn.serving.engine.sampling_params import SamplingParams

pytestmark = pytest.mark.kernels
VOCAB, K = 7, 3
TABLE = np.random.default_rng(0).normal(0, 1.5, (VOCAB, VOCAB)).astype(np.float32)
sample_jit, adjusted_jit = jax.jit(sample), jax.jit(adjust_logits)


def adjustments_of(params, outputs, rows=1):
    requests = [
        RequestAdjustments(
            request_params,
            [1, 2],
            ids,
            [4] if request_params.min_tokens else [],
            num_generated=len(ids),
            pending_row=-1,
        )
        for request_params, ids in zip(params, outputs, strict=True)
    ]
    sizes = {"num_rows": rows, "vocab_size": VOCAB}
    return build_logits_adjustments(requests, jnp.zeros(1, jnp.int32), **sizes)


def one_by_one(params, last, outputs, count):
    """Return a request's next tokens as sampled by steps of one token."""
    outputs = list(outputs)
    for _ in range(count):
        logits, generated = jnp.asarray(TABLE[[last]]), np.array([len(outputs)], np.int32)
        adjustments = adjustments_of([params], [outputs])
        logits = logits if adjustments is None else adjusted_jit(logits, adjustments, generated)
        last = int(sample_jit(logits, build_sampling_metadata([params]), generated)[0])
        outputs.append(last)
    return outputs[-count:]


def verified(params, lasts, outputs, drafts, num_drafts=None, **options):
    ids = np.concatenate([np.reshape(lasts, (-1, 1)), drafts], axis=1).reshape(-1).astype(np.int32)
    generated = np.array([len(tokens_of_request) for tokens_of_request in outputs], np.int32)
    adjustments = adjustments_of(params, outputs, len(params))
    drafted = ids, np.full(len(params), np.shape(drafts)[1] if num_drafts is None else num_drafts, np.int32)
    rows = build_sampling_metadata(params), generated, adjustments
    return rejection_sample(jnp.asarray(TABLE[ids]), *drafted, *rows, **options)


some_values = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 2.0]),
        "top_k": st.sampled_from([None, 2, 3]),
        "top_p": st.sampled_from([0.8, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "seed": st.integers(0, 2**32 - 1),
        "presence_penalty": st.sampled_from([0.0, 0.9]),
        "frequency_penalty": st.sampled_from([0.0, -0.7]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "logit_bias": st.sampled_from([None, {3: 2.0}]),
        "min_tokens": st.sampled_from([0, 3]),
    }
)
tokens = st.integers(0, VOCAB - 1)


@hypothesis.given(st.data())
@pytest.mark.kernels
def test_accepted_tokens_equal_those_without_drafts(data):
    values = data.draw(st.lists(some_values, min_size=2, max_size=2))
    params = [SamplingParams(**fields) for fields in values]
    outputs = [data.draw(st.lists(tokens, max_size=3)) for _ in params]
    lasts = [data.draw(tokens) for _ in params]
    expected = [one_by_one(*row, K + 1) for row in zip(params, lasts, outputs, strict=True)]
    num_right = [data.draw(st.integers(0, K)) for _ in params]
    drafts = [ids[:n] + data.draw(st.lists(tokens, min_size=K - n, max_size=K - n))
              for ids, n in zip(expected, num_right, strict=True)]  # fmt: skip
    actual = verified(params, lasts, outputs, drafts)
    for row, right in enumerate(num_right):
        accepted = int(actual.num_accepted[row])
        agree_on_num_blocks = [a == b for a, b in zip(expected[row], drafts[row], strict=False)]
        assert accepted == ([*agree_on_num_blocks, False]).index(False) >= right
        assert actual.token_ids[row, : accepted + 1].tolist() == expected[row][: accepted + 1]


def test_greedy_rows_accept_the_argmax_and_nothing_after_a_wrong_draft():
    argmax = TABLE.argmax(axis=1)
    chain = [int(argmax[0])]
    for _ in range(K):
        chain.append(int(argmax[chain[-1]]))
    wrong = (chain[1] + 1) % VOCAB
    drafts = [chain[:K], [chain[0], wrong, chain[2]], [(chain[0] + 1) % VOCAB, chain[1], chain[2]]]
    actual = verified([SamplingParams()] * 3, [0] * 3, [[]] * 3, drafts)
    assert actual.num_accepted.tolist() == [3, 1, 0]
    assert actual.token_ids[0].tolist() == chain
    assert actual.token_ids[1, :2].tolist() == chain[:2]
    assert actual.token_ids[2, 0] == chain[0]
    assert actual.logprobs is None


def test_padding_is_never_accepted():
    argmax = TABLE.argmax(axis=1)
    chain = [0]
    for _ in range(K):
        chain.append(int(argmax[chain[-1]]))
    for count in range(K + 1):
        actual = verified([SamplingParams()], [0], [[]], [chain[1:]], num_drafts=count)
        assert actual.num_accepted.tolist() == [count]


# 99.9th percentile of chi-square by degrees of freedom: of one token, of a pair of tokens.
LIMIT = {VOCAB - 1: 22.46, VOCAB**2 - 1: 84.04}
NUM_DRAWS = 4000
softmax = lambda z: np.exp(z) / np.exp(z).sum(axis=-1, keepdims=True)


def pairs_drawn(drafts_of, accepts=None):
    """Return the first two tokens of NUM_DRAWS requests after token 0, with drafts by `drafts_of` (of
    their seeds).
    """
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(NUM_DRAWS)]
    drafts = np.asarray(drafts_of(np.arange(NUM_DRAWS)))
    first = verified(params, [0] * NUM_DRAWS, [[]] * NUM_DRAWS, drafts[:, None])
    num_accepted = np.asarray(first.num_accepted) if accepts is None else accepts(first, drafts)
    tokens = np.asarray(first.token_ids)
    accepted_tokens = np.where(num_accepted > 0, drafts, tokens[:, 0])
    next_steps = verified(params, accepted_tokens, [[0]] * NUM_DRAWS, np.zeros((NUM_DRAWS, 1), np.int32))
    second = np.where(num_accepted > 0, tokens[:, 1], np.asarray(next_steps.token_ids)[:, 0])
    return accepted_tokens, second, num_accepted


def chi_square(actual, probs):
    expected = probs.reshape(-1) * NUM_DRAWS
    count = np.bincount(actual, minlength=expected.size)
    return ((count - expected) ** 2 / expected).sum()


def drawn_from(probs, seeds):
    rng = np.random.default_rng(3)
    return rng.choice(VOCAB, size=len(seeds), p=probs)


TARGET = softmax(TABLE[0].astype(np.float64))
PAIRS = TARGET[:, None] * softmax(TABLE.astype(np.float64))
DRAFTERS = {
    "always the likeliest": lambda seeds: np.full(len(seeds), TARGET.argmax()),
    "always the unlikeliest": lambda seeds: np.full(len(seeds), TARGET.argmin()),
    "as the model draws": functools.partial(drawn_from, TARGET),
    "evenly": functools.partial(drawn_from, np.full(VOCAB, 1 / VOCAB)),
}


@pytest.mark.parametrize("draft_config", DRAFTERS)
def test_tokens_have_the_models_distribution_for_any_drafts(draft_config):
    first, second, num_accepted = pairs_drawn(DRAFTERS[draft_config])
    assert chi_square(first, TARGET) < LIMIT[VOCAB - 1]
    assert chi_square(first * VOCAB + second, PAIRS) < LIMIT[VOCAB**2 - 1]
    assert 0 < num_accepted.mean() < 1


def test_a_draft_is_accepted_with_the_models_probability():
    _, _, num_accepted = pairs_drawn(DRAFTERS["always the likeliest"])
    error = abs(num_accepted.mean() - TARGET.max())
    assert error < 4 * np.sqrt(TARGET.max() * (1 - TARGET.max()) / NUM_DRAWS)


def test_the_frequency_test_detects_a_sampler_that_accepts_too_much():
    every_other = lambda first, drafts: np.maximum(np.asarray(first.num_accepted), np.arange(NUM_DRAWS) % 2)
    first, _, _ = pairs_drawn(DRAFTERS["evenly"], every_other)
    assert chi_square(first, TARGET) > LIMIT[VOCAB - 1]


def test_log_probabilities_are_per_position():
    drafts = [[3, 1, 2], [0, 0, 5]]
    actual = verified([SamplingParams()] * 2, [0, 4], [[], []], drafts, num_logprobs=2)
    ids = np.array([0, 3, 1, 2, 4, 0, 0, 5])
    expected = compute_logprobs(jnp.asarray(TABLE[ids]), actual.token_ids.reshape(-1), 2)
    for actual_table, expected_table in zip(actual.logprobs, expected, strict=True):
        np.testing.assert_allclose(actual_table, expected_table, rtol=1e-6)
    assert actual.logprobs.chosen.shape == (8,)


def test_other_values_do_not_retrace(traced_once):
    run = lambda *arguments: rejection_sample.__wrapped__(*arguments)
    rows = lambda seed: (
        jnp.asarray(np.random.default_rng(seed).normal(size=(8, VOCAB)).astype(np.float32)),
        jnp.full(8, seed, jnp.int32),
        jnp.full(2, seed, jnp.int32),
        build_sampling_metadata([SamplingParams(temperature=1.0 + seed, seed=seed)] * 2),
        jnp.full(2, seed, jnp.int32),
    )
    traced_once(run, rows(1), rows(2))
