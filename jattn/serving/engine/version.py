"""Which version of a package this is."""

import importlib.metadata


def version_of(package: str) -> str:
    """As it was installed; "of a checkout" where it is used without."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of a checkout"
