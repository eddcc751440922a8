"""Fields of frozen dataclasses: checked by their names, and numpy's numbers made Python's."""

from typing import Any

from pallas_kernels.checks import require_bool, require_int, require_number


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
