"""The README's code as its reader runs it: `python tests/readme.py README.md`, with what is installed."""

import pathlib
import re
import sys
from typing import NamedTuple


class Block(NamedTuple):
    """A fenced block: the heading above it, its language ("" where none is said), its lines."""

    heading: str
    language: str
    code: str


def blocks(readme: str) -> list[Block]:
    """All fenced blocks in their order."""
    found, heading = [], ""
    for match in re.finditer(r"^## ([^\n]*)$|^```(\w*)\n(.*?)^```$", readme, re.MULTILINE | re.DOTALL):
        heading = match[1] or heading
        if match[3] is not None:
            found.append(Block(heading, match[2], match[3]))
    return found


def examples(readme: str) -> list[Block]:
    """The blocks of Python. The first makes names that each of the others may use."""
    return [block for block in blocks(readme) if block.language in ("python", "py")]


def run(block: Block, names: dict) -> dict:
    """The names that there are when the block has run where `names` are known."""
    names = dict(names)
    exec(compile(block.code, f"README.md, {block.heading}", "exec"), names)
    return names


def main(path: str) -> None:
    """Runs every example."""
    first, *others = examples(pathlib.Path(path).read_text())
    names = run(first, {})
    for block in others:
        run(block, names)
    print(f"{1 + len(others)} examples of {path} ran with {names['jattn'].__file__}")


if __name__ == "__main__":
    main(sys.argv[1])
