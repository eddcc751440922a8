"""What a checkpoint's folder has for conversations: templates by name, and special tokens."""

import json
import pathlib
from typing import Any

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def templates_of(folder: pathlib.Path) -> dict[str, str]:
    """Name to template, as transformers finds them; "default" is the one without a name.

    A file chat_template.jinja goes before tokenizer_config.json, and that before chat_template.json, which
    older processors have; templates with names stand in tokenizer_config.json or in files of their own.
    """
    found: dict[str, str] = {}
    for file in ("chat_template.json", "tokenizer_config.json"):
        told = _object_in(folder / file).get("chat_template")
        if isinstance(told, list):
            found |= {one["name"]: one["template"] for one in told}
        elif told is not None:
            found["default"] = told
    own = folder / "chat_template.jinja"
    named = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    files = named | ({"default": own} if own.exists() else {})
    return found | {name: path.read_text(encoding="utf-8") for name, path in files.items()}


def special_tokens_of(folder: pathlib.Path) -> dict[str, str]:
    """Name to text, of those that the folder names.

    Older folders have them in special_tokens_map.json, which goes first where tokenizer_config.json does not
    list added tokens.
    """
    config = _object_in(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _object_in(folder / "special_tokens_map.json")
    return {name: _content(config[name]) for name in SPECIAL_TOKENS if config.get(name)}


def _object_in(path: pathlib.Path) -> dict[str, Any]:
    """A file's object; nothing where there is no file."""
    return json.loads(path.read_text(encoding="utf-8-sig")) if path.exists() else {}


def _content(token: Any) -> str:
    """A special token is its text, or an object that has it."""
    return token["content"] if isinstance(token, dict) else token
