"""Published checkpoints: config keys, tensor names, and refusals by name."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedConfig

from jattn.masks import LocalStrided
from jattn.models import DecoderConfig, load
from jattn.models.families import FAMILIES
from jattn.models.families.config_keys import IGNORED_KEYS, class_defaults, default_keys, key_names
from jattn.models.loading.pretrained import read_config
from tests.conftest import GOLDEN
from tests.models.families import published_configs as published
from tests.models.tiny_checkpoints import REMOTE_CONFIGS, SIZES

GOLDEN_OF = {name: name for name in FAMILIES}  # a folder of each family that transformers has
GOLDEN_OF |= {"gemma3_text": "gemma3", "phi3": "phi3_longrope", "llama4_text": "llama4"}


def hf_of(model_type):
    if model_type in REMOTE_CONFIGS:
        return REMOTE_CONFIGS[model_type]
    return json.loads((GOLDEN / "hf" / GOLDEN_OF[model_type] / "config.json").read_text())


def read(hf):
    """Return the config, and its first and last layer."""
    config = DecoderConfig.from_hf(hf)
    assert DecoderConfig.from_hf(config.to_hf()) == config
    return config, config.layers[0], config.layers[-1]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
BY_TYPE = {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}
LONGEST = {  # as vLLM reckons it, but for dynamic ones and factors that would shorten it
    "yarn": (published.QWEN3_30B_A3B, {"rope_scaling": YARN}, 131072),
    "yarn_without_an_original": (
        published.QWEN3_30B_A3B,
        {"rope_scaling": YARN | {"original_max_position_embeddings": None}},
        163840,
    ),
    "yarn_of_less": (published.QWEN3_30B_A3B, {"rope_scaling": YARN | {"factor": 1.0}}, 40960),
    "linear": (published.QWEN3_30B_A3B, {"rope_scaling": {"type": "linear", "factor": 2.5}}, 102400),
    "dynamic": (published.QWEN3_30B_A3B, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 40960),
    "by_type": (hf_of("olmo3"), {"rope_parameters": BY_TYPE}, 131072),
    "gemma3": (published.GEMMA3_4B, {}, 131072),
    "gpt_oss": (published.GPT_OSS_20B, {}, 131072),
    "longrope": (published.PHI4_MINI, {}, 131072),
    "command_r": (hf_of("cohere"), {"max_position_embeddings": 8192, "model_max_length": 131072}, 131072),
    "aya": (hf_of("cohere2"), {"max_position_embeddings": 8192}, 8192),
}


@pytest.mark.kernels
@pytest.mark.parametrize("name", LONGEST)
def test_max_context_is_what_ropes_are_scaled_for(name):
    hf, changes, longest = LONGEST[name]
    assert read(hf | changes)[0].max_position_embeddings == longest


def test_phi3small_config():
    config, sparse, dense = read(published.PHI3SMALL_8K)
    assert sparse.attention.sparsity == LocalStrided(block_size=64, local_blocks=16, vert_stride=8)
    assert dense.attention.sparsity is None
    assert [layer.attention.sparsity is None for layer in config.layers] == [False, True] * 16
    assert sparse.attention.scale == 1 / 128
    assert (config.embedding_scale, config.logit_scale) == (10.0, 1 / 8)
    assert config.suppressed_token_ids == (100256, 100258, 100259)
    plain = read(published.PHI3SMALL_8K | {"mup_use_scaling": False, "rope_position_scale": 2.0})[1]
    assert (plain.attention.scale, plain.rope.rope_type, plain.rope.factor) == (128**-0.5, "linear", 2.0)
    long = read(published.PHI3SMALL_128K)[1].rope
    assert (long.rope_type, long.attention_factor, long.long_attention_factor) == (
        "longrope",
        1.0,
        1.1902380714238083,
    )


def test_gemma3_config():
    config, sliding, _ = read(published.GEMMA3_4B)
    assert config.model_type == "gemma3_text"
    assert (config.vocab_size, config.num_attention_heads, config.head_dim) == (262208, 8, 256)
    windows = [layer.attention.window for layer in config.layers]
    assert windows == ([(1023, 0)] * 5 + [None]) * 5 + [(1023, 0)] * 4
    full = config.layers[5]
    assert (full.rope.rope_theta, full.rope.factor) == (1e6, 8.0)
    assert (sliding.rope.rope_theta, sliding.rope.rope_type) == (1e4, "default")
    assert (config.eos_token_ids, config.tie_word_embeddings, config.dtype) == ((1, 106), True, "bfloat16")


def test_missing_keys_of_text_config_get_the_defaults_of_its_class():
    config, layer, _ = read(published.LLAVA_15_7B)
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (32064, 4096, 32)
    assert (layer.attention.num_q_heads, layer.attention.num_kv_heads) == (32, 32)
    assert layer.mlp.intermediate_size == 11008
    for text in ({}, {"model_type": "qwen2_vl_text", "rope_theta": None, "num_hidden_layers": 80}):
        config, layer, _ = read({"model_type": "qwen2_vl", "text_config": text | {"hidden_size": 8192}})
        assert (config.num_hidden_layers, config.num_key_value_heads, layer.rope.rope_theta) == (80, 8, 1e6)
    config, _, _ = read({"model_type": "qwen3_vl", "text_config": {"num_hidden_layers": 1}})
    assert (config.max_position_embeddings, config.head_dim) == (128000, 128)


def test_llama4_config():
    config, local, full = read(published.LLAMA4_SCOUT)
    assert (local.attention.chunk_size, full.attention.chunk_size) == (8192, None)
    assert (local.rope.interleaved, full.rope) == (True, None)
    slower = local.rope.rope_theta ** (-np.arange(64) / 64) / local.rope.inv_freq()
    np.testing.assert_allclose(slower, np.where(slower > 4, 16, 1), rtol=1e-6)  # a step, not a blend
    assert (local.temperature, full.temperature.floor_scale) == (None, 8192.0)
    assert (local.qk_norm.comes_after_rope, full.qk_norm) == (True, None)
    assert (local.mlp.num_experts, local.mlp.shared.intermediate_size) == (16, 8192)
    assert config.eos_token_ids == (200001, 200007, 200008)


def test_other_published_configs():
    _, sliding, full = read(published.GPT_OSS_20B)
    assert (sliding.attention.window, full.attention.window, sliding.has_sinks) == ((127, 0), None, True)
    assert (sliding.mlp.experts_per_token, sliding.rope.truncate) == (4, False)
    _, layer, _ = read(published.PHI4_MINI)
    assert (layer.rope.rotary_dim, layer.attention.window) == (96, (262143, 0))
    config, layer, _ = read(published.BLOOM_560M)
    assert (config.hidden_size, config.max_position_embeddings, layer.mlp.intermediate_size) == (
        1024,
        2048,
        4096,
    )
    assert layer.alibi_slopes[:2] == (2**-0.5, 2**-1.0)
    _, layer, _ = read(published.MPT_7B_STORYWRITER)
    assert (layer.clip_qkv, layer.alibi_slopes[:2]) == (6.0, (2**-0.5, 2**-1.0))
    assert read(published.MIXTRAL_8X7B)[1].mlp.routing.renormalize
    _, layer, _ = read(published.QWEN3_30B_A3B)
    assert (layer.mlp.intermediate_size, layer.mlp.shared, layer.mlp.routing.renormalize) == (768, None, True)
    _, layer, _ = read(published.QWEN15_MOE)
    assert (layer.mlp.gates_shared, layer.qkv_bias, layer.out_bias) == (True, True, False)
    config, layer, _ = read(published.EXAONE_35_2B)
    assert (config.num_hidden_layers, config.tie_word_embeddings, layer.attention.num_kv_heads) == (
        30,
        True,
        8,
    )
    assert (layer.rope.rope_type, layer.rope.rope_theta, layer.rope.factor) == ("llama3", 1e6, 8.0)
    config, layer, last = read(published.MIMO_7B)
    assert (config.num_hidden_layers, layer.attention.head_dim, layer.rope.rope_theta) == (36, 128, 640000.0)
    assert (layer.qkv_bias, layer.out_bias, last.attention.window) == (True, False, None)
    config, layer, _ = read(published.GEMMA_2B)
    assert (layer.mlp.hidden_act, config.embedding_scale) == ("gelu_pytorch_tanh", 2048**0.5)
    with pytest.raises(NotImplementedError, match=r"'dual_chunk_attention_config'.*dual chunk attention"):
        read(published.QWEN25_7B_1M)


def test_hunyuan_a13b_has_experts_per_layer():
    lists = {"moe_topk": [2, 1], "moe_intermediate_size": [24, 16], "num_shared_expert": [1, 2]}
    _, *layers = read(hf_of("hunyuan_v1_moe") | {**lists, "num_experts": [4, 8]})
    config_of = lambda mlp: (
        mlp.num_experts,
        mlp.experts_per_token,
        mlp.intermediate_size,
        mlp.shared.intermediate_size,
    )
    assert [config_of(layer.mlp) for layer in layers] == [(4, 2, 24, 24), (8, 1, 16, 32)]


def test_hyperclovax_defaults_to_scaling_by_head_dim():
    hf = {key: value for key, value in hf_of("hyperclovax").items() if key in {*SIZES, "model_type"}}
    config, layer, _ = read(hf)
    assert layer.attention.scale == (config.hidden_size / config.num_attention_heads) ** -0.5


RESTRICTED_KEYS = [(name, key) for name, family in FAMILIES.items() for key in family.supported_values]


@pytest.mark.parametrize(("name", "key"), RESTRICTED_KEYS)
def test_unsupported_values_are_refused_with_the_supported_ones(name, key):
    hf, supported = hf_of(name), FAMILIES[name].supported_values[key][0]
    value = {bool: True, int: 7}.get(type((*supported, 7)[0]), "other")
    value = not supported[0] if isinstance(value, bool) else value
    outer, _, inner = key.partition(".")
    hf = hf | ({outer: hf[outer] | {inner: value}} if inner else {key: value})
    with pytest.raises(NotImplementedError, match=rf"^{key} {value!r}: .*Supported: "):
        DecoderConfig.from_hf(hf)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_refuses_keys_of_other_families_and_ignores_unknown_ones(name):
    other_keys = {"residual_multiplier", "query_pre_attn_scalar"} - default_keys(FAMILIES[name]).keys()
    key, hf = min(other_keys), hf_of(name)
    with pytest.raises(NotImplementedError, match=rf"config key '{key}' \(0.5\): \w+ does not support this"):
        DecoderConfig.from_hf(hf | {key: 0.5})
    without_effect = {"rope_twist": 0.5, key: 0}
    assert DecoderConfig.from_hf(hf | without_effect).layers == DecoderConfig.from_hf(hf).layers


@pytest.mark.parametrize("name", FAMILIES)
def test_every_field_of_a_configuration_class_is_read_or_known_to_have_no_effect(name):
    """A field that this list lacks, such as one of a newer transformers, may change logits."""
    family, common = FAMILIES[name], {field.name for field in dataclasses.fields(PreTrainedConfig)}
    names, fields = key_names(family), class_defaults(family.config_class or name)
    known = {*default_keys(family), *family.supported_values, *family.ignored_keys.split(), *IGNORED_KEYS}
    known |= {"attention_bias", "mlp_bias"} if family.config_class else set(family.nested_keys)
    unknown = {names.get(field, field) for field in fields} - known - common
    assert {key for key in unknown if "dropout" not in key and not key.endswith("pdrop")} == set()


def test_a_field_of_the_configuration_class_that_is_not_served_is_refused():
    hf = hf_of("minicpm")  # its class is Llama's, whose MLPs may have biases
    assert DecoderConfig.from_hf(hf | {"mlp_bias": False}).layers == DecoderConfig.from_hf(hf).layers
    with pytest.raises(NotImplementedError, match=r"config key 'mlp_bias' \(True\): MiniCPM"):
        DecoderConfig.from_hf(hf | {"mlp_bias": True})


@pytest.mark.parametrize(
    ("name", "keys"),
    [("hunyuan_v1_dense", published.HUNYUAN_7B_KEYS), ("minimax_m2", published.MINIMAX_M2_KEYS)],
)
def test_keys_of_published_configs_that_change_nothing_are_ignored(name, keys):
    assert DecoderConfig.from_hf(hf_of(name) | keys).layers == DecoderConfig.from_hf(hf_of(name)).layers


WRONG = [
    (
        "phi3small",
        {"blocksparse_triton_kernel_block_size": 64},
        "blocksparse_triton.* 64: it differs from blocksparse_block_size 16",
    ),
    ("phi3small", {"hidden_act": "gelu"}, "activation 'gelu': .*Supported: gegelu"),
    ("llama4_text", {"layer_types": ["sliding_attention"] * 4}, "'sliding_attention'.*chunked_attention"),
    ("opt", {"word_embed_proj_dim": 24}, "word_embed_proj_dim 24: .*Supported: 32"),
]


@pytest.mark.parametrize(("name", "change", "message"), WRONG)
def test_invalid_values_of_family_keys_are_refused(name, change, message):
    with pytest.raises((ValueError, NotImplementedError), match=message):
        DecoderConfig.from_hf(hf_of(name) | change)


def same(first, second):
    for old, new in zip(jax.tree.leaves(nnx.state(first)), jax.tree.leaves(nnx.state(second)), strict=True):
        np.testing.assert_array_equal(old, new)
    return True


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["bloom", "llama"])
def test_checkpoints_of_the_base_model_may_lack_the_prefix(tmp_path, name):
    folder = GOLDEN / "hf" / name
    prefix = FAMILIES[name].prefix
    tensors = load_file(folder / "model.safetensors").items()
    save_file({key.removeprefix(prefix): value for key, value in tensors}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert same(load(tmp_path, progress=False), load(folder, progress=False))
    assert read_config(tmp_path) == read_config(folder) or name == "llama"  # it has a generation_config
