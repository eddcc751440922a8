"""Hugging Face folders: config.json, *.safetensors, tokenizer.json, in and out."""

import functools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jattn.cache.spec import checked_float_dtype
from jattn.models.activations import Constant
from jattn.models.config import DecoderConfig
from jattn.models.decoder import Decoder
from jattn.models.families.config_keys import are_token_ids
from jattn.models.families.multimodal import is_wrapper, text_part
from jattn.models.kv_scales import KVScales, is_scale
from jattn.models.loading import tokenizer
from jattn.models.loading.checkpoint import (
    by_family_s_names,
    check_tensors,
    float_dtype,
    open_tensors,
    optional_module,
    tensors_in,
)
from jattn.models.loading.files import as_path, existing, read_json
from jattn.models.loading.generation_config import FILE, GenerationConfig
from jattn.models.loading.placement import OnMesh, check_host, read_parameter
from jattn.models.loading.quantized_weights import Tensor, widened
from jattn.models.loading.safetensors_files import SCALES_FILE
from jattn.models.loading.tensor_layouts import Path, Stored, hf_shapes, join_of, tensor_names, to_hf
from jattn.models.mesh_padding import gathered, spread, whole_shape
from jattn.models.sharding import check_divides, sharding_of
from jattn.parallel import CP, TP
from pallas_kernels.checks import require, require_int, require_positive, require_type, unsupported

_READERS = 2  # parameters at a time; one is sent or written while another is joined or compiled for


def load_shapes(
    directory: str | pathlib.Path,
    *,
    dtype: DTypeLike | None = None,
    implementation: str | Sequence[str] | None = None,
    mesh: Mesh | None = None,
    cp_kv_cache_interleave_size: int = 1,
) -> Decoder:
    """The decoder that `load` makes, with shapes in the place of its weights: to ask it, not to run it.

    Args:
        directory: As in `load`; of the tensors' files only headers and scales are read.
        dtype: As in `load`.
        implementation: As in `load`.
        mesh: As in `load`.
        cp_kv_cache_interleave_size: As in `load`.

    Raises:
        FileNotFoundError: As `load`.
        ValueError: As `load`.
        NotImplementedError: As `load`.
    """
    directory = as_path("directory", directory)
    config = _spread(read_config(directory), mesh, cp_kv_cache_interleave_size)
    tensors = _tensors(directory, config)
    model = _shapes(config, tensors, dtype, implementation)
    model.mesh, model.cp_kv_cache_interleave_size = mesh, cp_kv_cache_interleave_size
    model.kv_scales = _kv_scales(directory, tensors, config.num_hidden_layers)
    model.generation_config = GenerationConfig.read(directory)
    return model


def _spread(config: DecoderConfig, mesh: Mesh | None, interleave: int) -> DecoderConfig:
    """The configuration as a mesh has it, once it is known to fit."""
    require_int(cp_kv_cache_interleave_size=interleave)
    require_positive(cp_kv_cache_interleave_size=interleave)
    if mesh is None:
        return config
    check_divides(config, mesh, interleave)
    return config.spread_over(mesh.shape[TP], mesh.shape[CP])


def _tensors(directory: pathlib.Path, config: DecoderConfig) -> dict[str, Tensor]:
    """A checkpoint's tensors as floats, by the names that its family has for them. Headers are read."""
    hf = read_json(directory / "config.json")
    has_more = is_wrapper(hf)
    named = by_family_s_names(open_tensors(directory), config, has_more_than_text=has_more)
    return widened(named, text_part(hf).get("quantization_config"))


def _kv_scales(directory: pathlib.Path, tensors: Mapping[str, Tensor], num_layers: int) -> KVScales | None:
    """Those of kv_scales.safetensors, or the checkpoint's own."""
    own = KVScales.read(tensors, num_layers)
    beside = directory / SCALES_FILE
    return KVScales.load(beside, num_layers) if beside.exists() else own


def _repeats(config: DecoderConfig) -> dict[str, str]:
    """A tensor that a checkpoint may have once more: the head, where it is the embedding."""
    (head,), (embedding,) = (config.family.tensors[part].names for part in ("lm_head", "embed_tokens"))
    return {f"{head}.weight": f"{embedding}.weight"} if config.tie_word_embeddings else {}


