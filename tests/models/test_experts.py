"""Mixtures of experts match each family's definition, computed in float64 token by token."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import mosaic_gpu as plgpu

from jattn.models import expert_matmuls
from jattn.models.activations import ClampedSwiGLU
from jattn.models.expert_matmuls import (
    MAX_DENSE_TOKENS,
    ExpertStatics,
    ExpertWeights,
    run_all_experts,
    run_rows,
    run_tiles_mosaic,
    run_tiles_xla,
    select_method,
    why_not_expert_kernel,
)
from jattn.models.experts import Experts
from jattn.models.layers import MLP
from jattn.models.routing import Routing
from jattn.models.specs import MLPSpec
from pallas_kernels.checks import forbid_kernel_derivative

HIDDEN, INTERMEDIATE = 24, 40
# Tokens that make each way of computing the products: fewer rows than experts, all experts, tiles.
TOKENS = {"run_rows": 3, "run_all_experts": 17, "tiles": MAX_DENSE_TOKENS + 9}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def best(logits, k):
    return np.argsort(-logits, kind="stable")[:k]


# Each takes one token [hidden] and the tensors as transformers names and lays them out.


def mixtral(x, t, k, renormalize=True):
    scores = softmax(t["gate.weight"] @ x)
    chosen = best(scores, k)
    total = scores[chosen].sum() if renormalize else 1
    out = np.zeros_like(x)
    for e in chosen:
        inner = silu(t[f"experts.{e}.w1.weight"] @ x) * (t[f"experts.{e}.w3.weight"] @ x)
        out += scores[e] / total * (t[f"experts.{e}.w2.weight"] @ inner)
    return out


def qwen2_moe(x, t, k):
    inner = silu(t["shared_expert.gate_proj.weight"] @ x) * (t["shared_expert.up_proj.weight"] @ x)
    shared = t["shared_expert.down_proj.weight"] @ inner
    return mixtral(x, t, k, renormalize=False) + sigmoid(t["shared_expert_gate.weight"] @ x) * shared


def gpt_oss(x, t, k):
    logits = t["router.weight"] @ x + t["router.bias"]
    chosen = best(logits, k)
    out = np.zeros_like(x)
    for e, score in zip(chosen, softmax(logits[chosen]), strict=True):
        gate_up = x @ t["experts.gate_up_proj"][e] + t["experts.gate_up_proj_bias"][e]
        gate, up = np.minimum(gate_up[::2], 7), np.clip(gate_up[1::2], -7, 7)
        inner = (up + 1) * gate * sigmoid(1.702 * gate)
        out += score * (inner @ t["experts.down_proj"][e] + t["experts.down_proj_bias"][e])
    return out


def llama4(x, t, k):
    logits = t["router.weight"] @ x
    inner = silu(t["shared_expert.gate_proj.weight"] @ x) * (t["shared_expert.up_proj.weight"] @ x)
    out = t["shared_expert.down_proj.weight"] @ inner
    for e in best(logits, k):
        gate, up = np.split((sigmoid(logits[e]) * x) @ t["experts.gate_up_proj"][e], 2)
        out += (up * silu(gate)) @ t["experts.down_proj"][e]
    return out


@dataclasses.dataclass(frozen=True)
class Family:
    reference: object
    routing: Routing
    activation: object = "silu"
    use_bias: bool = False
    shares: bool = False
    gates_shared: bool = False


FAMILIES = {
    "mixtral": Family(mixtral, Routing(renormalize=True)),
    "qwen2_moe": Family(qwen2_moe, Routing(), shares=True, gates_shared=True),
    "qwen3_moe": Family(lambda x, t, k: mixtral(x, t, k, renormalize=False), Routing()),
    "gpt_oss": Family(
        gpt_oss, Routing(scores="softmax_of_top_k", has_bias=True), activation=ClampedSwiGLU(), use_bias=True
    ),
    "llama4": Family(llama4, Routing(scores="sigmoid", scale_target="input"), shares=True),
}


def make(family, *, num_experts=8, chosen=2, dtype=jnp.float32, seed=0):
    family_case = FAMILIES[family]
    rngs = nnx.Rngs(seed)
    spec = MLPSpec(intermediate_size=INTERMEDIATE, hidden_act="silu")
    shared = MLP(HIDDEN, spec, dtype=dtype, rngs=rngs)
    layer = Experts(
        HIDDEN,
        INTERMEDIATE,
        num_experts=num_experts,
        experts_per_token=chosen,
        routing=family_case.routing,
        activation=family_case.activation,
        use_bias=family_case.use_bias,
        shared_expert=shared if family_case.shares else None,
        gates_shared_expert=family_case.gates_shared,
        rngs=rngs,
        dtype=dtype,
    )
    rng = np.random.default_rng(seed)
    for path, value in nnx.to_flat_state(nnx.state(layer, nnx.Param)):  # gates beyond gpt-oss's limit, too
        scale = 3 if "router" in path or path[-1] == "bias" else 0.6
        value[...] = jnp.asarray(scale * rng.normal(size=value.shape), dtype)
    return layer


def tensors(layer):
    """The layer's parameters as transformers names and lays them out, in float64."""
    to_float64 = lambda array: np.asarray(array[...].astype(jnp.float32)).astype(np.float64)
    t = {"router.weight": to_float64(layer.router.kernel).T}
    t["gate.weight"] = t["router.weight"]
    if layer.router.bias is not None:
        t["router.bias"] = to_float64(layer.router.bias)
    gate_up, down = to_float64(layer.gate_up_proj.weight), to_float64(layer.down_proj.weight)
    is_interleaved = layer.gate_up_proj.bias is not None
    columns = (0, 3, 2, 1) if is_interleaved else (0, 3, 1, 2)
    t["experts.gate_up_proj"] = gate_up.transpose(columns).reshape(len(gate_up), HIDDEN, -1)
    t["experts.down_proj"] = down
    for e in range(len(gate_up)):
        t[f"experts.{e}.w1.weight"], t[f"experts.{e}.w3.weight"] = gate_up[e]
        t[f"experts.{e}.w2.weight"] = down[e].T
    if is_interleaved:
        t["experts.gate_up_proj_bias"] = (
            to_float64(layer.gate_up_proj.bias).transpose(0, 2, 1).reshape(len(down), -1)
        )
        t["experts.down_proj_bias"] = to_float64(layer.down_proj.bias)
    if layer.shared_expert is not None:
        both = to_float64(layer.shared_expert.gate_up_proj.kernel)
        t["shared_expert.gate_proj.weight"], t["shared_expert.up_proj.weight"] = both[:, 0].T, both[:, 1].T
        t["shared_expert.down_proj.weight"] = to_float64(layer.shared_expert.down_proj.kernel).T
    if layer.shared_expert_gate is not None:
        t["shared_expert_gate.weight"] = to_float64(layer.shared_expert_gate.kernel).T
    return t


