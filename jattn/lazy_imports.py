"""Import of a package's public names on first use, so that importing the package is fast."""

import importlib
import sys
from collections.abc import Callable, Collection, Mapping
from typing import Any


def lazy_attributes(
    package: str, modules: Mapping[str, str], submodules: Collection[str] = ()
) -> Callable[[str], Any]:
    """Return a package's `__getattr__` (PEP 562).

    Args:
        package: Name of the package.
        modules: Module of each public name.
        submodules: Submodules that are attributes of the package.
    """

    def get(name: str) -> Any:
        if name in modules:
            value = getattr(importlib.import_module(modules[name]), name)
        elif name in submodules:
            value = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    return get
