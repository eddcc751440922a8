"""On a GPU: whole models through the kernels, compared with the XLA path on the same machine."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from jattn.serving.step import with_implementation
from tests.contract import CASES, AttentionContract, Problem

pytestmark = pytest.mark.gpu
TINY = pathlib.Path(__file__).parents[1] / "examples" / "tiny_model"
HF = pathlib.Path(__file__).parent / "golden" / "hf"
PROMPTS = [
    "import os\nimport sys\n\n\ndef main(",
    'class Stack:\n    """A stack of items."""\n\n    def __init__(self',
    "for index, value in enumerate(values):\n    if value is None:\n",
]


def decode_logits(model, implementation, prompt, steps):
    """Logits behind all but the prompt's last `steps` tokens, and behind each of those, fed one a step."""
    graphdef, params = nnx.split(with_implementation(model, implementation))
    caches = model.create_caches(20)
    table = [list(range(1, 20))]

    @jax.jit(donate_argnums=1)
    def run(params, caches, tokens, metadata):
        module = nnx.merge(graphdef, params)
        hidden, caches = module(tokens, caches, metadata)
        return module.logits(hidden[metadata.last_token_indices]), caches

    first = len(prompt) - steps
    rows = []
    for tokens, end in [(prompt[:first], first)] + [([prompt[i]], i + 1) for i in range(first, len(prompt))]:
        metadata = jattn.build_batch_metadata([len(tokens)], [end], table)
        logits, caches = run(params, caches, jnp.asarray(tokens, jnp.int32), metadata)
        rows.append(np.asarray(logits[0]))
    return np.stack(rows)


def test_the_tiny_model_writes_the_same_text_with_kernels_and_without():
    model = jattn.models.load(TINY, progress=False)

    def run(implementation):
        engine = jattn.serving.Engine(model, implementation=implementation)
        return [result.token_ids for result in engine.generate(PROMPTS, max_tokens=48)]

    assert run(("mosaic_gpu",)) == run("xla")


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_logits_of_bf16_models_agree_within_bf16s_error(name):
    model = jattn.models.load(HF / name, dtype=jnp.bfloat16, progress=False)
    prompt = np.load(HF / name / "expected.npz")["prompt2"].tolist()
    exact = jattn.models.load(HF / name, progress=False)
    steps = min(4, len(prompt) - 1)
    kernel, plain = (decode_logits(model, i, prompt, steps) for i in (None, "xla"))
    full = decode_logits(exact, "xla", prompt, steps)
    assert np.abs(kernel - full).max() <= 2 * np.abs(plain - full).max()


def test_golden_text_comes_out_of_a_gpu_too():
    for name in ("llama", "qwen3", "gemma2"):
        expected = np.load(HF / name / "expected.npz")
        model = jattn.models.load(HF / name, progress=False)
        count = sum(key.startswith("prompt") for key in expected)
        prompts = [expected[f"prompt{i}"].tolist() for i in range(count)]
        results = jattn.serving.Engine(model).generate(prompts, max_tokens=8, ignore_eos=True)
        for i, result in enumerate(results):
            sure = np.asarray(expected[f"margin{i}"])[:8] > 1e-3
            until = int(np.argmin(sure)) if not sure.all() else 8
            assert result.token_ids[:until] == expected[f"greedy{i}"][:until].tolist()


def test_the_xla_path_meets_float64_on_a_gpu():
    contract = AttentionContract()
    contract.implementation = "xla"
    for case in CASES[::4]:
        problem = Problem(case)
        problem.check(*contract.attend(problem))
