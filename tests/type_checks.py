"""Runtime type checks that the import hook adds: jaxtyping for annotations with shapes, else beartype.

jaxtyping binds and checks a call's arguments twice. For the many host functions without arrays this took two
fifths of the time of five test files of the engine, the cache and the models.
"""

import dataclasses
import functools
import inspect
import types
import typing

import beartype
import jaxtyping

BY_SHAPES = jaxtyping.jaxtyped


def jaxtyped(*, typechecker):
    """Replace `jaxtyping.jaxtyped`, with the same checks and the same switch to disable them."""
    return functools.partial(checked, by_shapes=BY_SHAPES(typechecker=typechecker))


def checked(fn, by_shapes):
    """Return a function or class that checks its arguments and results."""
    if inspect.isclass(fn):
        if dataclasses.is_dataclass(fn) and "__init__" in vars(fn):
            fn.__init__ = checked(fn.__init__, by_shapes)
        return fn
    if not isinstance(fn, types.FunctionType) or any(map(is_for_jaxtyping, fn.__annotations__.values())):
        return by_shapes(fn)
    by_types = functools.cache(lambda: beartype.beartype(fn))  # most of what is imported is never called

    @functools.wraps(fn)
    def wrapped(*args, **kwargs):
        __tracebackhide__ = True
        return (fn if jaxtyping.config.jaxtyping_disable else by_types())(*args, **kwargs)

    return wrapped


def is_for_jaxtyping(annotation):
    """Return whether an annotation contains a shape, or a name imported for type checking only."""
    if isinstance(annotation, str | typing.ForwardRef):
        return True
    if isinstance(annotation, typing.TypeAliasType):
        return is_for_jaxtyping(annotation.__value__)
    if inspect.isclass(annotation) and annotation.__module__.startswith("jaxtyping"):
        return True
    return any(map(is_for_jaxtyping, typing.get_args(annotation)))
