"""A model's static KV-cache scales, with the file and tensor names that checkpoints use."""

import dataclasses
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jattn.cache import CacheSpec
from jattn.models.loading.checkpoint import float_dtype
from jattn.models.loading.files import optional_module, require_exists
from jattn.models.loading.safetensors_files import read_header
from jattn.models.specs import require_one_per_layer
from pallas_kernels.checks import require, warn_caller

# The names of vLLM, ModelOpt (k_proj.k_scale), Quark and compressed-tensors (k_proj.output_scale).
# kv_scale is the scale of both sides. Scales of queries and probabilities are not used.
# Source: vLLM `maybe_remap_kv_scale_name`, `get_cache_scale`.
NAME = re.compile(
    r"model\.layers\.(\d+)\.self_attn\."
    r"(?:(?:attn\.)?(kv|k|v|q|prob_output|prob)_scale|(?:qk)?qkv_proj\.([kv])_scale"
    r"|([qkv])_proj\.(?:\4_scale|output_scale))"
)


class CalibrationWarning(UserWarning):
    """Warning that an 8-bit KV cache uses uncalibrated static scales."""


class LayerScales(NamedTuple):
    """The scales of one layer: key = stored * k, value = stored * v. None = unknown.

    Each has the shape of `PagedCache`'s k_scale or v_scale.
    """

    k: np.ndarray | None = None
    v: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class KVScales:
    """The static scales of a model's caches, from a checkpoint or from `jattn.calibrate`.

    Attributes:
        layers: Scales of each layer.
    """

    layers: tuple[LayerScales, ...]

    @classmethod
    def read(cls, tensors: Mapping[str, Any], num_layers: int) -> "KVScales | None":
        """Read the scales among a checkpoint's tensors, or return None if there are none.

        Args:
            tensors: Tensors by name, from `checkpoint.open_tensors`.
            num_layers: Number of layers of the model.

        Raises:
            ValueError: If a scale belongs to no layer, is not a float, or is not positive and finite.
        """
        scales_by_layer: list[dict[str, np.ndarray]] = [{} for _ in range(num_layers)]
        for name in filter(is_kv_scale, tensors):
            layer, *matched = NAME.fullmatch(name).groups()  # type: ignore[union-attr]
            (sides,) = filter(None, matched)
            require(int(layer) < num_layers, name, f"belong to one of {num_layers} layers", layer)
            float_dtype(tensors, name)
            scale = tensors[name].view().astype(np.float32)
            require(bool((np.isfinite(scale) & (scale > 0)).all()), name, "be positive and finite", scale)
            scale = scale.reshape(() if scale.size == 1 else scale.shape)
            for side in {"k", "v"} & {*sides}:  # none for queries and probabilities
                if sides == side or side not in scales_by_layer[int(layer)]:
                    scales_by_layer[int(layer)][side] = scale
        return (
            cls(tuple(LayerScales(**scales) for scales in scales_by_layer)) if any(scales_by_layer) else None
        )

    @classmethod
    def load(cls, path: str | pathlib.Path, num_layers: int) -> "KVScales | None":
        """Read a file that `save` wrote.

        Raises:
            FileNotFoundError: If the file does not exist.
            ValueError: If the file is invalid.
        """
        return cls.read(read_header(require_exists(pathlib.Path(path))), num_layers)

    def save(self, path: str | pathlib.Path) -> None:
        """Write a safetensors file. `load` finds it as `kv_scales.safetensors` in a checkpoint's folder.

        Raises:
            ImportError: If safetensors is not installed.
        """
        optional_module("safetensors.numpy").save_file(self.tensors(), pathlib.Path(path))

    def tensors(self) -> dict[str, np.ndarray]:
        """Return the scales by the tensor names that checkpoints use."""
        return {
            f"model.layers.{i}.self_attn.{side}_scale": np.asarray(scale, np.float32, order="C")
            for i, layer in enumerate(self.layers)
            for side, scale in layer._asdict().items()
            if scale is not None
        }


def is_kv_scale(name: str) -> bool:
    """Return whether a checkpoint's tensor is a static KV-cache scale."""
    return NAME.fullmatch(name) is not None


def make_static_scales(
    kv_scales: KVScales | None, specs: Sequence[CacheSpec], *, num_replicas: int = 1
) -> list[dict[str, Any]]:
    """Return each layer's k_scale and v_scale arguments of `PagedCache.create`.

    Args:
        kv_scales: Scales of the model; None = unknown.
        specs: Specification of each layer's cache.
        num_replicas: Number of consecutive kv heads of a cache that share a head's scales.

    Raises:
        ValueError: If the number of entries is not the number of layers, or a scale per channel is missing.

    Warns:
        CalibrationWarning: A static scale per tensor is missing.
    """
    if kv_scales is None:
        layers: Sequence[LayerScales] = (LayerScales(),) * len(specs)
    else:
        layers = kv_scales.layers
        require_one_per_layer("kv_scales", layers, len(specs))
    scales: list[dict[str, Any]] = []
    unmeasured: dict[int, str | None] = {}
    for layer, (layer_scales, spec) in enumerate(zip(layers, specs, strict=True)):
        scales.append({})
        for side, stored, scale in zip("kv", spec.storage_formats, layer_scales, strict=True):
            call = f"jattn.calibrate(model, prompts, quantization={spec.quantization!r})"
            rule = f"have a {side}_scale per channel for {spec.quantization} ({call} computes them)"
            require(scale is not None or stored.scale != "channel", "kv_scales", rule, None)
            is_static = stored.scale in ("static", "channel")
            scales[-1][f"{side}_scale"] = _repeat(scale, num_replicas) if is_static else None
            if is_static and scale is None:
                unmeasured[layer] = spec.quantization
    if unmeasured:
        layer_list = ", ".join(map(str, unmeasured))
        message = (
            f"{set(unmeasured.values()).pop()} cache: layers {layer_list} have no scales and use 1, which "
            "clips large keys and values and rounds small ones to 0. "
            "Set model.kv_scales = jattn.calibrate(model, prompts), or save these scales as "
            "kv_scales.safetensors in the model folder, where jattn serve finds them. "
            "The cache format fp8_per_token_head needs no scales."
        )
        warn_caller(message, CalibrationWarning)
    return scales


def _repeat(scale: np.ndarray | None, num_replicas: int) -> np.ndarray | None:
    """Repeat scales per head or channel for the replicas of each kv head."""
    return scale if scale is None or np.ndim(scale) == 0 else np.repeat(scale, num_replicas, axis=0)
