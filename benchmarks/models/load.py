"""Loading a checkpoint of Llama 3 8B's sizes: bytes per second from the page cache, and host memory."""

import argparse
import json
import pathlib
import resource
import tempfile
import time
from typing import Any

import jax
import ml_dtypes
import numpy as np

import jattn
from benchmarks.models.graphs import LLAMA_8B
from benchmarks.runner import Rows
from jattn.models.decoder import Decoder
from jattn.models.loading.safetensors_files import read_header

LAYERS_PER_FILE = 2
ROUNDS = 3
STATUS, CLEAR = pathlib.Path("/proc/self/status"), pathlib.Path("/proc/self/clear_refs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks load`."""
    parser.add_argument("--layers", type=int, default=8, help="Number of layers, 436 MB each. Default: 8.")
    parser.add_argument(
        "--vocab",
        type=int,
        default=LLAMA_8B["vocab_size"],
        help="Vocabulary size, 2 x 8 kB per token. Default: Llama's.",
    )
    parser.add_argument("--dtype", help="Dtype of the parameters. Default: as stored, bfloat16.")
    parser.add_argument(
        "--folder",
        help="Directory in which the checkpoint is created. Default: the system's temporary directory.",
    )
    parser.add_argument("--out", help="Directory for the result rows.")


def main(arguments: argparse.Namespace) -> None:
    """Record a row per load; the first load includes compilation."""
    rows = Rows("load", arguments.out)
    jax.block_until_ready(jax.numpy.zeros(8) + 1)  # initializes the device
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        directory = pathlib.Path(folder)
        sizes = make_checkpoint(directory, arguments.layers, arguments.vocab)
        for number in range(ROUNDS):
            model, row = measure(directory, arguments.dtype)
            check(model, directory)
            rate = sum(sizes) / row["seconds"] / 1e9
            file_sizes = {"bytes": sum(sizes), "largest_file_mb": max(sizes) / 1e6}
            rows.add(name="load", number=number, layers=arguments.layers, gb_per_s=rate, **file_sizes, **row)
            del model


def make_checkpoint(directory: pathlib.Path, layers: int, vocab: int) -> list[int]:
    """Write a checkpoint with random weights and return the size of each file in bytes.

    Embedding and head have a file of their own. Written files are in the page cache.

    Args:
        directory: Directory of the checkpoint.
        layers: Number of layers.
        vocab: Vocabulary size.
    """
    hf: dict[str, Any] = {**LLAMA_8B, "num_hidden_layers": layers, "vocab_size": vocab}
    (directory / "config.json").write_text(json.dumps(hf | {"torch_dtype": "bfloat16"}))
    hidden, inner = hf["hidden_size"], hf["intermediate_size"]
    kv = hidden // hf["num_attention_heads"] * hf["num_key_value_heads"]
    attention = {"q_proj": (hidden, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden)}
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{name}": shape for name, shape in attention.items()}
    shapes |= {"self_attn.o_proj": (hidden, hidden)} | {f"mlp.{name}": shape for name, shape in mlp.items()}
    shapes |= {name: (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    files: list[dict[str, tuple[int, ...]]] = [{"model.embed_tokens.weight": (vocab, hidden)}]
    files.append({"lm_head.weight": (vocab, hidden), "model.norm.weight": (hidden,)})
    for first in range(0, layers, LAYERS_PER_FILE):
        numbers = range(first, min(first + LAYERS_PER_FILE, layers))
        files.append({f"model.layers.{i}.{name}.weight": shapes[name] for i in numbers for name in shapes})
    names = [f"model-{number:05d}.safetensors" for number in range(len(files))]
    for name, file in zip(names, files, strict=True):
        write_random(directory / name, file)
    weight_map = {tensor: name for name, file in zip(names, files, strict=True) for tensor in file}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return [(directory / name).stat().st_size for name in names]


def write_random(path: pathlib.Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write a safetensors file of small bfloat16 numbers in chunks, without holding a tensor in memory."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    chunk = np.random.default_rng(end).normal(0.0, 0.02, 2**20 + 1).astype(ml_dtypes.bfloat16).tobytes()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while end > 0:
            end -= file.write(chunk[:end])


def measure(directory: pathlib.Path, dtype: str | None) -> tuple[Decoder, dict[str, Any]]:
    """Load a checkpoint and return the model, and wall seconds, CPU seconds and host memory of loading.

    Args:
        directory: Directory of the checkpoint.
        dtype: Dtype of the parameters; None keeps that of the checkpoint.
    """
    CLEAR.write_text("5")  # resets the peak of resident memory
    resident_mb, cpu_start, start = read_status_mb("VmRSS"), time.process_time(), time.perf_counter()
    model = jattn.models.load(directory, dtype=dtype, progress=False)
    jax.block_until_ready(jax.tree.leaves(model))
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    row = {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_mb": read_status_mb("VmHWM") - resident_mb}
    if jax.default_backend() == "cpu":  # the parameters are in host memory, too
        row["parameters_mb"] = sum(leaf.nbytes for leaf in jax.tree.leaves(model)) / 1e6
    row["major_faults"] = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    return model, row


def read_status_mb(key: str) -> float:
    """Return a memory size of /proc/self/status in megabytes."""
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024 / 1e6


def check(model: Decoder, directory: pathlib.Path) -> None:
    """Compare rows of the last layer's parameters, the embedding and the head with the checkpoint.

    Raises:
        SystemExit: A parameter differs from the checkpoint.
    """
    tensors = {name: t for path in directory.glob("*.safetensors") for name, t in read_header(path).items()}
    number = len(model.layers) - 1
    layer, prefix = model.layers[number], f"model.layers.{number}"
    heads = model.config.num_key_value_heads
    qkv_kernel = layer.self_attn.qkv_proj.kernel[...]
    parts = {
        "model.embed_tokens": model.embed_tokens.embedding[...].T,
        "lm_head": model.lm_head.kernel[...],
        f"{prefix}.self_attn.q_proj": qkv_kernel[:, :, :-2].reshape(qkv_kernel.shape[0], -1),
        f"{prefix}.self_attn.k_proj": qkv_kernel[:, :, -2].reshape(qkv_kernel.shape[0], -1),
        f"{prefix}.self_attn.v_proj": qkv_kernel[:, :, -1].reshape(qkv_kernel.shape[0], -1),
        f"{prefix}.mlp.gate_proj": layer.mlp.gate_up_proj.kernel[:, 0],
        f"{prefix}.mlp.up_proj": layer.mlp.gate_up_proj.kernel[:, 1],
        f"{prefix}.mlp.down_proj": layer.mlp.down_proj.kernel[...],
    }
    assert qkv_kernel.shape[1] == heads
    for name, array in parts.items():
        expected = tensors[f"{name}.weight"].view()
        rows = np.linspace(0, len(expected) - 1, 7).astype(int)
        actual = np.asarray(array[:, rows].T)
        if not np.array_equal(actual.astype(np.float32), expected[rows].astype(np.float32)):
            raise SystemExit(f"{name} differs from the checkpoint. No rows are recorded.")
