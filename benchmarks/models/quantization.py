"""Accuracy and size of 8-bit caches with the tiny model, on a CPU: bits per byte, and equal top-1 bytes."""

import argparse
import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jattn
from benchmarks.runner import Rows
from jattn.cache.spec import QUANTIZATIONS
from jattn.calibration import STATIC

ROOT = pathlib.Path(__file__).parents[2]
TINY_MODEL = ROOT / "examples" / "tiny_model"
# Files written after the model was trained.
TEXTS = [
    ROOT / "jattn" / "metadata" / f"{name}.py"
    for name in ("batch", "buckets", "cascade", "graph_dispatch", "local", "slots", "speculative", "split")
]
CALIBRATION_TEXTS = [
    ROOT / "jattn" / "models" / f"{name}.py" for name in ("config", "families", "layer", "rope")
]
TOKENS = 2048
BLOCK_SIZE = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Cache and query formats of one row.

    Attributes:
        quantization: Format of the caches; None stores 16 bits.
        skip_layers: Indices of layers whose caches are not quantized.
        query_quantization: Format to which queries are rounded; None keeps 16 bits.
    """

    quantization: str | None
    skip_layers: tuple[int, ...] = ()
    query_quantization: str | None = None

    def __str__(self) -> str:
        skipped = (
            f", layers {' and '.join(map(str, self.skip_layers))} in 16 bits" if self.skip_layers else ""
        )
        query = f", {self.query_quantization} queries" if self.query_quantization else ""
        return f"{self.quantization or '16 bits'}{skipped}{query}"


SETTINGS = (
    *(Setting(quantization=name) for name in QUANTIZATIONS),
    Setting(quantization="int8_token_head", skip_layers=(0, -1)),
    Setting(quantization="int8_token_head", query_quantization="int8"),
    Setting(quantization="fp8_e4m3", query_quantization="fp8_e4m3"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks quantization`."""
    parser.add_argument("--out", help="Directory for the result rows.")


def main(arguments: argparse.Namespace) -> None:
    """Record a row for every setting, the 16-bit cache first."""
    rows = Rows("quantization", arguments.out)
    model = jattn.models.load(TINY_MODEL, progress=False)

    def token_ids(path: pathlib.Path) -> list[int]:
        return model.tokenizer.encode(path.read_text()).ids[: TOKENS + 1]

    windows = jnp.asarray([token_ids(path) for path in TEXTS])
    calibration = [token_ids(path)[:TOKENS] for path in CALIBRATION_TEXTS]
    exact_choices: np.ndarray | None = None
    for setting in SETTINGS:
        bits, choices = bits_and_choices(model, windows, setting, calibration)
        exact_choices = choices if exact_choices is None else exact_choices
        rows.add(
            cache=str(setting),
            num_bytes=bits.size,
            bits=round(float(bits.sum())),
            same_choices=int((choices == exact_choices).sum()),
            cache_bytes_per_token=bytes_per_token(model, setting),
        )


def bytes_per_token(model: Any, setting: Setting) -> int:
    """Return the cache bytes per token in all layers together."""
    specs = model.cache_specs(
        1, block_size=BLOCK_SIZE, quantization=setting.quantization, skip_layers=setting.skip_layers
    )
    return sum(spec.bytes_per_block for spec in specs) // BLOCK_SIZE


def bits_and_choices(
    model: Any, windows: jax.Array, setting: Setting, calibration: list[list[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the model's bits per byte and top-1 bytes, for all bytes of the windows but the first.

    Attention reads all keys and values from the cache, including those of the current byte.

    Args:
        model: The tiny model. Its kv_scales and its layers' specs are changed.
        windows: Bytes [windows, tokens + 1].
        setting: Formats of the caches and queries.
        calibration: Prompts that determine the static scales.
    """
    round_queries(model, None)
    if setting.quantization in STATIC:
        model.kv_scales = jattn.calibrate(model, calibration, quantization=setting.quantization)
    round_queries(model, setting.query_quantization)
    graphdef, params = nnx.split(model)
    tokens = windows.shape[1] - 1
    num_blocks = -(-tokens // BLOCK_SIZE)
    blocks = [list(range(1, num_blocks + 1))]
    metadata = jattn.build_batch_metadata([tokens], [tokens], blocks, block_size=BLOCK_SIZE)

    @jax.jit
    def score_window(params: Any, window: jax.Array) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(graphdef, params)
        caches = model.create_caches(
            num_blocks + 1,
            block_size=BLOCK_SIZE,
            quantization=setting.quantization,
            skip_layers=setting.skip_layers,
        )
        hidden, _ = model(window[:-1], caches, metadata)
        logprobs = jax.nn.log_softmax(model.logits(hidden))
        bits = -jnp.take_along_axis(logprobs, window[1:, None], axis=1)[:, 0] / np.log(2)
        return bits, jnp.argmax(logprobs, axis=1)

    results = [jax.device_get(score_window(params, window)) for window in windows]
    bits, choices = (np.stack(parts) for parts in zip(*results, strict=True))
    return bits, choices


def round_queries(model: Any, query_quantization: str | None) -> None:
    """Set the query format of every layer."""
    for layer in model.layers:
        spec = layer.self_attn.spec
        layer.self_attn.spec = dataclasses.replace(spec, query_quantization=query_quantization)
