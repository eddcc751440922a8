"""Each model family with each engine feature: tokens equal transformers', or the feature is refused."""

import functools
import json

import numpy as np
import pytest

import jattn
from jattn.batch.bucket import Bucket
from jattn.models import Decoder, load
from jattn.models.families import FAMILIES
from jattn.serving import Engine, SamplingParams
from tests.conftest import GOLDEN
from tests.models.tiny_checkpoints import REMOTE_CONFIGS

NUM_TOKENS = 10
FAST = ("phi3small",)
# These families cover the features of all; the others run with the slow tests.
KERNELS = ("bloom", "gemma3", "gpt_oss", "llama4", "phi3_longrope", "qwen3_moe")
FOLDERS = sorted(path.parent for path in (GOLDEN / "hf").glob("*/expected.npz"))
# Before the pages' examples add one; those that transformers lacks have a Llama's layers.


def marks_of(name):
    return () if name in FAST else pytest.mark.kernels if name in KERNELS else pytest.mark.slow


per_family = pytest.mark.parametrize(
    "name",
    [pytest.param(path.name, marks=marks_of(path.name)) for path in FOLDERS],
)


def per_family_in_turn(name, values):
    """Parametrize families and `values`; with the kernel tests, families take the values in turn."""
    params = []
    for i, path in enumerate(sorted(FOLDERS, key=lambda path: path.name not in (*FAST, *KERNELS))):
        for j, value in enumerate(values):
            marks = marks_of(path.name) if i % len(values) == j else pytest.mark.slow
            params.append(pytest.param(path.name, value, marks=marks))
    return pytest.mark.parametrize(("name", name), params)


@functools.cache
def golden(name) -> tuple[Decoder, dict]:
    folder = GOLDEN / "hf" / name
    return load(folder, progress=False), dict(np.load(folder / "expected.npz"))


def engine_of(model, **options):
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 160, "num_blocks": 48, "max_model_len": 160}
    limits |= {"check_batches": True} | options
    if not {"speculative", "buckets"} & {*options}:
        most = limits["max_num_batched_tokens"]
        sizes = Bucket(max_decodes=4, max_prefills=4, max_prefill_tokens=most, max_blocks=10)
        limits["buckets"] = [sizes]
    return Engine(model, **limits)


def generated(engine, expected, numbers=range(4), **params):
    """Return the tokens generated for the prompts, ignoring stop tokens."""
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **params)
    return engine.generate([expected[f"prompt{i}"].tolist() for i in numbers], params)


def assert_greedy(results, expected, numbers=range(4)):
    """Assert equality with transformers' tokens up to the first near tie."""
    for i, result in zip(numbers, results, strict=True):
        close = np.flatnonzero(expected[f"margin{i}"][:NUM_TOKENS] <= 1e-3)
        sure = close[0] if len(close) else NUM_TOKENS
        assert result.token_ids[:sure] == expected[f"greedy{i}"][:sure].tolist()


def test_every_family_is_tested():
    types = {json.loads((folder / "config.json").read_text())["model_type"] for folder in FOLDERS}
    assert types >= set(FAMILIES) - set(REMOTE_CONFIGS)


@pytest.mark.kernels
@per_family
def test_batched_prompts_and_prompts_with_cached_prefixes(name):
    model, expected = golden(name)
    engine = engine_of(model)
    results = generated(engine, expected)
    assert_greedy(results, expected)
    repeated = generated(engine, expected)
    assert [result.token_ids for result in repeated] == [result.token_ids for result in results]
    assert engine.stats.num_prefix_hit_tokens == 128  # of 33 and 100 tokens the full blocks


@pytest.mark.kernels
@per_family
def test_prompts_in_chunks(name):
    model, expected = golden(name)
    # Long factors are taken from a request's first step on: it must reach beyond the original length.
    by_length = any(rope is not None and rope.longrope_threshold for rope in model.config.ropes)
    engine = engine_of(model, max_num_batched_tokens=70 if by_length else 32)
    assert_greedy(generated(engine, expected), expected)


@pytest.mark.kernels
@per_family_in_turn("quantization", ["int8_token_head", "fp8_e4m3"])
def test_8_bit_caches_generate_nearly_optimal_tokens(name, quantization):
    model, expected = golden(name)
    prompt = expected["prompt3"].tolist()
    model.kv_scales = jattn.calibrate(model, [prompt]) if quantization == "fp8_e4m3" else None
    (result,) = generated(engine_of(model, kv_cache_dtype=quantization), expected, [3])
    model.kv_scales = None
    last = expected["logits3"][-1]
    finite_logits = last[last > np.finfo(np.float32).min]
    assert last[result.token_ids[0]] > last.max() - 0.2 * (finite_logits.max() - finite_logits.min())


@pytest.mark.kernels
@per_family_in_turn("draft_config", ["ngram", "model"])
def test_drafts_change_no_token(name, draft_config):
    model, expected = golden(name)
    engine = engine_of(model, speculative="ngram" if draft_config == "ngram" else model)
    engine._speculation._draft_cost = 0.0  # here a draft model is as large as the model
    assert_greedy(generated(engine, expected, [1, 2]), expected, [1, 2])
    assert draft_config == "ngram" or engine.stats.num_accepted_tokens > 0


@pytest.mark.kernels
@per_family
def test_a_shared_prefix_is_read_once_or_refused(name):
    model, expected = golden(name)
    specs = model.config.attention_specs
    by_distance = any(spec.window or spec.chunk_size or spec.sparsity is not None for spec in specs)
    if by_distance or any(layer.alibi_slopes for layer in model.config.layers):
        message = r"cascade_attention=True: (spec\.|alibi_slopes).*need.* masks that ignore distance"
        with pytest.raises(NotImplementedError, match=message):
            engine_of(model, cascade_attention=True)
        return
    engine = engine_of(model, cascade_attention=True)
    prompt = expected["prompt2"].tolist()
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    engine.generate([prompt], SamplingParams(max_tokens=1))  # leaves its blocks in the prefix cache
    results = engine.generate([prompt] * 3, params)
    alike = {f"{key}{i}": expected[f"{key}2"] for i in range(3) for key in ("greedy", "margin")}
    assert_greedy(results, alike, range(3))
    assert engine.stats.num_cascade_steps > 0


@pytest.mark.kernels
@per_family
def test_batch_invariant_bits_equal_a_single_run(name):
    model, expected = golden(name)
    if any(rope is not None and rope.longrope_threshold for rope in model.config.ropes):
        with pytest.raises(
            NotImplementedError, match=r"batch_invariant=True: requests of more than 64 tokens"
        ):
            engine_of(model, batch_invariant=True, buckets=None)
        return
    engine = engine_of(model, batch_invariant=True, buckets=None, enable_prefix_caching=False)
    (expected_results,) = generated(engine, expected, [2], logprobs=1)
    _, actual, _ = generated(engine, expected, [3, 2, 1], logprobs=1)
    assert actual.token_ids == expected_results.token_ids
    logprobs_of = lambda result: [logprob.logprob for table in result.logprobs for logprob in table.values()]
    assert logprobs_of(actual) == logprobs_of(expected_results)
