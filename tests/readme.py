"""The pages' code as their reader runs it: `python -P tests/readme.py README.md docs/*.md`.

The blocks of a page run in their order, in one set of names, as a reader types them. Paths are a checkout's.
"""

import pathlib
import re
import sys
from typing import NamedTuple


class Block(NamedTuple):
    """A fenced block: the heading above it, its language ("" where none is said), its lines."""

    heading: str
    language: str
    code: str


def blocks(page: str) -> list[Block]:
    """All fenced blocks in their order."""
    found, heading = [], ""
    for match in re.finditer(r"^#+ ([^\n]*)$|^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        heading = match[1] or heading
        if match[3] is not None:
            found.append(Block(heading, match[2], match[3]))
    return found


def examples(page: str) -> list[Block]:
    """The blocks of Python."""
    return [block for block in blocks(page) if block.language in ("python", "py")]


def run(block: Block, names: dict, page: str = "README.md") -> dict:
    """The names that there are when the block has run where `names` are known."""
    names = dict(names)
    exec(compile(block.code, f"{page}, {block.heading}", "exec"), names)
    return names


def run_all(path: pathlib.Path) -> dict:
    """The names that there are when every example of a page has run."""
    names: dict = {}
    for block in examples(path.read_text()):
        names = run(block, names, path.name)
    return names


def main(paths: list[str]) -> None:
    """Runs every example of the pages."""
    import jattn

    for path in map(pathlib.Path, paths):
        run_all(path)
        print(f"{len(examples(path.read_text()))} examples of {path} ran with {jattn.__file__}")


if __name__ == "__main__":
    main(sys.argv[1:])
