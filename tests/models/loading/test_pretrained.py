"""Folders in and out: bits kept, and errors that name the tensor or the file before anything is allocated."""

import json
import mmap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models

from jattn.models import Decoder, load, save
from jattn.models.loading import checkpoint, placement, pretrained
from jattn.parallel import make_mesh
from tests.conftest import GOLDEN
from tests.models.tiny_checkpoints import BFLOAT16, CONFIGS, random_tensors, write_checkpoint

TIED, UNTIED = CONFIGS["llama3_rope"], CONFIGS["llama_biases"]
EMBEDDING, PROJECTION = "model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize("name", sorted(path.parent.name for path in (GOLDEN / "hf").glob("*/config.json")))
def test_golden_checkpoints_survive_bit_by_bit(tmp_path, name):
    save(load(GOLDEN / "hf" / name, progress=False), tmp_path)
    file = "model.safetensors"
    before, after = load_file(GOLDEN / "hf" / name / file), load_file(tmp_path / file)
    assert before.keys() == after.keys()
    for key in before:
        assert before[key].shape == after[key].shape
        np.testing.assert_array_equal(before[key].view(np.uint32), after[key].view(np.uint32))
    with safe_open(tmp_path / file, "numpy") as opened:
        assert opened.metadata() == {"format": "pt"}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16])
@pytest.mark.parametrize("hf", [TIED, UNTIED], ids=["tied", "untied"])
def test_round_trip_in_every_dtype(tmp_path, hf, dtype):
    hf = {key: value for key, value in hf.items() if key not in ("dtype", "torch_dtype")}
    tensors = random_tensors(hf, dtype)
    model = load(write_checkpoint(tmp_path / "a", hf, tensors), progress=False)
    assert model.dtype == dtype
    save(model, tmp_path / "b")
    again = load(tmp_path / "b", progress=False)
    for old, new in zip(jax.tree.leaves(model), jax.tree.leaves(again), strict=True):
        assert old.dtype == new.dtype == dtype
        np.testing.assert_array_equal(old, new)
    stored = load_file(tmp_path / "b" / "model.safetensors")
    assert all(np.array_equal(stored[name], tensors[name]) for name in tensors)


def test_dtype_may_be_chosen(tmp_path):
    directory = write_checkpoint(tmp_path, TIED, random_tensors(TIED))
    assert load(directory, dtype=jnp.bfloat16, progress=False).dtype == jnp.bfloat16
    (tmp_path / "config.json").write_text(json.dumps(TIED | {"torch_dtype": "float16"}))
    assert load(directory, progress=False).dtype == jnp.float16


@pytest.mark.parametrize(("name", "dtype"), [("gpt_oss", jnp.bfloat16), ("phi3small", jnp.float32)])
def test_a_parameter_is_the_same_by_the_host_and_by_the_device(monkeypatch, name, dtype):
    """A host writes it in pieces where it stays; a device is sent tensors in pieces, and joins them."""
    read = lambda: jax.tree.leaves(load(GOLDEN / "hf" / name, dtype=dtype, progress=False))
    whole, sent = read(), []
    monkeypatch.setattr(placement, "_PIECE", 1000)
    by_host = read()

    def send(view):
        sent.append(view.nbytes)
        return placement.put(view)

    by_device = lambda *of, is_on_host, **how: placement.read_parameter(*of, send, **how)
    monkeypatch.setattr(placement, "PIECE", 5000)
    monkeypatch.setattr(pretrained, "read_parameter", by_device)
    for a, b, c in zip(whole, by_host, read(), strict=True):
        assert a.dtype == b.dtype == c.dtype
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)
    assert 4000 < max(sent) <= 5000


def test_a_parameter_on_the_host_is_written_once(tmp_path):
    model = load(write_checkpoint(tmp_path, TIED, random_tensors(TIED)), progress=False)
    kernel = model.layers[0].mlp.down_proj.kernel[...]
    start = kernel.unsafe_buffer_pointer()
    assert start % mmap.PAGESIZE == 0  # memory of its own, as it was written


@pytest.mark.parametrize("has_index", [True, False])
def test_several_files(tmp_path, has_index):
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
    with pytest.raises(FileNotFoundError if has_index else ValueError, match=r"model-2|must be in the check"):
        load(tmp_path, progress=False)


def test_a_tensor_stands_in_one_file(tmp_path):
    tensors = random_tensors(TIED)
    write_checkpoint(tmp_path, TIED, tensors, "a.safetensors")
    write_checkpoint(tmp_path, TIED, {EMBEDDING: tensors[EMBEDDING]}, "b.safetensors")
    with pytest.raises(ValueError, match=f"{EMBEDDING} must be in one file, got a second one in b.safe"):
        load(tmp_path, progress=False)


