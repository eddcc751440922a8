"""The tensors of a checkpoint: opening, renaming and checking them."""

import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jattn.models.config import DecoderConfig
from jattn.models.families import Family
from jattn.models.families.multimodal import drop_non_text_tensors
from jattn.models.loading.quantized_weights import Tensor
from jattn.models.loading.safetensors_files import (
    DTYPES,
    FLOATS,
    StoredTensor,
    find_tensor_files,
    read_header,
)
from jattn.models.loading.tensor_layouts import HFTensors
from pallas_kernels.checks import require, require_shape

# Buffers of old checkpoints that follow from the config: frequencies, positions and attention masks.
_BUFFERS = (
    *(".inv_freq", ".original_inv_freq", ".cos_cached", ".sin_cached", ".position_ids"),
    *(".attn.masked_bias", ".attention.masked_bias"),
)
_MASKS = (".attn.bias", ".attention.bias")  # [1, 1, queries, keys]


def open_tensors(directory: pathlib.Path) -> dict[str, StoredTensor]:
    """Return the tensors of a folder by name.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If a file is not a safetensors file.
    """
    paths, weight_map = find_tensor_files(directory)
    return {
        name: tensor
        for path in paths
        for name, tensor in read_header(path).items()
        if directory / weight_map.get(name, path.name) == path
    }


