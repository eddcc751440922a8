"""Loading of a made checkpoint of 8B widths: bytes a second from the page cache, and the host's memory."""

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

LAYERS_A_FILE = 2
ROUNDS = 3
STATUS, CLEAR = pathlib.Path("/proc/self/status"), pathlib.Path("/proc/self/clear_refs")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `python -m benchmarks load` takes."""
    parser.add_argument("--layers", type=int, default=8, help="436 MB each")
    parser.add_argument("--vocab", type=int, default=LLAMA_8B["vocab_size"], help="2 x 8 kB a word")
    parser.add_argument("--dtype", help="of the parameters; default as stored, bfloat16")
    parser.add_argument("--folder", help="where the checkpoint is made; default a temporary one")
    parser.add_argument("--out", help="folder of the rows")


def main(arguments: argparse.Namespace) -> None:
    """A row for the first load, what it compiles included, and one for each of those behind it."""
    rows = Rows("load", arguments.out)
    jax.block_until_ready(jax.numpy.zeros(8) + 1)  # the device is there
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        directory = pathlib.Path(folder)
        sizes = make_checkpoint(directory, arguments.layers, arguments.vocab)
        for number in range(ROUNDS):
            model, row = measured(directory, arguments.dtype)
            check(model, directory)
            rate = sum(sizes) / row["seconds"] / 1e9
            shares = {"bytes": sum(sizes), "largest_file_mb": max(sizes) / 1e6}
            rows.add(name="load", number=number, layers=arguments.layers, gb_per_s=rate, **shares, **row)
            del model


def make_checkpoint(directory: pathlib.Path, layers: int, vocab: int) -> list[int]:
    """Writes one of random bits, the embedding and the head in a file each; the files' bytes.

    A file is in the page cache when it has been written.
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
    for first in range(0, layers, LAYERS_A_FILE):
        numbers = range(first, min(first + LAYERS_A_FILE, layers))
        files.append({f"model.layers.{i}.{name}.weight": shapes[name] for i in numbers for name in shapes})
    names = [f"model-{number:05d}.safetensors" for number in range(len(files))]
    for name, file in zip(names, files, strict=True):
        write_random(directory / name, file)
    found = {tensor: name for name, file in zip(names, files, strict=True) for tensor in file}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": found}))
    return [(directory / name).stat().st_size for name in names]


def write_random(path: pathlib.Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file of small bfloat16 numbers, written a piece at a time: no tensor is ever held."""
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    piece = np.random.default_rng(end).normal(0.0, 0.02, 2**20 + 1).astype(ml_dtypes.bfloat16).tobytes()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while end > 0:
            end -= file.write(piece[:end])


def measured(directory: pathlib.Path, dtype: str | None) -> tuple[Decoder, dict[str, Any]]:
    """The model, and what loading it took: seconds, the processor's among them, and memory of the host."""
    CLEAR.write_text("5")  # the peak is the present again
    before, cpu, start = megabytes("VmRSS"), time.process_time(), time.perf_counter()
    model = jattn.models.load(directory, dtype=dtype, progress=False)
    jax.block_until_ready(jax.tree.leaves(model))
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    row = {"seconds": seconds, "cpu_seconds": cpu_seconds, "peak_mb": megabytes("VmHWM") - before}
    if jax.default_backend() == "cpu":  # the parameters lie in the host's memory, too
        row["parameters_mb"] = sum(leaf.nbytes for leaf in jax.tree.leaves(model)) / 1e6
    row["major_faults"] = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    return model, row


def megabytes(key: str) -> float:
    """A line of /proc/self/status."""
    lines = STATUS.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024 / 1e6


def check(model: Decoder, directory: pathlib.Path) -> None:
    """Some rows of each kind of parameter of the last layer, and of both ends, must be the files'."""
    tensors = {name: t for path in directory.glob("*.safetensors") for name, t in read_header(path).items()}
    number = len(model.layers) - 1
    layer, prefix = model.layers[number], f"model.layers.{number}"
    heads = model.config.num_key_value_heads
    of_qkv = layer.self_attn.qkv_proj.kernel[...]
    parts = {
        "model.embed_tokens": model.embed_tokens.embedding[...].T,
        "lm_head": model.lm_head.kernel[...],
        f"{prefix}.self_attn.q_proj": of_qkv[:, :, :-2].reshape(of_qkv.shape[0], -1),
        f"{prefix}.self_attn.k_proj": of_qkv[:, :, -2].reshape(of_qkv.shape[0], -1),
        f"{prefix}.self_attn.v_proj": of_qkv[:, :, -1].reshape(of_qkv.shape[0], -1),
        f"{prefix}.mlp.gate_proj": layer.mlp.gate_up_proj.kernel[:, 0],
        f"{prefix}.mlp.up_proj": layer.mlp.gate_up_proj.kernel[:, 1],
        f"{prefix}.mlp.down_proj": layer.mlp.down_proj.kernel[...],
    }
    assert of_qkv.shape[1] == heads
    for name, array in parts.items():
        want = tensors[f"{name}.weight"].view()
        some = np.linspace(0, len(want) - 1, 7).astype(int)
        got = np.asarray(array[:, some].T)
        if not np.array_equal(got.astype(np.float32), want[some].astype(np.float32)):
            raise SystemExit(f"{name} is not what the checkpoint has: no rows")
