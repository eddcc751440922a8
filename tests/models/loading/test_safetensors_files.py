"""Safetensors files are memory-mapped, selected as transformers does, and refused if they are invalid."""

import json
import pathlib
import subprocess
import sys
import textwrap

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jattn.models.loading.checkpoint import open_tensors
from jattn.models.loading.safetensors_files import read_header

ROOT = pathlib.Path(__file__).parents[3]
STATUS = pathlib.Path("/proc/self/status")


@pytest.mark.parametrize(
    "dtype",
    [
        *(np.float64, np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn),
        *(ml_dtypes.float8_e5m2, np.uint8, np.int8, np.int32, np.int64),
    ],
)
def test_reads_what_safetensors_writes(tmp_path, dtype):
    tensors = {
        "a": np.arange(15).reshape(3, 5).astype(dtype),
        "b": np.array(3).astype(dtype),
        "c": np.zeros((0, 4), dtype),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    header = read_header(tmp_path / "x.safetensors")
    assert header.keys() == tensors.keys()
    for name, tensor in tensors.items():
        view = header[name].view()
        assert (view.dtype, view.shape) == (tensor.dtype, tensor.shape)
        np.testing.assert_array_equal(view, tensor)


def test_released_tensors_can_be_read_again(tmp_path):
    tensors = {"a": np.arange(1 << 20, dtype=np.int32), "b": np.arange(1 << 20, dtype=np.int32) * 3}
    save_file(tensors, tmp_path / "x.safetensors")
    header = read_header(tmp_path / "x.safetensors")
    for name in ("a", "b", "a"):
        np.testing.assert_array_equal(header[name].view(), tensors[name])
        header[name].release()


def test_unsupported_dtypes_may_be_in_a_file(tmp_path):
    header = json.dumps({"x": {"dtype": "F4", "shape": [4, 4], "data_offsets": [0, 8]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert read_header(tmp_path / "x.safetensors")["x"].code == "F4"


def entry(**changes):
    return {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


@pytest.mark.parametrize(
    "header",
    [b"", b"{", b"[1]", *(json.dumps(x).encode() for x in (entry(shape=[3]), entry(data_offsets=[0, 80])))],
)
def test_invalid_files_are_named(tmp_path, header):
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + (bytes(8) if header else b""))
    with pytest.raises(ValueError, match=f"{path} is not a complete safetensors file: .* Download it again"):
        read_header(path)


LOADER = """
    import pathlib, sys
    import jax
    from jattn.models import load

    def megabytes(key):
        lines = pathlib.Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key)) / 1024

    load(sys.argv[2], progress=False)  # compiles
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak is the present again
    before = megabytes("VmRSS")
    model = load(sys.argv[1], progress=False)
    print(megabytes("VmHWM") - before - sum(leaf.nbytes for leaf in jax.tree.leaves(model)) / 2**20)
"""


@pytest.mark.kernels
@pytest.mark.skipif(not STATUS.exists(), reason="reads /proc")
def test_loading_never_holds_a_second_copy_of_the_weights_on_the_host(tmp_path):
    """Measure peak memory beyond the parameters, which are in the same memory on a CPU."""
    hf = {
        **{"model_type": "llama", "vocab_size": 1000, "hidden_size": 1024, "intermediate_size": 2048},
        **{"num_attention_heads": 8, "num_hidden_layers": 12, "torch_dtype": "float32"},
        "tie_word_embeddings": True,
    }
    shapes = {"self_attn.q_proj": (1024, 1024), "self_attn.k_proj": (1024, 1024)}
    shapes |= {"self_attn.v_proj": (1024, 1024), "self_attn.o_proj": (1024, 1024)}
    shapes |= {"mlp.gate_proj": (2048, 1024), "mlp.up_proj": (2048, 1024), "mlp.down_proj": (1024, 2048)}
    shapes |= {"input_layernorm": (1024,), "post_attention_layernorm": (1024,)}
    shard_bytes = 0
    for directory, layers in (("big", 12), ("small", 1)):
        folder = tmp_path / directory
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(hf | {"num_hidden_layers": layers}))
        ends = {"model.embed_tokens.weight": np.ones((1000, 1024), np.float32)}
        save_file(ends | {"model.norm.weight": np.ones(1024, np.float32)}, folder / "ends.safetensors")
        for first in range(0, layers, 4):
            tensors = {
                f"model.layers.{layer}.{name}.weight": np.full(shape, layer, np.float32)
                for layer in range(first, min(first + 4, layers))
                for name, shape in shapes.items()
            }
            save_file(tensors, folder / f"layers-{first}.safetensors")
            shard_bytes = max(shard_bytes, sum(tensor.nbytes for tensor in tensors.values()))
    command = [sys.executable, "-c", textwrap.dedent(LOADER), str(tmp_path / "big"), str(tmp_path / "small")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout) < 1.5 * shard_bytes / 2**20  # 0.8 to 1.2 seen; all weights are 3


SHARDS = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
RIGHT = {"a": 1.0, "b": 2.0}
STALE = {"a": -1.0, "b": -2.0, "c": -3.0}


def folder(directory, files):
    """Write a folder of one-element tensors by file, or of other files."""
    for name, content in files.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        if name.endswith(".json"):
            path.write_text(json.dumps(content))
        elif isinstance(content, dict):
            save_file({key: np.full(1, value) for key, value in content.items()}, path)
        else:
            path.write_bytes(content)
    return directory


def index_of(a=SHARDS[0], b=SHARDS[1], **other_entries):
    return {INDEX: {"weight_map": {"a": a, "b": b, **other_entries}, "metadata": {"total_size": 16}}}


HALVES = {SHARDS[0]: {"a": 1.0}, SHARDS[1]: {"b": 2.0}}
RIGHTS = {
    "shards_without_an_index": HALVES,
    "shards_beside_other_forms": HALVES
    | {
        "consolidated.safetensors": STALE,
        "adapter_model.safetensors": STALE,
    },
    "only_what_the_index_names": HALVES | index_of() | {"model-00003-of-00003.safetensors": STALE},
    "an_index_in_two_minds": {SHARDS[0]: {"a": 1.0, "b": -2.0}, SHARDS[1]: {"a": -1.0, "b": 2.0}}
    | index_of(),
    "the_second_of_two_as_the_index_says": {SHARDS[0]: {"a": -1.0}, SHARDS[1]: RIGHT} | index_of(a=SHARDS[1]),
    "shards_in_a_folder": {"sub/x.safetensors": RIGHT}
    | index_of(a="sub/x.safetensors", b="sub/x.safetensors"),
    "a_single_file_beside_stale_shards": {"model.safetensors": RIGHT, SHARDS[0]: STALE} | index_of(),
    "a_single_file_beside_another_form": {"model.safetensors": RIGHT, "original/model.safetensors": STALE},
    "files_of_any_name": {"x.safetensors": {"a": 1.0}, "y.safetensors": {"b": 2.0}},
    "shards_of_another_name": {
        f"fp16-{number}-of-2.safetensors": {name: RIGHT[name]} for number, name in ((1, "a"), (2, "b"))
    },
}


@pytest.mark.parametrize("name", RIGHTS)
def test_open_tensors_selects_the_right_files(tmp_path, name):
    tensors = open_tensors(folder(tmp_path, RIGHTS[name]))
    assert {key: float(tensor.view()[0]) for key, tensor in tensors.items()} == RIGHT


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988097824\n"
PICKLE = b"PK\x03\x04"
MISSING = {
    rf"{SHARDS[1]} does not exist \(model.safetensors.index.json names it\)": {SHARDS[0]: RIGHT} | index_of(),
    r"model.safetensors does not exist. Convert files of another format .*save_pretrained": {
        "pytorch_model.bin": PICKLE,
        "adapter_model.safetensors": STALE,
    },
}
BROKEN = {
    "is not a complete safetensors file: .* in a Git checkout with .git lfs pull": {
        "model.safetensors": POINTER
    },
}


@pytest.mark.parametrize("message", MISSING)
def test_missing_tensor_files_are_reported_with_a_hint(tmp_path, message):
    with pytest.raises(FileNotFoundError, match=message):
        open_tensors(folder(tmp_path, MISSING[message]))


@pytest.mark.parametrize("message", BROKEN)
def test_invalid_tensor_files_are_named(tmp_path, message):
    with pytest.raises(ValueError, match=message):
        open_tensors(folder(tmp_path, BROKEN[message]))
