"""DecoderConfig reads, checks and writes config.json."""

import dataclasses

import pytest

from jattn.models import DecoderConfig
from tests.models.tiny_checkpoints import CONFIGS


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_survives_to_hf_and_from_hf(name):
    config = DecoderConfig.from_hf(CONFIGS[name])
    assert DecoderConfig.from_hf(config.to_hf()) == config


WRONG = {
    "vocab_size must be an int, got None": {"vocab_size": None},
    "hidden_size must be a multiple of num_attention_heads .6.*got 50": {"hidden_size": 50},
    "num_q_heads must be a multiple of num_kv_heads .4.*got 6": {"num_key_value_heads": 4},
    "head_dim must be even, got 5": {"head_dim": 5},
    "rope parameter factor must be given for 'linear'": {"rope_scaling": {"type": "linear"}},
    "rope parameter low_freq_factor must be given": {"rope_scaling": {"type": "llama3", "factor": 2.0}},
    "high_freq_factor must be at least low_freq_factor .4.0.*got 1.0": {
        "rope_scaling": {"type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 1}
    },
    "factor must be positive, got -1": {"rope_scaling": {"type": "linear", "factor": -1.0}},
    "rms_norm_eps must be positive, got 0": {"rms_norm_eps": 0.0},
    "max_position_embeddings must be positive, got 0": {"max_position_embeddings": 0},
    r"final_logit_softcapping must be positive, got 0\.0": {
        "model_type": "gemma2",
        "final_logit_softcapping": 0.0,
    },
    "sliding_window must be positive .*got 0": {"model_type": "mistral", "sliding_window": 0},
    "layer_types must have one entry per layer .3.*got 2": {
        "model_type": "gemma2",
        "layer_types": ["full_attention"] * 2,
    },
    "rope_parameters must have 'sliding_attention'": {
        "model_type": "gemma2",
        "rope_parameters": {"full_attention": {"rope_theta": 1e4}},
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_invalid_configs_are_refused(message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig.from_hf(CONFIGS["llama_old_keys"] | WRONG[message])


def test_an_unknown_model_type_is_refused():
    fields = vars(DecoderConfig.from_hf(CONFIGS["llama_old_keys"]))
    with pytest.raises(ValueError, match=r"model_type must be one of 'llama'.*got 'mamba'"):
        DecoderConfig(**{**fields, "model_type": "mamba"})


def test_to_hf_refuses_fields_that_differ_from_config_json():
    config = DecoderConfig.from_hf(CONFIGS["llama_old_keys"])
    with pytest.raises(ValueError, match=r"config must match its config.json .*got vocab_size 98"):
        dataclasses.replace(config, vocab_size=98).to_hf()
    for name, value, message in (
        (
            "norm_placement",
            "behind",
            "norm_placement must be one of 'before', .*, got 'behind'",
        ),
        ("layers", config.layers[:2], r"layers must have one entry per layer \(3\), got 2"),
        ("suppressed_token_ids", (97,), r"a suppressed token id must lie in \[0, 97\), got 97"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(config, **{name: value})
