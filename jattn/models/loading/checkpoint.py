"""The tensors of a Hugging Face folder, and whether they are the ones that a model needs."""

import importlib
import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jattn.models.config import DecoderConfig
from jattn.models.families import Family
from jattn.models.families.multimodal import text_tensors
from jattn.models.loading.quantized_weights import Tensor
from jattn.models.loading.safetensors_files import (
    DTYPES,
    FLOATS,
    StoredTensor,
    is_same_bytes,
    read_header,
    tensor_files,
)
from jattn.models.loading.tensor_layouts import Stored
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


_NUM_DRAFT_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules")


def by_family_s_names(
    tensors: Mapping[str, Any], config: DecoderConfig, *, has_more_than_text: bool
) -> dict[str, Any]:
    """A checkpoint's tensors by the names that its family has for them.

    Layers behind the last, which draft tokens, are passed over. A checkpoint that has the head alone where
    that is the embedding has the embedding.

    Args:
        tensors: By the names that they have there.
        config: Of the decoder.
        has_more_than_text: Those that have no part in text are passed over.

    Raises:
        ValueError: Two tensors have one name.
    """
    family = config.family
    named = text_tensors(tensors) if has_more_than_text else dict(tensors)
    named = _with_the_family_s_prefix(named, family)
    drafts = _names_of_drafts(config)
    named = {name: tensor for name, tensor in named.items() if not name.startswith(drafts)}
    head, embedding = (f"{family.tensors[part].names[0]}." for part in ("lm_head", "embed_tokens"))
    if config.tie_word_embeddings and not any(name.startswith(embedding) for name in named):
        of_head = [name for name in named if name.startswith(head)]
        named |= {embedding + name.removeprefix(head): named.pop(name) for name in of_head}
    return named


def tensors_in(family: Family, names: Iterable[str]) -> dict[str, Stored]:
    """Where a checkpoint has a family's parameters.

    Args:
        family: The family.
        names: Of the checkpoint's tensors.
    """
    modules = {re.sub(r"(?<=\.)\d+(?=\.)", "*", name.removesuffix(".weight")) for name in names}
    others = family.other_tensors.items()
    return {**family.tensors, **{ours: stored for ours, stored in others if modules & {*stored.names}}}


def _with_the_family_s_prefix(tensors: dict[str, Any], family: Family) -> dict[str, Any]:
    """With the prefix that the body has in the whole, where it has none or others in a checkpoint.

    The body alone has none; what trainers, adapters and models of more than text wrap around it has another,
    or one before it. Where the body begins is told by a tensor of the first layer.
    """
    (head,), (inner,) = (family.tensors[part].names for part in ("lm_head", "layers.*.self_attn.o_proj"))
    inner = inner.removeprefix(family.prefix).replace("*", "0")
    place = re.compile(rf"(|.+\.){re.escape(inner)}\..+")
    found = sorted({match[1] for match in map(place.fullmatch, tensors) if match}, key=len)
    if not found or family.prefix in found:
        return tensors
    lacks_prefix = not found[0].endswith(f".{family.prefix}")
    outer = found[0] if lacks_prefix else found[0].removesuffix(family.prefix)
    named: dict[str, Any] = {}
    for name, tensor in tensors.items():
        new = name.removeprefix(outer)
        if lacks_prefix and name.startswith(outer) and not new.startswith(f"{head}."):
            new = family.prefix + new
        require(new not in named, "the checkpoint", f"have one tensor {new}", f"another named {name}")
        named[new] = tensor
    return named


def _names_of_drafts(config: DecoderConfig) -> tuple[str, ...]:
    """What the names of tensors begin with that only draft the tokens behind the next."""
    hf, prefix = json.loads(config.source), config.family.prefix
    count = max(hf.get(key) or 0 for key in _NUM_DRAFT_LAYERS)
    layers = range(config.num_hidden_layers, config.num_hidden_layers + count)
    others = (f"{prefix}mtp_", "mtp.") if count else ()
    return (*(f"{prefix}layers.{layer}." for layer in layers), *others)
