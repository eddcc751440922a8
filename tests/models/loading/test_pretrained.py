"""load and save keep every bit, and errors name the tensor or file before anything is allocated."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models

from jattn.models import Decoder, load, save
from jattn.models.loading import files
from jattn.models.loading.pretrained import load_shapes
from tests.conftest import GOLDEN
from tests.models.tiny_checkpoints import (
    BFLOAT16,
    CONFIGS,
    GOLDEN_TEXT_MODELS,
    random_tensors,
    write_checkpoint,
)

TIED, UNTIED = CONFIGS["llama3_rope"], CONFIGS["llama_biases"]
EMBEDDING, PROJECTION = "model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.kernels
@pytest.mark.parametrize("name", GOLDEN_TEXT_MODELS)
def test_golden_checkpoints_survive_load_and_save_bit_by_bit(tmp_path, name):
    save(load(GOLDEN / "hf" / name, progress=False), tmp_path)
    file = "model.safetensors"
    before, after = load_file(GOLDEN / "hf" / name / file), load_file(tmp_path / file)
    assert before.keys() == after.keys()
    for key in before:
        assert before[key].shape == after[key].shape
        np.testing.assert_array_equal(before[key].view(np.uint32), after[key].view(np.uint32))
    with safe_open(tmp_path / file, "numpy") as opened:
        assert opened.metadata() == {"format": "pt"}


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16])
@pytest.mark.parametrize("hf", [TIED, UNTIED], ids=["tied", "untied"])
def test_round_trip_in_every_dtype(tmp_path, hf, dtype):
    hf = {key: value for key, value in hf.items() if key not in ("dtype", "torch_dtype")}
    tensors = random_tensors(hf, dtype)
    model = load(write_checkpoint(tmp_path / "a", hf, tensors), progress=False)
    assert model.dtype == dtype
    save(model, tmp_path / "b")
    reloaded = load(tmp_path / "b", progress=False)
    for old, new in zip(jax.tree.leaves(model), jax.tree.leaves(reloaded), strict=True):
        assert old.dtype == new.dtype == dtype
        np.testing.assert_array_equal(old, new)
    stored = load_file(tmp_path / "b" / "model.safetensors")
    assert all(np.array_equal(stored[name], tensors[name]) for name in tensors)


def test_load_accepts_a_dtype(tmp_path):
    directory = write_checkpoint(tmp_path, TIED, random_tensors(TIED))
    assert load(directory, dtype=jnp.bfloat16, progress=False).dtype == jnp.bfloat16
    (tmp_path / "config.json").write_text(json.dumps(TIED | {"torch_dtype": "float16"}))
    assert load(directory, progress=False).dtype == jnp.float16


@pytest.mark.parametrize("has_index", [True, False])
def test_a_checkpoint_may_have_several_files(tmp_path, has_index):
    tensors = random_tensors(TIED)
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[:5], "model-2.safetensors": names[5:]}
    for file, part in parts.items():
        write_checkpoint(tmp_path, TIED, {name: tensors[name] for name in part}, file)
    if has_index:
        index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        (tmp_path / "consolidated.safetensors").write_bytes(b"not in the index: never opened")
    model = load(tmp_path, progress=False)
    np.testing.assert_array_equal(model.embed_tokens.embedding[...], tensors[EMBEDDING])
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError if has_index else ValueError,
        match=r"model-2|The checkpoint has no tensor model\.layers",
    ):
        load(tmp_path, progress=False)


def test_buffers_of_old_checkpoints_are_ignored(tmp_path):
    tensors = random_tensors(TIED)
    tensors |= {"lm_head.weight": tensors[EMBEDDING]}
    tensors |= {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    load(write_checkpoint(tmp_path, TIED, tensors), progress=False)


def damaged(change):
    tensors = random_tensors(UNTIED)
    change(tensors)
    return tensors


DAMAGE = {
    f"no tensor {PROJECTION}; 1 of the": lambda t: t.pop(PROJECTION),
    f"no tensor {EMBEDDING}": lambda t: t.pop(EMBEDDING),
    "no tensor lm_head.weight": lambda t: t.pop("lm_head.weight"),
    rf"{PROJECTION} must have shape \(32, 48\).*got \(48, 32\)": lambda t: t.update(
        {PROJECTION: np.zeros((48, 32), np.float32)}
    ),
    "not require: model.layers.3.mlp.up_proj.weight": lambda t: t.update(
        {"model.layers.3.mlp.up_proj.weight": np.zeros(3, np.float32)}
    ),
    rf"{PROJECTION}'s dtype must be one of F32, BF16, F16, got I8": lambda t: t.update(
        {PROJECTION: np.zeros((32, 48), np.int8)}
    ),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_a_wrong_tensor_is_named_before_anything_is_allocated(tmp_path, message, monkeypatch):
    write_checkpoint(tmp_path, UNTIED, damaged(DAMAGE[message]))
    monkeypatch.setattr(
        jax, "device_put", lambda *_, **options: pytest.fail("a tensor was put on the device")
    )
    with pytest.raises(ValueError, match=message):
        load(tmp_path, progress=False)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere is not a folder, nor a name on the Hub"):
        load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"config.json does not exist"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TIED))
    with pytest.raises(FileNotFoundError, match=r"model.safetensors does not exist"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x" * 20)
    with pytest.raises(ValueError, match=r"model.safetensors is not a complete safetensors file"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TIED | {"model_type": "mamba"}))
    with pytest.raises(NotImplementedError, match=r"model_type 'mamba'.*LlamaForCausalLM"):
        load(tmp_path)


BROKEN = {
    "config.json": ["{", "[1]", "\xff\xfe"],
    "generation_config.json": ["", "3"],
    "tokenizer.json": ["{", '{"model": 3}'],
    "tokenizer_config.json": ["{", "[]"],
    "kv_scales.safetensors": ["x" * 20],
    "model.safetensors.index.json": ["{", "[]"],
}


@pytest.mark.parametrize(("file", "content"), [(file, text) for file in BROKEN for text in BROKEN[file]])
def test_invalid_files_are_named(tmp_path, file, content):
    write_checkpoint(tmp_path, TIED, random_tensors(TIED))
    Tokenizer(models.BPE({"a": 0}, [])).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / file).write_bytes(content.encode("latin-1"))
    if file.endswith("index.json"):
        (tmp_path / "model.safetensors").unlink()
    message = rf"{tmp_path}/{file} (must (be|hold) .*, got|is not a complete)"
    with pytest.raises(ValueError, match=message):
        load(tmp_path, progress=False)


@pytest.mark.parametrize("change", [{"hidden_size": "48"}, {"hidden_size": 50}, {"num_hidden_layers": 3.0}])
def test_invalid_config_values_are_named_with_the_file(tmp_path, change):
    (tmp_path / "config.json").write_text(json.dumps(TIED | change))
    with pytest.raises(ValueError, match=rf"^{tmp_path}/config.json: "):
        load(tmp_path, progress=False)


def test_missing_packages_are_reported_with_the_extra():
    with pytest.raises(ImportError, match=r"needs not_there of .* pip install '\.\[models\]' in"):
        files.optional_module("not_there.numpy")


def test_eos_token_id_of_generation_config_takes_precedence(tmp_path):
    write_checkpoint(tmp_path, TIED | {"eos_token_id": 5}, random_tensors(TIED))
    assert load(tmp_path, progress=False).config.eos_token_ids == (5,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9]}))
    assert load(tmp_path, progress=False).config.eos_token_ids == (5, 9)


def test_load_shows_progress(tmp_path, capfd):
    load(write_checkpoint(tmp_path / "tiny", TIED, random_tensors(TIED)))
    assert "Loading tiny: 100%" in capfd.readouterr().err


def test_the_tokenizer_survives_nnx_transforms(tmp_path):
    write_checkpoint(tmp_path / "a", TIED, random_tensors(TIED))
    Tokenizer(models.BPE({"a": 0, "b": 1}, [])).save(str(tmp_path / "a" / "tokenizer.json"))
    model = load(tmp_path / "a", progress=False)
    assert model.tokenizer.encode("ab").ids == [0, 1]
    save(model, tmp_path / "b")
    assert load(tmp_path / "b", progress=False).tokenizer.encode("ba").ids == [1, 0]
    graph, state = nnx.split(model)
    assert hash(graph) == hash(nnx.split(model)[0])
    assert nnx.merge(graph, state).tokenizer is model.tokenizer
    assert nnx.jit(lambda model: model.embed_tokens.embedding[...] * 1.0)(model).shape == (97, 48)


def test_save_may_overwrite_the_loaded_folder(tmp_path):
    model = load(write_checkpoint(tmp_path, TIED, random_tensors(TIED)), progress=False)
    before = jax.tree.map(np.array, nnx.state(model))
    save_file({"x": np.zeros(1000)}, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(model))
    assert isinstance(model, Decoder)


class TestDummyWeights:
    def test_only_the_configuration_is_read(self, tmp_path):
        write_checkpoint(tmp_path, CONFIGS["mistral"], random_tensors(CONFIGS["mistral"]))
        expected = load(tmp_path, progress=False)
        (tmp_path / "model.safetensors").unlink()
        first, second = (load(tmp_path, load_format="dummy", progress=False) for _ in range(2))
        shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), nnx.state(m)) for m in (expected, first)]
        assert jax.tree.leaves(shapes[0]) == jax.tree.leaves(shapes[1])
        values, same_values = (jax.tree.leaves(nnx.state(model, nnx.Param)) for model in (first, second))
        for value, same in zip(values, same_values, strict=True):
            np.testing.assert_array_equal(value, same)
            assert 0 < np.abs(value).max() <= 1e-3
        assert jax.tree.leaves(nnx.state(load_shapes(tmp_path, load_format="dummy")))[0].shape

    def test_formats_of_vllm_without_a_meaning_here_are_refused(self, tmp_path):
        with pytest.raises(
            ValueError, match="load_format must be one of 'auto', 'dummy', got 'bitsandbytes'"
        ):
            load(tmp_path, load_format="bitsandbytes")
