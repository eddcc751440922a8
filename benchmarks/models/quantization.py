"""What an 8-bit cache costs the tiny model in bits per byte and in choices, and saves in bytes; on a CPU."""

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
# Written after the model was trained, so it has not seen them.
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
    """One row.

    Attributes:
        quantization: Of the caches.
        skip_layers: Layers that are not quantised.
        query_quantization: Of the queries.
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
    """What `python -m benchmarks quantization` takes."""
    parser.add_argument("--out", help="folder of the rows")


def main(arguments: argparse.Namespace) -> None:
    """Every setting, the 16-bit cache first."""
    rows = Rows("quantization", arguments.out)
    model = jattn.models.load(TINY_MODEL, progress=False)
    ids = lambda path: model.tokenizer.encode(path.read_text()).ids[: TOKENS + 1]
    windows = jnp.asarray([ids(path) for path in TEXTS])
    calibration = [ids(path)[:TOKENS] for path in CALIBRATION_TEXTS]
    exact: np.ndarray | None = None
    for setting in SETTINGS:
        bits, choices = bits_and_choices(model, windows, setting, calibration)
        exact = choices if exact is None else exact
        rows.add(
            cache=str(setting),
            num_bytes=bits.size,
            bits=round(float(bits.sum())),
            same_choices=int((choices == exact).sum()),
            cache_bytes_per_token=bytes_per_token(model, setting),
        )


def bytes_per_token(model: Any, setting: Setting) -> int:
    """Of all layers' caches."""
    specs = model.cache_specs(
        1, block_size=BLOCK_SIZE, quantization=setting.quantization, skip_layers=setting.skip_layers
    )
    return sum(spec.bytes_per_block for spec in specs) // BLOCK_SIZE


def bits_and_choices(
    model: Any, windows: jax.Array, setting: Setting, calibration: list[list[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Bits that the model needs for each byte of the windows but the first, and what it thinks likeliest.

    All keys and values are read from the cache, those of the byte itself too.

    Args:
        model: The tiny model; its kv_scales and its layers' specs are changed.
        windows: Bytes [windows, tokens + 1].
        setting: Of the caches and queries.
        calibration: Prompts for the static scales.
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
    def of_window(params: Any, window: jax.Array) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(graphdef, params)
        caches = model.create_caches(
            num_blocks + 1,
            block_size=BLOCK_SIZE,
            quantization=setting.quantization,
            skip_layers=setting.skip_layers,
        )
        hidden, _ = model(window[:-1], caches, metadata)
        scores = jax.nn.log_softmax(model.logits(hidden))
        bits = -jnp.take_along_axis(scores, window[1:, None], axis=1)[:, 0] / np.log(2)
        return bits, jnp.argmax(scores, axis=1)

    results = [jax.device_get(of_window(params, window)) for window in windows]
    bits, choices = (np.stack(parts) for parts in zip(*results, strict=True))
    return bits, choices


def round_queries(model: Any, query_quantization: str | None) -> None:
    """Changes every layer's spec."""
    for layer in model.layers:
        spec = layer.self_attn.spec
        layer.self_attn.spec = dataclasses.replace(spec, query_quantization=query_quantization)