def check_tensors(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], repeats: Mapping[str, str]
) -> None:
    """Require that a checkpoint holds a model's tensors as floats of the right shapes, and no others.

    Args:
        tensors: Tensors of the checkpoint by name.
        shapes: Names and shapes of the tensors that the model requires.
        repeats: Tensors that the checkpoint may hold in addition, each mapped to the tensor that it must
            equal bit by bit.

    Raises:
        ValueError: If a tensor is missing, unexpected or of another shape or dtype. The message names it.
    """
    missing = [name for name in shapes if name not in tensors]
    extra = [name for name, tensor in tensors.items() if name not in shapes and not _is_buffer(name, tensor)]
    extra = [name for name in extra if name not in repeats]
    for name in missing[:1]:
        module = name.rpartition(".")[0] + "."
        nearest = sorted(extra, key=lambda name: not name.startswith(module))[:3]
        unexpected = f" It has these unexpected tensors: {', '.join(nearest)}." if nearest else ""
        raise ValueError(
            f"The checkpoint has no tensor {name}; {len(missing)} of the {len(shapes)} required tensors are "
            f"missing.{unexpected} Check that config.json belongs to the checkpoint."
        )
    if extra:
        raise ValueError(
            f"The checkpoint has tensors that its config.json does not require: {', '.join(extra[:5])}. "
            "Check that config.json belongs to the checkpoint."
        )
    for name, shape in shapes.items():
        require_shape(name, tensors[name].shape, shape, "the shape that config.json requires")
        float_dtype(tensors, name)
    for copy, name in repeats.items():
        # transformers 4 ignores an output projection that differs from the tied embedding, transformers 5
        # uses it: it is not known which one is intended.
        if copy not in tensors:
            continue
        is_copy = _is_same(tensors[copy], tensors[name])
        if not is_copy:
            raise ValueError(
                f"{copy} differs from {name}, but tie_word_embeddings is true. Set it to false in "
                "config.json."
            )


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors are equal bit by bit."""
    if (a.shape, a.code, len(a.sources)) != (b.shape, b.code, len(b.sources)):
        return False
    pairs = zip(a.sources, b.sources, strict=True)
    return all(np.array_equal(x.view().view(np.uint8), y.view().view(np.uint8)) for x, y in pairs)


def _is_buffer(name: str, tensor: Tensor) -> bool:
    return name.endswith(_BUFFERS) or (name.endswith(_MASKS) and len(tensor.shape) == 4)


def float_dtype(tensors: Mapping[str, Tensor], name: str) -> np.dtype:
    """Return the dtype that a tensor is stored in.

    Raises:
        ValueError: If the tensor is missing, or its dtype is not one that parameters may have.
    """
    if name not in tensors:
        raise ValueError(f"The checkpoint has no tensor {name}. It has {len(tensors)} other tensors.")
    code = tensors[name].code
    require(code in FLOATS, f"{name}'s dtype", "be one of " + ", ".join(FLOATS), code)
    return DTYPES[code]


_NUM_DRAFT_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules")


def rename_to_family_names(
    tensors: Mapping[str, Any], config: DecoderConfig, *, is_multimodal: bool
) -> dict[str, Any]:
    """Rename a checkpoint's tensors to the names that its family uses.

    Layers after the last one, which predict draft tokens, are dropped. A checkpoint that stores only the
    output projection of tied embeddings gets it as the embedding.

    Args:
        tensors: Tensors by their names in the checkpoint.
        config: Configuration of the decoder.
        is_multimodal: Whether to drop the tensors of vision towers and projectors.

    Raises:
        ValueError: If two tensors get the same name.
    """
    family = config.family
    renamed = drop_non_text_tensors(tensors) if is_multimodal else dict(tensors)
    renamed = _add_family_prefix(renamed, family)
    draft_prefixes = _draft_layer_prefixes(config)
    renamed = {name: tensor for name, tensor in renamed.items() if not name.startswith(draft_prefixes)}
    head, embedding = (f"{family.tensors[part].names[0]}." for part in ("lm_head", "embed_tokens"))
    if config.tie_word_embeddings and not any(name.startswith(embedding) for name in renamed):
        head_names = [name for name in renamed if name.startswith(head)]
        renamed |= {embedding + name.removeprefix(head): renamed.pop(name) for name in head_names}
    return renamed


def find_tensor_mappings(family: Family, names: Iterable[str]) -> dict[str, HFTensors]:
    """Return the mapping of a family's parameters to a checkpoint's tensors.

    Args:
        family: Family of the checkpoint.
        names: Names of the checkpoint's tensors, which determine the alternative mappings that apply.
    """
    modules = {re.sub(r"(?<=\.)\d+(?=\.)", "*", name.removesuffix(".weight")) for name in names}
    alternatives = {
        module: stored for module, stored in family.alternative_tensors.items() if modules & {*stored.names}
    }
    return {**family.tensors, **alternatives}


def _add_family_prefix(tensors: dict[str, Any], family: Family) -> dict[str, Any]:
    """Give tensors the family's prefix, such as "model.", if the checkpoint has no prefix or a different one.

    Exports of the base model without the output projection have none. Trainers, adapters and multimodal
    models have another one, or one before it. A tensor of the first layer shows the checkpoint's prefix.
    """
    (head,), (inner,) = (family.tensors[part].names for part in ("lm_head", "layers.*.self_attn.o_proj"))
    inner = inner.removeprefix(family.prefix).replace("*", "0")
    pattern = re.compile(rf"(|.+\.){re.escape(inner)}\..+")
    prefixes = sorted({match[1] for match in map(pattern.fullmatch, tensors) if match}, key=len)
    if not prefixes or family.prefix in prefixes:
        return tensors
    lacks_prefix = not prefixes[0].endswith(f".{family.prefix}")
    outer = prefixes[0] if lacks_prefix else prefixes[0].removesuffix(family.prefix)
    renamed: dict[str, Any] = {}
    for name, tensor in tensors.items():
        new_name = name.removeprefix(outer)
        if lacks_prefix and name.startswith(outer) and not new_name.startswith(f"{head}."):
            new_name = family.prefix + new_name
        if new_name in renamed:
            raise ValueError(
                f"Two tensors of the checkpoint are the parameter {new_name}, one of them {name}. Remove one."
            )
        renamed[new_name] = tensor
    return renamed


def _draft_layer_prefixes(config: DecoderConfig) -> tuple[str, ...]:
    """Return name prefixes of tensors that only predict draft tokens (multi-token prediction)."""
    hf, prefix = json.loads(config.source), config.family.prefix
    count = max(hf.get(key) or 0 for key in _NUM_DRAFT_LAYERS)
    layers = range(config.num_hidden_layers, config.num_hidden_layers + count)
    modules = (f"{prefix}mtp_", "mtp.") if count else ()
    return (*(f"{prefix}layers.{layer}." for layer in layers), *modules)
