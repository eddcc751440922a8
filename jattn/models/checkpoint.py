"""The tensors of a Hugging Face folder, and whether they are the ones that a model needs."""

import importlib
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from jattn.models.stored_tensors import DTYPES, FLOATS, StoredTensor, is_same_bytes, read_header
from jattn.models.tensor_files import tensor_files
from jattn.models.weight_formats import Tensor
from pallas_kernels.checks import require, require_shape

# Old checkpoints store what the config already says: frequencies, positions, and which tokens are seen.
_BUFFERS = (
    *(".inv_freq", ".original_inv_freq", ".cos_cached", ".sin_cached", ".position_ids"),
    *(".attn.masked_bias", ".attention.masked_bias"),
)
_MASKS = (".attn.bias", ".attention.bias")  # [1, 1, queries, keys]


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
    tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], repeats: Mapping[str, str]
) -> None:
    """A checkpoint must hold these tensors, in these shapes and as floats, and nothing else that matters.

    Args:
        tensors: By name.
        shapes: What the model needs.
        repeats: Tensors that the model does not need, each another one's copy, byte by byte.

    Raises:
        ValueError: It does not; the message names the tensor and the shapes.
    """
    missing = [name for name in shapes if name not in tensors]
    extra = [name for name, tensor in tensors.items() if name not in shapes and not _is_buffer(name, tensor)]
    extra = [name for name in extra if name not in repeats]
    for name in missing[:1]:
        module = name.rpartition(".")[0] + "."
        nearest = sorted(extra, key=lambda other: not other.startswith(module))[:3]
        others = f", but {', '.join(nearest)}" if nearest else ""
        require(
            False, name, "be in the checkpoint", f"{len(tensors)} tensors, {len(missing)} missing{others}"
        )
    require(not extra, "the checkpoint", "hold only what its config.json asks for", ", ".join(extra[:5]))
    for name, shape in shapes.items():
        require_shape(name, tensors[name].shape, shape, "as config.json says")
        float_dtype(tensors, name)
    for copy, name in repeats.items():
        # transformers 4 passes over such a head, 5 takes it: neither is known to be meant.
        if copy not in tensors:
            continue
        is_copy = _is_same(tensors[copy], tensors[name])
        rule = f"be {name}, as tie_word_embeddings says (or that be false in config.json)"
        require(is_copy, copy, rule, f"{tensors[copy].shape} other numbers")


def _is_same(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.code, len(one.sources)) != (other.shape, other.code, len(other.sources)):
        return False
    return all(map(is_same_bytes, one.sources, other.sources))


def _is_buffer(name: str, tensor: Tensor) -> bool:
    return name.endswith(_BUFFERS) or (name.endswith(_MASKS) and len(tensor.shape) == 4)


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
        told = f"jattn.models needs {package}, of the extra 'models': pip install '.[models]' in a checkout"
        raise ImportError(f"{told}.") from error
