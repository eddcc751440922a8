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
    "hidden_size must be a multiple of num_attention_heads .6.*got 50": {"hidden_size": 50},
    "num_q_heads must be a multiple of num_kv_heads .4.*got 6": {"num_key_value_heads": 4},
    "head_dim must be even, got 5": {"head_dim": 5},
    "rope parameter factor must be given for 'linear'": {"rope_scaling": {"type": "linear"}},
    "rope parameter low_freq_factor must be given": {"rope_scaling": {"type": "llama3", "factor": 2.0}},
    "rms_norm_eps must be positive, got 0": {"rms_norm_eps": 0.0},
    "rope_parameters must have 'sliding_attention'": {
        "model_type": "gemma2",
        "rope_parameters": {"full_attention": {"rope_theta": 1e4}},
    },
}


@pytest.mark.parametrize("message", WRONG)
def test_invalid_configs_are_refused(message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig.from_hf(CONFIGS["llama_old_keys"] | WRONG[message])


def test_to_hf_refuses_fields_that_differ_from_config_json():
    config = DecoderConfig.from_hf(CONFIGS["llama_old_keys"])
    with pytest.raises(ValueError, match=r"config must match its config.json .*got vocab_size 98"):
        dataclasses.replace(config, vocab_size=98).to_hf()
