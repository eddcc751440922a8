"""A checkpoint's tokenizer: tokenizer.json and its special tokens."""

import pathlib
from typing import Any

from jattn.models.loading.files import optional_module, read_json_if_exists
from pallas_kernels.checks import require

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SWITCHES = ("single_word", "lstrip", "rstrip", "normalized", "special")  # attributes of an added token


def read_tokenizer(folder: pathlib.Path) -> Any | None:
    """Return the folder's `tokenizers.Tokenizer`, or None if it has no tokenizer.json.

    Truncation and padding are switched off: some files are saved with the settings of the training.

    Raises:
        ImportError: If tokenizers is not installed.
        ValueError: If tokenizer.json or tokenizer_config.json is invalid. The message names the file.
    """
    path = folder / FILE
    if not path.exists():
        return None
    tokenizers = optional_module("tokenizers")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises only plain Exceptions
        raise ValueError(f"{path} must be a tokenizer of the tokenizers package, got {error}.") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _add_tokens(tokenizer, folder)
    return tokenizer


def _add_tokens(tokenizer: Any, folder: pathlib.Path) -> None:
    """Add the tokens that only tokenizer_config.json lists as added or special, as transformers does.

    In tokenizer.json they may be ordinary tokens of the vocabulary, missing, or added but not special.

    Source: transformers `TokenizersBackend.__init__`, `_post_init`.
    """
    added_tokens, num_vocab = (
        tokenizer.get_added_tokens_decoder(),
        tokenizer.get_vocab_size(with_added_tokens=False),
    )
    tokens_by_text = {token.content: token for token in added_tokens.values()}
    next_id = max([*added_tokens, num_vocab - 1]) + 1
    new_tokens: dict[str, Any] = {}
    for token_id, attributes in sorted(_added_tokens(folder).items()):
        token = optional_module("tokenizers").AddedToken(**attributes)
        vocab_id = tokenizer.token_to_id(token.content)
        if token_id == (next_id if vocab_id is None else vocab_id):
            new_tokens[token.content], next_id = token, max(next_id, token_id + 1)
    tokenizer.add_tokens(
        [token for text, token in new_tokens.items() if repr(tokens_by_text.get(text)) != repr(token)]
    )
    special_texts = [
        text for text in read_special_tokens(folder).values() if tokenizer.token_to_id(text) is not None
    ]
    special = {text: (new_tokens or tokens_by_text).get(text) for text in special_texts}
    tokenizer.add_special_tokens(
        [token or text for text, token in special.items() if token or text not in tokens_by_text]
    )


def _added_tokens(folder: pathlib.Path) -> dict[int, dict[str, Any]]:
    """Return the attributes of tokenizer_config.json's added tokens by token id.

    Raises:
        ValueError: If the entry is invalid. The message names the file.
    """
    path = folder / CONFIG
    entries = read_json_if_exists(path).get("added_tokens_decoder") or {}
    require(isinstance(entries, dict), f"{path}: added_tokens_decoder", "be an object", repr(entries)[:60])
    tokens: dict[int, dict[str, Any]] = {}
    for key, token in entries.items():
        is_token = key.isdecimal() and isinstance(token, dict) and isinstance(token.get("content"), str)
        if not is_token:
            raise ValueError(
                f"{path}: added_tokens_decoder has the invalid entry {repr({key: token})[:60]}. An entry "
                "maps a token id to an object with the token's text as content."
            )
        attributes = {name: token[name] for name in _SWITCHES if isinstance(token.get(name), bool)}
        tokens[int(key)] = {"content": token["content"], **attributes}
    return tokens


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
        ValueError: If a file is invalid. The message names it.
    """
    text = read_special_tokens(folder).get("eos_token")
    if text is None:
        return None
    content = read_json_if_exists(folder / FILE)
    added = content.get("added_tokens") or []
    require(isinstance(added, list), f"{folder / FILE}: added_tokens", "be a list", repr(added)[:60])
    for token in added:
        is_token = isinstance(token, dict) and isinstance(token.get("id"), int) and "content" in token
        if not is_token:
            raise ValueError(
                f"{folder / FILE}: added_tokens has the invalid entry {repr(token)[:60]}. An entry is an "
                "object with the keys id and content."
            )
        if token["content"] == text:
            return token["id"]
    # transformers also accepts a special token that is only in the model's vocabulary.
    vocab = content["model"].get("vocab") if isinstance(content.get("model"), dict) else None
    if isinstance(vocab, dict) and text in vocab:
        return vocab[text]
    pieces = vocab if isinstance(vocab, list) else ()  # a Unigram vocabulary lists tokens with scores
    ids = [i for i, piece in enumerate(pieces) if isinstance(piece, list) and piece[:1] == [text]]
    ids += [i for i, token in _added_tokens(folder).items() if token["content"] == text]
    return ids[0] if ids else None


def _token_text(token: Any) -> Any:
    """Return the text of a special token, which is a string or an object with content."""
    return token.get("content") if isinstance(token, dict) else token
