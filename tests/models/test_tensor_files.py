"""Which files of a folder count, as published folders have them, and what is said where none does."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from jattn.models.checkpoint import open_tensors

SHARDS = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
RIGHT = {"a": 1.0, "b": 2.0}
STALE = {"a": -1.0, "b": -2.0, "c": -3.0}


def folder(directory, files):
    """Tensors of one number by file, or what else is in a file."""
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


def index_of(a=SHARDS[0], b=SHARDS[1], **others):
    return {INDEX: {"weight_map": {"a": a, "b": b, **others}, "metadata": {"total_size": 16}}}


HALVES = {SHARDS[0]: {"a": 1.0}, SHARDS[1]: {"b": 2.0}}
RIGHTS = {
    "shards_without_an_index": HALVES,
    "shards_beside_other_forms": HALVES
    | {
        "consolidated.safetensors": STALE,
        "adapter_model.safetensors": STALE,
        "model.fp16.safetensors": STALE,
    },
    "only_what_the_index_names": HALVES | index_of() | {"model-00003-of-00003.safetensors": STALE},
    "an_index_that_names_other_shards": HALVES | index_of(a=SHARDS[1], c=SHARDS[0]),
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
def test_takes_the_tensors_that_count(tmp_path, name):
    found = open_tensors(folder(tmp_path, RIGHTS[name]))
    assert {key: float(tensor.view()[0]) for key, tensor in found.items()} == RIGHT


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 988097824\n"
PICKLE = b"PK\x03\x04"
MISSING = {
    rf"{SHARDS[1]} does not exist \(model.safetensors.index.json names it\)": {SHARDS[0]: RIGHT} | index_of(),
    rf"{SHARDS[1]} does not exist \({SHARDS[0]} is one of 2\)": {SHARDS[0]: RIGHT},
    rf"{SHARDS[0]} does not exist \({SHARDS[1]} is one of 2\)": {SHARDS[1]: RIGHT},
    "model.safetensors does not exist; pytorch_model.bin is pickled.*save_pretrained": {
        "pytorch_model.bin": PICKLE,
        "training_args.bin": PICKLE,
    },
    "pytorch_model-00001-of-00002.bin is pickled": {"pytorch_model-00001-of-00002.bin": PICKLE},
    "consolidated.00.pth is pickled": {"consolidated.00.pth": PICKLE},
    "consolidated.safetensors has Mistral's own names": {"consolidated.safetensors": STALE},
    "adapter_model.safetensors is an adapter": {"adapter_model.safetensors": STALE},
    "x-Q4_K.gguf is llama.cpp's": {"x-Q4_K.gguf": b"GGUF"},
    "original/model.safetensors is in a folder below": {"original/model.safetensors": STALE},
    "model.safetensors does not exist.$": {"training_args.bin": PICKLE},
}
BROKEN = {
    "a must stand in one file, got a second one in y.safetensors": {
        "x.safetensors": RIGHT,
        "y.safetensors": {"a": 1.0},
    },
    "b must stand in one file": {SHARDS[0]: RIGHT, SHARDS[1]: RIGHT}
    | index_of(b="z.safetensors", c=SHARDS[1])
    | {"z.safetensors": {}},
    rf"{INDEX}'s weight_map must map tensors to files, got \{{\}}": HALVES | {INDEX: {"weight_map": {}}},
    r"weight_map must map tensors to files, got \{\}": HALVES | {INDEX: {"metadata": {}}},
    "must map tensors to safetensors files, got x.bin": index_of(a="x.bin") | {"x.bin": PICKLE},
    "must be a whole safetensors file, got a pointer of Git LFS .git lfs pull": {
        "model.safetensors": POINTER
    },
}


@pytest.mark.parametrize("message", MISSING)
def test_says_what_is_missing_and_the_way_out(tmp_path, message):
    with pytest.raises(FileNotFoundError, match=message):
        open_tensors(folder(tmp_path, MISSING[message]))


@pytest.mark.parametrize("message", BROKEN)
def test_says_what_is_broken(tmp_path, message):
    with pytest.raises(ValueError, match=message):
        open_tensors(folder(tmp_path, BROKEN[message]))
