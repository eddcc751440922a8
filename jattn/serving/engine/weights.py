"""A model's weights as the engine runs them: whoever changes them, in whatever way, gets the new ones."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.models.collectives import PeerVariable
from jattn.runtime.parameters import is_same
from pallas_kernels.checks import require, require_shape


class Weights:
    """The state of a model, whose Variables it shares: what is assigned to one is in the next step."""

    def __init__(self, model: Any) -> None:
        """Looks at the model for the first time."""
        self._model = model
        self._look()

    def refresh(self) -> Any:
        """The model's state (`nnx.state`); the one of before unless Variables or modules were exchanged."""
        if not all(is_same(now, before) for now, before in self._attributes):
            self._look()
        return self.state

    def update(self, state: Any) -> None:
        """Assigns new values to the model's Variables, to all of them or to none.

        Args:
            state: `nnx.state` of a model of the same structure, or nested dictionaries of arrays; what it
                lacks stays as it is, and so does memory for sums over devices.

        Raises:
            ValueError: It holds what the model has not, or another shape or dtype; the message names it.
        """
        is_tree = isinstance(state, Mapping)
        require(is_tree, "state", "be a tree of the model's weights (nnx.state(model))", state)
        variables = dict(nnx.to_flat_state(self.refresh()))
        spread = getattr(self._model, "spread", lambda path, array, shape: array)
        new = {path: _fitting(path, value, variables, spread) for path, value in _flat(state)}
        for path, array in new.items():
            if not isinstance(variables[path], PeerVariable):  # a copy would be another place in memory
                variables[path].set_value(array)

    def _look(self) -> None:
        """Notes the state, and all modules' attributes: comparing them takes 0.1 ms, `nnx.state` 15."""
        self.state = nnx.state(self._model)
        nodes = [vars(node) for _, node in nnx.iter_graph(self._model) if isinstance(node, nnx.Pytree)]
        self._attributes = [(attributes, dict(attributes)) for attributes in nodes]


def _flat(tree: Mapping[Any, Any], path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Each value with its path."""
    for key, child in tree.items():
        if isinstance(child, Mapping):
            yield from _flat(child, (*path, key))
        else:
            yield (*path, key), child


def _fitting(
    path: tuple[Any, ...],
    value: Any,
    variables: Mapping[tuple[Any, ...], Any],
    spread: Callable[[tuple[Any, ...], Any, tuple[int, ...]], Any],
) -> jax.Array:
    """The value as an array that may stand in the place of the model's."""
    name = ".".join(map(str, path))
    require(path in variables, "state", "hold only what the model has", name)
    value = value.get_value() if isinstance(value, nnx.Variable) else value
    require(isinstance(value, jax.Array | np.ndarray), name, "be an array", repr(value))
    before = variables[path].get_value()
    value = spread(path, value, before.shape)
    require_shape(name, value.shape, before.shape, "as the model's")
    require(value.dtype == before.dtype, name, f"be {before.dtype}", value.dtype)
    if not isinstance(before, jax.Array) or not before.committed:
        return jnp.asarray(value)
    if before.sharding.is_fully_addressable:
        # A copy: devices of a CPU take the caller's memory as it is, which may change.
        value = value if isinstance(value, jax.Array) else np.array(value)
        return jax.device_put(value, before.sharding)  # on a mesh: each device its own part
    host = np.asarray(value)
    part = lambda index: np.array(host[index])
    return jax.make_array_from_callback(host.shape, before.sharding, part, dtype=host.dtype)


def host_tree(state: Any) -> dict[Any, Any]:
    """A state as nested dictionaries of numpy's arrays, as `Weights.update` takes it.

    Raises:
        ValueError: It is no tree, or no host has all of an array.
    """
    is_tree = isinstance(state, Mapping)
    require(is_tree, "state", "be a tree of the model's weights (nnx.state(model))", state)
    tree: dict[Any, Any] = {}
    for path, value in _flat(state):
        value = value.get_value() if isinstance(value, nnx.Variable) else value
        is_here = not isinstance(value, jax.Array) or value.is_fully_addressable or value.is_fully_replicated
        name = ".".join(map(str, path))
        require(is_here, name, "be an array that this process has whole", getattr(value, "sharding", None))
        inner = tree
        for key in path[:-1]:
            inner = inner.setdefault(key, {})
        inner[path[-1]] = jax.device_get(value)
    return tree
