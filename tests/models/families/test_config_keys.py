"""Published config.json files: ignored keys, and ambiguous values that are refused."""

import json

import pytest

from jattn.models import DecoderConfig
from jattn.models.loading.pretrained import read_config
from tests.models.tiny_checkpoints import CONFIGS, SIZES

LLAMA = CONFIGS["llama_old_keys"]
GPT2 = {"model_type": "gpt2", "vocab_size": 97, "n_embd": 48, "n_layer": 2, "n_head": 6, "n_positions": 64}
_OF_FALCON = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
FALCON = {key: SIZES[key] for key in _OF_FALCON} | {"model_type": "falcon", "bias": False, "alibi": False}
OPT = {key: SIZES[key] for key in (*_OF_FALCON, "max_position_embeddings")}
OPT |= {"model_type": "opt", "ffn_dim": 96, "word_embed_proj_dim": 48, "do_layer_norm_before": True}
EXAONE4 = {**SIZES, "model_type": "exaone4", "num_hidden_layers": 5, "sliding_window": 8}
MINIMAX_M2 = {**SIZES, "model_type": "minimax_m2", "head_dim": 16, "rotary_dim": 8, "num_local_experts": 8}
MINISTRAL3 = {**SIZES, "model_type": "ministral3", "head_dim": 16}
YARN = {"rope_type": "yarn", "factor": 4.0}
GEMMA3 = {**SIZES, "model_type": "gemma3_text", "layer_types": ["sliding_attention"] * 3}
# Config keys of published checkpoints, and keys without effect.
PUBLISHED = {
    "smollm2": (
        LLAMA,
        {
            "is_llama_config": True,
            "rope_interleaved": False,
            "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
        },
    ),
    "llama_1": (LLAMA, {"max_sequence_length": 2048, "pad_token_id": -1, "architectures": None}),
    "falcon3": (LLAMA, {"activation": "swiglu", "_name_or_path": "x", "auto_map": {"AutoConfig": "x.X"}}),
    "saved_by_a_trainer": (
        LLAMA,
        {"_flash_attn_2_enabled": True, "use_cache": False, "attention_dropout": 0.1},
    ),
    "a_body": (LLAMA, {"architectures": ["LlamaModel"]}),
    "a_body_of_gpt2": (GPT2, {"architectures": ["GPT2Model"]}),
    "no_biases": (LLAMA, {"bias": False, "use_bias": False, "lm_head_bias": False}),
    "no_quantization": (LLAMA, {"quantization_config": None, "compression_config": None}),
    "gpt2_medium": (GPT2, {"n_special": 0, "predict_special_tokens": True, "n_ctx": 64, "resid_pdrop": 0.1}),
    "dialogpt": (
        GPT2,
        {"output_past": True, "_num_labels": 1, "summary_first_dropout": 0.1, "vocab_size": 97},
    ),
    "falcon_7b": (FALCON, {"apply_residual_connection_post_layernorm": False, "hidden_dropout": 0.0}),
    "opt_125m": (OPT, {"activation_dropout": 0.0, "dropout": 0.1, "layerdrop": 0.0, "prefix": "</s>"}),
    "minimax_m2": (MINIMAX_M2, {"mlp_intermediate_size": 128, "use_mtp": True, "num_mtp_modules": 3}),
    "falcon_by_both_names": (FALCON | {"n_head_kv": 2, "multi_query": False}, {"num_kv_heads": 2}),
    "falcon_by_one_of_them": (FALCON | {"n_head_kv": 2, "multi_query": False}, {"num_kv_heads": None}),
    "rope_null": (LLAMA, {"rope_scaling": None, "rope_parameters": None, "head_dim": None}),
    "ministral3": (
        MINISTRAL3 | {"rope_parameters": YARN},
        {"rope_parameters": YARN | {"original_max_position_embeddings": None, "llama_4_scaling_beta": None}},
    ),
    "ministral3_rope_empty": (
        MINISTRAL3 | {"rope_parameters": {"rope_type": "default"}},
        {"rope_parameters": {}},
    ),
    "rope_empty": (LLAMA, {"rope_scaling": {}, "rope_parameters": {}}),
    "rope_default": (LLAMA, {"rope_scaling": {"type": "default", "rope_type": "default"}}),
    "rope_without_a_type": (LLAMA, {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 1.0}}),
    "exaone4": (EXAONE4 | {"sliding_window_pattern": 4}, {"sliding_window_pattern": None}),
    "gemma3": (GEMMA3, {"sliding_window_pattern": None, "query_pre_attn_scalar": 256.0, "is_causal": True}),
    "decoders_are_causal": (LLAMA, {"is_causal": True, "use_bidirectional_attention": False}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_ignored_keys_do_not_change_the_config(name):
    hf, more = PUBLISHED[name]
    assert DecoderConfig.from_hf(hf | more).layers == DecoderConfig.from_hf(hf).layers


OF_ROPES = {  # other keys besides a rope's dictionary, and a null in it
    "llama": ({"rope_theta": 5e5}, {"rope_theta": None}),
    "phi": ({"num_key_value_heads": 6}, {"partial_rotary_factor": None}),
    "gemma3_text": ({"rope_theta": 7.0, "rope_local_base_freq": 5.0}, {"rope_theta": None}),
    "olmo3": ({"rope_theta": 7.0}, {"rope_theta": None}),
}


@pytest.mark.parametrize("name", OF_ROPES)
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_null_rope_parameters_do_not_override_other_keys(name, key):
    other_files, null = OF_ROPES[name]
    hf = {**SIZES, "model_type": name} | other_files
    linear = {"rope_type": "linear", "factor": 2.0}
    types = ("full_attention", "sliding_attention")
    is_by_type = key == "rope_parameters" and name in ("gemma3_text", "olmo3")
    as_config_value = lambda value: dict.fromkeys(types, value) if is_by_type else value
    layers_of = lambda value: DecoderConfig.from_hf(hf | {key: as_config_value(value)}).layers
    assert layers_of(linear | null) == layers_of(linear)


def test_a_letter_pattern_selects_sliding_window_layers():
    windows = lambda **keys: [
        layer.attention.window is not None for layer in DecoderConfig.from_hf(EXAONE4 | keys).layers
    ]
    assert windows(sliding_window_pattern="LLLG") == [True, True, True, False, False]
    assert windows(sliding_window_pattern="LG") == [True, False, True, False, False]
    assert windows(sliding_window_pattern=2) == [True, False, True, False, True]
    assert windows(sliding_window=None, sliding_window_pattern=None) == [False] * 5


IN_DOUBT = {
    r"rope parameters must have a rope_type, got .*'factor': 8.0": {"rope_scaling": {"factor": 8.0}},
    r"rope_parameters must hold one rope for all layers, got \['full_attention'\]": {
        "rope_parameters": {"full_attention": {"rope_theta": 7.0, "rope_type": "default"}}
    },
    r"rope_parameters must have 'sliding_attention', got \['rope_theta', 'rope_type'\]": {
        "model_type": "gemma3_text",
        "rope_parameters": {"rope_theta": 7.0, "rope_type": "default"},
    },
    r"rope_parameters must have 'full_attention', got \['factor', 'rope_type', 'sliding_attention'\]": {
        "model_type": "olmo3",
        "layer_types": ["full_attention"] * 3,
        "rope_parameters": {"factor": 8.0, "rope_type": "linear", "sliding_attention": {"rope_theta": 7.0}},
    },
    "use_sliding_window False with a sliding_window of 5: .*Set sliding_window to null": {
        "model_type": "mistral",
        "sliding_window": 5,
        "use_sliding_window": False,
    },
    "use_sliding_window False with a sliding_window of 4096": {
        "model_type": "mistral",
        "use_sliding_window": False,
    },
    "rope_interleaved True: pairs are elements of a head's halves. Supported: False": {
        "rope_interleaved": True
    },
    "activation 'geglu': its MLPs are gated. Supported: 'swiglu'": {"activation": "geglu"},
    r"layer_norm_eps must equal the key's other name \(1e-05\), got 0\.001": {
        "model_type": "phi",
        "layer_norm_eps": 1e-3,
    },
    "config key 'bias' .True.: LlamaForCausalLM does not support this key": {"bias": True},
    "config key 'compression_config'": {"compression_config": {"quant_method": "compressed-tensors"}},
    "architecture LlamaForSequenceClassification": {"architectures": ["LlamaForSequenceClassification"]},
    "rope parameters must have a rope_type, got .*'short_factor'": {
        "model_type": "phi3",
        "rope_scaling": {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
    },
}


@pytest.mark.parametrize("message", IN_DOUBT)
def test_ambiguous_configs_are_refused(message):
    with pytest.raises((ValueError, NotImplementedError), match=message):
        DecoderConfig.from_hf(LLAMA | IN_DOUBT[message])


def test_a_disabled_null_window_is_no_window():
    config = DecoderConfig.from_hf(CONFIGS["mistral_full"] | {"use_sliding_window": False})
    assert config.attention_spec(0).window is None


def write(directory, text, **other_files):
    (directory / "config.json").write_bytes(text)
    for name, content in other_files.items():
        (directory / f"{name}.json").write_bytes(content)
    return directory


def test_a_byte_order_mark_is_ignored(tmp_path):
    text, mark = json.dumps(LLAMA).encode(), b"\xef\xbb\xbf"
    generation = mark + b'{"eos_token_id": [7, 8], "do_sample": false, "temperature": null, "top_k": 0}'
    config = read_config(write(tmp_path, mark + text, generation_config=generation))
    assert config.eos_token_ids == (7, 8)
    assert config.layers == DecoderConfig.from_hf(LLAMA).layers


@pytest.mark.parametrize(
    ("model_type", "omitted", "as_config_value"),
    [
        ("granitemoeshared", {}, {"shared_intermediate_size": 0}),
        ("granitemoehybrid", {"layer_types": ["attention"] * 3}, {"shared_intermediate_size": 1024}),
        ("solar_open", {}, {"moe_intermediate_size": 1280}),
    ],
)
def test_missing_widths_get_the_defaults_of_transformers(model_type, omitted, as_config_value):
    config = SIZES | {"model_type": model_type} | omitted
    assert DecoderConfig.from_hf(config).layers == DecoderConfig.from_hf(config | as_config_value).layers
