"""What a Hugging Face folder has for its tokenizer: tokenizer.json, and which of its tokens are special."""

import pathlib
from typing import Any

from jattn.models.loading.checkpoint import optional_module
from jattn.models.loading.files import object_in
from pallas_kernels.checks import require

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SWITCHES = ("single_word", "lstrip", "rstrip", "normalized", "special")  # of an added token


def read_tokenizer(folder: pathlib.Path) -> Any | None:
    """A `tokenizers.Tokenizer` that neither cuts texts nor pads them: some are saved as a training had them.

    None where the folder has no tokenizer.json.

    Raises:
        ImportError: tokenizers is missing.
        ValueError: The file is none, or tokenizer_config.json is broken; the message names it.
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
    _add_tokens(tokenizer, folder)
    return tokenizer


def _add_tokens(tokenizer: Any, folder: pathlib.Path) -> None:
    """Tokens that tokenizer_config.json alone calls added or special are read as such, as in transformers.

    To tokenizer.json they are tokens of its model's own, of which texts are made letter by letter and which
    nobody leaves out of a text, or none at all, or added ones that are not special.

    Source: transformers `TokenizersBackend.__init__`, `_post_init`.
    """
    added, num_own = tokenizer.get_added_tokens_decoder(), tokenizer.get_vocab_size(with_added_tokens=False)
    known, next_id = {token.content: token for token in added.values()}, max([*added, num_own - 1]) + 1
    told: dict[str, Any] = {}
    for token_id, of_token in sorted(_added_tokens(folder).items()):
        token = optional_module("tokenizers").AddedToken(**of_token)
        own_id = tokenizer.token_to_id(token.content)
        if token_id == (next_id if own_id is None else own_id):
            told[token.content], next_id = token, max(next_id, token_id + 1)
    tokenizer.add_tokens([token for text, token in told.items() if repr(known.get(text)) != repr(token)])
    named = [text for text in special_tokens_of(folder).values() if tokenizer.token_to_id(text) is not None]
    of_named = {text: (told or known).get(text) for text in named}
    tokenizer.add_special_tokens(
        [token or text for text, token in of_named.items() if token or text not in known]
    )


def _added_tokens(folder: pathlib.Path) -> dict[int, dict[str, Any]]:
    """What tokenizer_config.json says of added tokens, by their ids.

    Raises:
        ValueError: It is of another kind; the message names the file.
    """
    path = folder / CONFIG
    told = object_in(path).get("added_tokens_decoder") or {}
    require(isinstance(told, dict), f"{path}: added_tokens_decoder", "be an object", repr(told)[:60])
    tokens: dict[int, dict[str, Any]] = {}
    for key, token in told.items():
        is_token = key.isdecimal() and isinstance(token, dict) and isinstance(token.get("content"), str)
        rule = "map ids to objects with content"
        require(is_token, f"{path}: added_tokens_decoder", rule, repr({key: token})[:60])
        told_of_it = {name: token[name] for name in _SWITCHES if isinstance(token.get(name), bool)}
        tokens[int(key)] = {"content": token["content"], **told_of_it}
    return tokens


def special_tokens_of(folder: pathlib.Path) -> dict[str, str]:
    """Name to text, of those that the folder names.

    Older folders have them in special_tokens_map.json, which goes first where tokenizer_config.json does not
    list added tokens.

    Raises:
        ValueError: A file is broken; the message names it.
    """
    config = object_in(folder / CONFIG)
    if "added_tokens_decoder" not in config:
        config |= object_in(folder / "special_tokens_map.json")
    texts = {name: _content(config[name]) for name in SPECIAL_TOKENS if config.get(name)}
    for name, text in texts.items():
        rule = "be a text, or an object with one as its content"
        require(isinstance(text, str), f"{folder}: {name}", rule, repr(config[name])[:60])
    return texts


def eos_id_of(folder: pathlib.Path) -> int | None:
    """The token that the tokenizer ends a text with; None = the folder names none that it has.

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
    if isinstance(vocab, dict) and text in vocab:
        return vocab[text]
    pieces = vocab if isinstance(vocab, list) else ()  # Unigram's, each with a score
    ids = [i for i, piece in enumerate(pieces) if isinstance(piece, list) and piece[:1] == [text]]
    ids += [i for i, token in _added_tokens(folder).items() if token["content"] == text]
    return ids[0] if ids else None


def _content(token: Any) -> Any:
    """A special token is its text, or an object that has it."""
    return token.get("content") if isinstance(token, dict) else token
