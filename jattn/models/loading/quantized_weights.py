"""Weights that checkpoints store in few bits with scales, made floats again on the device.

| quant_method | what stands in the checkpoint | scales |
|---|---|---|
| fp8 | `X.weight` (float8) | `X.weight_scale_inv` a block of 128 x 128, or `X.weight_scale` |
| compressed-tensors | `X.weight` (float8) | `X.weight_scale`: one, one a row, or one a block |
| mxfp4 | `X_blocks`: two 4-bit floats a byte, 32 to a scale | `X_scales`: exponents, biased by 127 |

Activations are not rounded to 8 bits, though these methods may: results are nearer to those of floats.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Shaped

from jattn.models.loading.safetensors_files import FLOATS, StoredTensor
from pallas_kernels.checks import require, require_shape, unsupported

METHODS = ("fp8", "compressed-tensors", "mxfp4")
_FLOAT8 = ("F8_E4M3", "F8_E5M2")
_SCALES = ("_scale_inv", "_scale")
_OF_ACTIVATIONS = ("input_scale", "activation_scale", "input_zero_point")
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclasses.dataclass(frozen=True)
class Scaled:
    """Each value times the scale of its block of rows and columns.

    Attributes:
        block: Rows and columns that share a scale.
    """

    block: tuple[int, int]

    def __call__(
        self, values: Shaped[Array, "rows columns"], scales: Shaped[Array, "row_blocks column_blocks"]
    ) -> Float32[Array, "rows columns"]:
        """The weights."""
        wide = scales.astype(jnp.float32)
        for axis, (size, length) in enumerate(zip(self.block, values.shape, strict=True)):
            wide = jnp.repeat(wide, min(size, length), axis=axis)
        return values.astype(jnp.float32) * wide[: values.shape[0], : values.shape[1]]


@dataclasses.dataclass(frozen=True)
class MXFP4:
    """gpt-oss: 4-bit floats, 32 to an exponent; a byte's low half comes first."""

    def __call__(
        self,
        blocks: Shaped[Array, "experts outputs groups 16"],
        scales: Shaped[Array, "experts outputs groups"],
    ) -> Float32[Array, "experts inputs outputs"]:
        """The weights, inputs before outputs."""
        table = jnp.asarray((*_FP4, *(-value for value in _FP4)), jnp.float32)
        halves = jnp.stack([blocks & 15, blocks >> 4], axis=-1)
        values = jnp.take(table, halves.astype(jnp.int32), mode="clip")
        exponents = scales.astype(jnp.int32)[..., None, None] - 127
        values = jnp.ldexp(values, exponents)
        return values.reshape(*scales.shape[:2], -1).swapaxes(1, 2)


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A tensor that stands in a checkpoint in few bits.

    Attributes:
        name: Of the floats.
        code: Of the floats, whatever they are rounded to later.
        shape: Of the floats.
        sources: What stands in the checkpoint.
        widen: How those become floats; static for jit.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    sources: tuple[StoredTensor, ...]
    widen: Callable[..., Array]

    def check_scales(self) -> None:
        """Looks at scales that are floats, which are few beside the weights.

        Raises:
            ValueError: One is NaN or infinite, and with it all weights of its block.
        """
        for source in self.sources:
            if source.code in FLOATS:
                is_finite = np.isfinite(source.view().astype(np.float32))
                rule, got = "hold finite numbers", f"{is_finite.size - is_finite.sum()} others"
                require(bool(is_finite.all()), source.name, rule, got)


type Tensor = StoredTensor | QuantizedTensor


def check_quantization(config: Mapping[str, Any] | None) -> None:
    """Refuses a config's quantization_config that is not read here.

    Raises:
        ValueError: A part of it is of another kind than it should be.
        NotImplementedError: It is another method, or stores other numbers.
    """
    if not config:
        return
    method = config.get("quant_method", config)
    if method not in METHODS:
        supported = "Supported: " + ", ".join(METHODS)
        raise unsupported(f"quantization_config {method!r}", "its weights are not read here", supported)
    for name, weights in _groups(config).items():
        kind = (weights.get("type", "float"), weights.get("num_bits", 8), weights.get("symmetric", True))
        if kind != ("float", 8, True):
            what = f"quantization_config's {name} of {kind[1]} bits {kind[0]}, symmetric {kind[2]}"
            raise unsupported(what, "its weights are not read here", "Supported: 8 bits float, symmetric")
    transforms = config.get("transform_config")
    if transforms and (not isinstance(transforms, Mapping) or transforms.get("config_groups", transforms)):
        what, reason = "quantization_config's transform_config", "weights are of rotated inputs or outputs"
        raise unsupported(what, reason, "Supported: none")
    _block_size(config)


