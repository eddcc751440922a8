"""Loading and saving of models as Hugging Face folders."""

import functools
import json
import os
import pathlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jattn.cache.spec import require_float_dtype
from jattn.models.activations import Constant
from jattn.models.config import DecoderConfig
from jattn.models.decoder import Decoder
from jattn.models.families.multimodal import extract_text_config, is_multimodal
from jattn.models.kv_scales import KVScales, is_kv_scale
from jattn.models.loading.checkpoint import (
    check_tensors,
    find_tensor_mappings,
    float_dtype,
    open_tensors,
    rename_to_family_names,
)
from jattn.models.loading.files import (
    optional_module,
    read_json,
    read_json_if_exists,
)
from jattn.models.loading.hub import resolve_checkpoint
from jattn.models.loading.placement import MeshPlacement, check_host, read_parameter
from jattn.models.loading.quantized_weights import Tensor, dequantize_tensors
from jattn.models.loading.safetensors_files import SCALES_FILE
from jattn.models.loading.tensor_layouts import (
    HFTensors,
    Path,
    hf_tensor_names,
    hf_tensor_shapes,
    make_join,
    to_hf,
)
from jattn.models.loading.tokenizer import FILE as TOKENIZER_FILE
from jattn.models.loading.tokenizer import read_tokenizer
from jattn.models.mesh_padding import pad_to_mesh, unpad_from_mesh, unpadded_shape
from jattn.models.sharding import check_divides, parameter_sharding
from jattn.parallel import CP, TP
from pallas_kernels.checks import (
    require_int,
    require_one_of,
    require_positive,
    require_type,
    unsupported,
)

_GENERATION_FILE = "generation_config.json"
_NUM_READERS = 2  # threads: one parameter is transferred while another one is assembled or compiled for


def load_shapes(
    directory: str | os.PathLike[str],
    *,
    revision: str | None = None,
    dtype: DTypeLike | None = None,
    implementation: str | Sequence[str] | None = None,
    load_format: str = "auto",
    mesh: Mesh | None = None,
    cp_kv_cache_interleave_size: int = 1,
) -> Decoder:
    """Return the decoder that `load` returns, with abstract arrays instead of weights, to inspect it.

    Args:
        directory: Folder or Hub name of the checkpoint; see `load`. Only the headers and KV-cache scales are
            read.
        revision: Branch, tag or commit on the Hub; see `load`.
        dtype: Dtype of parameters and computation; see `load`.
        implementation: Requested attention implementations; see `load`.
        load_format: "auto" or "dummy"; see `load`.
        mesh: Mesh to shard the model over; see `load`.
        cp_kv_cache_interleave_size: Number of consecutive positions per rank; see `load`.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If a file or an argument is invalid.
        NotImplementedError: If the model or the mesh is not supported.
    """
    directory = _resolve(directory, revision, load_format)
    arguments = dtype, implementation, load_format, mesh, cp_kv_cache_interleave_size
    return _load_abstract(directory, read_tokenizer(directory), *arguments)[0]


def _load_abstract(
    directory: pathlib.Path,
    tokenizer: Any | None,
    dtype: DTypeLike | None,
    implementation: str | Sequence[str] | None,
    load_format: str,
    mesh: Mesh | None,
    interleave: int,
) -> tuple[Decoder, dict[str, Tensor]]:
    """Return a decoder with abstract arrays and everything but weights, and the tensors of its weights."""
    require_int(cp_kv_cache_interleave_size=interleave)
    require_positive(cp_kv_cache_interleave_size=interleave)
    config = _read_config(directory, tokenizer)
    if mesh is not None:
        check_divides(config, mesh, interleave)
        config = config.with_mesh(mesh.shape[TP], mesh.shape[CP])
    tensors = {} if load_format == "dummy" else _open_float_tensors(directory, config)
    model = _make_abstract_model(config, tensors, dtype, implementation)
    model.mesh, model.cp_kv_cache_interleave_size = mesh, interleave
    model.kv_scales = _read_kv_scales(directory, tensors, config.num_hidden_layers)
    model.generation_config = json.dumps(read_json_if_exists(directory / _GENERATION_FILE), indent=2)
    model.tokenizer = None if tokenizer is None else tokenizer.backend_tokenizer
    return model, {name: tensor for name, tensor in tensors.items() if not is_kv_scale(name)}


def _resolve(directory: str | os.PathLike[str], revision: str | None, load_format: str) -> pathlib.Path:
    """Return the folder of a checkpoint after checking `load_format`; see `load`."""
    require_one_of("load_format", load_format, ("auto", "dummy"))
    return resolve_checkpoint(directory, revision, has_weights=load_format != "dummy")


def _open_float_tensors(directory: pathlib.Path, config: DecoderConfig) -> dict[str, Tensor]:
    """Return a checkpoint's tensors by the family's names. Only headers are read."""
    hf = read_json(directory / "config.json")
    is_multimodal_model = is_multimodal(hf)
    renamed = rename_to_family_names(open_tensors(directory), config, is_multimodal=is_multimodal_model)
    return dequantize_tensors(renamed, extract_text_config(hf).get("quantization_config"))