def _shapes(
    config: DecoderConfig,
    tensors: Mapping[str, Tensor],
    dtype: DTypeLike | None,
    implementation: str | Sequence[str] | None,
) -> Decoder:
    if dtype is None:
        (embedding,) = tensor_names(config.family.tensors, ("embed_tokens", "embedding"), ())
        dtype = config.dtype or float_dtype(tensors, embedding)
    dtype = checked_float_dtype("dtype", dtype)
    make = lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype, implementation=implementation)
    return nnx.eval_shape(make)


def load(
    directory: str | pathlib.Path,
    *,
    dtype: DTypeLike | None = None,
    implementation: str | Sequence[str] | None = None,
    mesh: Mesh | None = None,
    cp_kv_cache_interleave_size: int = 1,
    progress: bool = True,
) -> Decoder:
    """Loads a Hugging Face checkpoint of a supported family, with its tokenizer if there is a tokenizer.json.

    Static scales of 8-bit caches (`model.layers.N.self_attn.k_scale`, `.v_scale`) become `kv_scales`: those
    of kv_scales.safetensors, or the checkpoint's own.

    Names and shapes are checked from the files' headers before anything is allocated. The bytes go to the
    device as they are stored, a parameter at a time, and are joined, widened and cast there: the host holds
    those of one parameter. Weights in few bits (`jattn.models.loading.quantized_weights`) become floats.

    Args:
        directory: Holds config.json and *.safetensors files, if need be those that an index.json names.
        dtype: Of parameters and computation; None = the config's, or the embedding's where it says nothing.
        implementation: Of the attention, as in `jattn.attend`.
        mesh: Devices to spread it over (`jattn.parallel.make_mesh`); None = it lies on one. Parameters that
            are joined or widened are made on the host then: no device ever holds more than its own part.
        cp_kv_cache_interleave_size: On a mesh with cp, neighbouring positions whose keys stay on one device;
            else it changes nothing.
        progress: Shows a bar on stderr.

    Raises:
        FileNotFoundError: A file is missing; the message names it.
        ValueError: A tensor is missing, unexpected or misshapen, or a file is broken; the message names it.
            Or directory is no path, dtype is none of floats, or the model does not fall into a mesh's parts.
        NotImplementedError: The config asks for what is not here, a mesh for a cut that is not, or JAX has no
            CPU backend to make a mesh's parameters with.
        ImportError: tokenizers or tqdm is missing.
    """
    directory = as_path("directory", directory)
    check_host(mesh)
    config = _spread(read_config(directory), mesh, cp_kv_cache_interleave_size)
    generation_config = GenerationConfig.read(directory)
    tensors = _tensors(directory, config)
    graph, state = nnx.split(_shapes(config, tensors, dtype, implementation))
    flat, names = dict(nnx.to_flat_state(state)), tensors_in(config.family, tensors)
    shapes: dict[str, tuple[int, ...]] = {}
    for path, value in flat.items():
        shapes |= hf_shapes(names, path, whole_shape(config, path, value.shape))
    kv_scales = _kv_scales(directory, tensors, config.num_hidden_layers)
    tensors = {name: tensor for name, tensor in tensors.items() if not is_scale(name)}
    check_tensors(tensors, shapes, _repeats(config))
    read = _reader(config, names, tensors, mesh)
    bar = optional_module("tqdm").tqdm(None, f"Loading {directory.name}", len(flat), disable=not progress)
    with bar, ThreadPoolExecutor(_READERS) as readers:
        for path, array in zip(flat, readers.map(read, flat, list(flat.values())), strict=True):
            flat[path] = flat[path].replace(array)
            bar.update()
    model = nnx.merge(graph, nnx.from_flat_state(flat))
    model.mesh, model.cp_kv_cache_interleave_size = mesh, cp_kv_cache_interleave_size
    model.kv_scales, model.generation_config = kv_scales, generation_config
    model.tokenizer = tokenizer.read_tokenizer(directory)
    return model


