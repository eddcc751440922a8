"""Quantized weights of checkpoints, which are dequantized on the device when they are loaded.

| quant_method | tensors | scales |
|---|---|---|
| fp8 | `X.weight` (float8) | `X.weight_scale_inv` per block of 128 x 128, or `X.weight_scale` |
| compressed-tensors | `X.weight` (float8) | `X.weight_scale`: one, one per row, or one per block |
| mxfp4 | `X_blocks`: two 4-bit floats per byte | `X_scales`: an exponent per 32 floats, biased by 127 |

Activations are not quantized, although these methods may do so: results are closer to the float model's.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float32, Shaped

from jattn.models.loading.safetensors_files import FLOATS, StoredTensor
from pallas_kernels.checks import require, require_shape, unsupported

METHODS = ("fp8", "compressed-tensors", "mxfp4")
_FLOAT8 = ("F8_E4M3", "F8_E5M2")
_SCALES = ("_scale_inv", "_scale")
_ACTIVATION_SUFFIXES = ("input_scale", "activation_scale", "input_zero_point")
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclasses.dataclass(frozen=True)
class BlockScaled:
    """Dequantization by a scale per block of rows and columns. Hashable: static for jit.

    Attributes:
        block: Numbers of rows and columns that share a scale.
    """

    block: tuple[int, int]

    def __call__(
        self, values: Shaped[Array, "rows columns"], scales: Shaped[Array, "row_blocks column_blocks"]
    ) -> Float32[Array, "rows columns"]:
        """Return the dequantized weights."""
        scales = scales.astype(jnp.float32)
        for axis, (size, length) in enumerate(zip(self.block, values.shape, strict=True)):
            scales = jnp.repeat(scales, min(size, length), axis=axis)
        return values.astype(jnp.float32) * scales[: values.shape[0], : values.shape[1]]


@dataclasses.dataclass(frozen=True)
class MXFP4:
    """Dequantization of gpt-oss's MXFP4: 32 floats share an exponent; each byte holds two, low bits first."""

    def __call__(
        self,
        blocks: Shaped[Array, "experts outputs groups 16"],
        scales: Shaped[Array, "experts outputs groups"],
    ) -> Float32[Array, "experts inputs outputs"]:
        """Return the dequantized weights, with inputs before outputs."""
        table = jnp.asarray((*_FP4, *(-value for value in _FP4)), jnp.float32)
        nibbles = jnp.stack([blocks & 15, blocks >> 4], axis=-1)
        values = jnp.take(table, nibbles.astype(jnp.int32), mode="clip")
        exponents = scales.astype(jnp.int32)[..., None, None] - 127
        values = jnp.ldexp(values, exponents)
        return values.reshape(*scales.shape[:2], -1).swapaxes(1, 2)


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A quantized tensor of a checkpoint.

    Attributes:
        name: Name of the dequantized tensor.
        code: Dtype of the dequantized tensor in safetensors' notation.
        shape: Shape of the dequantized tensor.
        sources: Stored values and scales.
        dequantize: Function that computes the tensor from the sources; static for jit.
    """

    name: str
    code: str
    shape: tuple[int, ...]
    sources: tuple[StoredTensor, ...]
    dequantize: Callable[..., Array]


type Tensor = StoredTensor | QuantizedTensor


def check_quantization(config: Mapping[str, Any] | None) -> None:
    """Require that a quantization_config is supported.

    Raises:
        NotImplementedError: If the method or the format of the weights is not supported.
    """
    if not config:
        return
    method = config.get("quant_method", config)
    if method not in METHODS:
        supported = "Supported: " + ", ".join(METHODS)
        raise unsupported(f"quantization_config {method!r}", "this format is not supported", supported)
    for name, weights in _groups(config).items():
        weight_format = (
            weights.get("type", "float"),
            weights.get("num_bits", 8),
            weights.get("symmetric", True),
        )
        if weight_format != ("float", 8, True):
            type_name, num_bits, symmetric = weight_format
            feature = f"quantization_config's {name} with {num_bits}-bit {type_name}, symmetric {symmetric}"
            raise unsupported(feature, "this format is not supported", "Supported: 8-bit float, symmetric")
    transforms = config.get("transform_config")
    if transforms and (not isinstance(transforms, Mapping) or transforms.get("config_groups", transforms)):
        feature, reason = (
            "quantization_config's transform_config",
            "weights are stored for rotated inputs or outputs",
        )
        raise unsupported(feature, reason, "Use a checkpoint without transform_config")
    _block_size(config)


def _groups(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return compressed-tensors' description of the weights of each group."""
    groups = config.get("config_groups") or {}
    return {name: group.get("weights") or {} for name, group in groups.items()}


