"""Helpers for files: JSON objects, files that must exist, path arguments, and packages that read them."""

import importlib
import json
import logging
import pathlib
from typing import Any

from pallas_kernels.checks import require


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """Return the object in a JSON file, with or without a byte order mark.

    Raises:
        FileNotFoundError: If the file does not exist.
        ValueError: If the file is not JSON or holds something else than an object. The message names the
            file.
    """
    try:
        content = json.loads(require_exists(path).read_text(encoding="utf-8-sig"))
    except ValueError as error:  # from json or from the decoding
        raise ValueError(f"{path} must be JSON, got {error}.") from error
    require(isinstance(content, dict), str(path), "hold a JSON object", repr(content)[:60])
    return content


def read_json_if_exists(path: pathlib.Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one if the file does not exist.

    Raises:
        ValueError: If the file is not JSON or holds something else than an object.
    """
    return read_json(path) if path.exists() else {}


def require_exists(path: pathlib.Path, reason: str = "") -> pathlib.Path:
    """Return `path` if it exists.

    Args:
        path: Path of a file or folder.
        reason: Text that the error message appends, such as why the file is required.

    Raises:
        FileNotFoundError: If it does not exist.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist{reason}.")
    return path


def optional_module(name: str) -> Any:
    """Import a module of the optional extra `models`.

    Raises:
        ImportError: If it is not installed.
    """
    logging.getLogger("transformers").addFilter(_is_not_about_torch)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        message = (
            f"jattn.models needs {package} of the extra 'models': pip install '.[models]' in a checkout."
        )
        raise ImportError(message) from error


def _is_not_about_torch(record: logging.LogRecord) -> bool:
    """Return whether a message of transformers is not that it lacks PyTorch, which is not used."""
    return "PyTorch was not found" not in record.getMessage()