def _reader(
    config: DecoderConfig, names: Mapping[str, Stored], tensors: Mapping[str, Tensor], mesh: Mesh | None
) -> Callable[[Path, Any], jax.Array]:
    """Of an nnx path and a variable with its shape and dtype: the parameter, in any thread."""
    device = next(iter(jnp.zeros(()).devices()))  # the caller's, whose thread may have another than others

    def read(path: Path, variable: Any) -> jax.Array:
        whole, on = whole_shape(config, path, variable.shape), None
        if mesh is not None:
            sharding = sharding_of(mesh, path, len(variable.shape))
            on = OnMesh(sharding, functools.partial(spread, config, path))
        stored = [tensors[name] for name in tensor_names(names, path, whole)]
        how: dict[str, Any] = {"on_mesh": on, "is_on_host": device.platform == "cpu"}
        with jax.default_device(device):
            return read_parameter(stored, join_of(names, path, whole), variable.dtype, **how)

    return read


def save(model: Decoder, directory: str | pathlib.Path) -> None:
    """Writes what `load` and transformers read, a Hugging Face folder.

    config.json and model.safetensors; tokenizer.json and generation_config.json where it has something for
    them. Every bit of the parameters is kept.

    Args:
        model: A Decoder.
        directory: Made where there is none; files of these names in it are overwritten.

    Raises:
        ImportError: safetensors is missing.
        ValueError: model is no Decoder, or directory no path.
        NotImplementedError: The model lies on devices of several processes.
    """
    require_type("model", model, Decoder, "save(model, directory)")
    if model.mesh is not None and model.mesh.is_multi_process:
        what, reason = "save of a model over several processes", "each of them has only its own part"
        raise unsupported(what, reason, "Save what one process has loaded: load(DIR), on a mesh or on none")
    directory = as_path("directory", directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {} if model.kv_scales is None else model.kv_scales.tensors()
    for path, value in nnx.to_flat_state(nnx.state(model, (nnx.Param, Constant))):
        array = gathered(model.config, path, np.asarray(jax.device_get(value[...])))
        parts = to_hf(model.config.family.tensors, path, array)
        tensors |= {name: np.asarray(part, order="C") for name, part in parts.items()}
    optional_module("safetensors.numpy").save_file(
        tensors, directory / "model.safetensors", metadata={"format": "pt"}
    )
    hf = model.config.to_hf() | {"torch_dtype": str(model.dtype)}
    (directory / "config.json").write_text(json.dumps(hf, indent=2, sort_keys=True) + "\n")
    model.generation_config.write(directory)
    if model.tokenizer is not None:
        model.tokenizer.save(str(directory / tokenizer.FILE))


def _where_one_is(directory: pathlib.Path) -> str:
    """What is said of a folder without a config.json, if it is the Hub's name of a model, or of its cache."""
    for config in sorted(directory.glob("snapshots/*/config.json"))[:1]:
        return f"; {config.parent} has one"
    if not directory.exists() and not directory.is_absolute() and len(directory.parts) == 2:
        return f"; nothing is downloaded: hf download {directory} --local-dir DIR, and give DIR"
    return ""


def read_config(directory: str | pathlib.Path) -> DecoderConfig:
    """The configuration in a Hugging Face folder; generation_config.json's eos_token_id wins.

    The tokenizer's own eos_token ends a text, too, as in vLLM.

    Raises:
        FileNotFoundError: There is no such folder, or no config.json in it.
        ValueError: A file is broken, or as `DecoderConfig.from_hf`; the message names the file; or directory
            is no path.
        NotImplementedError: As `DecoderConfig.from_hf`.
    """
    directory = as_path("directory", directory)
    hf, told = read_json(existing(directory / "config.json", _where_one_is(directory))), {}
    generation, own = directory / FILE, tokenizer.eos_id_of(directory)
    if generation.exists():
        eos = read_json(generation).get("eos_token_id")
        rule = "be an int or a list of them"
        require(eos is None or are_token_ids(eos), f"{generation}: eos_token_id", rule, repr(eos))
        told = {} if eos is None else {"eos_token_id": eos}
    try:
        config = DecoderConfig.from_hf({**text_part(hf), **told})
        if own is not None and own not in config.eos_token_ids:
            ids = [*config.eos_token_ids, own]
            config = DecoderConfig.from_hf({**text_part(hf), "eos_token_id": ids})
        return config
    except ValueError as error:
        raise ValueError(f"{directory / 'config.json'}: {error}") from error
