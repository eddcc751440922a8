"""Whole models on the kernels of a GPU, compared with the XLA path on the same machine."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from jattn import masks
from jattn.serving.engine.step import with_implementation
from tests.contract import CASES, AttentionContract, Problem
from tests.masks.test_attend_with_masks import masked
from tests.pallas_kernels.varlen_prefill.tile_list_problem import TileListCase

pytestmark = pytest.mark.gpu
TINY = pathlib.Path(__file__).parents[1] / "examples" / "tiny_model"
HF = pathlib.Path(__file__).parent / "golden" / "hf"
MODELS = ("llama", "qwen3", "gemma2", "mistral", "qwen2", "llama3")
# Families whose kernels differ, by a soft cap, sinks, chunks, experts, ALiBi, windows, head norms or a mask.
WITH_KERNELS = ("llama", "gemma2", "gpt_oss", "llama4", "mixtral", "mpt", "qwen2", "qwen3", "phi3small")
NUM_BLOCKS, BUCKET = 17, jattn.Bucket(max_decodes=4, max_prefills=2, max_prefill_tokens=128, max_blocks=8)
SMALL_STEPS = {"max_num_seqs": 16, "max_num_batched_tokens": 512}  # fewer executables to compile
PROMPTS = [
    "import os\nimport sys\n\n\ndef main(",
    'class Stack:\n    """A stack of items."""\n\n    def __init__(self',
    "for index, value in enumerate(values):\n    if value is None:\n",
]


def step_logits(model, implementation, prompt):
    """Return the logits of a prompt's tokens: two chunks, then one token decoded together with another
    prompt.
    """
    graphdef, params = nnx.split(with_implementation(model, implementation))
    caches = model.create_caches(NUM_BLOCKS)
    tables = np.random.default_rng(0).permutation(np.arange(1, NUM_BLOCKS)).reshape(2, -1)

    @jax.jit(donate_argnums=1)
    def run(params, caches, tokens, metadata):
        module = nnx.merge(graphdef, params)
        hidden, caches = module(tokens, caches, metadata)
        return module.logits(hidden), caches

    first, last, rows = len(prompt) // 2, len(prompt) - 1, []
    steps = [[(0, 0, first)], [(0, first, last)], [(0, last, last + 1), (1, 0, first)]]
    for step in steps:
        lens, ends = [end - start for _, start, end in step], [end for _, _, end in step]
        table = tables[[request for request, _, _ in step]]
        metadata = jattn.build_batch_metadata(lens, ends, table, bucket=BUCKET)
        positions, ids = np.flatnonzero(metadata.is_valid_token), np.zeros(BUCKET.max_tokens, np.int32)
        ids[positions] = np.concatenate([prompt[start:end] for _, start, end in step])
        logits, caches = run(params, caches, jnp.asarray(ids), metadata)
        rows.append(np.asarray(logits)[positions][: lens[0]])
    return np.concatenate(rows)


def with_wider_heads(name):
    """Return a model with random parameters and a golden config, except for head_dim 32.

    The golden model's head_dim is too small for kernels.
    """
    hf = json.loads((HF / name / "config.json").read_text())
    hf["hidden_size"] *= 32 // jattn.models.DecoderConfig.from_hf(hf).head_dim
    config = jattn.models.DecoderConfig.from_hf(hf)
    assert config.head_dim == 32
    model = jattn.models.Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.float32)
    rng = np.random.default_rng(0)
    moved = lambda x: x + 0.1 * rng.normal(size=x.shape).astype(np.float32)  # no bias is 0, no norm 1
    nnx.update(model, jax.tree.map(moved, nnx.state(model)))
    return model


def in_bf16(exact):
    model = nnx.clone(exact)
    nnx.update(model, jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.state(model)))
    return model


def test_greedy_tokens_of_the_tiny_model_are_optimal_within_16_bit_error():
    """Each token is float32's best, or its logit is lower by at most twice the error of 16-bit logits."""
    model, float32_model = (
        jattn.models.load(TINY, dtype=dtype, progress=False) for dtype in ("bfloat16", "float32")
    )
    engine = jattn.serving.Engine(model, implementation=("mosaic_gpu",), **SMALL_STEPS)

    def logits(model, ids):
        graphdef, params = nnx.split(with_implementation(model, "xla"))

        @jax.jit
        def run(params, ids, metadata):
            model = nnx.merge(graphdef, params)
            return model.logits(model(ids, None, metadata)[0])

        metadata = jattn.build_batch_metadata([len(ids)], [len(ids)], None)
        return np.asarray(run(params, jnp.asarray(ids, jnp.int32), metadata), np.float64)

    for prompt, result in zip(PROMPTS, engine.generate(PROMPTS, max_tokens=48), strict=True):
        ids = engine.tokenizer.encode(prompt).ids + list(result.token_ids)
        text = slice(len(ids) - len(result.token_ids) - 1, len(ids) - 1)
        expected, in_16_bits = (logits(x, ids)[text] for x in (float32_model, model))
        deficit = (
            expected.max(-1) - np.take_along_axis(expected, np.asarray(result.token_ids)[:, None], -1)[:, 0]
        )
        assert deficit.max() <= 2 * np.abs(in_16_bits - expected).max()


