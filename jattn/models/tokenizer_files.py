"""What a Hugging Face folder has for its tokenizer: tokenizer.json, and which of its tokens are special."""

import pathlib
from typing import Any

from jattn.models.checkpoint import optional_module
from jattn.models.json_files import object_in

FILE = "tokenizer.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_tokenizer(folder: pathlib.Path) -> Any | None:
    """A `tokenizers.Tokenizer` that neither cuts texts nor pads them: some are saved as a training had them.

    None where the folder has no tokenizer.json.

    Raises:
        ImportError: tokenizers is missing.
        ValueError: The file is none; the message names it.
    """
    path = folder / FILE
    if not path.exists():
        return None
    tokenizers = optional_module("tokenizers")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # all that the package raises is a bare Exception
        raise ValueError(f"{path} must be a tokenizer of the tokenizers package, got {error}.") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def special_tokens_of(folder: pathlib.Path) -> dict[str, str]:
    """Name to text, of those that the folder names.

    Older folders have them in special_tokens_map.json, which goes first where tokenizer_config.json does not
    list added tokens.

    Raises:
        ValueError: A file is broken; the message names it.
    """
    config = object_in(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= object_in(folder / "special_tokens_map.json")
    return {name: _content(config[name]) for name in SPECIAL_TOKENS if config.get(name)}


def eos_id_of(folder: pathlib.Path) -> int | None:
    """The token that the tokenizer ends a text with; None = the folder names none that tokenizer.json has.

    Raises:
        ValueError: A file is broken; the message names it.
    """
    text = special_tokens_of(folder).get("eos_token")
    added = object_in(folder / FILE).get("added_tokens") or () if text is not None else ()
    return next((token["id"] for token in added if token["content"] == text), None)


def _content(token: Any) -> str:
    """A special token is its text, or an object that has it."""
    return token["content"] if isinstance(token, dict) else token
