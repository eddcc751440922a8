"""Run the Python code of Markdown pages as a reader does: `python -P tests/readme.py README.md docs/*.md`.

The blocks of a page run in order in one namespace. Relative paths are those of a checkout.
"""

import pathlib
import re
import sys
from typing import NamedTuple


class Block(NamedTuple):
    """A fenced block: the heading above it, its language ("" if missing) and its lines."""

    heading: str
    language: str
    code: str


def blocks(page: str) -> list[Block]:
    """Return all fenced blocks in order."""
    fenced, heading = [], ""
    for match in re.finditer(r"^#+ ([^\n]*)$|^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        heading = match[1] or heading
        if match[3] is not None:
            fenced.append(Block(heading, match[2], match[3]))
    return fenced


def examples(page: str) -> list[Block]:
    """Return the Python blocks."""
    return [block for block in blocks(page) if block.language in ("python", "py")]


def run(block: Block, names: dict, page: str = "README.md") -> dict:
    """Run a block with the given names and return the names defined afterwards."""
    names = dict(names)
    exec(compile(block.code, f"{page}, {block.heading}", "exec"), names)
    return names


def run_all(path: pathlib.Path) -> dict:
    """Run every example of a page and return the names defined afterwards."""
    names: dict = {}
    for block in examples(path.read_text()):
        names = run(block, names, path.name)
    return names


def main(paths: list[str]) -> None:
    """Run every example of the pages."""
    import jattn

    for path in map(pathlib.Path, paths):
        run_all(path)
        print(f"{len(examples(path.read_text()))} examples of {path} ran with {jattn.__file__}")


if __name__ == "__main__":
    main(sys.argv[1:])
