"""The tensors of a Hugging Face folder, and whether they are the ones that a model needs."""

import importlib
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jattn.models.stored_tensors import DTYPES, StoredTensor, read_header
from jattn.models.tensor_files import tensor_files
from jattn.models.weight_formats import Tensor
from pallas_kernels.checks import require, require_shape

# Old checkpoints store what the config already says: frequencies, and which tokens are seen.
HARMLESS = (
    ".rotary_emb.inv_freq",
    *(f".{attention}.{mask}" for attention in ("attn", "attention") for mask in ("bias", "masked_bias")),
)
FLOATS = ("F32", "BF16", "F16")


def open_tensors(directory: pathlib.Path) -> dict[str, StoredTensor]:
    """The tensors of a folder, by name.

    Raises:
        FileNotFoundError: A file is missing.
        ValueError: Two files hold one tensor and no index says which counts, or one is no safetensors file.
    """
    paths, places = tensor_files(directory)
    tensors: dict[str, StoredTensor] = {}
    files: dict[str, pathlib.Path] = {}
    for path in paths:
        for name, tensor in read_header(path).items():
            said = directory / places.get(name, "")
            if name in tensors and files[name] == said:
                continue
            require(
                name not in tensors or path == said, name, "stand in one file", f"a second one in {path.name}"
            )
            tensors[name], files[name] = tensor, path
    return tensors


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
