"""A decoder's parameters as Hugging Face's tensors: under which names, and laid out how.

A projection's kernel is [in, *out] here and [out, in] there; what is one matrix here may be several there.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.checks import require_one_of

type Path = tuple[Any, ...]
type Tensors = Mapping[str, "Stored"]

_LEAVES = {"kernel": "weight", "embedding": "weight"}  # their names there


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a checkpoint has a module's parameters.

    Attributes:
        names: Of the modules there, `*` for the layer's number; several where ours is cut into parts.
        layout: How they lie there; a key of LAYOUTS.
    """

    names: tuple[str, ...]
    layout: str = "whole"

    def __post_init__(self) -> None:
        require_one_of("layout", self.layout, LAYOUTS)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How our array lies in a checkpoint's tensors.

    Attributes:
        split: Ours [*inputs, *out] -> the parts [*inputs, *out].
        join: Those parts [*inputs, out] and the shape of `out` -> ours.
    """

    split: Callable[[Any], Sequence[Any]]
    join: Callable[[Sequence[np.ndarray], tuple[int, ...]], np.ndarray]


def _split_heads(array: Any) -> tuple[Any, Any, Any]:
    """[..., kv_heads, group + 2, head_dim] -> queries, keys, values."""
    return array[..., :-2, :], array[..., -2, :], array[..., -1, :]


def _join_heads(parts: Sequence[np.ndarray], out: tuple[int, ...]) -> np.ndarray:
    kv_heads, _, head_dim = out
    heads = [part.reshape(*part.shape[:-1], kv_heads, -1, head_dim) for part in parts]
    return np.concatenate(heads, axis=-2)


def _cut_heads(whole: np.ndarray, out: tuple[int, ...]) -> list[np.ndarray]:
    kv_heads, width, head_dim = out
    ends = np.multiply((width - 2, width - 1), kv_heads * head_dim)
    return np.split(whole, ends, axis=-1)


def _stacked(array: Any) -> Any:
    parts = _split_heads(array)
    inputs = array.shape[:-3]
    return jnp.concatenate([part.reshape(*inputs, -1) for part in parts], axis=-1)


def _reshaped(parts: Sequence[np.ndarray], out: tuple[int, ...]) -> np.ndarray:
    (whole,) = parts
    return whole.reshape(*whole.shape[:-1], *out)


LAYOUTS = {
    "whole": Layout(lambda array: (array,), _reshaped),
    # Queries, keys, values: three matrices; one, all queries before all keys before all values.
    "heads_apart": Layout(_split_heads, _join_heads),
    "heads_stacked": Layout(
        lambda array: (_stacked(array),), lambda parts, out: _join_heads(_cut_heads(parts[0], out), out)
    ),
    # Gates and the rest [..., 2, inner]: two matrices; one whose rows are of the first and the other in turn.
    "gates_apart": Layout(
        lambda array: (array[..., 0, :], array[..., 1, :]), lambda parts, out: np.stack(parts, axis=-2)
    ),
    "gates_in_turn": Layout(
        lambda array: (array.swapaxes(-1, -2),),
        lambda parts, out: _reshaped(parts, out[::-1]).swapaxes(-1, -2),
    ),
}


def hf_shapes(tensors: Tensors, path: Path, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The tensors that the parameter at an nnx path is: names and shapes, in order.

    Args:
        tensors: The family's.
        path: Of the parameter.
        shape: Of the parameter.
    """
    names: list[str] = []

    def shapes_of(array: Any) -> list[Any]:
        named = to_hf(tensors, path, array)
        names.extend(named)
        return [*named.values()]

    found = jax.eval_shape(shapes_of, jax.ShapeDtypeStruct(shape, np.float32))
    return {name: tensor.shape for name, tensor in zip(names, found, strict=True)}


def to_hf(tensors: Tensors, path: Path, array: Any) -> dict[str, Any]:
    """The parameter at an nnx path as tensors, by their names."""
    stored, names = _stored(tensors, path)
    inputs = array.shape[:1] if path[-1] == "kernel" else ()
    if path[-1] not in ("kernel", "bias"):
        return dict(zip(names, (array,), strict=True))
    parts = LAYOUTS[stored.layout].split(array)
    return {name: part.reshape(*inputs, -1).T for name, part in zip(names, parts, strict=True)}


def from_hf(tensors: Tensors, path: Path, shape: tuple[int, ...], arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The parameter at an nnx path.

    Args:
        tensors: The family's.
        path: Where it is.
        shape: Of the parameter.
        arrays: The tensors that `hf_shapes` names, in its order.
    """
    if path[-1] not in ("kernel", "bias"):
        (whole,) = arrays
        return whole
    stored, _ = _stored(tensors, path)
    is_kernel = path[-1] == "kernel"
    return LAYOUTS[stored.layout].join([array.T for array in arrays], shape[1:] if is_kernel else shape)


def tensor_names(tensors: Tensors, *path: Any) -> tuple[str, ...]:
    """The names of the tensors that the parameter at an nnx path is."""
    return _stored(tensors, path)[1]


def _stored(tensors: Tensors, path: Path) -> tuple[Stored, tuple[str, ...]]:
    """Where the parameter at an nnx path is, and its tensors' names."""
    numbers = [part for part in path if isinstance(part, int)]
    number = str(numbers[0]) if numbers else ""
    *modules, leaf = ("*" if isinstance(part, int) else part for part in path)
    module, end = ".".join(modules), f".{_LEAVES.get(leaf, leaf)}"
    whole = tensors.get(f"{module}.{leaf}")
    stored, end = (tensors[module], end) if whole is None else (whole, "")
    return stored, tuple(name.replace("*", number) + end for name in stored.names)
