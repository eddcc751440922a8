"""JSON objects in files, files that must exist, and what names a file."""

import json
import os
import pathlib
from typing import Any

from pallas_kernels.checks import require, require_type


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file, with a byte order mark or without.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It holds something else; the message names the file.
    """
    try:
        content = json.loads(existing(path).read_text(encoding="utf-8-sig"))
    except ValueError as error:  # of json or of the encoding
        raise ValueError(f"{path} must be JSON, got {error}.") from error
    require(isinstance(content, dict), str(path), "hold a JSON object", repr(content)[:60])
    return content


def object_in(path: pathlib.Path) -> dict[str, Any]:
    """`read_json`'s; nothing where there is no file.

    Raises:
        ValueError: As read_json.
    """
    return read_json(path) if path.exists() else {}


def existing(path: pathlib.Path, why: str = "") -> pathlib.Path:
    """`path`, which must exist.

    Args:
        path: It.
        why: What tells so, behind the message's words.

    Raises:
        FileNotFoundError: It does not.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist{why}.")
    return path


def as_path(name: str, value: str | os.PathLike[str]) -> pathlib.Path:
    """A file or folder as a path.

    Raises:
        ValueError: It is no path; `name` is what it is called.
    """
    require_type(name, value, (str, os.PathLike), "a path")
    return pathlib.Path(value)
