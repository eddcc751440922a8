"""A checkpoint's tokenizer, read by transformers."""

import pathlib
from typing import Any

from jattn.models.loading.files import optional_module, read_json_if_exists

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"


def read_tokenizer(folder: pathlib.Path) -> Any | None:
    """Return the folder's `transformers.PreTrainedTokenizerFast`, or None if it has no tokenizer.json.

    Truncation and padding are switched off: some files are saved with the settings of the training.

    Raises:
        ImportError: If transformers is not installed.
        ValueError: If tokenizer.json or tokenizer_config.json is invalid. The message names the folder.
    """
    if not (folder / FILE).exists():
        return None
    read_json_if_exists(folder / CONFIG)
    try:
        tokenizer = optional_module("transformers").PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as error:  # tokenizers raises only plain Exceptions
        rule = f"must be a tokenizer that transformers can read, with {CONFIG}"
        raise ValueError(f"{folder / FILE} {rule}, got {type(error).__name__}: {error}.") from error
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    return tokenizer