def tokens(count, seed=1, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(count, HIDDEN)), dtype)


def expected(family, layer, x):
    family_case, t = FAMILIES[family].reference, tensors(layer)
    return np.stack(
        [family_case(row, t, layer.experts_per_token) for row in np.asarray(x[sample_tokens(x)], np.float64)]
    )


def sample_tokens(x):
    """Select the tokens that are compared; their stride is not a multiple of a tile."""
    return slice(None, None, max(1, len(x) // 23))


def run(layer, x):
    return _run(*nnx.split(layer), x)


@functools.partial(jax.jit, static_argnums=0)  # compiled once for all layers of a kind
def _run(graph, state, x):
    return nnx.merge(graph, state)(x)


def assert_close(actual, expected, tolerance=2e-5):
    actual = np.asarray(actual[sample_tokens(actual)].astype(jnp.float32))
    assert np.abs(actual - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.kernels
@pytest.mark.parametrize("token_case", TOKENS)
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_of_each_family_match_transformers(family, token_case):
    layer, x = make(family), tokens(TOKENS[token_case])
    assert_close(run(layer, x), expected(family, layer, x))


@pytest.mark.parametrize("token_case", TOKENS)
def test_all_tokens_may_choose_one_expert(token_case):
    layer, x = make("gpt_oss", chosen=1), tokens(TOKENS[token_case])
    x = x.at[:, 0].set(4.0)
    layer.router.kernel[...] = layer.router.kernel[...].at[:, 5].set(0).at[0, 5].set(50.0)
    assert_close(run(layer, x), expected("gpt_oss", layer, x))


@pytest.mark.parametrize("token_case", TOKENS)
def test_every_expert_may_be_chosen_by_every_token(token_case):
    layer, x = make("qwen2_moe", num_experts=4, chosen=4), tokens(TOKENS[token_case])
    assert_close(run(layer, x), expected("qwen2_moe", layer, x))


@pytest.mark.parametrize("token_case", TOKENS)
@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "llama4"])
def test_padding_tokens_do_not_affect_other_tokens(family, token_case):
    layer, x = make(family), tokens(TOKENS[token_case])
    dirty = x.at[1::3].set(jnp.nan).at[2::3].set(jnp.inf)
    expected, actual = run(layer, x), run(layer, dirty)
    assert jnp.array_equal(actual[::3], expected[::3])


@pytest.mark.parametrize("token_case", TOKENS)
def test_an_overflowing_expert_affects_only_tokens_routed_to_it(token_case):
    layer, x = make("mixtral"), tokens(TOKENS[token_case])
    layer.gate_up_proj.weight[...] = layer.gate_up_proj.weight[...].at[3].set(jnp.inf)
    _, chosen = jax.lax.top_k(layer.router_logits(x), 2)
    spared = ~np.asarray((chosen == 3).any(axis=1))
    assert 0 < spared.sum() < len(x)
    assert jnp.array_equal(run(layer, x)[spared], run(make("mixtral"), x)[spared])


@pytest.mark.parametrize("token_case", TOKENS)
def test_one_executable_serves_every_routing(token_case):
    layer = make("gpt_oss")
    run(layer, tokens(TOKENS[token_case]))
    before = _run._cache_size()
    for seed in range(2, 4):
        run(layer, tokens(TOKENS[token_case], seed=seed))
    assert _run._cache_size() == before


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_with_equal_configurations_share_a_jit_trace(family):
    first, second = (nnx.split(make(family, seed=seed))[0] for seed in (0, 1))
    assert first == second
    assert hash(first) == hash(second)


@pytest.mark.kernels
@pytest.mark.parametrize("token_case", TOKENS)
@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "llama4"])
def test_16_bit_error_is_at_most_twice_that_of_rounding(family, token_case):
    layer, x = make(family, dtype=jnp.bfloat16), tokens(TOKENS[token_case], dtype=jnp.bfloat16)
    out = run(layer, x)
    assert out.dtype == jnp.bfloat16
    float64_output = expected(family, layer, x.astype(jnp.float32))
    error = np.abs(np.asarray(out[sample_tokens(out)], np.float64) - float64_output).max(axis=1)
    assert (error <= 2 * 2**-8 * np.abs(float64_output).max()).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"experts_per_token": 9}, ValueError, r"experts_per_token must lie in \[1, 8\].*got 9\."),
        ({"experts_per_token": 0}, ValueError, r"experts_per_token must lie in \[1, 8\].*got 0\."),
        ({"activation": "mish"}, NotImplementedError, "activation 'mish': not implemented. Supported: silu"),
    ],
)
def test_impossible_sizes_are_refused(change, error, message):
    arguments = {"num_experts": 8, "experts_per_token": 2, "routing": Routing()} | change
    with pytest.raises(error, match=message):
        Experts(HIDDEN, INTERMEDIATE, **arguments, rngs=nnx.Rngs(0), dtype=jnp.float32)


