"""Cached leaves of a parameter tree, with detection of in-place changes."""

from typing import Any

import jax
from flax import nnx


class ParameterLeaves:
    """Leaves of a parameter tree, collected once, and a check for in-place changes since then.

    Flattening nnx State and Variables runs in Python and takes 0.45 ms for 230 arrays, while a small model's
    step takes 0.2 ms. Comparing containers with copies runs in C and takes a twentieth of that.
    """

    def __init__(self, tree: Any) -> None:
        """Collect the leaves.

        Args:
            tree: Any pytree. Changes are detected in trees of dicts, lists, tuples, nnx.State and
                nnx.Variables; any other tree counts as changed.
        """
        self.tree = tree
        self.values: list[Any]
        self.structure: Any
        self.values, self.structure = jax.tree.flatten(tree)
        self._variables: list[nnx.Variable[Any]] = []
        self._is_watched = True
        self._before = self._copy_containers(_raw_dictionaries(tree))
        self._variable_values = [variable.get_raw_value() for variable in self._variables]

    def match(self, tree: Any) -> bool:
        """Return whether flattening `tree` would give these leaves; a False may be wrong, a True may not."""
        if tree is not self.tree or not self._is_watched:
            return False
        values = [variable.get_raw_value() for variable in self._variables]
        return is_same(_raw_dictionaries(tree), self._before) and is_same(values, self._variable_values)

    def _copy_containers(self, node: Any) -> Any:
        """Copy the containers, but not their contents."""
        if type(node) is dict:
            return {key: self._copy_containers(child) for key, child in node.items()}
        if type(node) in (list, tuple):
            return type(node)(map(self._copy_containers, node))
        if isinstance(node, nnx.Variable):
            self._variables.append(node)
            self._is_watched &= jax.tree_util.all_leaves([node.get_raw_value()])
        else:
            self._is_watched &= node is None or jax.tree_util.all_leaves([node])
        return node


def _raw_dictionaries(tree: Any) -> Any:
    """Return the raw dictionaries of a State, whose properties create new objects at every access."""
    return tree.raw_mapping if isinstance(tree, nnx.State) else tree


def is_same(now: Any, before: Any) -> bool:
    """Return whether containers hold the same objects."""
    try:
        return bool(now == before)
    except (ValueError, TypeError, RuntimeError):  # arrays, one in the other's place: == is no truth value
        return False
