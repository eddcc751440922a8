"""Each family, with every notation of its config, matches a numpy decoder in float64."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from jattn.models import Decoder, DecoderConfig, load, save
from jattn.models.families import FAMILIES, find_family
from jattn.models.families.config_keys import NULLABLE, default_keys, key_names
from jattn.models.families.config_keys import SIZES as SIZES_OF_ALL
from tests.conftest import GOLDEN
from tests.models import numpy_decoder
from tests.models.tiny_checkpoints import BFLOAT16, CONFIGS, REMOTE_CONFIGS, random_tensors, write_checkpoint

TOKENS = np.random.default_rng(1).integers(0, 97, 40)


@nnx.jit
def score(model, token_ids, metadata):
    return model.logits(model(token_ids, None, metadata)[0])


def logits_of(model):
    metadata = jattn.build_batch_metadata([len(TOKENS)], [len(TOKENS)], None)
    return np.asarray(score(model, jnp.asarray(TOKENS, jnp.int32), metadata))


@pytest.mark.kernels
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_match_a_numpy_decoder(tmp_path, name):
    tensors = random_tensors(CONFIGS[name])
    model = load(write_checkpoint(tmp_path, CONFIGS[name], tensors), progress=False)
    expected = numpy_decoder.logits(CONFIGS[name], tensors, TOKENS)
    np.testing.assert_allclose(logits_of(model), expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.kernels
@pytest.mark.parametrize("name", ["qwen2_sliding", "gemma2_default_layers"])
def test_bf16_logits_are_close_to_f32(tmp_path, name):
    tensors = random_tensors(CONFIGS[name], BFLOAT16)
    model = load(write_checkpoint(tmp_path, CONFIGS[name] | {"dtype": "bfloat16"}, tensors), progress=False)
    expected = numpy_decoder.logits(CONFIGS[name], tensors, TOKENS)
    actual = logits_of(model)
    assert model.dtype == jnp.bfloat16
    assert actual.dtype == np.float32
    assert (
        np.sqrt(np.mean((actual - expected) ** 2)) < 0.02 * np.abs(expected).max()
    )  # torch's bfloat16 error is 0.4 to 1.4 percent


def windows(name, **changes):
    config = DecoderConfig.from_hf(CONFIGS[name] | changes)
    return [config.attention_spec(i).window for i in range(config.num_hidden_layers)]


def test_sliding_windows_include_the_query_token():
    assert windows("mistral") == [(6, 0)] * 3
    assert windows("mistral_full") == [None] * 3
    assert windows("qwen2") == [None] * 3
    assert windows("qwen2_sliding") == [None, None, (4, 0)]
    assert windows("qwen2_layer_types") == [(5, 0), None, (5, 0)]
    assert windows("gemma2_default_layers") == [(4, 0), None, (4, 0)]
    assert windows("llama_old_keys", sliding_window=4) == [None] * 3


def test_rope_may_differ_by_layer_type():
    ropes = {
        "full_attention": {"rope_theta": 7.0, "rope_type": "default"},
        "sliding_attention": {"rope_theta": 9.0, "rope_type": "linear", "factor": 2.0},
    }
    config = DecoderConfig.from_hf(CONFIGS["qwen2_layer_types"] | {"rope_parameters": ropes})
    assert [rope.rope_theta for rope in config.ropes] == [9.0, 7.0, 9.0]
    assert config.ropes[0].factor == 2.0
    assert DecoderConfig.from_hf(config.to_hf()) == config


def test_missing_keys_get_the_defaults_of_transformers():
    sizes = dict(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=4)
    llama = DecoderConfig.from_hf(sizes | {"model_type": "llama"})
    assert (llama.head_dim, llama.num_key_value_heads, llama.ropes[0].rope_theta) == (2, 4, 10000.0)
    assert (llama.eos_token_ids, llama.tie_word_embeddings, llama.dtype) == ((2,), False, None)
    gemma = DecoderConfig.from_hf(sizes | {"model_type": "gemma2", "eos_token_id": [1, 107]})
    spec = gemma.attention_spec(0)
    assert (spec.head_dim, spec.scale, spec.window) == (256, 1 / 16, (4095, 0))
    assert (gemma.eos_token_ids, gemma.tie_word_embeddings) == ((1, 107), True)
    mistral = DecoderConfig.from_hf(
        sizes | {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
    )
    spec = mistral.attention_spec(0)
    assert (mistral.model_type, spec.window, spec.num_kv_heads) == ("mistral", (4095, 0), 2)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_an_architecture_belongs_to_the_family_named_after_it(family):
    """InternLM3 checkpoints may name Llama's architecture, which other families share."""
    assert find_family({"architectures": [family.architecture]}) is family


