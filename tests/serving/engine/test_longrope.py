"""LongRoPE: requests that cross the threshold get the tokens of a computation without a cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from jattn.models import load
from jattn.serving import Engine, SamplingParams
from tests.conftest import GOLDEN

LENGTH = 64  # longer requests use the checkpoint's long factors for all keys
MODEL = load(GOLDEN / "hf" / "phi3_longrope", progress=False)
TEXT = np.random.default_rng(3).integers(3, 320, 120).tolist()


def engine_of(**options):
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 80, "num_blocks": 64, "max_model_len": 160}
    return Engine(MODEL, **limits | {"block_size": 8, "check_batches": True} | options)


GRAPH, STATE = nnx.split(MODEL)


@jax.jit  # nnx.jit would copy the weights
def next_token(state, token_ids, metadata):
    model = nnx.merge(GRAPH, state)
    hidden, _ = model(token_ids, None, metadata)
    return model.logits(hidden[metadata.last_token_indices])[0].argmax()


@functools.cache
def without_a_cache(prompt, num_tokens):
    """Return a greedy continuation, each token computed from all earlier ones without a cache."""
    tokens = list(prompt)
    bucket = jattn.Bucket(max_prefills=1, max_prefill_tokens=160)
    for _ in range(num_tokens):
        metadata = jattn.build_batch_metadata([len(tokens)], [len(tokens)], None, bucket=bucket)
        padded = jnp.asarray(tokens + [0] * (160 - len(tokens)), jnp.int32)
        tokens.append(int(next_token(STATE, padded, metadata)))
    return tokens[len(prompt) :]


def check(engine, prompts, num_tokens=10, **params):
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **params)
    for prompt, result in zip(prompts, engine.generate(prompts, params), strict=True):
        for completion in result.outputs:
            assert completion.token_ids == without_a_cache(tuple(prompt), num_tokens)


@pytest.fixture(scope="module")
def engine():
    return engine_of()


@pytest.mark.kernels
def test_a_request_that_exceeds_the_threshold_is_recomputed(engine):
    before = engine.stats.num_prefix_tokens
    check(engine, [TEXT[:60], TEXT[50:113], TEXT[9:20]])
    stats = engine.stats
    assert stats.num_prefix_tokens - before == 60 + 63 + 11 + 2 * (LENGTH + 1)
    assert stats.num_preemptions == 0  # no request lost blocks


@pytest.mark.kernels
def test_a_long_prompts_first_chunk_exceeds_the_threshold(engine):
    check(engine, [TEXT[:30], TEXT[20:120], TEXT[:110]])


@pytest.mark.kernels
def test_short_and_long_requests_share_no_blocks(engine):
    check(engine, [TEXT[:50]])
    check(engine, [TEXT[:100]])
    hits = engine.stats.num_prefix_hit_tokens
    check(engine, [TEXT[:41], TEXT[:90]])  # each finds its like's
    assert engine.stats.num_prefix_hit_tokens - hits == 40 + 88


@pytest.mark.kernels
def test_completions_and_drafts_cross_the_threshold(engine):
    check(engine, [TEXT[30:92]], n=2, temperature=1.0, top_k=1)
    draft_state = engine_of(speculative=MODEL, num_speculative_tokens=3)
    draft_state._speculation._draft_cost = 0.0
    check(draft_state, [TEXT[:60], TEXT[7:50]], num_tokens=16)
    assert draft_state.stats.num_accepted_tokens > 0


@pytest.mark.kernels
def test_conflicting_limits_are_refused():
    message = r"max_num_batched_tokens=64: .*more than 64 tokens .*at least 65, or set max_model_len=64"
    with pytest.raises(NotImplementedError, match=message):
        engine_of(max_num_batched_tokens=64)
    with pytest.raises(NotImplementedError, match=r"batch_invariant=True: .*more than 64 .*max_model_len=64"):
        engine_of(batch_invariant=True)
    check(engine_of(max_num_batched_tokens=16, max_model_len=64), [TEXT[:40]])
