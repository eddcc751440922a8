"""Where executables are kept from one process to the next."""

import os
import pathlib

import jax
from jax.experimental.compilation_cache import compilation_cache

from pallas_kernels.checks import require_type


def keep_executables_in(folder: str | os.PathLike[str] | None) -> None:
    """Has JAX keep in a folder all that this process compiles from now on, and find there what others kept.

    XLA's choices of matrix products are kept in it, too. JAX has one such folder for a process
    (`jax_compilation_cache_dir`); None leaves it as it is.

    Raises:
        ValueError: It is no name of a folder.
        NotADirectoryError: There is a file of that name.
    """
    if folder is None:
        return
    require_type("cache_dir", folder, (str, os.PathLike), "a folder, or None")
    path = pathlib.Path(folder).expanduser().absolute()
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"cache_dir must be a folder, got the file {path}.")
    path.mkdir(parents=True, exist_ok=True)
    compilation_cache.reset_cache()  # else JAX stays with the folder that it used before, if it did
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
