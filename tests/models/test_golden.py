"""Logits and greedy tokens match transformers through the paged cache, for chunked and batched prompts."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from jattn.models import Decoder, DecoderConfig, load
from tests.conftest import GOLDEN
from tests.models.tiny_checkpoints import OFTEN

BLOCK = 16
NUM_BLOCKS = 48
BUCKET = jattn.Bucket(max_decodes=4, max_prefills=4, max_prefill_tokens=160, max_blocks=8)
PROMPTS = range(4)
FAST = ("llama", "gemma2")  # one plain family and one with everything
NAMES = sorted(path.parent.name for path in (GOLDEN / "hf").glob("*/expected.npz"))


@nnx.jit
def step(model, token_ids, caches, metadata):
    hidden, caches = model(token_ids, caches, metadata)
    return model.logits(hidden), caches


class Golden:
    """A checkpoint, its recorded transformers results, and shuffled blocks for four requests."""

    def __init__(self, name):
        self.model = load(GOLDEN / "hf" / name, progress=False)
        self.expected = dict(np.load(GOLDEN / "hf" / name / "expected.npz"))
        blocks = np.random.default_rng(0).permutation(np.arange(1, NUM_BLOCKS))
        self.tables = blocks[:32].reshape(4, 8)
        self.caches = self.model.create_caches(NUM_BLOCKS, block_size=BLOCK)
        logits = self.expected["logits3"]
        self.tolerance = max(2e-5, 4e-6 * np.abs(logits[logits > np.finfo(np.float32).min]).max())
        # Length-dependent ropes use the length so far for a chunk, transformers the length of the prompt.
        self.is_whole = any(rope is not None and rope.needs_lengths for rope in self.model.config.ropes)

    def prompt(self, i):
        return self.expected[f"prompt{i}"].tolist()

    def run(self, rows):
        """Run one padded step of `rows` (request, new tokens, context) and return the logits of each row's
        tokens.
        """
        lens, contexts = [len(tokens) for _, tokens, _ in rows], [context for _, _, context in rows]
        seq_lens = np.add(lens, contexts)
        table = self.tables[[request for request, _, _ in rows]]
        metadata = jattn.build_batch_metadata(lens, seq_lens, table, block_size=BLOCK, bucket=BUCKET)
        positions = np.flatnonzero(metadata.is_valid_token)
        token_ids = np.zeros(BUCKET.max_tokens, np.int32)
        token_ids[positions] = np.concatenate([tokens for _, tokens, _ in rows])
        logits, self.caches = step(self.model, jnp.asarray(token_ids), self.caches, metadata)
        return np.split(np.asarray(logits)[positions], np.cumsum(lens)[:-1])

    def error(self, i, logits, first=0):
        return np.abs(logits - self.expected[f"logits{i}"][first : first + len(logits)]).max()


@functools.cache
def golden_of(name):
    return Golden(name)


def marks_of(name):
    return () if name in FAST else pytest.mark.kernels if name in OFTEN else pytest.mark.slow


@pytest.fixture(params=[pytest.param(name, marks=marks_of(name)) for name in NAMES])
def golden(request):
    return golden_of(request.param)


@pytest.mark.parametrize(
    ("name", "has_cache"),
    [
        *(pytest.param(name, False, marks=marks_of(name)) for name in NAMES),
        *(pytest.param(name, True, marks=() if name in FAST else pytest.mark.kernels) for name in NAMES),
    ],
)
def test_whole_prompt_matches_transformers(name, has_cache):
    golden = golden_of(name)
    prompt = golden.prompt(3)
    table, caches = (golden.tables[:1], golden.model.create_caches(NUM_BLOCKS)) if has_cache else (None, None)
    metadata = jattn.build_batch_metadata([len(prompt)], [len(prompt)], table)
    logits, caches = step(golden.model, jnp.asarray(prompt, jnp.int32), caches, metadata)
    assert golden.error(3, np.asarray(logits)) < golden.tolerance
    assert (caches is not None) == has_cache


@pytest.mark.kernels
def test_prompt_in_uneven_chunks_matches_transformers(golden):
    number, lengths = (2, (1, 20, 2, 9, 1)) if golden.is_whole else (3, (1, 30, 2, 17, 1, 49))
    prompt, done = golden.prompt(number), 0
    for length in lengths:
        (logits,) = golden.run([(2, prompt[done : done + length], done)])
        assert golden.error(number, logits, first=done) < golden.tolerance
        done += length
    assert done == len(prompt)


def test_batched_prompts_match_transformers(golden):
    rows = [(i, golden.prompt(i), 0) for i in PROMPTS]
    for i, logits in zip(PROMPTS, golden.run(rows), strict=True):
        assert golden.error(i, logits) < golden.tolerance


@pytest.mark.kernels
def test_greedy_decoding_in_a_batch_matches_transformers(golden):
    """Three requests decode one token per step while the prompt of a fourth is computed in chunks."""
    prompts = [golden.prompt(i) for i in PROMPTS]
    first = golden.run([(i, prompts[i], 0) for i in PROMPTS[:3]])
    tokens = [int(logits[-1].argmax()) for logits in first]
    chunk = len(prompts[3]) if golden.is_whole else -(-len(prompts[3]) // 23)
    for n in range(24):
        for i in PROMPTS[:3]:
            if golden.expected[f"margin{i}"][n] > 1e-3:
                assert tokens[i] == golden.expected[f"greedy{i}"][n]
            tokens[i] = int(golden.expected[f"greedy{i}"][n])
        late = prompts[3][n * chunk : (n + 1) * chunk]
        rows = [(i, [tokens[i]], len(prompts[i]) + n) for i in PROMPTS[:3]]
        rows += [(3, late, n * chunk)] if late else []
        logits = golden.run(rows)
        tokens = [int(row[-1].argmax()) for row in logits[:3]]
        if late:
            assert golden.error(3, logits[3], first=n * chunk) < golden.tolerance


def test_greedy_decoding_matches_transformers(golden):
    prompt = golden.prompt(3)
    (logits,) = golden.run([(1, prompt, 0)])
    for n, expected in enumerate(golden.expected["greedy3"]):
        token = int(logits[-1].argmax())
        if golden.expected["margin3"][n] <= 1e-3:
            break
        assert token == expected
        (logits,) = golden.run([(1, [token], len(prompt) + n)])


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 25}),
        ("qwen2", {"sliding_window": 19}),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}),
        ("llama3", {"rope_parameters": {"high_freq_factor": 5.0}}),
        ("llama3", {"rope_parameters": {"rope_type": "linear"}}),
    ],
)
def test_golden_logits_reveal_a_wrong_window_or_rope(name, change):
    golden = golden_of(name)
    hf = golden.model.config.to_hf()
    change = {key: hf[key] | value if isinstance(value, dict) else value for key, value in change.items()}
    changed_model = Decoder(DecoderConfig.from_hf(hf | change), rngs=nnx.Rngs(0))
    nnx.update(changed_model, nnx.state(golden.model))
    prompt = golden.prompt(3)
    metadata = jattn.build_batch_metadata([len(prompt)], [len(prompt)], None)
    logits, _ = step(changed_model, jnp.asarray(prompt, jnp.int32), None, metadata)
    assert golden.error(3, np.asarray(logits)) > 1e-2
