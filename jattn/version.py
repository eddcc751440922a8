"""Versions of installed packages."""

import importlib.metadata


def version_of(package: str) -> str:
    """Return the installed version of a package, or "of a checkout" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of a checkout"
