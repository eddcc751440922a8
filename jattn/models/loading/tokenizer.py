"""A checkpoint's tokenizer, read by transformers, and its special tokens."""

import pathlib
from typing import Any

from jattn.models.loading.files import optional_module, read_json_if_exists
from pallas_kernels.checks import require

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_hf_tokenizer(folder: pathlib.Path) -> Any | None:
    """Return the folder's `transformers.PreTrainedTokenizerFast`, or None if it has no tokenizer.json.

    Raises:
        ImportError: If transformers is not installed.
        ValueError: If tokenizer.json or tokenizer_config.json is invalid. The message names the folder.
    """
    if not (folder / FILE).exists():
        return None
    read_json_if_exists(folder / CONFIG)
    try:
        return optional_module("transformers").PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as error:  # tokenizers raises only plain Exceptions
        rule = f"must be a tokenizer that transformers can read, with {CONFIG}"
        raise ValueError(f"{folder / FILE} {rule}, got {type(error).__name__}: {error}.") from error


def read_tokenizer(folder: pathlib.Path) -> Any | None:
    """Return the folder's `tokenizers.Tokenizer`, or None if it has no tokenizer.json.

    Truncation and padding are switched off: some files are saved with the settings of the training.

    Raises:
        ImportError: If transformers is not installed.
        ValueError: If tokenizer.json or tokenizer_config.json is invalid.
    """
    tokenizer = read_hf_tokenizer(folder)
    if tokenizer is None:
        return None
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer.backend_tokenizer


def read_special_tokens(folder: pathlib.Path) -> dict[str, str]:
    """Return the texts of the folder's special tokens by name, such as "eos_token".

    Older folders have them in special_tokens_map.json, which takes precedence if tokenizer_config.json does
    not list added tokens.

    Raises:
        ValueError: If a file is invalid. The message names it.
    """
    config = read_json_if_exists(folder / CONFIG)
    if "added_tokens_decoder" not in config:
        config |= read_json_if_exists(folder / "special_tokens_map.json")
    texts = {name: _token_text(config[name]) for name in SPECIAL_TOKENS if config.get(name)}
    for name, text in texts.items():
        rule = "be a string, or an object whose content is one"
        require(isinstance(text, str), f"{folder}: {name}", rule, repr(config[name])[:60])
    return texts


def read_eos_token_id(folder: pathlib.Path) -> int | None:
    """Return the id of the tokenizer's eos_token, or None if the folder does not define one.

    Raises:
        ValueError: If tokenizer.json or tokenizer_config.json is invalid.
    """
    tokenizer = read_hf_tokenizer(folder)
    return None if tokenizer is None else tokenizer.eos_token_id


def _token_text(token: Any) -> Any:
    """Return the text of a special token, which is a string or an object with content."""
    return token.get("content") if isinstance(token, dict) else token
