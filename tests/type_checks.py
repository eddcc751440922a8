"""What the import hook puts around functions: jaxtyping where shapes are said, beartype elsewhere.

jaxtyping binds a call's arguments and checks them twice: two fifths of the time of five files of tests of the
engine, the cache and the models, while it was done for the many functions of the host without arrays.
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
    """In the place of `jaxtyping.jaxtyped`: the same checks, and the same switch that turns them off."""
    return functools.partial(checked, by_shapes=BY_SHAPES(typechecker=typechecker))


def checked(fn, by_shapes):
    """A function or class that checks what it is called with and what it returns."""
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
    """Whether a shape is a part of it, or a name that only type checkers import, which beartype refuses."""
    if isinstance(annotation, str | typing.ForwardRef):
        return True
    if isinstance(annotation, typing.TypeAliasType):
        return is_for_jaxtyping(annotation.__value__)
    if inspect.isclass(annotation) and annotation.__module__.startswith("jaxtyping"):
        return True
    return any(map(is_for_jaxtyping, typing.get_args(annotation)))
