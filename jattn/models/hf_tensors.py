"""A decoder's parameters as Hugging Face's tensors; what is one matrix here is several there."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

type Path = tuple[Any, ...]

_QKV = ("q_proj", "k_proj", "v_proj")
_GATE_UP = ("gate_proj", "up_proj")


def hf_shapes(path: Path, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The tensors that the parameter at an nnx path is: names and shapes, in order."""
    names: list[str] = []

    def shapes_of(array: Any) -> list[Any]:
        named = to_hf(path, array)
        names.extend(named)
        return [*named.values()]

    tensors = jax.eval_shape(shapes_of, jax.ShapeDtypeStruct(shape, np.float32))
    return {name: tensor.shape for name, tensor in zip(names, tensors, strict=True)}


def to_hf(path: Path, array: Any) -> dict[str, Any]:
    """The parameter at an nnx path as tensors; projections are [out, in] there."""
    *modules, leaf = path
    if leaf not in ("kernel", "bias"):
        return {_name(modules, leaf): array}
    inputs = array.shape[:1] if leaf == "kernel" else ()
    matrix = lambda part: part.reshape(*inputs, -1).T
    if modules[-1] == "qkv_proj":
        parts = dict(zip(_QKV, (array[..., :-2, :], array[..., -2, :], array[..., -1, :]), strict=True))
    elif modules[-1] == "gate_up_proj":
        parts = dict(zip(_GATE_UP, (array[..., 0, :], array[..., 1, :]), strict=True))
    else:
        return {_name(modules, leaf): matrix(array)}
    return {_name([*modules[:-1], part], leaf): matrix(values) for part, values in parts.items()}


def from_hf(path: Path, shape: tuple[int, ...], tensors: Sequence[np.ndarray]) -> np.ndarray:
    """The parameter at an nnx path.

    Args:
        path: Where it is.
        shape: Of the parameter.
        tensors: Those that `hf_shapes` names, in its order.
    """
    module = path[-2] if len(path) > 1 else None
    if module == "qkv_proj":
        *inputs, kv_heads, _, head_dim = shape
        heads = [part.T.reshape(*inputs, kv_heads, -1, head_dim) for part in tensors]
        return np.concatenate(heads, axis=-2)
    if module == "gate_up_proj":
        return np.stack([part.T for part in tensors], axis=-2)
    (whole,) = tensors
    return whole.T if path[-1] == "kernel" else whole


def _name(modules: list[Any], leaf: str) -> str:
    leaf = {"kernel": "weight", "embedding": "weight"}.get(leaf, leaf)
    prefix = [] if modules[0] == "lm_head" else ["model"]
    return ".".join([*prefix, *map(str, modules), leaf])
