"""The text model of a multimodal checkpoint is loaded as its family."""

import json

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jattn.models import DecoderConfig, load, save
from jattn.models.families import FAMILIES
from jattn.models.families.multimodal import MULTIMODAL_MODELS
from tests.conftest import GOLDEN
from tests.models.tiny_checkpoints import REMOTE_CONFIGS

GOLDEN_OF = {name: name for name in FAMILIES}  # a folder of each family that transformers has
GOLDEN_OF |= {"gemma3_text": "gemma3", "phi3": "phi3_longrope", "llama4_text": "llama4"}


def hf_of(model_type):
    if model_type in REMOTE_CONFIGS:
        return REMOTE_CONFIGS[model_type]
    return json.loads((GOLDEN / "hf" / GOLDEN_OF[model_type] / "config.json").read_text())


def same(first, second):
    for old, new in zip(jax.tree.leaves(nnx.state(first)), jax.tree.leaves(nnx.state(second)), strict=True):
        np.testing.assert_array_equal(old, new)
    return True


def wrapped(name, wrapper, text_type):
    """Return a golden config as the text config of a multimodal model."""
    model_type, architecture = wrapper
    names = {"model_type": model_type, "architectures": [architecture]}
    text = {key: value for key, value in hf_of(name).items() if key != "model_type" or text_type}
    return names | {"text_config": text, "vision_config": {"hidden_size": 3}, "image_token_index": 7}


@pytest.mark.parametrize("outer", [True, False, None])
@pytest.mark.parametrize("inner", [True, False])
def test_embeddings_are_tied_if_either_config_says_so(outer, inner):
    hf = wrapped("mistral", ("mistral3", "Mistral3ForConditionalGeneration"), text_type=True)
    hf["text_config"] |= {"tie_word_embeddings": inner}
    tied = DecoderConfig.from_hf(hf | {"tie_word_embeddings": outer}).tie_word_embeddings
    assert tied == bool(outer or inner)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_dtype_and_eos_of_the_outer_config_take_precedence(key):
    hf = wrapped("gemma3_text", ("gemma3", "Gemma3ForConditionalGeneration"), text_type=True)
    inner = DecoderConfig.from_hf(hf)
    assert (inner.dtype, inner.eos_token_ids, inner.bos_token_id) == ("float32", (2,), 1)
    config = DecoderConfig.from_hf(hf | {key: "bfloat16", "eos_token_id": [1, 106], "bos_token_id": 2})
    assert (config.dtype, config.eos_token_ids, config.bos_token_id) == ("bfloat16", (1, 106), 2)
    assert config.tie_word_embeddings == inner.tie_word_embeddings


RENAMES = {  # as transformers 4 and 5 write them
    "language_model.model.": "vision_tower.x",
    "model.language_model.": "model.vision_tower.x",
}


FAMILY_OF = {  # of the text model
    "gemma3": "gemma3_text",
    "llama4": "llama4_text",
    "mistral3": "mistral",
    "llava": "llama",
    "llava_next": "llama",
    "internvl": "qwen2",
    "aya_vision": "cohere2",
    "qwen2_vl": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "glm4v": "glm4",
}


@pytest.mark.kernels
@pytest.mark.parametrize(
    "wrapper", [(name, names[0]) for name, names in MULTIMODAL_MODELS.items()], ids=MULTIMODAL_MODELS
)
@pytest.mark.parametrize("body", RENAMES)
def test_the_text_model_of_a_multimodal_checkpoint_is_loaded(tmp_path, wrapper, body):
    name = FAMILY_OF[wrapper[0]]
    folder = GOLDEN / "hf" / GOLDEN_OF[name]
    head = "language_model.lm_head." if body.startswith("language_model.") else "lm_head."
    rename = lambda key: body + key.removeprefix("model.") if key.startswith("model.") else head + key[8:]
    tensors = {rename(key): value for key, value in load_file(folder / "model.safetensors").items()}
    save_file(tensors | {RENAMES[body]: np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(wrapped(name, wrapper, text_type=wrapper[0] != "llava")))
    assert same(load(tmp_path, progress=False), load(folder, progress=False))
    save_file(tensors | {"audio.x": np.zeros(3, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"tensors that its config.json does not require: audio.x"):
        load(tmp_path, progress=False)


def test_matrices_of_qwen3_vl_moe_are_stored_transposed(tmp_path):
    folder = GOLDEN / "hf" / "qwen3_moe"
    model = load(folder, progress=False)
    tensors, experts = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        name = name.replace("model.", "model.language_model.", 1)
        module, is_expert, rest = name.partition(".mlp.experts.")
        if is_expert:
            number, part, _ = rest.split(".")
            experts.setdefault(module, {}).setdefault(part, {})[int(number)] = tensor.T.copy("C")
        else:
            tensors[name] = tensor
    for module, parts in experts.items():
        gate, up, down = (
            np.stack([matrices[i] for i in range(len(matrices))])
            for matrices in (parts[f"{part}_proj"] for part in ("gate", "up", "down"))
        )
        tensors[f"{module}.mlp.experts.gate_up_proj"] = np.concatenate([gate, up], axis=2)
        tensors[f"{module}.mlp.experts.down_proj"] = down
    hf = wrapped("qwen3_moe", ("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration"), text_type=True)
    hf["text_config"] |= {"model_type": "qwen3_vl_moe_text"}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(hf))
    loaded = load(tmp_path, progress=False)
    assert loaded.config.layers == model.config.layers
    assert same(loaded, model)
    save(loaded, tmp_path / "again")
    assert same(load(tmp_path / "again", progress=False), model)


@pytest.mark.parametrize(
    ("model_type", "family", "theta"), [("qwen2_vl", "qwen2", 1e6), ("qwen3_vl", "qwen3", 5e5)]
)
def test_mrope_becomes_a_plain_rope_for_text(model_type, family, theta):
    plain = {key: value for key, value in hf_of(family).items() if key != "rope_parameters"}
    expected = DecoderConfig.from_hf(plain | {"rope_theta": theta})
    sections = {"type": "mrope", "rope_type": "mrope", "mrope_section": [2, 3, 3]}
    text = {**plain, "model_type": f"{model_type}_text"}
    for rope in ({"rope_scaling": sections}, {"rope_parameters": {**sections, "mrope_interleaved": True}}):
        nested = DecoderConfig.from_hf({"model_type": model_type, "text_config": text | rope})
        assert (nested.model_type, nested.layers) == (family, expected.layers)
        flat = plain | {"model_type": model_type, "vision_config": {"depth": 2}, "image_token_id": 5} | rope
        flat["architectures"] = [MULTIMODAL_MODELS[model_type][0]]
        assert DecoderConfig.from_hf(flat).layers == expected.layers
