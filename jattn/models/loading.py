"""Hugging Face folders: config.json, *.safetensors, tokenizer.json, in and out."""

import contextlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from jattn.models.checkpoint import (
    SCALES_FILE,
    check_tensors,
    open_tensors,
    optional_module,
    read_json,
    stored_dtype,
)
from jattn.models.config import DecoderConfig
from jattn.models.decoder import Decoder
from jattn.models.generation_config import FILE, GenerationConfig
from jattn.models.hf_tensors import from_hf, hf_shapes, tensor_names, to_hf
from jattn.models.scales import KVScales, is_scale
from jattn.models.tensor_names import by_family_s_names


def load_shapes(
    directory: str | pathlib.Path,
    *,
    dtype: DTypeLike | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Decoder:
    """The decoder that `load` makes, with shapes in the place of its weights: to ask it, not to run it.

    Args:
        directory: As in `load`; of the tensors' files only headers and scales are read.
        dtype: As in `load`.
        implementation: As in `load`.

    Raises:
        FileNotFoundError: As `load`.
        ValueError: As `load`.
        NotImplementedError: As `load`.
        ImportError: safetensors is missing.
    """
    directory = pathlib.Path(directory)
    config = read_config(directory)
    with contextlib.ExitStack() as stack:
        files = by_family_s_names(open_tensors(directory, stack), config.family)
        model = _shapes(config, files, dtype, implementation)
        model.kv_scales = _kv_scales(directory, files, config.num_hidden_layers)
    model.generation_config = GenerationConfig.read(directory)
    return model


def _kv_scales(directory: pathlib.Path, files: Any, num_layers: int) -> KVScales | None:
    """Those of kv_scales.safetensors, or the checkpoint's own."""
    own = KVScales.read(files, num_layers)
    beside = directory / SCALES_FILE
    return KVScales.load(beside, num_layers) if beside.exists() else own


def _shapes(
    config: DecoderConfig, files: Any, dtype: DTypeLike | None, implementation: str | Sequence[str] | None
) -> Decoder:
    if dtype is None:
        (embedding,) = tensor_names(config.family.tensors, ("embed_tokens", "embedding"), ())
        dtype = config.dtype or stored_dtype(files, embedding)
    make = lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype, implementation=implementation)
    return nnx.eval_shape(make)


def load(
    directory: str | pathlib.Path,
    *,
    dtype: DTypeLike | None = None,
    implementation: str | Sequence[str] | None = None,
    progress: bool = True,
) -> Decoder:
    """Loads a Hugging Face checkpoint of a supported family, with its tokenizer if there is a tokenizer.json.

    Static scales of 8-bit caches (`model.layers.N.self_attn.k_scale`, `.v_scale`) become `kv_scales`: those
    of kv_scales.safetensors, or the checkpoint's own.

    Names and shapes are checked from the files' headers before anything is allocated.

    Args:
        directory: Holds config.json and model.safetensors, or the files that model.safetensors.index.json
            names, or other *.safetensors files.
        dtype: Of parameters and computation; None = the config's, or the embedding's where it says nothing.
        implementation: Of the attention, as in `jattn.attend`.
        progress: Shows a bar on stderr.

    Raises:
        FileNotFoundError: A file is missing; the message names it.
        ValueError: A tensor is missing, unexpected or misshapen, or a file is broken; the message names it.
        NotImplementedError: The config asks for what is not here; the message names it.
        ImportError: safetensors, tokenizers or tqdm is missing.
    """
    directory = pathlib.Path(directory)
    config, generation_config = read_config(directory), GenerationConfig.read(directory)
    with contextlib.ExitStack() as stack:
        files = by_family_s_names(open_tensors(directory, stack), config.family)
        graph, state = nnx.split(_shapes(config, files, dtype, implementation))
        flat, names = dict(nnx.to_flat_state(state)), config.family.tensors
        tensors = {path: hf_shapes(names, path, value.shape) for path, value in flat.items()}
        shapes = {name: shape for parts in tensors.values() for name, shape in parts.items()}
        kv_scales = _kv_scales(directory, files, config.num_hidden_layers)
        files = {name: file for name, file in files.items() if not is_scale(name)}
        check_tensors(files, shapes, may_repeat_head=config.tie_word_embeddings)
        bar = optional_module("tqdm").tqdm(flat.items(), f"Loading {directory.name}", disable=not progress)
        for path, value in bar:
            array = from_hf(
                names, path, value.shape, [files[name].get_tensor(name) for name in tensors[path]]
            )
            flat[path] = value.replace(jnp.array(array.astype(value.dtype)))  # never the file's memory
    model = nnx.merge(graph, nnx.from_flat_state(flat))
    model.kv_scales, model.generation_config = kv_scales, generation_config
    if (directory / "tokenizer.json").exists():
        model.tokenizer = _read_tokenizer(directory / "tokenizer.json")
    return model


def save(model: Decoder, directory: str | pathlib.Path) -> None:
    """Writes what `load` and transformers read, a Hugging Face folder.

    config.json and model.safetensors; tokenizer.json and generation_config.json where it has something for
    them. Every bit of the parameters is kept.

    Raises:
        ImportError: safetensors is missing.
    """
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {} if model.kv_scales is None else model.kv_scales.tensors()
    for path, value in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        parts = to_hf(model.config.family.tensors, path, np.asarray(jax.device_get(value[...])))
        tensors |= {name: np.ascontiguousarray(part) for name, part in parts.items()}
    optional_module("safetensors.numpy").save_file(
        tensors, directory / "model.safetensors", metadata={"format": "pt"}
    )
    hf = model.config.to_hf() | {"torch_dtype": str(model.dtype)}
    (directory / "config.json").write_text(json.dumps(hf, indent=2, sort_keys=True) + "\n")
    model.generation_config.write(directory)
    if model.tokenizer is not None:
        model.tokenizer.save(str(directory / "tokenizer.json"))


def read_config(directory: str | pathlib.Path) -> DecoderConfig:
    """The configuration in a Hugging Face folder; generation_config.json's eos_token_id wins.

    Raises:
        FileNotFoundError: There is no such folder, or no config.json in it.
        ValueError: A file is broken, or as `DecoderConfig.from_hf`; the message names the file.
        NotImplementedError: As `DecoderConfig.from_hf`.
    """
    directory = pathlib.Path(directory)
    hf = read_json(directory / "config.json")
    generation = directory / FILE
    if generation.exists():
        eos = read_json(generation).get("eos_token_id")
        hf = hf if eos is None else hf | {"eos_token_id": eos}
    try:
        return DecoderConfig.from_hf(hf)
    except ValueError as error:
        raise ValueError(f"{directory / 'config.json'}: {error}") from error


def _read_tokenizer(path: pathlib.Path) -> Any:
    tokenizers = optional_module("tokenizers")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # all that the package raises is a bare Exception
        raise ValueError(f"{path} must be a tokenizer of the tokenizers package, got {error}.") from error
