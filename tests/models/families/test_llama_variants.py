"""Families without a recorded checkpoint match a Llama or a Qwen2 with equivalent weights."""

import jax.numpy as jnp
import numpy as np
import pytest

from jattn.models import DecoderConfig, load, save
from tests.models.families.test_families import logits_of
from tests.models.tiny_checkpoints import REMOTE_CONFIGS, SIZES, random_tensors, write_checkpoint

HEADS, KV_HEADS, WIDTH = SIZES["num_attention_heads"], SIZES["num_key_value_heads"], SIZES["hidden_size"]
LLAMA = {**SIZES, "model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_theta": 300.0}


def logits(folder, hf, tensors):
    model = load(write_checkpoint(folder, hf, tensors), dtype=jnp.float32, progress=False)
    return model, logits_of(model)


def as_internlm2(name, tensors):
    """Return a Llama's tensor as InternLM2 stores it: renamed, with queries, key and value of a KV head
    fused.

    Returns None for keys and values, which are part of the query tensor.
    """
    names = {
        "model.embed_tokens": "model.tok_embeddings",
        "lm_head": "output",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.o_proj": "attention.wo",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2",
    }
    tensor = tensors[name]
    if "self_attn.q_proj" in name:
        qkv_tensors = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
        heads = [part.reshape(KV_HEADS, -1, WIDTH // HEADS, *part.shape[1:]) for part in qkv_tensors]
        whole = np.concatenate(heads, axis=1)
        return name.replace("self_attn.q_proj", "attention.wqkv"), whole.reshape(-1, *whole.shape[3:])
    if "self_attn.k_proj" in name or "self_attn.v_proj" in name:
        return None
    for hf_name, llama_name in names.items():
        name = name.replace(hf_name, llama_name)
    return name, tensor


@pytest.mark.kernels
@pytest.mark.parametrize("has_bias", [False, True])
def test_internlm2_matches_a_llama_with_renamed_tensors(tmp_path, has_bias):
    hf = LLAMA | {"attention_bias": has_bias, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}
    tensors = random_tensors(hf)
    renamed = dict(filter(None, (as_internlm2(name, tensors) for name in tensors)))
    config = REMOTE_CONFIGS["internlm2"] | {"bias": has_bias}
    _, expected = logits(tmp_path / "llama", hf, tensors)
    model, actual = logits(tmp_path / "internlm2", config, renamed)
    np.testing.assert_allclose(actual, expected, atol=2e-5)
    save(model, tmp_path / "again")
    np.testing.assert_array_equal(logits_of(load(tmp_path / "again", progress=False)), actual)


@pytest.mark.kernels
@pytest.mark.parametrize("is_tied", [False, True])
def test_minicpm_matches_a_llama_with_scaled_weights(tmp_path, is_tied):
    config = REMOTE_CONFIGS["minicpm"] | {"tie_word_embeddings": is_tied}
    tensors = random_tensors(config)
    depth = config["scale_depth"] / np.sqrt(config["num_hidden_layers"])
    scaled = {
        name: tensor * (depth if "o_proj" in name or "down_proj" in name else 1)
        for name, tensor in tensors.items()
    }
    head = tensors["model.embed_tokens.weight" if is_tied else "lm_head.weight"]
    scaled["lm_head.weight"] = head * (config["dim_model_base"] / WIDTH)
    scaled["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] * config["scale_emb"]
    _, expected = logits(tmp_path / "llama", LLAMA, {n: x.astype(np.float32) for n, x in scaled.items()})
    _, actual = logits(tmp_path / "minicpm", config, tensors)
    np.testing.assert_allclose(actual, expected, atol=2e-5)
    assert np.abs(expected).max() > 1e-2


EXAONE_NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.norm": "transformer.ln_f",
    "model.layers": "transformer.h",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "self_attn.o_proj": "attn.attention.out_proj",
    "self_attn": "attn.attention",
    "mlp.gate_proj": "mlp.c_fc_0",
    "mlp.up_proj": "mlp.c_fc_1",
    "mlp.down_proj": "mlp.c_proj",
}


@pytest.mark.kernels
def test_exaone_matches_a_llama_with_renamed_tensors(tmp_path):
    tensors = random_tensors(LLAMA)
    renamed = {}
    for name, tensor in tensors.items():
        for llama_name, exaone_name in EXAONE_NAMES.items():
            name = name.replace(llama_name, exaone_name)
        renamed[name] = tensor
    _, expected = logits(tmp_path / "llama", LLAMA, tensors)
    model, actual = logits(tmp_path / "exaone", REMOTE_CONFIGS["exaone"], renamed)
    np.testing.assert_array_equal(actual, expected)
    published_names = {"num_layers": 3, "layer_norm_epsilon": 1e-5, "activation_function": "silu"}
    hf = {key: value for key, value in REMOTE_CONFIGS["exaone"].items() if key != "num_hidden_layers"}
    del hf["rms_norm_eps"]
    assert DecoderConfig.from_hf(hf | published_names).layers == model.config.layers


@pytest.mark.kernels
def test_mimo_matches_a_qwen2_and_drops_its_draft_layers(tmp_path):
    hf = {**SIZES, "model_type": "qwen2"}
    tensors = random_tensors(hf)
    drafts = {"model.mtp_layers.0.input_proj.weight": np.ones((48, 96), np.float32)}
    _, expected = logits(tmp_path / "qwen2", hf, tensors)
    _, actual = logits(tmp_path / "mimo", REMOTE_CONFIGS["mimo"], tensors | drafts)
    np.testing.assert_array_equal(actual, expected)
