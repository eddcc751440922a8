"""What a Hugging Face folder has for its tokenizer: tokenizer.json, and which of its tokens are special."""

import pathlib
from typing import Any

from jattn.models.checkpoint import optional_module
from jattn.models.json_files import object_in
from pallas_kernels.checks import require

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
    texts = {name: _content(config[name]) for name in SPECIAL_TOKENS if config.get(name)}
    for name, text in texts.items():
        rule = "be a text, or an object with one as its content"
        require(isinstance(text, str), f"{folder}: {name}", rule, repr(config[name])[:60])
    return texts


def eos_id_of(folder: pathlib.Path) -> int | None:
    """The token that the tokenizer ends a text with; None = the folder names none that tokenizer.json has.

    Raises:
        ValueError: A file is broken; the message names it.
    """
    text = special_tokens_of(folder).get("eos_token")
    if text is None:
        return None
    content = object_in(folder / FILE)
    added = content.get("added_tokens") or []
    require(isinstance(added, list), f"{folder / FILE}: added_tokens", "be a list", repr(added)[:60])
    for token in added:
        is_token = isinstance(token, dict) and isinstance(token.get("id"), int) and "content" in token
        rule = "hold objects with an id and content"
        require(is_token, f"{folder / FILE}: added_tokens", rule, repr(token)[:60])
        if token["content"] == text:
            return token["id"]
    # To transformers a special token is one too where it is a token of the model's own alone.
    vocab = content["model"].get("vocab") if isinstance(content.get("model"), dict) else None
    if isinstance(vocab, dict):
        return vocab.get(text)
    pieces = vocab if isinstance(vocab, list) else ()  # Unigram's, each with a score
    return next(
        (i for i, piece in enumerate(pieces) if isinstance(piece, list) and piece[:1] == [text]), None
    )


def _content(token: Any) -> Any:
    """A special token is its text, or an object that has it."""
    return token.get("content") if isinstance(token, dict) else token
