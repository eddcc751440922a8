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

from pallas_kernels.checks import require_bool, require_int, require_number

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

    flatten, unflatten = _flatten_and_unflatten(cls, leaf_names, static_names)
    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls


def _flatten_and_unflatten(
    cls: type, leaf_names: tuple[str, ...], static_names: tuple[str, ...]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """How JAX takes an instance apart, and how it rebuilds one without `__init__`.

    A step's caches pass here at every call. 32 of them there and back, CPU time on the machine of the tests:
    53 us so; 26 by code that is written out and exec'd; 54 by `register_dataclass`, which flattens in C++ (9)
    but rebuilds by `__init__`.
    """
    new, names = object.__new__, leaf_names + static_names
    leaves_of, structure_of = _values_of(leaf_names), _values_of(static_names)

    def flatten(tree: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        fields = vars(tree)
        return leaves_of(fields), structure_of(fields)

    def unflatten(structure: Any, leaves: Any) -> Any:
        tree: Any = new(cls)
        vars(tree).update(zip(names, (*leaves, *structure), strict=False))
        return tree

    return flatten, unflatten


def _values_of(names: tuple[str, ...]) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """What takes the values of some names out of a dictionary, as a tuple."""
    if len(names) > 1:
        return operator.itemgetter(*names)
    if not names:
        return lambda fields: ()
    (name,) = names
    return lambda fields: (fields[name],)


def unchecked[T](cls: type[T], **fields: Any) -> T:
    """An instance without validation: for leaves that are no arrays of JAX's, all fields given."""
    new = object.__new__(cls)
    vars(new).update(fields)
    return new


def replace[T](tree: T, **changes: Any) -> T:
    """`dataclasses.replace` without validation: for use on traced values."""
    fields = {field.name: getattr(tree, field.name) for field in dataclasses.fields(tree)}  # type: ignore[arg-type]
    return unchecked(type(tree), **{**fields, **changes})


def set_ints(spec: Any, *names: str) -> None:
    """Checks fields that are ints, and makes numpy's Python's."""
    for name in names:
        require_int(**{name: getattr(spec, name)})
        object.__setattr__(spec, name, int(getattr(spec, name)))


def set_bools(spec: Any, *names: str) -> None:
    """Likewise bools."""
    for name in names:
        require_bool(**{name: getattr(spec, name)})
        object.__setattr__(spec, name, bool(getattr(spec, name)))


def set_floats(spec: Any, *names: str) -> None:
    """Likewise numbers; None stays."""
    for name in names:
        if getattr(spec, name) is not None:
            require_number(**{name: getattr(spec, name)})
            object.__setattr__(spec, name, float(getattr(spec, name)))
