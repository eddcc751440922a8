"""A decoder's parameters as Hugging Face's tensors: under which names, and laid out how.

A projection's kernel is [in, *out] here and [out, in] there; what is one matrix here may be several there.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

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
        is_turned: Matrices of projections are [in, out] there (GPT-2's), not [out, in].
    """

    names: tuple[str, ...]
    layout: str = "whole"
    is_turned: bool = False

    def __post_init__(self) -> None:
        require_one_of("layout", self.layout, LAYOUTS)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How our array lies in a checkpoint's tensors.

    Attributes:
        split: Ours -> the parts. Of a projection ours is [*inputs, *out], parts are [*inputs, *out] too.
        join: The parts, and our shape -> ours. Of a projection parts are [out, *inputs], the shape
            is out's, and the result [*out, *inputs].
        is_whole_array: Parts are the tensors as they are, of no projection's.
        is_stacked: The parts of a projection stand in one tensor, the rows of one behind those of another.
        has_views: What split gives of a host's array are views of it.
    """

    split: Callable[[Any], Sequence[Any]]
    join: Callable[[Sequence[Array], tuple[int, ...]], Array]
    is_whole_array: bool = False
    is_stacked: bool = False
    has_views: bool = True


def _split_heads(array: Any) -> tuple[Any, Any, Any]:
    """[..., kv_heads, group + 2, head_dim] -> queries, keys, values."""
    return array[..., :-2, :], array[..., -2, :], array[..., -1, :]


def _join_heads(parts: Sequence[Array], out: tuple[int, ...]) -> Array:
    kv_heads, _, head_dim = out
    heads = [part.reshape(kv_heads, -1, head_dim, *part.shape[1:]) for part in parts]
    return jnp.concatenate(heads, axis=1)


def _cut_heads(whole: Array, out: tuple[int, ...]) -> list[Array]:
    kv_heads, width, head_dim = out
    ends = np.multiply((width - 2, width - 1), kv_heads * head_dim)
    return jnp.split(whole, ends)


def _reshaped(parts: Sequence[Array], out: tuple[int, ...]) -> Array:
    (whole,) = parts
    return whole.reshape(*out, *whole.shape[1:])


def _in_turn(array: Any) -> Any:
    """[experts, 2, inner, *hidden] -> [experts, *hidden, 2 * inner]."""
    axes = (0, 3, 2, 1)[: array.ndim] if array.ndim == 4 else (0, 2, 1)
    turned = array.transpose(axes)
    return turned.reshape(*turned.shape[:-2], -1)


def _from_turns(array: Array) -> Array:
    pairs = array.reshape(*array.shape[:-1], -1, 2)
    return pairs.transpose((0, 3, 2, 1) if pairs.ndim == 4 else (0, 2, 1))


LAYOUTS = {
    "whole": Layout(lambda array: (array,), _reshaped),
    # Queries, keys, values: three matrices; one, all queries before all keys before all values.
    "heads_apart": Layout(_split_heads, _join_heads),
    "heads_stacked": Layout(
        _split_heads, lambda parts, out: _join_heads(_cut_heads(parts[0], out), out), is_stacked=True
    ),
    # Heads' numbers, ours [heads, head_dim]: one behind the other.
    "heads_in_a_row": Layout(
        lambda array: (array.reshape(-1),),
        lambda parts, shape: parts[0].reshape(shape),
        is_whole_array=True,
    ),
    # Gates and the rest [..., 2, inner]: two matrices; one whose rows are of the first and the other in turn.
    "gates_apart": Layout(
        lambda array: (array[..., 0, :], array[..., 1, :]), lambda parts, out: jnp.stack(parts)
    ),
    "gates_in_turn": Layout(
        lambda array: (array.swapaxes(-1, -2),),
        lambda parts, out: _reshaped(parts, out[::-1]).swapaxes(0, 1),
    ),
    # Experts' gates and the rest, ours [experts, 2, inner, hidden] (biases: without hidden): a matrix each;
    # [experts, hidden, 2 * inner] with columns of the first and the other in turn, or one behind the other.
    "experts_apart": Layout(
        lambda array: [part for pair in array for part in pair],
        lambda parts, shape: jnp.stack(parts).reshape(shape),
        is_whole_array=True,
    ),
    "experts_in_turn": Layout(
        lambda array: (_in_turn(array),),
        lambda parts, shape: _from_turns(parts[0]),
        is_whole_array=True,
        has_views=False,
    ),
    "experts_stacked": Layout(
        lambda array: (array.reshape(len(array), -1, array.shape[-1]).swapaxes(1, 2),),
        lambda parts, shape: parts[0].swapaxes(1, 2).reshape(shape),
        is_whole_array=True,
    ),
    # All experts' rows in one matrix [experts * inner, hidden]: two of them; one, of the second products.
    "experts_below": Layout(
        lambda array: [array[:, i].reshape(-1, array.shape[-1]) for i in range(2)],
        lambda parts, shape: jnp.stack([part.reshape(shape[0], *shape[2:]) for part in parts], axis=1),
        is_whole_array=True,
        has_views=False,
    ),
    "experts_down_below": Layout(
        lambda array: (array.reshape(-1, array.shape[-1]),),
        lambda parts, shape: parts[0].reshape(shape),
        is_whole_array=True,
    ),
    # Their second products, ours [experts, inner, hidden]: a matrix [hidden, inner] each; as ours.
    "experts_down_apart": Layout(
        lambda array: [part.T for part in array],
        lambda parts, shape: jnp.stack(parts).swapaxes(1, 2),
        is_whole_array=True,
    ),
    "experts_down_turned": Layout(
        lambda array: (array.swapaxes(1, 2),),
        lambda parts, shape: parts[0].swapaxes(1, 2),
        is_whole_array=True,
    ),
    # An array a row; one with all axes but the first and the last as one.
    "rows_apart": Layout(tuple, lambda parts, shape: jnp.stack(parts), is_whole_array=True),
    "experts_whole": Layout(
        lambda array: (array.reshape(len(array), -1, array.shape[-1]),),
        lambda parts, shape: parts[0].reshape(shape),
        is_whole_array=True,
    ),
    "one_row": Layout(
        lambda array: (array[None],), lambda parts, shape: parts[0].reshape(shape), is_whole_array=True
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
    rows = [part.reshape(*inputs, -1) for part in layout.split(array)]
    rows = [jnp.concatenate(rows, axis=-1)] if layout.is_stacked else rows
    return {name: part if stored.is_turned else part.T for name, part in zip(names, rows, strict=True)}


@dataclasses.dataclass(frozen=True)
class Join:
    """Tensors -> the parameter that they are. Hashable: static for jit, and one for parameters of a kind.

    Attributes:
        layout: How they lie in the checkpoint, a key of LAYOUTS.
        leaf: The parameter's own name, such as "kernel".
        shape: Of the parameter.
        is_turned: As `Stored`'s.
    """

    layout: str
    leaf: str
    shape: tuple[int, ...]
    is_turned: bool = False

    @property
    def is_nothing(self) -> bool:
        """Whether one tensor is the parameter as it is."""
        if LAYOUTS[self.layout].is_whole_array:
            return self.layout == "array"
        return self.leaf not in _OF_PROJECTIONS

    @property
    def has_views(self) -> bool:
        """Whether a parameter on the host can be written where it stays (`pairs`)."""
        return LAYOUTS[self.layout].has_views

    def pairs(self, whole: np.ndarray, tensors: Sequence[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Views of a parameter on the host, and of the tensors what belongs there, shape by shape.

        Args:
            whole: The parameter, in C order.
            tensors: As `__call__`'s parts.
        """
        layout = LAYOUTS[self.layout]
        if layout.is_whole_array:
            targets: Sequence[Any] = layout.split(whole)
        elif self.is_nothing:
            targets = (whole,)
        else:
            targets = layout.split(whole)
            turned = [tensor if self.is_turned else tensor.T for tensor in tensors]  # [inputs, out], or [out]
            num_inputs = whole.shape[0] if self.leaf == "kernel" else 1
            ends = np.cumsum([target.size // num_inputs for target in targets])[:-1]
            tensors = np.split(turned[0], ends, axis=-1) if layout.is_stacked else turned
        return [(t, tensor.reshape(t.shape)) for t, tensor in zip(targets, tensors, strict=True)]

    def __call__(self, parts: Sequence[Array]) -> Array:
        """The parameter.

        Args:
            parts: The tensors that `hf_shapes` names, in its order.
        """
        layout = LAYOUTS[self.layout]
        if layout.is_whole_array:
            return layout.join(parts, self.shape)
        if self.is_nothing:
            (whole,) = parts
            return whole
        if self.leaf != "kernel":
            return layout.join(parts, self.shape)
        parts = [part.T for part in parts] if self.is_turned else parts
        # Turned at the end and apart: XLA makes a slow loop of a join that turns.
        return jnp.moveaxis(jax.lax.optimization_barrier(layout.join(parts, self.shape[1:])), -1, 0)


def join_of(tensors: Tensors, path: Path, shape: tuple[int, ...]) -> Join:
    """How the parameter at an nnx path is made of its tensors.

    Args:
        tensors: The family's.
        path: Where it is.
        shape: Of the parameter.
    """
    stored = _stored(tensors, path, shape)[0]
    return Join(stored.layout, path[-1], tuple(shape), stored.is_turned)


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
