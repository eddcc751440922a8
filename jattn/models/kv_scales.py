"""A model's static scales of keys and values, in the files and under the names that checkpoints use."""

import dataclasses
import pathlib
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jattn.cache import CacheSpec
from jattn.models.loading.checkpoint import float_dtype, optional_module
from jattn.models.loading.files import as_path, existing
from jattn.models.loading.safetensors_files import read_header
from jattn.models.specs import require_one_a_layer
from pallas_kernels.checks import require

# vLLM reads the first form; ModelOpt's checkpoints have the second.
NAME = re.compile(r"model\.layers\.(\d+)\.self_attn\.(?:([kv])_scale|([kv])_proj\.\3_scale)")


PACKAGE = str(pathlib.Path(__file__).parents[1])  # a warning points at whoever called into it


class CalibrationWarning(UserWarning):
    """An 8-bit cache has static scales that nobody has measured."""


class LayerScales(NamedTuple):
    """One layer's: key = stored * k. Shapes as `PagedCache`'s arguments; None = not known."""

    k: np.ndarray | None = None
    v: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class KVScales:
    """The static scales of a model's caches, from a checkpoint or from `jattn.calibrate`.

    Attributes:
        layers: One a layer.
    """

    layers: tuple[LayerScales, ...]

    @classmethod
    def read(cls, tensors: Mapping[str, Any], num_layers: int) -> "KVScales | None":
        """Those among a checkpoint's tensors; None where there are none.

        Args:
            tensors: As `checkpoint.open_tensors` returns them.
            num_layers: Of the model.

        Raises:
            ValueError: A scale belongs to no layer, is not a float, or is not positive and finite.
        """
        found: list[dict[str, np.ndarray]] = [{} for _ in range(num_layers)]
        for name in filter(is_scale, tensors):
            layer, *sides = NAME.fullmatch(name).groups()  # type: ignore[union-attr]
            require(int(layer) < num_layers, name, f"belong to one of {num_layers} layers", layer)
            float_dtype(tensors, name)
            scale = tensors[name].view().astype(np.float32)
            require(bool((np.isfinite(scale) & (scale > 0)).all()), name, "be positive and finite", scale)
            found[int(layer)][sides[0] or sides[1]] = scale.reshape(() if scale.size == 1 else scale.shape)
        return cls(tuple(LayerScales(**scales) for scales in found)) if any(found) else None

    @classmethod
    def load(cls, path: str | pathlib.Path, num_layers: int) -> "KVScales | None":
        """Reads a file that `save` wrote.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It is broken, path is none, or as `read`.
        """
        return cls.read(read_header(existing(as_path("path", path))), num_layers)

    def save(self, path: str | pathlib.Path) -> None:
        """Writes a safetensors file; as `kv_scales.safetensors` in a checkpoint's folder, `load` finds it.

        Raises:
            ImportError: safetensors is missing.
            ValueError: path is none.
        """
        optional_module("safetensors.numpy").save_file(self.tensors(), as_path("path", path))

    def tensors(self) -> dict[str, np.ndarray]:
        """By the names that checkpoints use."""
        return {
            f"model.layers.{i}.self_attn.{side}_scale": np.asarray(scale, np.float32, order="C")
            for i, layer in enumerate(self.layers)
            for side, scale in layer._asdict().items()
            if scale is not None
        }


def is_scale(name: str) -> bool:
    """Whether a checkpoint's tensor is a static scale of a cache."""
    return NAME.fullmatch(name) is not None


def static_scales(
    kv_scales: KVScales | None, specs: Sequence[CacheSpec], *, num_replicas: int = 1
) -> list[dict[str, Any]]:
    """Each layer's static scales, as `PagedCache.create` takes them; None for what has none.

    Args:
        kv_scales: The model's.
        specs: Of its caches, one a layer.
        num_replicas: So many kv heads of a cache, one behind the other, have the scales of one.

    Raises:
        ValueError: There is not an entry a layer, or a scale per channel is missing.

    Warns:
        CalibrationWarning: Another static scale is missing.
    """
    layers = (LayerScales(),) * len(specs) if kv_scales is None else kv_scales.layers
    require_one_a_layer("kv_scales", layers, len(specs))
    scales: list[dict[str, Any]] = []
    unmeasured: dict[int, str | None] = {}
    for layer, (known, spec) in enumerate(zip(layers, specs, strict=True)):
        scales.append({})
        for side, stored, scale in zip("kv", spec.storage_formats, known, strict=True):
            rule = f"have a {side}_scale per channel for {spec.quantization} (jattn.calibrate makes them)"
            require(scale is not None or stored.scale != "channel", "kv_scales", rule, None)
            is_static = stored.scale in ("static", "channel")
            scales[-1][f"{side}_scale"] = _repeated(scale, num_replicas) if is_static else None
            if is_static and scale is None:
                unmeasured[layer] = spec.quantization
    if unmeasured:
        unscaled = f"{set(unmeasured.values()).pop()} cache: layers {', '.join(map(str, unmeasured))}"
        harm = "have no scales and take 1, which cuts large keys and values off and rounds small ones away"
        way_out = "model.kv_scales = jattn.calibrate(model, prompts) measures them."
        message = f"{unscaled} {harm}. {way_out}"
        warnings.warn(message, CalibrationWarning, skip_file_prefixes=(PACKAGE,))
    return scales


def _repeated(scale: np.ndarray | None, num_replicas: int) -> np.ndarray | None:
    """Scales a head or channel, of each kv head and its replicas."""
    return scale if scale is None or np.ndim(scale) == 0 else np.repeat(scale, num_replicas, axis=0)