@pytest.mark.parametrize("name", WITH_KERNELS)
def test_logits_of_bf16_models_agree_within_bf16s_error(name):
    expected = np.load(HF / name / "expected.npz")
    prompt = expected["prompt3"].tolist()
    if name == "phi3small":
        exact = with_wider_heads(name)
        model, full = in_bf16(exact), step_logits(exact, "xla", prompt)
    else:  # transformers', in f32
        model, full = jattn.models.load(HF / name, dtype=jnp.bfloat16, progress=False), expected["logits3"]
    metadata = jattn.build_batch_metadata([1, 5], [9, 40], [[1, 0, 0], [2, 3, 4]])
    layers = model.plan(metadata, model.create_caches(8)).layers
    assert {choice.implementation for layer_plan in layers for _, choice in layer_plan.choices} == {
        "mosaic_gpu"
    }
    error = lambda logits: np.sqrt(np.mean(np.square(np.where(full > -1e30, logits - full, 0.0))))
    kernel, plain = (step_logits(model, implementation, prompt) for implementation in (None, "xla"))
    assert 0 < error(kernel) <= 2 * error(plain)


def test_gpu_generates_the_golden_tokens():
    for name in MODELS:
        expected = np.load(HF / name / "expected.npz")
        model = jattn.models.load(HF / name, progress=False)
        count = sum(key.startswith("prompt") for key in expected)
        prompts = [expected[f"prompt{i}"].tolist() for i in range(count)]
        results = jattn.serving.Engine(model, **SMALL_STEPS).generate(prompts, max_tokens=8, ignore_eos=True)
        for i, result in enumerate(results):
            sure = np.asarray(expected[f"margin{i}"])[:8] > 1e-3
            until = int(np.argmin(sure)) if not sure.all() else 8
            assert result.token_ids[:until] == expected[f"greedy{i}"][:until].tolist()


def test_xla_path_equals_float64_on_a_gpu():
    contract = AttentionContract()
    contract.implementation = "xla"
    for case in CASES[::4]:
        problem = Problem(case)
        problem.check(*contract.attend(problem))


@pytest.mark.parametrize(
    "case",
    [
        {"kv": "NHD"},
        {"kv": "no_cache"},
        {"kv": "HND", "soft_cap": 5.0},
        {"kv": "no_cache", "window": (9, None), "sinks": True},
        {"kv": "NHD", "sparsity": "strided"},
        {"kv": "no_cache", "sparsity": "group"},
    ],
)
def test_kernels_attend_to_a_mixed_step_with_and_without_a_plan(case):
    changes = {"head_dim": 128, "dtype": "bfloat16", "block_size": 16, "padded": True} | case
    make = TileListCase if "sparsity" in case else Problem
    problem = make(AttentionContract().plain_case(**changes))
    contract = AttentionContract()
    contract.implementation = "mosaic_gpu"
    without = contract.attend(problem)
    problem.check(*without)
    with_plan = contract.attend(problem, plan=jattn.plan(problem.metadata, problem.spec, problem.kv))
    for a, b in zip(without, with_plan, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("name", "kv"),
    [("documents", "NHD"), ("gathered", "no_cache"), ("prefix", "no_cache"), ("vertical_slash", "NHD")],
)
def test_per_row_mask_arrays_apply_in_mixed_steps(name, kv):
    changes = {"head_dim": 128, "dtype": "bfloat16", "block_size": 16, "padded": True, "kv": kv}
    changes |= {"mask": name, "region": "mixed", "causal": name != "prefix"}
    problem, mask = masked(changes, TileListCase)
    contract = AttentionContract()
    contract.implementation = "mosaic_gpu"
    problem.check(*contract.attend(problem, mask=mask))


