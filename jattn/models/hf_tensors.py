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
_OF_PROJECTIONS = ("kernel", "bias")


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a checkpoint has a module's parameters, or one array.

    Attributes:
        names: Of the modules or arrays there, `*` for the layer's number and `#` for the expert's; several
            where ours is cut into parts.
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
        split: Ours -> the parts. Of a projection ours is [*inputs, *out], parts are [*inputs, *out] too.
        join: The parts, and our shape -> ours. Of a projection parts are [*inputs, out], the shape is out's.
        is_whole_array: Parts are the tensors as they are, of no projection's.
    """

    split: Callable[[Any], Sequence[Any]]
    join: Callable[[Sequence[np.ndarray], tuple[int, ...]], np.ndarray]
    is_whole_array: bool = False


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


def _in_turn(array: Any) -> Any:
    """[experts, 2, inner, *hidden] -> [experts, *hidden, 2 * inner]."""
    axes = (0, 3, 2, 1)[: array.ndim] if array.ndim == 4 else (0, 2, 1)
    turned = array.transpose(axes)
    return turned.reshape(*turned.shape[:-2], -1)


def _from_turns(array: np.ndarray) -> np.ndarray:
    pairs = array.reshape(*array.shape[:-1], -1, 2)
    return pairs.transpose((0, 3, 2, 1) if pairs.ndim == 4 else (0, 2, 1))


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
    # Experts' gates and the rest, ours [experts, 2, inner, hidden] (biases: without hidden): a matrix each;
    # [experts, hidden, 2 * inner] with columns of the first and the other in turn, or one behind the other.
    "experts_apart": Layout(
        lambda array: [part for pair in array for part in pair],
        lambda parts, shape: np.stack(parts).reshape(shape),
        is_whole_array=True,
    ),
    "experts_in_turn": Layout(
        lambda array: (_in_turn(array),), lambda parts, shape: _from_turns(parts[0]), is_whole_array=True
    ),
    "experts_stacked": Layout(
        lambda array: (array.reshape(len(array), -1, array.shape[-1]).swapaxes(1, 2),),
        lambda parts, shape: parts[0].swapaxes(1, 2).reshape(shape),
        is_whole_array=True,
    ),
    # Their second products, ours [experts, inner, hidden]: a matrix [hidden, inner] each; as ours.
    "experts_down_apart": Layout(
        lambda array: [part.T for part in array],
        lambda parts, shape: np.stack([part.T for part in parts]),
        is_whole_array=True,
    ),
    "array": Layout(lambda array: (array,), lambda parts, shape: parts[0], is_whole_array=True),
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
    stored, names = _stored(tensors, path, array.shape)
    layout = LAYOUTS[stored.layout]
    if layout.is_whole_array:
        return dict(zip(names, layout.split(array), strict=True))
    if path[-1] not in _OF_PROJECTIONS:
        return dict(zip(names, (array,), strict=True))
    inputs = array.shape[:1] if path[-1] == "kernel" else ()
    return {name: part.reshape(*inputs, -1).T for name, part in zip(names, layout.split(array), strict=True)}


def from_hf(tensors: Tensors, path: Path, shape: tuple[int, ...], arrays: Sequence[np.ndarray]) -> np.ndarray:
    """The parameter at an nnx path.

    Args:
        tensors: The family's.
        path: Where it is.
        shape: Of the parameter.
        arrays: The tensors that `hf_shapes` names, in its order.
    """
    layout = LAYOUTS[_stored(tensors, path, shape)[0].layout]
    if layout.is_whole_array:
        return layout.join(arrays, shape)
    if path[-1] not in _OF_PROJECTIONS:
        (whole,) = arrays
        return whole
    out = shape[1:] if path[-1] == "kernel" else shape
    return layout.join([array.T for array in arrays], out)


def tensor_names(tensors: Tensors, path: Path, shape: tuple[int, ...]) -> tuple[str, ...]:
    """The names of the tensors that the parameter at an nnx path is."""
    return _stored(tensors, path, shape)[1]


def _stored(tensors: Tensors, path: Path, shape: tuple[int, ...]) -> tuple[Stored, tuple[str, ...]]:
    """Where the parameter at an nnx path is, and its tensors' names."""
    numbers = [str(part) for part in path if isinstance(part, int)]
    *modules, leaf = ("*" if isinstance(part, int) else part for part in path)
    module, end = ".".join(modules), f".{_LEAVES.get(leaf, leaf)}"
    array = tensors.get(f"{module}.{leaf}")
    stored, end = (tensors[module], end) if array is None else (array, "")
    of_layer = [name.replace("*", "".join(numbers[:1])) + end for name in stored.names]
    if not any("#" in name for name in of_layer):
        return stored, tuple(of_layer)
    return stored, tuple(name.replace("#", str(e)) for e in range(shape[0]) for name in of_layer)
