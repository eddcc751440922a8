"""The tensors of a Hugging Face folder, memory-mapped, and whether they are the ones that a model needs."""

import contextlib
import importlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.checks import require, require_shape

HARMLESS = (".rotary_emb.inv_freq",)  # old checkpoints store what the config already says
SCALES_FILE = "kv_scales.safetensors"  # a cache's static scales, where the model's own files have none
STORED = {"F32": jnp.float32, "BF16": jnp.bfloat16, "F16": jnp.float16}


def open_tensors(directory: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """Name -> the memory-mapped file that holds the tensor. The files close with the stack.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: Two files hold one tensor, or a file is no safetensors file.
    """
    files: dict[str, Any] = {}
    for path in _tensor_files(directory):
        file = stack.enter_context(open_file(path))
        for name in file.keys():  # noqa: SIM118  (a safetensors file is no dict)
            require(name not in files, name, "stand in one file", f"a second one in {path.name}")
            files[name] = file
    return files


def open_file(path: pathlib.Path) -> Any:
    """A safetensors file, to be closed by whoever opened it.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is broken.
    """
    safetensors = optional_module("safetensors")
    try:
        return safetensors.safe_open(existing(path), framework="numpy")
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} must be a whole safetensors file, got {error}.") from error


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
    files: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], *, may_repeat_head: bool
) -> None:
    """The files must hold these tensors, in these shapes and as floats, and nothing else that matters.

    Args:
        files: As open_tensors returns them.
        shapes: What the model needs.
        may_repeat_head: An lm_head.weight that the model does not need is passed over: it is the embedding.

    Raises:
        ValueError: They do not; the message names the tensor and the shapes.
    """
    missing = [name for name in shapes if name not in files]
    for name in missing[:1]:
        require(False, name, "be in the checkpoint", f"{len(files)} tensors, {len(missing)} missing")
    extra = [name for name in files if name not in shapes and not name.endswith(HARMLESS)]
    extra = [name for name in extra if not (may_repeat_head and name == "lm_head.weight")]
    require(not extra, "the checkpoint", "hold only what its config.json asks for", ", ".join(extra[:5]))
    for name, shape in shapes.items():
        require_shape(name, tuple(files[name].get_slice(name).get_shape()), shape, "as config.json says")
        stored_dtype(files, name)


def stored_dtype(files: Mapping[str, Any], name: str) -> np.dtype:
    """What a tensor is stored as.

    Raises:
        ValueError: It is missing, or of no dtype that parameters may have.
    """
    require(name in files, name, "be in the checkpoint", f"{len(files)} other tensors")
    code = files[name].get_slice(name).get_dtype()
    require(code in STORED, f"{name}'s dtype", "be one of " + ", ".join(STORED), code)
    return jnp.dtype(STORED[code])


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
