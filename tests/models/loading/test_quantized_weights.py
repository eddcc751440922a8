"""Quantized weights are dequantized to their exact values."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jattn.models import Decoder, DecoderConfig, load, save
from jattn.models.loading.quantized_weights import MXFP4
from tests.conftest import GOLDEN
from tests.models.tiny_checkpoints import CONFIGS, random_tensors, write_checkpoint

HF = CONFIGS["llama_old_keys"]
FLOAT8 = ml_dtypes.float8_e4m3fn
FP8 = {"quant_method": "fp8", "weight_block_size": [20, 32], "activation_scheme": "dynamic"}
GROUP = {"weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": GROUP},
    "ignore": ["lm_head"],
}
PROJECTION = "model.layers.1.self_attn.k_proj.weight"


def blocks_of(shape, block):
    return tuple(-(-length // size) for length, size in zip(shape, block, strict=True))


def floats_of(values, scale, block):
    """Return each value times the scale of its block, in a loop."""
    dequantized = np.zeros(values.shape, np.float32)
    for row, column in np.ndindex(*values.shape):
        block_scale = scale[row // block[0], column // block[1]]
        dequantized[row, column] = np.float32(values[row, column]) * np.float32(block_scale)
    return dequantized


def quantized(tensors, suffix, block_of, shape_of=lambda blocks: blocks):
    """Return the projections' weights as float8 with random scales, and their dequantized values."""
    rng = np.random.default_rng(0)
    stored, floats = {}, {}
    for name, tensor in tensors.items():
        stored[name] = floats[name] = tensor
        if "_proj.weight" not in name:
            continue
        block = block_of(tensor.shape)
        scale = rng.uniform(0.01, 0.1, blocks_of(tensor.shape, block)).astype(np.float32)
        stored[name] = np.asarray(tensor / 0.05, np.float32).astype(FLOAT8)
        stored[name + suffix] = scale.reshape(shape_of(scale.shape))
        floats[name] = floats_of(stored[name], scale, block)
    return stored, floats


OF_BLOCKS = {"weights": GROUP["weights"] | {"strategy": "block", "block_structure": [20, 32]}}
IN_A_WORD = {"weights": GROUP["weights"] | {"block_structure": "20x32"}}
CASES = {
    "blocks": (FP8, "_scale_inv", lambda shape: (20, 32), lambda shape: shape),
    "structure": (
        COMPRESSED | {"config_groups": {"group_0": OF_BLOCKS, "group_1": IN_A_WORD}, "transform_config": {}},
        "_scale",
        lambda shape: (20, 32),
        lambda shape: shape,
    ),
    "one": ({"quant_method": "fp8"}, "_scale", lambda shape: shape, lambda shape: ()),
    "one_of_one": (COMPRESSED, "_scale", lambda shape: shape, lambda shape: (1,)),
    "rows": (COMPRESSED, "_scale", lambda shape: (1, shape[1]), lambda shape: shape),
    "flat_rows": (COMPRESSED, "_scale", lambda shape: (1, shape[1]), lambda shape: shape[:1]),
}


def write(directory, hf, tensors, quantization=None):
    return write_checkpoint(
        directory, hf | ({"quantization_config": quantization} if quantization else {}), tensors
    )


@pytest.mark.kernels
@pytest.mark.parametrize("name", CASES)
def test_float8_weights_are_dequantized(tmp_path, name):
    config, suffix, block_of, shape_of = CASES[name]
    stored, floats = quantized(random_tensors(HF), suffix, block_of, shape_of)
    stored["model.layers.0.mlp.up_proj.input_scale"] = np.float32([0.3])  # of activations
    actual = load(write(tmp_path / "a", HF, stored, config), progress=False)
    expected = load(write(tmp_path / "b", HF, floats), progress=False)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    save(actual, tmp_path / "c")
    assert "quantization_config" not in json.loads((tmp_path / "c" / "config.json").read_text())
    assert load_file(tmp_path / "c" / "model.safetensors")[PROJECTION].dtype == np.float32
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "c", progress=False), expected)


def test_float8_weights_may_be_dequantized_to_16_bits(tmp_path):
    stored, floats = quantized(random_tensors(HF), *CASES["blocks"][1:])
    actual = load(write(tmp_path, HF, stored, FP8), dtype=jnp.bfloat16, progress=False)
    expected = floats[PROJECTION].astype(ml_dtypes.bfloat16)
    (kernel,) = [layer.self_attn.qkv_proj.kernel[...] for layer in actual.layers][1:2]
    np.testing.assert_array_equal(np.asarray(kernel)[:, :, -2].reshape(len(kernel), -1).T, expected)


@pytest.mark.kernels
def test_float8_experts_are_dequantized(tmp_path):
    """The experts of a mixture are separate matrices with separate scales."""
    hf = {
        **{"model_type": "qwen3_moe", "vocab_size": 50, "hidden_size": 48, "intermediate_size": 40},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "num_hidden_layers": 2},
        **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 36, "norm_topk_prob": True},
    }
    config = DecoderConfig.from_hf(hf)
    save(Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.float32), tmp_path / "random")
    tensors = load_file(tmp_path / "random" / "model.safetensors")
    assert "model.layers.1.mlp.experts.3.down_proj.weight" in tensors
    stored, floats = quantized(tensors, *CASES["blocks"][1:])
    actual = load(write(tmp_path / "a", hf, stored, FP8), progress=False)
    expected = load(write(tmp_path / "b", hf, floats), progress=False)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