@pytest.mark.kernels
@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "llama4"])
def test_kernel_tile_error_is_at_most_twice_that_of_rounding_to_16_bits(family, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "HIDDEN", 64)
    monkeypatch.setattr(sys.modules[__name__], "INTERMEDIATE", 64)
    layer, x = make(family, dtype=jnp.bfloat16), tokens(90, dtype=jnp.bfloat16)
    choices = layer.route(x)
    weights, statics = layer.weights(), ExpertStatics(layer.activation, layer.precision)
    out = run_tiles_mosaic(x, choices, weights, statics, interpret=plgpu.InterpretGPUParams())
    float32_weights = ExpertWeights(
        *(None if array is None else array.astype(jnp.float32) for array in weights)
    )
    expected = run_tiles_xla(
        x.astype(jnp.float32), choices, float32_weights, ExpertStatics(layer.activation, "highest")
    )
    assert float(jnp.abs(out - expected).max()) <= 2 * 2**-8 * float(jnp.abs(expected).max())


@pytest.mark.kernels
def test_kernel_tiles_have_the_gradients_of_xla_tiles(monkeypatch):
    def product(x, weights, group_of_tile, *, outputs_first=False, interpret=None):
        x = forbid_kernel_derivative(
            x, "grouped_matmul", "None"
        )  # as the kernel, whose results no gradient reads
        return jnp.zeros((len(x), weights.shape[1 if outputs_first else 2]), x.dtype) + x[:, :1]

    monkeypatch.setattr(expert_matmuls, "grouped_matmul", product)
    layer, x = make("gpt_oss", dtype=jnp.bfloat16), tokens(9, dtype=jnp.bfloat16)
    choices, statics = layer.route(x), ExpertStatics(layer.activation, layer.precision)

    def gradients(run):
        family_case = lambda x, scores, weights: run(x, choices._replace(scores=scores), weights, statics)
        pull_back = lambda *args: jax.vjp(family_case, *args)[1](x.astype(jnp.float32))
        return jax.tree.leaves(jax.jit(pull_back)(x, choices.scores, layer.weights()))

    for actual, expected in zip(gradients(run_tiles_mosaic), gradients(run_tiles_xla), strict=True):
        assert jnp.abs(expected).max() > 0
        np.testing.assert_array_equal(actual, expected)


