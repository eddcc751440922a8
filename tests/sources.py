"""The project's own files, as tests of its rules read them."""

import ast
import functools
import pathlib

ROOT = pathlib.Path(__file__).parents[1]
FOLDERS = ("jattn", "pallas_kernels")
FILES = {folder: sorted((ROOT / folder).rglob("*.py")) for folder in FOLDERS}


@functools.cache
def tree(path):
    """A file's syntax; nobody changes it."""
    return ast.parse(path.read_text())
