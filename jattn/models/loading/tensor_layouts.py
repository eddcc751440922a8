"""The mapping between a decoder's parameters and Hugging Face's tensors: names and layouts.

A projection's kernel is [in, *out] in a Decoder and [out, in] in a checkpoint. One parameter of a Decoder may
be several tensors of a checkpoint.
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
type Tensors = Mapping[str, "HFTensors"]

_LEAVES = {"kernel": "weight", "embedding": "weight"}  # their names in checkpoints
_PROJECTION_LEAVES = ("kernel", "bias")


@dataclasses.dataclass(frozen=True)
class HFTensors:
    """The tensors of a checkpoint that hold a module's parameters, or one array.

    Attributes:
        names: Names of the checkpoint's modules or arrays, with `*` for the layer's number and `#` for the
            expert's. Several if the parameter is split in the checkpoint.
        layout: Layout in the checkpoint, a key of LAYOUTS.
        is_transposed: Whether projection matrices are stored as [in, out] (GPT-2) instead of [out, in].
    """

    names: tuple[str, ...]
    layout: str = "whole"
    is_transposed: bool = False

    def __post_init__(self) -> None:
        require_one_of("layout", self.layout, LAYOUTS)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A layout of a parameter in a checkpoint's tensors.

    Attributes:
        split: Function from the parameter to its parts. For a projection both are [*inputs, *out].
        join: Function from the parts and the parameter's shape to the parameter. For a projection the parts
            are [out, *inputs], the shape is that of out, and the result is [*out, *inputs].
        is_whole_array: Whether the parts are the stored tensors themselves, without a projection's transpose.
        is_stacked: Whether the parts of a projection are stored in one tensor, one after another.
    """

    split: Callable[[Any], Sequence[Any]]
    join: Callable[[Sequence[Array], tuple[int, ...]], Array]
    is_whole_array: bool = False
    is_stacked: bool = False


def _split_heads(array: Any) -> tuple[Any, Any, Any]:
    """Split [..., kv_heads, group + 2, head_dim] into queries, keys and values."""
    return array[..., :-2, :], array[..., -2, :], array[..., -1, :]


def _join_heads(parts: Sequence[Array], out: tuple[int, ...]) -> Array:
    kv_heads, _, head_dim = out
    heads = [part.reshape(kv_heads, -1, head_dim, *part.shape[1:]) for part in parts]
    return jnp.concatenate(heads, axis=1)


def _split_stacked_heads(whole: Array, out: tuple[int, ...]) -> list[Array]:
    kv_heads, width, head_dim = out
    ends = np.multiply((width - 2, width - 1), kv_heads * head_dim)
    return jnp.split(whole, ends)


def _reshape_to(parts: Sequence[Array], out: tuple[int, ...]) -> Array:
    (whole,) = parts
    return whole.reshape(*out, *whole.shape[1:])


def _interleave_gate_up(array: Any) -> Any:
    """Convert [experts, 2, inner, *hidden] to [experts, *hidden, 2 * inner]."""
    axes = (0, 3, 2, 1)[: array.ndim] if array.ndim == 4 else (0, 2, 1)
    transposed = array.transpose(axes)
    return transposed.reshape(*transposed.shape[:-2], -1)


def _deinterleave_gate_up(array: Array) -> Array:
    """Undo `_interleave_gate_up`."""
    pairs = array.reshape(*array.shape[:-1], -1, 2)
    return pairs.transpose((0, 3, 2, 1) if pairs.ndim == 4 else (0, 2, 1))