def test_a_layer_uses_the_kernel_unless_other_implementations_are_requested(monkeypatch):
    monkeypatch.setattr(expert_matmuls, "why_not_expert_kernel", lambda x, weights: None)
    taken = []
    monkeypatch.setattr(expert_matmuls, "run_tiles_mosaic", lambda x, *_: taken.append(1) or x)
    for implementation, expected in ((None, 1), ("mosaic_gpu", 1), ("xla", 0), (("reference", "xla"), 0)):
        taken.clear()
        layer = Experts(
            *(HIDDEN, INTERMEDIATE),
            num_experts=64,
            experts_per_token=1,
            routing=Routing(),
            rngs=nnx.Rngs(0),
            dtype=jnp.float32,
            implementation=implementation,
        )
        layer(tokens(400))
        assert len(taken) == expected


def test_why_not_expert_kernel_gives_the_reason():
    layer, x = make("mixtral"), tokens(3)
    assert why_not_expert_kernel(x, layer.weights()) in (
        "the kernels need an NVIDIA GPU, and JAX's platform here is 'cpu'",
        "dtype=float32 is not supported; supported: bfloat16, float16",
    )


@pytest.mark.parametrize(
    ("tokens", "has_kernel", "expected"),
    [
        (15, True, run_rows),
        (16, True, run_all_experts),
        (64, True, run_all_experts),
        (172, True, run_all_experts),
        (173, True, run_tiles_mosaic),
        (256, True, run_tiles_mosaic),
        (8192, True, run_tiles_mosaic),
        (512, False, run_all_experts),
        (513, False, run_tiles_xla),
    ],
)
def test_static_sizes_select_the_method(tokens, has_kernel, expected):
    """Sizes of Qwen3-30B-A3B, which uses 8 of 128 experts."""
    assert (
        select_method(num_tokens=tokens, num_selected=8, num_experts=128, has_kernel=has_kernel) is expected
    )


@pytest.mark.gpu
@pytest.mark.parametrize("count", [3, 17, 100, 1000])
@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "llama4"])
def test_16_bit_error_on_a_gpu_is_at_most_twice_that_of_rounding(family, count, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "HIDDEN", 256)
    monkeypatch.setattr(sys.modules[__name__], "INTERMEDIATE", 192)
    layer, x = make(family, dtype=jnp.bfloat16), tokens(count, dtype=jnp.bfloat16)
    assert why_not_expert_kernel(x, layer.weights()) is None
    actual, float64_output = run(layer, x), expected(family, layer, x.astype(jnp.float32))
    error = np.abs(np.asarray(actual[sample_tokens(actual)], np.float64) - float64_output)
    assert error.max() <= 2 * 2**-8 * np.abs(float64_output).max()
    assert jnp.array_equal(run(layer, x), actual)