def _read_kv_scales(
    directory: pathlib.Path, tensors: Mapping[str, Tensor], num_layers: int
) -> KVScales | None:
    """Read the static KV-cache scales of kv_scales.safetensors, or else the checkpoint's own."""
    stored = KVScales.read(tensors, num_layers)
    path = directory / SCALES_FILE
    return KVScales.load(path, num_layers) if path.exists() else stored


def _tied_copies(config: DecoderConfig) -> dict[str, str]:
    """Return the tensors that a checkpoint may repeat: the output projection of tied embeddings."""
    (head,), (embedding,) = (config.family.tensors[part].names for part in ("lm_head", "embed_tokens"))
    return {f"{head}.weight": f"{embedding}.weight"} if config.tie_word_embeddings else {}


def _make_abstract_model(
    config: DecoderConfig,
    tensors: Mapping[str, Tensor],
    dtype: DTypeLike | None,
    implementation: str | Sequence[str] | None,
) -> Decoder:
    if dtype is None and not tensors:
        dtype = config.dtype or jnp.float32
    elif dtype is None:
        (embedding,) = hf_tensor_names(config.family.tensors, ("embed_tokens", "embedding"), ())
        dtype = config.dtype or float_dtype(tensors, embedding)
    dtype = require_float_dtype("dtype", dtype)
    return nnx.eval_shape(
        lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=dtype, implementation=implementation)
    )


def load(
    directory: str | os.PathLike[str],
    *,
    revision: str | None = None,
    dtype: DTypeLike | None = None,
    implementation: str | Sequence[str] | None = None,
    load_format: str = "auto",
    mesh: Mesh | None = None,
    cp_kv_cache_interleave_size: int = 1,
    progress: bool = True,
) -> Decoder:
    """Load a Hugging Face checkpoint of a supported family, with its tokenizer if it has a tokenizer.json.

    Static scales of 8-bit KV caches (`model.layers.N.self_attn.k_scale`, `.v_scale`) become `kv_scales`:
    from kv_scales.safetensors if the folder has it, otherwise from the checkpoint's tensors.

    Names and shapes are checked from the files' headers before anything is allocated. The bytes go to the
    device as they are stored, one parameter at a time, and are joined, dequantized and cast there, so the
    host holds one parameter at a time. Quantized weights (`jattn.models.loading.quantized_weights`) are
    dequantized.

    Args:
        directory: Folder with config.json and *.safetensors files, or the name of a model on the Hugging Face
            Hub, such as "org/name", which is downloaded to huggingface_hub's cache unless it is there.
        revision: Branch, tag or commit on the Hub; None = the default branch.
        dtype: Dtype of parameters and computation; None = the config's, or the stored embedding's if it has
            none.
        implementation: Requested attention implementations; see `jattn.attend`.
        load_format: "auto", or "dummy" for random weights: only the configuration and the tokenizer are read.
        mesh: Mesh to shard the model over (`jattn.parallel.make_mesh`); None = one device. With a mesh,
            parameters are joined and dequantized on the host, so that no device holds more than its shard.
        cp_kv_cache_interleave_size: On a mesh with cp: number of consecutive positions whose keys are on the
            same device. Without cp it has no effect.
        progress: Whether to show a progress bar on stderr. Downloads have huggingface_hub's own.

    Raises:
        FileNotFoundError: If a file is missing, or the Hub has no such model. The message names it.
        ValueError: If a tensor is missing, unexpected or misshapen, or a file is invalid; the message names
            it. Or if dtype is not a float dtype, or the model cannot be sharded evenly.
        NotImplementedError: If config.json or the mesh requires something that is not supported, or JAX has
            no CPU backend to assemble a mesh's parameters.
        ImportError: If a package of the extra `models` is not installed.
    """
    check_host(mesh)
    name, directory = pathlib.Path(directory).name, _resolve(directory, revision, load_format)
    arguments = dtype, implementation, load_format, mesh, cp_kv_cache_interleave_size
    model, tensors = _load_abstract(directory, read_tokenizer(directory), *arguments)
    config, (graph, state) = model.config, nnx.split(model)
    flat, names = dict(nnx.to_flat_state(state)), find_tensor_mappings(config.family, tensors)
    shapes: dict[str, tuple[int, ...]] = {}
    for path, value in flat.items():
        shapes |= hf_tensor_shapes(names, path, unpadded_shape(config, path, value.shape))
    if load_format == "dummy":
        read = _make_random_reader(mesh)
    else:
        check_tensors(tensors, shapes, _tied_copies(config))
        read = _make_reader(config, names, tensors, mesh)
    bar = optional_module("tqdm").tqdm(None, f"Loading {name}", len(flat), disable=not progress)
    with bar, ThreadPoolExecutor(_NUM_READERS) as readers:
        for path, array in zip(flat, readers.map(read, flat, list(flat.values())), strict=True):
            flat[path] = flat[path].replace(array)
            bar.update()
    return nnx.merge(graph, nnx.from_flat_state(flat))