REFUSED = {
    r"model_type 'unheard_of': no model family is registered for it. Supported: Llama.* that --plugin": {
        "model_type": "unheard_of"
    },
    r"model_type 'deepseek_v3': it has latent attention \(MLA\), which jattn does not support. Supported: ": {
        "model_type": "deepseek_v3"
    },
    "architecture Qwen3NextForCausalLM: it has linear attention": {
        "model_type": None,
        "architectures": ["Qwen3NextForCausalLM"],
    },
    "model_type 'qwen3_5_text': it has linear attention": {"model_type": "qwen3_5_text"},
    "architecture Qwen3_5ForCausalLM: it has linear attention": {
        "model_type": None,
        "architectures": ["Qwen3_5ForCausalLM"],
    },
    "model_type 'gemma3n_text': it has embeddings per layer and alternating": {
        "model_type": "gemma3n_text",
        "architectures": ["Gemma3nForCausalLM"],
        "intermediate_size": [96] * 3,
    },
    "model_type 'gemma4': it has embeddings per layer, and layers that use": {"model_type": "gemma4"},
    r"model_type 'mamba': it has recurrent layers \(Mamba\)": {"model_type": "mamba"},
    "LlamaForSequenceClassification": {"architectures": ["LlamaForSequenceClassification"]},
    "'xielu'.*gelu_pytorch_tanh": {"hidden_act": "xielu"},
    "'mrope'.*default, linear, dynamic": {"rope_scaling": {"rope_type": "mrope"}},
    "partial_rotary_factor 0.5.*Supported: 1": {"partial_rotary_factor": 0.5},
    "partial_rotary_factor 0.25": {"rope_parameters": {"partial_rotary_factor": 0.25}},
    "quantization_config 'gptq'": {"quantization_config": {"quant_method": "gptq"}},
    "dtype 'float8_e4m3fn'.*bfloat16": {"dtype": "float8_e4m3fn"},
    "use_bidirectional_attention": {"model_type": "gemma2", "use_bidirectional_attention": True},
    "layer type 'chunked_attention'": {"model_type": "qwen3", "layer_types": ["chunked_attention"] * 3},
}


@pytest.mark.parametrize("message", REFUSED)
def test_unsupported_configs_are_refused_by_name(message):
    with pytest.raises(NotImplementedError, match=message):
        DecoderConfig.from_hf(CONFIGS["llama_old_keys"] | REFUSED[message])


GOLDEN_CONFIGS = REMOTE_CONFIGS | {
    hf["model_type"]: hf
    for hf in (json.loads(path.read_text()) for path in sorted((GOLDEN / "hf").glob("*/config.json")))
}


@pytest.mark.parametrize("model_type", ["granite", "bloom", "gemma3_text"])
def test_null_means_the_default_of_transformers(model_type):
    family, hf = FAMILIES[model_type], GOLDEN_CONFIGS[model_type]
    keys = default_keys(family).keys() - {*SIZES_OF_ALL, *key_names(family), *NULLABLE}
    hf = {key: value for key, value in hf.items() if key not in keys}
    nulls = {key: None for key in keys if not isinstance(default_keys(family)[key], bool)}
    assert DecoderConfig.from_hf(hf | nulls).layers == DecoderConfig.from_hf(hf).layers


def test_layers_with_recurrent_state_are_refused():
    hf = GOLDEN_CONFIGS["granitemoehybrid"] | {"layer_types": ["attention", "mamba"]}
    with pytest.raises(
        NotImplementedError, match=r"layers_block_type 'mamba': the layer keeps a recurrent state"
    ):
        DecoderConfig.from_hf(hf)
    layers = DecoderConfig.from_hf(hf | {"layer_types": None, "layers_block_type": ["attention"] * 2}).layers
    assert [layer.mlp.intermediate_size for layer in layers] == [40, 40]
    without = DecoderConfig.from_hf(
        hf | {"layer_types": ["attention"] * 2, "position_embedding_type": "nope"}
    )
    assert without.ropes == (None, None)


def test_null_rope_bases_mean_the_family_s_default():
    hf = {key: value for key, value in GOLDEN_CONFIGS["mixtral"].items() if key != "rope_parameters"}
    silent, null = DecoderConfig.from_hf(hf), DecoderConfig.from_hf(hf | {"rope_theta": None})
    assert null.ropes == silent.ropes
    assert null.ropes[0].rope_theta == 1e6


def test_keys_that_would_change_the_result_are_refused_by_name():
    hf = CONFIGS["llama_old_keys"]
    message = r"config key 'residual_multiplier' \(0.5\): LlamaForCausalLM does not support this key"
    with pytest.raises(NotImplementedError, match=message):
        DecoderConfig.from_hf(hf | {"residual_multiplier": 0.5})
    with pytest.raises(NotImplementedError, match=r"'dual_chunk_attention_config'.*dual chunk attention"):
        DecoderConfig.from_hf(CONFIGS["qwen2"] | {"dual_chunk_attention_config": {"chunk_size": 9}})
    with pytest.raises(NotImplementedError, match=r"'is_causal' \(False\): decoders are causal"):
        DecoderConfig.from_hf(hf | {"is_causal": False})
    harmless = {"initializer_range": 0.02, "residual_multiplier": None, "use_cache": True}
    config = DecoderConfig.from_hf(hf | harmless)
    assert config.layers == DecoderConfig.from_hf(hf).layers
    assert config.to_hf()["initializer_range"] == 0.02


@pytest.mark.parametrize("key", ["use_qk_norm", "qkv_bias"])
def test_a_feature_that_a_family_lacks_may_be_false_but_not_true(key):
    hf = CONFIGS["llama_old_keys"]
    assert DecoderConfig.from_hf(hf | {key: False}).layers == DecoderConfig.from_hf(hf).layers
    with pytest.raises(
        NotImplementedError, match=rf"config key '{key}' \(True\): LlamaForCausalLM does not support"
    ):
        DecoderConfig.from_hf(hf | {key: True})


def test_a_family_without_the_tensors_of_a_module_cannot_be_saved(tmp_path, monkeypatch):
    family = dataclasses.replace(FAMILIES["mistral"], model_type="mine", config_class="mistral", tensors={})
    monkeypatch.setitem(FAMILIES, "mine", family)
    model = Decoder(DecoderConfig.from_hf(CONFIGS["mistral"] | {"model_type": "mine"}), rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError, match=r"family has no tensors for the module '.*'. Add it to Family\(tens"
    ):
        save(model, tmp_path)
