"""The sampler, compared with a loop over tokens; its random numbers do not depend on the batch."""

import dataclasses
import re

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.serving.engine import sampler
from jattn.serving.engine.sampler import build_sampling_metadata, sample
from jattn.serving.engine.sampling_params import SamplingParams

VOCAB, CHUNK = 7, 500
sample_jit = jax.jit(sample)
filtered_jit = jax.jit(lambda logits, params: sampler._filter_logits(logits, params, params.temperature > 0))


def kept_by_loop(logits, params):
    """Return the candidate tokens of a row and their probabilities, one token at a time in float64."""
    z = [float(x) / params.temperature for x in logits]
    likeliest_first = sorted(range(len(z)), key=lambda t: (-z[t], t))
    best = z[likeliest_first[0]]
    candidates = [t for t in likeliest_first if np.exp(z[t] - best) >= params.min_p]
    if params.top_k:
        kth = z[candidates[min(params.top_k, len(candidates)) - 1]]
        candidates = [t for t in candidates if z[t] >= kth]
    total = sum(np.exp(z[t] - best) for t in candidates)
    if params.top_p < 1:
        nucleus, so_far = [], 0.0
        for t in candidates:
            if so_far < params.top_p:
                nucleus.append(t)
            so_far += np.exp(z[t] - best) / total
        candidates = nucleus
    total = sum(np.exp(z[t] - best) for t in candidates)
    return {t: np.exp(z[t] - best) / total for t in candidates}


def draws(logits, params, num_draws):
    """Return the tokens that a request samples from the same logits as its first, second, ... token."""
    rows = build_sampling_metadata([params] * CHUNK)
    same = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (CHUNK, len(logits)))
    starts = range(0, num_draws, CHUNK)  # chunks of one size, so that one executable draws them all
    tokens = [sample_jit(same, rows, np.arange(i, i + CHUNK, dtype=np.int32)) for i in starts]
    return np.concatenate(tokens)[:num_draws]


# Quarters, so that ties are common; the filters' values keep clear of the edges where rounding decides.
row_of_logits = hnp.arrays(np.float32, VOCAB, elements=st.integers(-12, 12).map(lambda i: np.float32(i / 4)))
# Values, not SamplingParams: what checks its annotations takes samples, which hypothesis must not see.
some_values = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.25, 0.5, 1.0, 2.0]),
        "top_k": st.sampled_from([None, 0, 1, 2, 3, VOCAB, 99]),
        "top_p": st.sampled_from([0.0101, 0.3103, 0.6107, 0.9109, 1.0]),
        "min_p": st.sampled_from([0.0, 0.0511, 0.3513, 0.9017]),
        "seed": st.integers(0, 2**32 - 1),
    }
)
values_or_greedy = st.one_of(some_values, st.just({}))


@hypothesis.given(st.lists(st.tuples(row_of_logits, some_values), min_size=3, max_size=3))
def test_filters_keep_what_a_loop_over_tokens_keeps(rows):
    rows = [(row, SamplingParams(**values)) for row, values in rows]
    logits = np.stack([row for row, _ in rows])
    z = np.asarray(filtered_jit(jnp.asarray(logits), build_sampling_metadata([p for _, p in rows])))
    for actual, (row, params) in zip(z, rows, strict=True):
        expected = kept_by_loop(row, params)
        assert set(np.flatnonzero(np.isfinite(actual)).tolist()) == set(expected)
        tokens = sorted(expected)
        probs = np.exp(actual[tokens] - actual.max())
        np.testing.assert_allclose(probs / probs.sum(), [expected[t] for t in tokens], rtol=1e-5)


def chi_square(tokens, probs):
    expected = np.array([probs.get(t, 0) for t in range(VOCAB)]) * len(tokens)
    actual = np.bincount(tokens, minlength=VOCAB)
    assert (actual[expected == 0] == 0).all()
    return (((actual - expected) ** 2)[expected > 0] / expected[expected > 0]).sum(), (expected > 0).sum() - 1


LOGITS = [0.0, 1.0, -1.0, 2.0, 0.5, 1.5, -3.0]
# 99.9th percentile of chi-square, by degrees of freedom.
LIMIT = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 5: 20.52, 6: 22.46}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 2.0, "top_k": 6, "top_p": 0.9, "min_p": 0.1},
    ],
)
def test_frequencies_are_the_filtered_softmax(values):
    params = SamplingParams(**{"temperature": 1.0, "seed": 5, **values})
    statistic, freedom = chi_square(draws(LOGITS, params, 4000), kept_by_loop(LOGITS, params))
    assert statistic < LIMIT[freedom]


