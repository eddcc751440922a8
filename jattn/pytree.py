"""Frozen dataclasses that JAX can flatten.

`jax.tree_util.register_dataclass` calls `__init__` to rebuild a tree, so validation would run on the
tracers, shapes and placeholders that JAX puts into the leaves. Here `__init__` and `__post_init__`
run for people only: JAX rebuilds without them.
"""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, dataclass_transform

import jax

_STATIC = "jattn_static"


def static(**kwargs: Any) -> Any:
    """A dataclass field that is part of the tree's structure: hashable, and a change recompiles."""
    return dataclasses.field(metadata={_STATIC: True}, **kwargs)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(static, dataclasses.field))
def pytree[T](cls: type[T]) -> type[T]:
    """Makes `cls` a frozen, keyword-only dataclass and a pytree; fields made by `static()` are structure."""
    cls = dataclasses.dataclass(frozen=True, kw_only=True, eq=False)(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    static_names = tuple(field.name for field in fields if _STATIC in field.metadata)
    leaf_names = tuple(field.name for field in fields if _STATIC not in field.metadata)

    def flatten_with_keys(tree: Any) -> tuple[Any, Any]:
        leaves = [(jax.tree_util.GetAttrKey(name), getattr(tree, name)) for name in leaf_names]
        return leaves, tuple(getattr(tree, name) for name in static_names)

    leaves_of, structure_of = _getter(leaf_names), _getter(static_names)

    def flatten(tree: Any) -> tuple[Any, Any]:
        return leaves_of(tree), structure_of(tree)

    def unflatten(structure: Any, leaves: Any) -> Any:
        tree = object.__new__(cls)
        fields = vars(tree)  # a setattr a field costs more, and a step's caches pass here at every call
        fields.update(zip(leaf_names, leaves, strict=True))
        fields.update(zip(static_names, structure, strict=True))
        return tree

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls


def _getter(names: tuple[str, ...]) -> Callable[[Any], tuple[Any, ...]]:
    """The function that reads these attributes."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda tree: tuple(getattr(tree, name) for name in names)


def replace[T](tree: T, **changes: Any) -> T:
    """`dataclasses.replace` without validation: for use on traced values."""
    leaves = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}  # type: ignore[arg-type]
    new = object.__new__(type(tree))
    for name, value in {**leaves, **changes}.items():
        object.__setattr__(new, name, value)
    return new
