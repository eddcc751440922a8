"""Python sources as bytes to train on and to score: what the tiny model knows."""

import pathlib

import numpy as np
from jaxtyping import Int
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT = 256  # ids 0 to 255 are bytes
CONTEXT = 2048
HELD_OUT_EVERY = 20  # the files number 10, 30, 50, ... in sorted order are held out
NOT_PROSE = {"site-packages", "dist-packages", "encodings", "__pycache__"}


def read_sources(directory: pathlib.Path) -> tuple[Int[np.ndarray, " train"], Int[np.ndarray, " held_out"]]:
    """Training and held-out bytes of the .py files below `directory`, END_OF_TEXT behind each file."""
    files = sorted(path.relative_to(directory) for path in directory.rglob("*.py"))
    files = [path for path in files if not NOT_PROSE & set(path.parts)]
    parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for i, path in enumerate(files):
        text = np.frombuffer((directory / path).read_bytes(), np.uint8).astype(np.int32)
        parts[i % HELD_OUT_EVERY == HELD_OUT_EVERY // 2].append(np.append(text, np.int32(END_OF_TEXT)))
    return np.concatenate(parts[0]), np.concatenate(parts[1])


def line_starts(stream: Int[np.ndarray, " bytes"]) -> Int[np.ndarray, " lines"]:
    """Where lines begin, CONTEXT bytes or more before the end: a window's indentation is then its file's."""
    starts = np.flatnonzero((stream == ord("\n")) | (stream == END_OF_TEXT)) + 1
    return starts[starts < stream.size - CONTEXT].astype(np.int32)


def byte_tokenizer() -> Tokenizer:
    """A tokenizer whose ids are the text's UTF-8 bytes, and END_OF_TEXT."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE({letter: byte for byte, letter in letters.items()}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    return tokenizer