NOISE_VOCAB = 60_000
noise_of = jax.jit(jax.vmap(lambda seed, n: sampler._gumbel(seed, n, NOISE_VOCAB)))


@pytest.fixture(scope="module")
def uniforms():
    """Return the noise of four draws as uniform numbers: two seeds with two tokens each."""
    seeds, counts = np.array([0, 0, 1, 1], np.uint32), np.array([0, 1, 0, 1], np.int32)
    return np.exp(-np.exp(-np.asarray(noise_of(seeds, counts), np.float64)))


def test_noise_has_the_gumbel_distribution(uniforms):
    """The Kolmogorov-Smirnov distance times sqrt(n) is below 1.95 with probability 99.9 %."""
    steps = np.arange(NOISE_VOCAB + 1) / NOISE_VOCAB
    for row in np.sort(uniforms, axis=1):
        distance = np.maximum(row - steps[:-1], steps[1:] - row).max()
        assert distance < 1.95 / NOISE_VOCAB**0.5


def test_noise_of_tokens_draws_and_seeds_is_independent(uniforms):
    """Pairs of uniforms fill an 8 x 8 table evenly: chi-square with 63 degrees of freedom is below 113
    with 99.99 %.
    """
    shifts = (1, 2, 3, 64, 1024, 32768)
    pairs = [(row[:-shift], row[shift:]) for row in uniforms for shift in shifts]
    pairs += [(first, second) for i, first in enumerate(uniforms) for second in uniforms[:i]]
    for first, second in pairs:
        counts, *_ = np.histogram2d(first, second, bins=8, range=[[0, 1], [0, 1]])
        expected = len(first) / 64
        assert ((counts - expected) ** 2 / expected).sum() < 113


def test_the_frequency_test_detects_a_wrong_temperature():
    tokens = draws(LOGITS, SamplingParams(temperature=1.2, seed=5), 4000)
    statistic, freedom = chi_square(tokens, kept_by_loop(LOGITS, SamplingParams(temperature=1.0)))
    assert statistic > LIMIT[freedom]


def test_filters_off_draw_the_same_tokens_as_filters_that_keep_all():
    off = draws(LOGITS, SamplingParams(temperature=1.0, seed=3), 500)
    for values in ({"top_k": VOCAB}, {"top_k": 0}, {"top_p": 0.999999}, {"min_p": 1e-9}):
        np.testing.assert_array_equal(
            draws(LOGITS, SamplingParams(temperature=1.0, seed=3, **values), 500), off
        )


def test_temperature_0_is_greedy_regardless_of_filters():
    params = SamplingParams(top_k=5, top_p=0.5, min_p=0.1, seed=1)
    assert set(draws(LOGITS, params, 50).tolist()) == {3}


def test_greedy_and_top_p_break_ties_by_the_lower_id():
    tied = [0.0, 2.0, 2.0, 0.0, 2.0, -1.0, 2.0]
    assert set(draws(tied, SamplingParams(), 5).tolist()) == {1}
    assert set(draws(tied, SamplingParams(temperature=1.0, top_p=0.01, seed=1), 99).tolist()) == {1}
    assert set(draws(tied, SamplingParams(temperature=1.0, top_p=0.4, seed=1), 99).tolist()) == {1, 2}


def test_smallest_top_p_keeps_only_the_likeliest_token():
    for top_p in (1e-39, 1e-60):  # float32 has them as denormal, and as 0
        assert set(draws(LOGITS, SamplingParams(temperature=2.0, top_p=top_p, seed=1), 99).tolist()) == {3}


def test_top_k_keeps_ties_of_the_kth_token():
    tied = [0.0, 2.0, 2.0, 0.0, 2.0, -1.0, 2.0]
    assert set(draws(tied, SamplingParams(temperature=1.0, top_k=2, seed=1), 99).tolist()) == {1, 2, 4, 6}