def of_heads(heads, size):
    return masks.BlockMask(
        blocks=np.random.default_rng(heads).random((4, heads, 1, 144 // size + 1)) < 0.5,
        block_q=None,
        block_kv=size,
    )


@pytest.mark.parametrize("heads", [(8, 2), (16, 2)])
@pytest.mark.parametrize("stored", ["plain", "fp8_head"])
@pytest.mark.parametrize("size", [16, 64])
def test_query_heads_of_a_group_may_see_different_blocks_in_decode(heads, stored, size):
    mask = of_heads(heads[0], size)
    rule = lambda r, h, i, j: mask.blocks[r, h, 0, j // size]
    changes = {"heads": heads, "head_dim": 128, "dtype": "bfloat16", "block_size": 16, "region": "decode"}
    problem = Problem(AttentionContract().plain_case(stored=stored, **changes), mask=rule)
    contract = AttentionContract()
    contract.implementation = "mosaic_gpu"
    problem.check(*contract.attend(problem, mask=mask))


@pytest.mark.parametrize("heads", [(8, 2), (16, 2)])
@pytest.mark.parametrize("stored", ["plain", "fp8_head"])
@pytest.mark.parametrize("num_lists", [1, 2])
def test_decode_attends_to_listed_tokens(heads, stored, num_lists):
    blocks = np.random.default_rng(num_lists).random((4, num_lists, 1, 145)) < 0.4
    counts = blocks.sum(-1)[:, :, 0].astype(np.int32)
    ids = np.argsort(~blocks[:, :, 0], axis=-1, kind="stable").astype(np.int32)
    mask = masks.ListedBlocks(blocks=blocks, block_q=None, block_kv=1, ids=ids, counts=counts)
    rule = lambda r, h, i, j: blocks[r, h * num_lists // heads[0], 0, j]
    changes = {"heads": heads, "head_dim": 128, "dtype": "bfloat16", "block_size": 16, "region": "decode"}
    problem = Problem(AttentionContract().plain_case(stored=stored, **changes), mask=rule)
    contract = AttentionContract()
    contract.implementation = "mosaic_gpu"
    problem.check(*contract.attend(problem, mask=mask))


def test_batch_invariant_request_has_the_same_bits_alone_and_in_a_batch():
    spec = jattn.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=128, batch_invariant=True)
    size, blocks, rng = 16, 2000, np.random.default_rng(0)
    draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
    cache = jattn.PagedCache(k=draw(1, blocks, size, 2, 128), v=draw(2, blocks, size, 2, 128))

    def outputs(query_lens, seq_lens, seeds, bucket=None):
        tables = [np.arange(seed, seed + -(-n // size)) for seed, n in zip(seeds, seq_lens, strict=True)]
        metadata = jattn.build_batch_metadata(query_lens, seq_lens, tables, block_size=size, bucket=bucket)
        rows = jattn.batch.bucket.row_indices(np.asarray(query_lens), metadata.bucket)
        starts = np.asarray(metadata.row_starts)[rows]
        query = np.full((metadata.bucket.max_tokens, 8, 128), np.nan, jnp.bfloat16)
        for start, n, seed in zip(starts, query_lens, seeds, strict=True):
            query[start : start + n] = draw(seed, n, 8, 128)
        run = jax.jit(lambda *args: jattn.attend(*args, spec, implementation="mosaic_gpu"))
        out = run(jnp.asarray(query), cache, metadata)
        return [np.asarray(out[start : start + n]) for start, n in zip(starts, query_lens, strict=True)]

    query_lens, seq_lens = [1] * 20 + [300, 77, 129], [*rng.integers(1, 9000, 20).tolist(), 300, 1500, 1000]
    seeds = [7 * i + 3 for i in range(23)]
    bucket = jattn.Bucket(max_decodes=32, max_prefills=4, max_prefill_tokens=1024, max_blocks=600)
    together = outputs(query_lens, seq_lens, seeds, bucket)
    for r in (0, 7, 19, 20, 21, 22):
        (alone,) = outputs(query_lens[r : r + 1], seq_lens[r : r + 1], seeds[r : r + 1])
        np.testing.assert_array_equal(together[r], alone)
