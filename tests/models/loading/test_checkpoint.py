"""Tensors get the names of their family, copies of the embedding are checked, and buffers are ignored."""

import json

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jattn.models import DecoderConfig, load
from jattn.models.loading.checkpoint import rename_to_family_names
from jattn.models.loading.safetensors_files import read_header
from tests.conftest import GOLDEN
from tests.models.tiny_checkpoints import CONFIGS, GOLDEN_TEXT_MODELS, random_tensors, write_checkpoint

TIED = CONFIGS["llama3_rope"]
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def config_of(name):
    return DecoderConfig.from_hf(json.loads((GOLDEN / "hf" / name / "config.json").read_text()))


def same(first, second):
    for old, new in zip(jax.tree.leaves(nnx.state(first)), jax.tree.leaves(nnx.state(second)), strict=True):
        np.testing.assert_array_equal(old, new)
    return True


# How a tensor is called in a checkpoint, of its name and the prefix that its family's body has.
WRAPS = {
    "the_whole": lambda name, prefix: name,
    "the_body_alone": lambda name, prefix: name.removeprefix(prefix),
    "doubled": lambda name, prefix: prefix + name,
    "compiled": lambda name, prefix: f"_orig_mod.{name}",
    "merged_adapter": lambda name, prefix: f"base_model.model.{name}",
    "text_of_transformers_4": lambda name, prefix: f"language_model.{name}",
    "text_of_transformers_5": lambda name, prefix: (
        f"model.language_model.{name.removeprefix(prefix)}" if name.startswith(prefix) else name
    ),
    "another_prefix_for_all": lambda name, prefix: f"text_model.{name.removeprefix(prefix)}",
}


@pytest.mark.parametrize("name", GOLDEN_TEXT_MODELS)
def test_tensors_with_any_prefix_get_the_family_s_names(name):
    config = config_of(name)
    tensors = read_header(GOLDEN / "hf" / name / "model.safetensors")
    assert any(tensor.startswith(config.family.prefix) for tensor in tensors)
    for case, wrap in WRAPS.items():
        wrapped = {wrap(tensor, config.family.prefix): value for tensor, value in tensors.items()}
        renamed = rename_to_family_names(wrapped, config, is_multimodal=False)
        assert renamed == tensors, case


def test_a_prefix_that_merges_two_names_is_refused():
    names = ["language_model.model.layers.0.self_attn.o_proj.weight", HEAD, f"language_model.{HEAD}"]
    config = DecoderConfig.from_hf(TIED)
    message = f"Two tensors of the checkpoint are the parameter {HEAD}, one of them language_model.{HEAD}"
    with pytest.raises(ValueError, match=message):
        rename_to_family_names(dict.fromkeys(names), config, is_multimodal=False)


def test_draft_layers_are_ignored(tmp_path):
    """GLM-4.5 stores its draft layer after the last layer; ERNIE 4.5 names the parts differently."""
    folder = GOLDEN / "hf" / "glm4_moe"
    hf, expected = json.loads((folder / "config.json").read_text()), load(folder, progress=False)
    drafts = ("layers.{}.eh_proj", "layers.{}.embed_tokens", "layers.{}.shared_head.head", "mtp_block.0.norm")
    layer = hf["num_hidden_layers"]
    more = {f"model.{name.format(layer)}.weight": np.ones(3, np.float32) for name in drafts}
    tensors = load_file(folder / "model.safetensors") | more
    assert same(
        load(write_checkpoint(tmp_path, hf | {"num_nextn_predict_layers": 1}, tensors), progress=False),
        expected,
    )
    for count in (0, None):
        write_checkpoint(tmp_path, hf | {"num_nextn_predict_layers": count}, tensors)
        with pytest.raises(
            ValueError, match=rf"tensors that its config.json does not require: .*layers.{layer}"
        ):
            load(tmp_path, progress=False)


def test_tied_embeddings_may_be_stored_as_the_output_projection_or_twice(tmp_path):
    tensors = random_tensors(TIED)
    expected = load(write_checkpoint(tmp_path / "a", TIED, tensors), progress=False)
    embedding = tensors[EMBEDDING]
    assert same(
        load(write_checkpoint(tmp_path / "b", TIED, tensors | {HEAD: embedding}), progress=False), expected
    )
    alone = {name: tensor for name, tensor in tensors.items() if name != EMBEDDING}
    assert same(
        load(write_checkpoint(tmp_path / "c", TIED, alone | {HEAD: embedding}), progress=False), expected
    )


@pytest.mark.parametrize("name", ["llama3", "gpt_neox"])
def test_an_output_projection_that_differs_from_tied_embeddings_is_refused(tmp_path, name, monkeypatch):
    hf = json.loads((GOLDEN / "hf" / name / "config.json").read_text()) | {"tie_word_embeddings": True}
    family = DecoderConfig.from_hf(hf).family
    head, embedding = (f"{family.tensors[part].names[0]}.weight" for part in ("lm_head", "embed_tokens"))
    tensors = load_file(GOLDEN / "hf" / name / "model.safetensors")
    last = tensors[embedding].copy()
    last[-1, -1] += 1
    monkeypatch.setattr(jax, "device_put", lambda *_, **case: pytest.fail("a tensor was put on the device"))
    for different in (last, last[:-1], tensors[embedding].astype(np.float16)):
        write_checkpoint(tmp_path, hf, tensors | {head: different})
        message = f"{head} differs from {embedding}, but tie_word_embeddings is true"
        with pytest.raises(ValueError, match=message):
            load(tmp_path, progress=False)


def test_a_missing_tensor_is_reported_with_unexpected_ones_of_its_module(tmp_path):
    tensors = random_tensors(TIED)
    module = "model.layers.1.mlp.up_proj"
    del tensors[f"{module}.weight"]
    tensors |= {
        "a.x": np.zeros(1),
        f"{module}.qweight": np.zeros(3, np.int32),
        f"{module}.g_idx": np.zeros(3),
    }
    message = rf"no tensor {module}.weight; 1 of .* unexpected tensors: {module}\.[\w.]+, {module}"
    with pytest.raises(ValueError, match=message):
        load(write_checkpoint(tmp_path, TIED, tensors), progress=False)


def test_mask_buffers_of_old_checkpoints_are_ignored(tmp_path):
    folder = GOLDEN / "hf" / "gpt2"
    hf = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    mask = np.tril(np.ones((1, 1, 8, 8), bool))
    buffers = {
        "attn.bias": mask,
        "attn.masked_bias": np.float32(-1e4),
        "attn.rotary_emb.inv_freq": np.ones(4),
    }
    buffers |= {"attn.rotary_emb.cos_cached": np.ones((1, 1, 8, 4)), "attn.position_ids": np.arange(8)}
    buffers = {f"h.0.{name}": np.asarray(buffer) for name, buffer in buffers.items()}
    alone = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    expected = load(folder, progress=False)
    assert same(load(write_checkpoint(tmp_path, hf, alone | buffers), progress=False), expected)
    write_checkpoint(tmp_path, hf, tensors | {"transformer.h.0.attn.bias": np.ones(32, np.float32)})
    with pytest.raises(ValueError, match=r"does not require: transformer.h.0.attn.bias"):
        load(tmp_path, progress=False)