def test_banned_tokens_are_never_drawn():
    banned = [0.0, -np.inf, 1.0, -np.inf, 0.5, -np.inf, -np.inf]
    for values in ({}, {"top_k": 6}, {"top_p": 0.999}, {"min_p": 0.01}):
        params = SamplingParams(temperature=3.0, seed=2, **values)
        assert set(draws(banned, params, 300).tolist()) == {0, 2, 4}


@hypothesis.given(st.data())
def test_a_rows_sample_does_not_depend_on_the_batch_or_its_row(data):
    row, num_generated = data.draw(row_of_logits), data.draw(st.integers(0, 99))
    params = SamplingParams(**data.draw(values_or_greedy))
    alone = sample_jit(row[None], build_sampling_metadata([params]), jnp.full(1, num_generated, jnp.int32))
    drawn = data.draw(st.lists(st.tuples(row_of_logits, values_or_greedy), min_size=3, max_size=3))
    other_requests = [(row_logits, SamplingParams(**values)) for row_logits, values in drawn]
    batch_row = data.draw(st.integers(0, 3))
    batch = [*other_requests[:batch_row], (row, params), *other_requests[batch_row:]]
    counts = np.full(4, 17, np.int32)
    counts[batch_row] = num_generated
    together = sample_jit(
        jnp.stack([row_logits for row_logits, _ in batch]),
        build_sampling_metadata([p for _, p in batch]),
        jnp.asarray(counts),
    )
    assert together[batch_row] == alone[0]


def test_samples_depend_on_the_seed_and_the_token_number():
    params = SamplingParams(temperature=1.0, seed=11)
    first = draws(LOGITS, params, 200)
    np.testing.assert_array_equal(first, draws(LOGITS, params, 200))
    assert (first != draws(LOGITS, SamplingParams(temperature=1.0, seed=12), 200)).mean() > 0.5
    assert (first[1:] != first[:-1]).mean() > 0.5


DRAWN = SamplingParams(temperature=0.7, min_p=0.1, seed=9)
CUT = [dataclasses.replace(DRAWN, top_k=2), dataclasses.replace(DRAWN, top_p=0.5)]


def test_only_new_features_retrace_the_sampler():
    traces = []

    @jax.jit
    def counted(logits, params, num_generated):
        traces.append((params.has_sampling, params.has_filters, params.has_top_k_or_top_p))
        return sample(logits, params, num_generated)

    greedy = [SamplingParams(), SamplingParams(top_k=3, top_p=0.5)]
    logits, counts = jnp.zeros((2, VOCAB)), jnp.zeros(2, jnp.int32)
    drawn = [dataclasses.replace(DRAWN, min_p=0.0, temperature=value) for value in (1.0, 2.0)]
    floors = (dataclasses.replace(DRAWN, min_p=value) for value in (0.1, 0.2))
    for row_params in (*greedy, *drawn, *floors, *CUT, dataclasses.replace(CUT[0], min_p=0.1)):
        counted(logits, build_sampling_metadata([row_params, SamplingParams()]), counts)
    off, on = False, True
    assert traces == [(off, off, off), (on, off, off), (on, on, off), (on, on, on)]


@pytest.mark.parametrize(
    ("params", "sorts", "draws"), [(SamplingParams(), 0, 0), (DRAWN, 0, 1), (CUT[0], 1, 1), (CUT[1], 1, 1)]
)
def test_compiled_sampler_has_only_the_needed_features_and_no_branches(params, sorts, draws):
    rows = build_sampling_metadata([params, SamplingParams()])
    compiled = sample_jit.lower(jnp.zeros((2, VOCAB)), rows, jnp.zeros(2, jnp.int32)).compile().as_text()
    assert " conditional(" not in compiled
    assert bool(re.search(r"\bsort\(", compiled)) == sorts
    assert ("threefry" in compiled) == draws


@pytest.mark.parametrize(("min_p", "passes"), [(0.0, 1), (0.1, 2)])
def test_min_p_alone_adds_a_pass_over_the_logits(min_p, passes):
    """Each pass ends in a reduction over the vocabulary; the last one selects the token."""
    rows = build_sampling_metadata([dataclasses.replace(DRAWN, min_p=min_p), SamplingParams(min_p=0.5)])
    lowered = sample_jit.lower(jnp.zeros((2, VOCAB)), rows, jnp.zeros(2, jnp.int32)).as_text()
    assert len(re.findall(r"stablehlo\.reduce\(", lowered)) == passes


