"""Penalties, biases and bans, compared with a loop over tokens."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.serving.engine.logits_processors import RequestAdjustments, adjust_logits, build_logits_adjustments
from jattn.serving.engine.sampling_params import SamplingParams

VOCAB = 11
adjusted_jit = jax.jit(adjust_logits)


def by_loop(logits, params, prompt, output, end_ids):
    logits, counts = logits.astype(np.float64), collections.Counter(output)
    if len(output) < params.min_tokens:
        logits[list(end_ids)] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    for token, count in counts.items():
        logits[token] -= params.frequency_penalty * count + params.presence_penalty
    return logits


def draw(rng):
    params = SamplingParams(
        min_tokens=int(rng.integers(0, 4)),
        presence_penalty=float(rng.choice([0.0, 0.5, -1.25])),
        frequency_penalty=float(rng.choice([0.0, 0.75, -2.0])),
        repetition_penalty=float(rng.choice([1.0, 1.5, 0.5])),
        logit_bias=rng.choice([None, {3: 2.5}, {0: -100.0, 10: 1.0, 4: 0.25}]),
    )
    prompt, output = (rng.integers(VOCAB, size=n).tolist() for n in rng.integers(1, 6, 2))
    return params, prompt, output[: rng.integers(0, 6)]


@pytest.mark.parametrize("seed", range(20))
def test_each_row_gets_its_own_adjustments(seed):
    rng = np.random.default_rng(seed)
    requests = [draw(rng) for _ in range(3)]
    logits = rng.normal(size=(5, VOCAB)).astype(np.float32)
    # The last token of some is still on the device, in a row of the step before.
    pending = [row if output and rng.random() < 0.5 else -1 for row, (_, _, output) in enumerate(requests)]
    last = jnp.asarray([output[-1] if output else 9 for _, _, output in requests], jnp.int32)
    end_ids = (2, 7)
    sampling_params = [
        RequestAdjustments(params, np.asarray(prompt), known, end_ids, len(known), row)
        for (params, prompt, output), row in zip(requests, pending, strict=True)
        for known in [output[:-1] if row >= 0 else output]
    ]
    adjustment_arrays = build_logits_adjustments(sampling_params, last, num_rows=5, vocab_size=VOCAB)
    counts = np.zeros(5, np.int32)
    counts[:3] = [len(output) for _, _, output in requests]
    expected = logits.astype(np.float64)
    for row, request in enumerate(requests):
        expected[row] = by_loop(logits[row], *request, end_ids)
    if adjustment_arrays is None:
        assert (expected == logits).all()
        return
    np.testing.assert_allclose(
        adjusted_jit(logits, adjustment_arrays, counts), expected, rtol=1e-6, atol=1e-5
    )


def test_a_long_bias_of_one_row_does_not_widen_the_other_rows():
    params = SamplingParams(logit_bias={token: -100.0 for token in range(3000)})
    sampling_params = [
        RequestAdjustments(request_params, (), (), (), 0, -1)
        for request_params in (SamplingParams(), params, *[SamplingParams()] * 62)
    ]
    adjustment_arrays = build_logits_adjustments(
        sampling_params, jnp.zeros(1, jnp.int32), num_rows=64, vocab_size=4000
    )
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(adjustment_arrays)) < 2**17
    logits = adjusted_jit(np.zeros((64, 4000), np.float32), adjustment_arrays, np.zeros(64, np.int32))
    assert (np.argwhere(logits == -100) == [[1, token] for token in range(3000)]).all()


def test_requests_without_adjustments_build_none():
    plain = RequestAdjustments(SamplingParams(min_tokens=2), [1], [2, 3], (0,), 2, -1)
    assert build_logits_adjustments([plain], jnp.zeros(1), num_rows=1, vocab_size=9) is None


def test_growing_lists_recompile_only_a_few_times():
    shapes = set()
    for length in range(1, 200):
        adjustments = RequestAdjustments(
            SamplingParams(presence_penalty=1.0), [1] * length, [2] * (200 - length), (), length, -1
        )
        adjustment_arrays = build_logits_adjustments([adjustments], jnp.zeros(1), num_rows=1, vocab_size=9)
        shapes.add((adjustment_arrays.prompt_ids.shape, adjustment_arrays.output_ids.shape))
    assert shapes == {((1, 128),) * 2, ((1, 256),) * 2}