LAYOUTS = {
    "whole": Layout(lambda array: (array,), _reshape_to),
    # Queries, keys and values as three matrices, or as one: all queries, then all keys, then all values.
    "heads_separate": Layout(_split_heads, _join_heads),
    "heads_stacked": Layout(
        _split_heads,
        lambda parts, out: _join_heads(_split_stacked_heads(parts[0], out), out),
        is_stacked=True,
    ),
    # A norm's weights [heads, head_dim], flattened.
    "heads_in_a_row": Layout(
        lambda array: (array.reshape(-1),),
        lambda parts, shape: parts[0].reshape(shape),
        is_whole_array=True,
    ),
    # Gate and up [..., 2, inner] as two matrices, or as one whose rows alternate between gate and up.
    "gates_separate": Layout(
        lambda array: (array[..., 0, :], array[..., 1, :]), lambda parts, out: jnp.stack(parts)
    ),
    "gates_interleaved": Layout(
        lambda array: (array.swapaxes(-1, -2),),
        lambda parts, out: _reshape_to(parts, out[::-1]).swapaxes(0, 1),
    ),
    # Experts' gate and up [experts, 2, inner, hidden] (biases: without hidden) as a matrix per expert, or as
    # [experts, hidden, 2 * inner] whose columns alternate between gate and up, or are all gates, then all
    # ups.
    "experts_separate": Layout(
        lambda array: [part for pair in array for part in pair],
        lambda parts, shape: jnp.stack(parts).reshape(shape),
        is_whole_array=True,
    ),
    "experts_interleaved": Layout(
        lambda array: (_interleave_gate_up(array),),
        lambda parts, shape: _deinterleave_gate_up(parts[0]),
        is_whole_array=True,
    ),
    "experts_stacked": Layout(
        lambda array: (array.reshape(len(array), -1, array.shape[-1]).swapaxes(1, 2),),
        lambda parts, shape: parts[0].swapaxes(1, 2).reshape(shape),
        is_whole_array=True,
    ),
    # All experts' rows in one matrix [experts * inner, hidden]: gate and up as two matrices; down as one.
    "experts_flattened": Layout(
        lambda array: [array[:, i].reshape(-1, array.shape[-1]) for i in range(2)],
        lambda parts, shape: jnp.stack([part.reshape(shape[0], *shape[2:]) for part in parts], axis=1),
        is_whole_array=True,
    ),
    "experts_down_below": Layout(
        lambda array: (array.reshape(-1, array.shape[-1]),),
        lambda parts, shape: parts[0].reshape(shape),
        is_whole_array=True,
    ),
    # Experts' down projection [experts, inner, hidden] as a matrix [hidden, inner] per expert, or transposed.
    "experts_down_separate": Layout(
        lambda array: [part.T for part in array],
        lambda parts, shape: jnp.stack(parts).swapaxes(1, 2),
        is_whole_array=True,
    ),
    "experts_down_transposed": Layout(
        lambda array: (array.swapaxes(1, 2),),
        lambda parts, shape: parts[0].swapaxes(1, 2),
        is_whole_array=True,
    ),
    # An array per row; experts' gate and up as [experts, 2 * inner, hidden].
    "rows_separate": Layout(tuple, lambda parts, shape: jnp.stack(parts), is_whole_array=True),
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


def hf_tensor_shapes(tensors: Tensors, path: Path, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors that hold a parameter, in order.

    Args:
        tensors: Mapping of the family's parameters.
        path: nnx path of the parameter.
        shape: Shape of the parameter.
    """
    names: list[str] = []

    def list_tensors(array: Any) -> list[Any]:
        arrays = to_hf(tensors, path, array)
        names.extend(arrays)
        return [*arrays.values()]

    hf_tensors = jax.eval_shape(list_tensors, jax.ShapeDtypeStruct(shape, np.float32))
    return {name: tensor.shape for name, tensor in zip(names, hf_tensors, strict=True)}


def to_hf(tensors: Tensors, path: Path, array: Any) -> dict[str, Any]:
    """Convert the parameter at an nnx path to Hugging Face tensors by name."""
    stored, names = _find(tensors, path, array.shape)
    layout = LAYOUTS[stored.layout]
    if layout.is_whole_array:
        return dict(zip(names, layout.split(array), strict=True))
    if path[-1] not in _PROJECTION_LEAVES:
        return dict(zip(names, (array,), strict=True))
    inputs = array.shape[:1] if path[-1] == "kernel" else ()
    rows = [part.reshape(*inputs, -1) for part in layout.split(array)]
    rows = [jnp.concatenate(rows, axis=-1)] if layout.is_stacked else rows
    return {name: part if stored.is_transposed else part.T for name, part in zip(names, rows, strict=True)}


@dataclasses.dataclass(frozen=True)
class Join:
    """The conversion of a checkpoint's tensors to a parameter. Hashable: static for jit.

    Attributes:
        layout: Layout in the checkpoint, a key of LAYOUTS.
        leaf: Name of the parameter in its module, such as "kernel".
        shape: Shape of the parameter.
        is_transposed: Whether projection matrices are stored as [in, out]; see `HFTensors`.
    """

    layout: str
    leaf: str
    shape: tuple[int, ...]
    is_transposed: bool = False

    @property
    def is_identity(self) -> bool:
        """Whether the parameter is one stored tensor as is."""
        if LAYOUTS[self.layout].is_whole_array:
            return self.layout == "array"
        return self.leaf not in _PROJECTION_LEAVES

    def __call__(self, parts: Sequence[Array]) -> Array:
        """Build the parameter.

        Args:
            parts: Tensors that `hf_tensor_shapes` names, in its order.
        """
        layout = LAYOUTS[self.layout]
        if layout.is_whole_array:
            return layout.join(parts, self.shape)
        if self.is_identity:
            (whole,) = parts
            return whole
        if self.leaf != "kernel":
            return layout.join(parts, self.shape)
        parts = [part.T for part in parts] if self.is_transposed else parts
        # The transpose is separated by a barrier: XLA compiles a fused join and transpose to a slow loop.
        return jnp.moveaxis(jax.lax.optimization_barrier(layout.join(parts, self.shape[1:])), -1, 0)


def make_join(tensors: Tensors, path: Path, shape: tuple[int, ...]) -> Join:
    """Return the conversion of tensors to the parameter at an nnx path.

    Args:
        tensors: Mapping of the family's parameters.
        path: nnx path of the parameter.
        shape: Shape of the parameter.
    """
    stored = _find(tensors, path, shape)[0]
    return Join(stored.layout, path[-1], tuple(shape), stored.is_transposed)


def hf_tensor_names(tensors: Tensors, path: Path, shape: tuple[int, ...]) -> tuple[str, ...]:
    """Return the names of the tensors that hold the parameter at an nnx path."""
    return _find(tensors, path, shape)[1]


def _find(tensors: Tensors, path: Path, shape: tuple[int, ...]) -> tuple[HFTensors, tuple[str, ...]]:
    """Return the mapping of the parameter at an nnx path, and its tensors' names."""
    numbers = [str(part) for part in path if isinstance(part, int)]
    *modules, leaf = ("*" if isinstance(part, int) else part for part in path)
    module, suffix = ".".join(modules), f".{_LEAVES.get(leaf, leaf)}"
    array = tensors.get(f"{module}.{leaf}")
    if array is None and module not in tensors:
        raise ValueError(
            f"The model's family has no tensors for the module {module!r}. Add it to Family(tensors=), as in "
            "jattn.models.families.tensor_mappings.LLAMA_TENSORS."
        )
    stored, suffix = (tensors[module], suffix) if array is None else (array, "")
    layer_names = [name.replace("*", "".join(numbers[:1])) + suffix for name in stored.names]
    if not any("#" in name for name in layer_names):
        return stored, tuple(layer_names)
    return stored, tuple(name.replace("#", str(e)) for e in range(shape[0]) for name in layer_names)