def test_sample_of_a_row_does_not_depend_on_the_features_of_other_rows():
    logits = jnp.tile(jnp.asarray(LOGITS), (2, 1))
    for n in range(20):
        counts = jnp.full(2, n, jnp.int32)
        alone = sample_jit(logits, build_sampling_metadata([DRAWN, SamplingParams()]), counts)
        combined = sample_jit(logits, build_sampling_metadata([DRAWN, CUT[0]]), counts)
        assert alone[0] == combined[0]


def test_16_bit_logits_are_drawn_from_in_f32():
    logits = jnp.asarray([LOGITS], jnp.bfloat16)
    rows = build_sampling_metadata([SamplingParams(temperature=0.7, top_p=0.9, seed=1)])
    for n in range(20):
        count = jnp.full(1, n, jnp.int32)
        assert sample_jit(logits, rows, count) == sample_jit(logits.astype(jnp.float32), rows, count)


class TestBuild:
    def test_requests_stand_in_their_rows_and_padding_rows_are_greedy(self):
        params = SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=2**32 - 1)
        rows = build_sampling_metadata([params, SamplingParams(top_k=2**40)], num_rows=4, rows=[2, 0])
        np.testing.assert_array_equal(rows.temperature, np.float32([0, 0, 0.5, 0]))
        np.testing.assert_array_equal(rows.top_k, [2**31 - 1, 0, 3, 0])
        np.testing.assert_array_equal(rows.top_p, np.float32([1, 1, 0.9, 1]))
        np.testing.assert_array_equal(rows.min_p, np.float32([0, 0, 0.1, 0]))
        np.testing.assert_array_equal(rows.seed, [0, 0, 2**32 - 1, 0])

    def test_a_request_that_samples_needs_a_seed(self):
        with pytest.raises(
            ValueError, match=r"params\[1\] must have a seed \(see SamplingParams.with_seed\), got"
        ):
            build_sampling_metadata([SamplingParams(), SamplingParams(temperature=1.0)])

    def test_rows_must_be_valid_and_unique_per_request(self):
        with pytest.raises(ValueError, match=r"rows must have one entry per request \(2\), got 1"):
            build_sampling_metadata([SamplingParams()] * 2, num_rows=4, rows=[0])
        with pytest.raises(ValueError, match=r"rows must be in \[0, 1\), got \[0, 1\]"):
            build_sampling_metadata([SamplingParams()] * 2, num_rows=1)
        with pytest.raises(ValueError, match=r"rows must be in \[0, 2\), got \[-1\]"):
            build_sampling_metadata([SamplingParams()], num_rows=2, rows=[-1])


class TestSamplingParams:
    def test_ints_are_accepted_for_floats(self):
        assert SamplingParams(temperature=0, top_p=1, min_p=0) == SamplingParams()

    def test_vllms_disabled_values_are_accepted(self):
        assert SamplingParams(stop=None, stop_token_ids=None, bad_words=None, seed=-1) == SamplingParams()

    def test_with_seed_keeps_a_seed_of_the_request(self):
        assert SamplingParams(seed=7).with_seed(9).seed == 7
        assert SamplingParams(temperature=1.0).with_seed(9).seed == 9

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"temperature": -0.5}, r"temperature must be in \[0, 1e30\], got -0.5"),
            ({"temperature": float("nan")}, r"temperature must be in \[0, 1e30\], got nan"),
            ({"top_k": -2}, r"top_k must be at least 0 \(None = off\), got -2"),
            ({"top_p": 0.0}, r"top_p must be in \(0, 1\] \(1 = off\), got 0.0"),
            ({"top_p": 1.5}, r"top_p must be in \(0, 1\] \(1 = off\), got 1.5"),
            ({"min_p": -0.1}, r"min_p must be in \[0, 1\] \(0 = off\), got -0.1"),
            ({"min_p": 1.1}, r"min_p must be in \[0, 1\] \(0 = off\), got 1.1"),
            ({"n": 2**40, "temperature": 1.0}, r"n must be in \[1, 16384\], got 1099511627776"),
            ({"seed": -2}, r"seed must be in \[0, 2\*\*32\), got -2"),
            ({"seed": 2**32}, r"seed must be in \[0, 2\*\*32\), got 4294967296"),
        ],
    )
    def test_invalid_values_are_refused(self, values, message):
        with pytest.raises(ValueError, match=message):
            SamplingParams(**values)