def _make_reader(
    config: DecoderConfig, names: Mapping[str, HFTensors], tensors: Mapping[str, Tensor], mesh: Mesh | None
) -> Callable[[Path, Any], jax.Array]:
    """Return a function that reads the parameter of an nnx path and abstract variable, in any thread."""
    device = next(iter(jnp.zeros(()).devices()))  # default devices are per thread: use the caller's

    def read(path: Path, variable: Any) -> jax.Array:
        shape, placement = unpadded_shape(config, path, variable.shape), None
        if mesh is not None:
            sharding = parameter_sharding(mesh, path, len(variable.shape))
            placement = MeshPlacement(sharding, functools.partial(pad_to_mesh, config, path))
        stored = [tensors[name] for name in hf_tensor_names(names, path, shape)]
        with jax.default_device(device):
            return read_parameter(
                stored,
                make_join(names, path, shape),
                variable.dtype,
                mesh_placement=placement,
            )

    return read


def _make_random_reader(mesh: Mesh | None) -> Callable[[Path, Any], jax.Array]:
    """Return a function that draws the parameter of an nnx path, in any thread; see `_make_reader`."""
    device = next(iter(jnp.zeros(()).devices()))

    @functools.cache
    def compiled(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Callable[[jax.Array], jax.Array]:
        def draw(key: jax.Array) -> jax.Array:  # the distribution of vLLM's dummy weights
            return jax.random.uniform(key, shape, jnp.float32, -1e-3, 1e-3).astype(dtype)

        return jax.jit(draw, out_shardings=sharding)

    def read(path: Path, variable: Any) -> jax.Array:
        sharding = None if mesh is None else parameter_sharding(mesh, path, len(variable.shape))
        with jax.default_device(device):
            key = jax.random.key(zlib.crc32(repr(path).encode()))
            return compiled(variable.shape, variable.dtype, sharding)(key)

    return read


def save(model: Decoder, directory: str | pathlib.Path) -> None:
    """Write a model as a Hugging Face folder, for `load` and transformers.

    Writes config.json and model.safetensors, and tokenizer.json and generation_config.json if the model has
    them. Parameters are saved bit by bit.

    Args:
        model: The model to save.
        directory: Folder, which is created if it does not exist. Existing files are overwritten.

    Raises:
        ImportError: If safetensors is not installed.
        ValueError: If model is not a Decoder.
        NotImplementedError: If the model is sharded over several processes.
    """
    require_type("model", model, Decoder, "save(model, directory)")
    if model.mesh is not None and model.mesh.is_multi_process:
        feature, reason = "save of a model over several processes", "each process has only its own shards"
        raise unsupported(feature, reason, "Load the model in one process and save it there")
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {} if model.kv_scales is None else model.kv_scales.tensors()
    for path, value in nnx.to_flat_state(nnx.state(model, (nnx.Param, Constant))):
        array = unpad_from_mesh(model.config, path, np.asarray(jax.device_get(value[...])))
        parts = to_hf(model.config.family.tensors, path, array)
        tensors |= {name: np.asarray(part, order="C") for name, part in parts.items()}
    optional_module("safetensors.numpy").save_file(
        tensors, directory / "model.safetensors", metadata={"format": "pt"}
    )
    hf = model.config.to_hf() | {"torch_dtype": str(model.dtype)}
    (directory / "config.json").write_text(json.dumps(hf, indent=2, sort_keys=True) + "\n")
    if model.generation_config != "{}":
        (directory / _GENERATION_FILE).write_text(model.generation_config + "\n")
    if model.tokenizer is not None:
        model.tokenizer.save(str(directory / TOKENIZER_FILE))


def read_config(directory: str | pathlib.Path) -> DecoderConfig:
    """Read the configuration of a Hugging Face folder.

    generation_config.json's eos_token_id takes precedence over config.json's. The tokenizer's eos_token ends
    a sequence as well, as in vLLM.

    Raises:
        FileNotFoundError: If the folder or its config.json does not exist.
        ValueError: If a file is invalid (the message names it).
        NotImplementedError: If the model is not supported; see `DecoderConfig.from_hf`.
    """
    directory = pathlib.Path(directory)
    return _read_config(directory, read_tokenizer(directory))


def _read_config(directory: pathlib.Path, tokenizer: Any | None) -> DecoderConfig:
    """Read the configuration of a folder whose tokenizer has been read; see `read_config`."""
    hf = read_json(directory / "config.json")
    eos = read_json_if_exists(directory / _GENERATION_FILE).get("eos_token_id")
    overrides = {} if eos is None else {"eos_token_id": eos}
    tokenizer_eos = None if tokenizer is None else tokenizer.eos_token_id
    try:
        config = DecoderConfig.from_hf({**extract_text_config(hf), **overrides})
        # transformers adds an eos_token that the tokenizer lacks.
        exists = tokenizer_eos is not None and tokenizer_eos < config.vocab_size
        if exists and tokenizer_eos not in config.eos_token_ids:
            ids = [*config.eos_token_ids, tokenizer_eos]
            config = DecoderConfig.from_hf({**extract_text_config(hf), "eos_token_id": ids})
        return config
    except (ValueError, TypeError) as error:  # TypeError: a value of another type
        raise ValueError(f"{directory / 'config.json'}: {error}") from error