def _object(name: str, value: Any) -> Mapping[str, Any]:
    require(isinstance(value, Mapping), f"quantization_config's {name}", "be an object", repr(value))
    return value


def _groups(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """What compressed-tensors says of the weights of each group."""
    groups = _object("config_groups", config.get("config_groups") or {})
    return {
        name: _object(f"{name} weights", _object(name, group).get("weights") or {})
        for name, group in groups.items()
    }


def _block_size(config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of a block that has a scale: as fp8 says it, or compressed-tensors.

    Raises:
        ValueError: It is no pair of positive ints.
        NotImplementedError: Groups have blocks of several sizes.
    """
    sizes = {"weight_block_size": config.get("weight_block_size")}
    sizes |= {
        f"{name} block_structure": group.get("block_structure") for name, group in _groups(config).items()
    }
    found = {_pair(name, size) for name, size in sizes.items() if size is not None}
    if len(found) > 1:
        what = "quantization_config's blocks of " + " and ".join(f"{a} x {b}" for a, b in sorted(found))
        raise unsupported(what, "their weights are not told apart", "Supported: one size for all")
    return found.pop() if found else (128, 128)


def _pair(name: str, size: Any) -> tuple[int, int]:
    if isinstance(size, str) and "block_structure" in name:  # "128x128", as older files have it
        size = [int(part) if part.isdecimal() else part for part in size.split("x")]
    is_list = isinstance(size, list | tuple) and len(size) == 2
    is_pair = is_list and all(type(length) is int and length > 0 for length in size)
    require(is_pair, f"quantization_config's {name}", "be two positive ints", repr(size))
    return size[0], size[1]


def widened(tensors: Mapping[str, Any], config: Mapping[str, Any] | None) -> dict[str, Any]:
    """A checkpoint's tensors, those in few bits as the floats that they mean. Looks at headers alone.

    Args:
        tensors: By name.
        config: The quantization_config; None = there is none, and the tensors are as they are.

    Raises:
        ValueError: A scale is missing or no float, or its shape fits no blocks of its weight.
        NotImplementedError: As `check_quantization`.
    """
    check_quantization(config)
    if not config:
        return dict(tensors)
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(_OF_ACTIVATIONS)}
    size = _block_size(config)
    for name, tensor in tensors.items():
        if name.endswith("_blocks"):
            base = name.removesuffix("_blocks")
            kept[base] = _mxfp4(base, kept.pop(name), _taken(kept, base, ("_scales",)))
        elif tensor.code in _FLOAT8 and len(tensor.shape) == 2:
            kept[name] = _float8(tensor, _taken(kept, name, _SCALES), size)
    return kept


def _taken(tensors: dict[str, Any], name: str, suffixes: tuple[str, ...]) -> StoredTensor:
    found = [name + suffix for suffix in suffixes if name + suffix in tensors]
    rule = "have a scale: " + " or ".join(name + suffix for suffix in suffixes)
    require(bool(found), name, rule, "none in the checkpoint")
    return tensors.pop(found[0])


def _float8(values: StoredTensor, scale: StoredTensor, size: tuple[int, int]) -> QuantizedTensor:
    rows, columns = values.shape
    # Bytes may be exponents, which no quantization_config tells from numbers.
    require(scale.code in FLOATS, f"{scale.name}'s dtype", "be one of " + ", ".join(FLOATS), scale.code)
    if scale.shape in ((), (1,), (1, 1)):
        block = (rows, columns)
    elif scale.shape in ((rows,), (rows, 1)):
        block = (1, columns)
    else:
        block = size
        want = (-(-rows // block[0]), -(-columns // block[1]))
        meaning = f"one, one a row or one a block of {block[0]} x {block[1]} of {values.shape}"
        require_shape(scale.name, scale.shape, want, meaning)
    two_axes = dataclasses.replace(scale, shape=(-(-rows // block[0]), -(-columns // block[1])))
    return QuantizedTensor(values.name, "F32", values.shape, (values, two_axes), Scaled(block))


def _mxfp4(name: str, blocks: StoredTensor, scales: StoredTensor) -> QuantizedTensor:
    is_packed = blocks.code == scales.code == "U8" and len(blocks.shape) == 4 and blocks.shape[3] == 16
    rule = "be bytes [experts, outputs, groups, 16]"
    require(is_packed, blocks.name, rule, f"{blocks.code} {blocks.shape}, scales {scales.code}")
    require_shape(scales.name, scales.shape, blocks.shape[:3], f"an exponent a group of {blocks.name}")
    experts, outputs, groups, _ = blocks.shape
    return QuantizedTensor(name, "F32", (experts, groups * 32, outputs), (blocks, scales), MXFP4())