# Every 4-bit float, low halves first, and exponents on both sides of 127.
LITTLE_BYTES = np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2, np.uint8)
LITTLE_FLOATS = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6] * 2


def test_mxfp4_values_match_their_definition():
    blocks = np.tile(LITTLE_BYTES, (2, 3, 2, 1))
    scales = np.array([[[127, 128], [126, 120], [127, 0]], [[130, 250], [127, 127], [1, 2]]], np.uint8)
    actual = np.asarray(MXFP4()(jnp.asarray(blocks), jnp.asarray(scales)))
    assert actual.shape == (2, 64, 3)
    for expert, output, group in np.ndindex(*scales.shape):
        expected = np.float64(LITTLE_FLOATS) * 2.0 ** (float(scales[expert, output, group]) - 127)
        expected = np.where(
            np.abs(expected) < 2.0**-126, 0, expected
        )  # a device may flush what is not normal
        part = actual[expert, group * 32 : (group + 1) * 32, output]
        np.testing.assert_array_equal(np.where(np.abs(part) < 2.0**-126, 0, part), expected)


def test_mxfp4_experts_of_gpt_oss_are_dequantized(tmp_path):
    """Compare the tiny checkpoint with random 4-bit experts with one that has their dequantized values."""
    source = GOLDEN / "hf" / "gpt_oss"
    hf = json.loads((source / "config.json").read_text())
    stored, floats = load_file(source / "model.safetensors"), load_file(source / "model.safetensors")
    rng = np.random.default_rng(0)
    for name in [name for name in floats if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        codes = rng.integers(0, 16, (experts, outputs, inputs), dtype=np.uint8)
        scales = rng.integers(120, 125, (experts, outputs, inputs // 32), dtype=np.uint8)
        stored[name + "_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).reshape(*scales.shape, 16)
        stored[name + "_scales"] = scales
        dequantized = np.array(LITTLE_FLOATS[:16], np.float32)[codes]
        dequantized *= np.repeat(2.0 ** (scales.astype(np.float32) - 127), 32, axis=-1)
        floats[name] = np.ascontiguousarray(dequantized.swapaxes(1, 2))
    actual = load(write(tmp_path / "a", hf, stored, {"quant_method": "mxfp4"}), progress=False)
    expected = load(write(tmp_path / "b", hf, floats), progress=False)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


WRONG = {
    f"no scale for {PROJECTION}. Expected the tensor {PROJECTION}_scale_inv or ": lambda t: t.pop(
        PROJECTION + "_scale_inv"
    ),
    rf"{PROJECTION}_scale_inv must have shape \(1, 2\) .*20 x 32 of \(16, 48\).*got \(5, 2\)": lambda t: (
        t.update({PROJECTION + "_scale_inv": np.ones((5, 2), np.float32)})
    ),
    f"{PROJECTION}_scale_inv's dtype must be one of F32, BF16, F16, got U8": lambda t: t.update(
        {PROJECTION + "_scale_inv": np.full((1, 2), 127, np.uint8)}
    ),
    "tensors that its config.json does not require: model.norm.weight_scale": lambda t: t.update(
        {"model.norm.weight_scale": np.ones(1, np.float32)}
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_invalid_scales_are_named(tmp_path, message):
    stored, _ = quantized(random_tensors(HF), *CASES["blocks"][1:])
    WRONG[message](stored)
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path, HF, stored, FP8), progress=False)


def test_float8_without_quantization_config_is_refused(tmp_path):
    stored, _ = quantized(random_tensors(HF), *CASES["one"][1:])
    for name in [name for name in stored if name.endswith("_scale")]:
        del stored[name]
    with pytest.raises(ValueError, match=r"_proj.weight's dtype must be one of F32, BF16, F16, got F8_E4M3"):
        load(write(tmp_path, HF, stored), progress=False)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "gptq"},
            "quantization_config 'gptq': .* Supported: fp8, compressed-tensors, mxfp4",
        ),
        (
            COMPRESSED | {"config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}},
            "quantization_config's group_0 with 4-bit int, symmetric True: .* Supported: 8-bit float",
        ),
        (
            COMPRESSED | {"config_groups": {"g": {"weights": {"type": "float", "symmetric": False}}}},
            "quantization_config's g with 8-bit float, symmetric False",
        ),
        (
            COMPRESSED | {"transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
            "quantization_config's transform_config: weights are stored for rotated",
        ),
        (
            FP8 | {"config_groups": {"g": {"weights": {"block_structure": [8, 8]}}}},
            "quantization_config's blocks of 8 x 8 and 20 x 32: .*one block size for all",
        ),
    ],
)
def test_unsupported_formats_are_refused_by_name(config, message):
    with pytest.raises(NotImplementedError, match=message):
        DecoderConfig.from_hf(HF | {"quantization_config": config})
