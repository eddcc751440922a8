"""The tensors of a Hugging Face folder, and whether they are the ones that a model needs."""

import importlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jattn.models.stored_tensors import DTYPES, StoredTensor, read_header
from jattn.models.weight_formats import Tensor
from pallas_kernels.checks import require, require_shape

# Old checkpoints store what the config already says: frequencies, and which tokens are seen.
HARMLESS = (
    ".rotary_emb.inv_freq",
    *(f".{attention}.{mask}" for attention in ("attn", "attention") for mask in ("bias", "masked_bias")),
)
SCALES_FILE = "kv_scales.safetensors"  # a cache's static scales, where the model's own files have none
FLOATS = ("F32", "BF16", "F16")


def open_tensors(directory: pathlib.Path) -> dict[str, StoredTensor]:
    """The tensors of a folder, by name.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: Two files hold one tensor, or a file is no safetensors file.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in _tensor_files(directory):
        for name, tensor in read_header(existing(path)).items():
            require(name not in tensors, name, "stand in one file", f"a second one in {path.name}")
            tensors[name] = tensor
    return tensors


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It holds something else; the message names the file.
    """
    try:
        content = json.loads(existing(path).read_text(encoding="utf-8"))
    except ValueError as error:  # of json or of the encoding
        raise ValueError(f"{path} must be JSON, got {error}.") from error
    require(isinstance(content, dict), str(path), "hold a JSON object", repr(content)[:60])
    return content


def _tensor_files(directory: pathlib.Path) -> list[pathlib.Path]:
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if index.exists() and not single.exists():
        files = read_json(index).get("weight_map")
        are_names = isinstance(files, dict) and all(isinstance(name, str) for name in files.values())
        require(are_names, f"{index}'s weight_map", "map tensors to files", repr(files))
        assert isinstance(files, dict)
        return [directory / name for name in sorted(set(files.values()))]
    others = sorted(path for path in directory.glob("*.safetensors") if path.name != SCALES_FILE)
    return [single] if single.exists() else others or [single]


def check_tensors(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], *, may_repeat_head: bool
) -> None:
    """A checkpoint must hold these tensors, in these shapes and as floats, and nothing else that matters.

    Args:
        tensors: By name.
        shapes: What the model needs.
        may_repeat_head: An lm_head.weight that the model does not need is passed over: it is the embedding.

    Raises:
        ValueError: It does not; the message names the tensor and the shapes.
    """
    missing = [name for name in shapes if name not in tensors]
    for name in missing[:1]:
        require(False, name, "be in the checkpoint", f"{len(tensors)} tensors, {len(missing)} missing")
    extra = [name for name in tensors if name not in shapes and not name.endswith(HARMLESS)]
    extra = [name for name in extra if not (may_repeat_head and name == "lm_head.weight")]
    require(not extra, "the checkpoint", "hold only what its config.json asks for", ", ".join(extra[:5]))
    for name, shape in shapes.items():
        require_shape(name, tensors[name].shape, shape, "as config.json says")
        float_dtype(tensors, name)


def float_dtype(tensors: Mapping[str, Tensor], name: str) -> np.dtype:
    """What a tensor is stored as.

    Raises:
        ValueError: It is missing, or of no dtype that parameters may have.
    """
    require(name in tensors, name, "be in the checkpoint", f"{len(tensors)} other tensors")
    code = tensors[name].code
    require(code in FLOATS, f"{name}'s dtype", "be one of " + ", ".join(FLOATS), code)
    return DTYPES[code]


def existing(path: pathlib.Path) -> pathlib.Path:
    """`path`, which must exist.

    Raises:
        FileNotFoundError: It does not.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist.")
    return path


def optional_module(name: str) -> Any:
    """A module of the optional extra `models`.

    Raises:
        ImportError: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ImportError(f"jattn.models needs {package}: pip install 'jattn[models]'.") from error