def _block_size(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of rows and columns that share a scale, from fp8's or compressed-tensors' keys.

    Raises:
        NotImplementedError: If groups have different block sizes.
    """
    sizes = [config.get("weight_block_size")]
    sizes += [group.get("block_structure") for group in _groups(config).values()]
    # "128x128" in older files
    pairs = {tuple(map(int, size.split("x") if isinstance(size, str) else size)) for size in sizes if size}
    if len(pairs) > 1:
        feature = "quantization_config's blocks of " + " and ".join(f"{a} x {b}" for a, b in sorted(pairs))
        reason = "different block sizes are not supported"
        raise unsupported(feature, reason, "Use a checkpoint with one block size for all weights")
    rows, columns = pairs.pop() if pairs else (128, 128)
    return rows, columns


def dequantize_tensors(tensors: Mapping[str, Any], config: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a checkpoint's tensors with quantized ones as QuantizedTensor. Reads headers only.

    Args:
        tensors: Tensors by name.
        config: The quantization_config; None = tensors are not quantized.

    Raises:
        ValueError: If a scale is missing or not a float, or its shape does not match the blocks of its
            weight.
        NotImplementedError: If the format is not supported; see `check_quantization`.
    """
    check_quantization(config)
    if not config:
        return dict(tensors)
    result = {name: tensor for name, tensor in tensors.items() if not name.endswith(_ACTIVATION_SUFFIXES)}
    size = _block_size(config)
    for name, tensor in tensors.items():
        if name.endswith("_blocks"):
            base = name.removesuffix("_blocks")
            result[base] = _mxfp4(base, result.pop(name), _pop_scale(result, base, ("_scales",)))
        elif tensor.code in _FLOAT8 and len(tensor.shape) == 2:
            result[name] = _float8(tensor, _pop_scale(result, name, _SCALES), size)
    return result


def _pop_scale(tensors: dict[str, Any], name: str, suffixes: tuple[str, ...]) -> StoredTensor:
    scale_names = [name + suffix for suffix in suffixes if name + suffix in tensors]
    if not scale_names:
        expected = " or ".join(name + suffix for suffix in suffixes)
        raise ValueError(f"The checkpoint has no scale for {name}. Expected the tensor {expected}.")
    return tensors.pop(scale_names[0])


def _float8(values: StoredTensor, scale: StoredTensor, size: tuple[int, int]) -> QuantizedTensor:
    rows, columns = values.shape
    # A scale stored as bytes may be an exponent, which quantization_config does not say.
    require(scale.code in FLOATS, f"{scale.name}'s dtype", "be one of " + ", ".join(FLOATS), scale.code)
    if scale.shape in ((), (1,), (1, 1)):
        block = (rows, columns)
    elif scale.shape in ((rows,), (rows, 1)):
        block = (1, columns)
    else:
        block = size
        expected = (-(-rows // block[0]), -(-columns // block[1]))
        meaning = f"one, one per row or one per block of {block[0]} x {block[1]} of {values.shape}"
        require_shape(scale.name, scale.shape, expected, meaning)
    scale_2d = dataclasses.replace(scale, shape=(-(-rows // block[0]), -(-columns // block[1])))
    return QuantizedTensor(values.name, "F32", values.shape, (values, scale_2d), BlockScaled(block))


def _mxfp4(name: str, blocks: StoredTensor, scales: StoredTensor) -> QuantizedTensor:
    experts, outputs, groups, _ = blocks.shape
    return QuantizedTensor(name, "F32", (experts, groups * 32, outputs), (blocks, scales), MXFP4())
