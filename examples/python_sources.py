"""Python sources as bytes, for training and evaluating the tiny model."""

import pathlib

import numpy as np
from jaxtyping import Int
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT = 256  # Ids 0 to 255 are bytes.
CONTEXT = 2048
HELD_OUT_EVERY = 20  # Files 10, 30, 50, ... in sorted order are held out.
EXCLUDED_FOLDERS = {"site-packages", "dist-packages", "encodings", "__pycache__"}


def read_sources(directory: pathlib.Path) -> tuple[Int[np.ndarray, " train"], Int[np.ndarray, " held_out"]]:
    """Return the training and held-out bytes of the .py files in a folder; END_OF_TEXT follows each file."""
    files = sorted(path.relative_to(directory) for path in directory.rglob("*.py"))
    files = [path for path in files if not EXCLUDED_FOLDERS & set(path.parts)]
    parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for i, path in enumerate(files):
        text = np.frombuffer((directory / path).read_bytes(), np.uint8).astype(np.int32)
        parts[i % HELD_OUT_EVERY == HELD_OUT_EVERY // 2].append(np.append(text, np.int32(END_OF_TEXT)))
    return np.concatenate(parts[0]), np.concatenate(parts[1])


def line_starts(stream: Int[np.ndarray, " bytes"]) -> Int[np.ndarray, " lines"]:
    """Return the offsets of lines that begin at least CONTEXT bytes before the end.

    A window that begins with a line keeps the indentation of its file.
    """
    starts = np.flatnonzero((stream == ord("\n")) | (stream == END_OF_TEXT)) + 1
    return starts[starts < stream.size - CONTEXT].astype(np.int32)


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer whose ids are UTF-8 bytes and END_OF_TEXT."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    remaining = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + i) for i, byte in enumerate(remaining)
    }
    tokenizer = Tokenizer(models.BPE({letter: byte for byte, letter in letters.items()}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    return tokenizer