def test_passes_over_what_is_harmless(tmp_path):
    tensors = random_tensors(TIED)
    tensors |= {"lm_head.weight": tensors[EMBEDDING]}
    tensors |= {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    load(write_checkpoint(tmp_path, TIED, tensors), progress=False)


def damaged(change):
    tensors = random_tensors(UNTIED)
    change(tensors)
    return tensors


DAMAGE = {
    f"{PROJECTION} must be in the checkpoint.*1 missing": lambda t: t.pop(PROJECTION),
    f"{EMBEDDING} must be in the checkpoint": lambda t: t.pop(EMBEDDING),
    "lm_head.weight must be in the checkpoint": lambda t: t.pop("lm_head.weight"),
    rf"{PROJECTION} must have shape \(32, 48\).*got \(48, 32\)": lambda t: t.update(
        {PROJECTION: np.zeros((48, 32), np.float32)}
    ),
    "got model.layers.3.mlp.up_proj.weight": lambda t: t.update(
        {"model.layers.3.mlp.up_proj.weight": np.zeros(3, np.float32)}
    ),
    rf"{PROJECTION}'s dtype must be one of F32, BF16, F16, got I8": lambda t: t.update(
        {PROJECTION: np.zeros((32, 48), np.int8)}
    ),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_names_the_tensor_before_anything_is_allocated(tmp_path, message, monkeypatch):
    write_checkpoint(tmp_path, UNTIED, damaged(DAMAGE[message]))
    monkeypatch.setattr(jax, "device_put", lambda *_, **how: pytest.fail("a tensor was put on the device"))
    with pytest.raises(ValueError, match=message):
        load(tmp_path, progress=False)


def test_the_hub_is_named_where_its_name_of_a_model_is_no_folder(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"config.json does not exist; load does not .* hf download a/B-1\.5"
    ):
        load("a/B-1.5")
    (tmp_path / "snapshots" / "5f").mkdir(parents=True)
    (tmp_path / "snapshots" / "5f" / "config.json").write_text(json.dumps(TIED))
    with pytest.raises(
        FileNotFoundError, match=rf"config.json does not exist; {tmp_path}/snapshots/5f has one"
    ):
        load(tmp_path)


def test_names_the_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere/config.json does not exist"):
        load(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text(json.dumps(TIED))
    with pytest.raises(FileNotFoundError, match=r"model.safetensors does not exist"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"x" * 20)
    with pytest.raises(ValueError, match=r"model.safetensors must be a complete safetensors file"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(TIED | {"model_type": "mamba"}))
    with pytest.raises(NotImplementedError, match=r"architecture mamba.*LlamaForCausalLM"):
        load(tmp_path)


BROKEN = {
    "config.json": ["{", "[1]", "\xff\xfe"],
    "generation_config.json": ["", "3"],
    "tokenizer.json": ["{", '{"model": 3}'],
    "tokenizer_config.json": ["{", "[]"],
    "kv_scales.safetensors": ["x" * 20],
    "model.safetensors.index.json": ["{", "{}", '{"weight_map": {"x": 1}}'],
}


@pytest.mark.parametrize(("file", "content"), [(file, text) for file in BROKEN for text in BROKEN[file]])
def test_names_the_file_that_is_broken(tmp_path, file, content):
    write_checkpoint(tmp_path, TIED, random_tensors(TIED))
    (tmp_path / file).write_bytes(content.encode("latin-1"))
    if file.endswith("index.json"):
        (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=rf"{tmp_path}/{file}('s weight_map)? must (be|hold|map) .*, got"):
        load(tmp_path, progress=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": "48"}, "hidden_size must be an int, got '48'"),
        ({"num_hidden_layers": 3.0}, r"num_hidden_layers must be an int, got 3\.0"),
        ({"num_attention_heads": True}, "num_attention_heads must be an int, got True"),
        ({"num_attention_heads": 0}, "num_attention_heads must be positive, got 0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be positive, got -1"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a number, got '1e-5'"),
        ({"rope_scaling": 8}, "rope_scaling must be an object, got 8"),
        (
            {"rope_scaling": {"type": "linear", "factor": "8"}},
            "rope parameter factor must be a number, got '8'",
        ),
        ({"layer_types": "full_attention"}, "layer_types must be a list of names, got 'full_attention'"),
        ({"hidden_act": 3}, "hidden_act must be a name, got 3"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id must be an int or a list of ints, got"),
        ({"vocab_size": None}, r"config must have the keys vocab_size.*, got none of \['vocab_size'\]"),
    ],
)
def test_names_the_value_that_config_json_cannot_have(tmp_path, change, message):
    (tmp_path / "config.json").write_text(json.dumps(TIED | change))
    with pytest.raises(ValueError, match=rf"^{tmp_path}/config.json: {message}"):
        load(tmp_path, progress=False)


def test_names_the_extra_that_is_missing():
    with pytest.raises(ImportError, match=r"needs not_there of .* pip install '\.\[models\]' in"):
        checkpoint.optional_module("not_there.numpy")


def test_the_end_of_text_in_generation_config_wins(tmp_path):
    write_checkpoint(tmp_path, TIED | {"eos_token_id": 5}, random_tensors(TIED))
    assert load(tmp_path, progress=False).config.eos_token_ids == (5,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 9]}))
    assert load(tmp_path, progress=False).config.eos_token_ids == (5, 9)


@pytest.mark.parametrize("named", ["<end>", {"content": "<end>", "special": True}])
def test_the_tokenizer_s_end_of_text_ends_one_too(tmp_path, named):
    write_checkpoint(tmp_path, TIED | {"eos_token_id": None}, random_tensors(TIED))
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.add_special_tokens(["<pad>", "<end>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load(tmp_path, progress=False).config.eos_token_ids == ()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
    model = load(tmp_path, progress=False)
    assert model.config.eos_token_ids == (3,)
    save(model, tmp_path / "again")
    assert load(tmp_path / "again", progress=False).config.eos_token_ids == (3,)
    for ids, want in ([5], (5, 3)), ([3, 5], (3, 5)):
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
        assert load(tmp_path, progress=False).config.eos_token_ids == want
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<none>"}))
    assert load(tmp_path, progress=False).config.eos_token_ids == (3, 5)


@pytest.mark.parametrize(
    "tokens",
    [models.WordLevel({"a": 0, "</s>": 2}, unk_token="a"), models.Unigram([("a", 0.0), ("</s>", 0.0)])],
)
def test_an_end_of_text_may_be_a_token_of_the_tokenizer_s_model_alone(tmp_path, tokens):
    write_checkpoint(tmp_path, TIED | {"eos_token_id": None}, random_tensors(TIED))
    tokenizer = Tokenizer(tokens)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert load(tmp_path, progress=False).config.eos_token_ids == (tokenizer.token_to_id("</s>"),)


@pytest.mark.parametrize("named", [5, ["</s>"], {"text": "</s>"}, {"content": None}])
def test_a_special_token_that_is_no_text_is_named(tmp_path, named):
    write_checkpoint(tmp_path, TIED, random_tensors(TIED))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
    with pytest.raises(ValueError, match=f"{tmp_path}: eos_token must be a string, or an object whose"):
        load(tmp_path, progress=False)


@pytest.mark.parametrize(("added", "rule"), [([5], "hold objects .*, got 5"), (5, "be a list, got 5")])
def test_added_tokens_of_another_kind_are_named(tmp_path, added, rule):
    write_checkpoint(tmp_path, TIED, random_tensors(TIED))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    with pytest.raises(ValueError, match=rf"tokenizer\.json: added_tokens must {rule}"):
        load(tmp_path, progress=False)


def test_a_tokenizer_neither_cuts_nor_pads(tmp_path):
    write_checkpoint(tmp_path, TIED, random_tensors(TIED))
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=8, pad_id=1, pad_token="b")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    model = load(tmp_path, progress=False)
    assert [model.tokenizer.encode(text).ids for text in ("a", "a" * 9)] == [[0], [0] * 9]


def test_shows_progress(tmp_path, capfd):
    load(write_checkpoint(tmp_path / "tiny", TIED, random_tensors(TIED)))
    assert "Loading tiny: 100%" in capfd.readouterr().err


def test_the_tokenizer_travels_and_breaks_no_transform(tmp_path):
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


def test_a_saved_file_may_replace_the_one_it_came_from(tmp_path):
    model = load(write_checkpoint(tmp_path, TIED, random_tensors(TIED)), progress=False)
    before = jax.tree.map(np.array, nnx.state(model))
    save_file({"x": np.zeros(1000)}, tmp_path / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(model))
    assert isinstance(model, Decoder)


def test_a_mesh_wants_the_host_before_a_file_is_read(tmp_path, monkeypatch):
    def local_devices(backend):
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setattr(jax, "local_devices", local_devices)
    with pytest.raises(NotImplementedError, match=r"JAX has no CPU backend .*: JAX_PLATFORMS=cuda,cpu"):
        load(tmp_path / "nowhere", mesh=make_mesh(), progress=False)
