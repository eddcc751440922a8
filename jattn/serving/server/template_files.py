"""What a checkpoint's folder has for conversations: templates by name."""

import pathlib
from typing import Any

from jattn.models.json_files import object_in
from pallas_kernels.checks import require


def templates_of(folder: pathlib.Path) -> dict[str, str]:
    """Name to template, as transformers finds them; "default" is the one without a name.

    A file chat_template.jinja goes before tokenizer_config.json, and that before chat_template.json, which
    older processors have; templates with names stand in tokenizer_config.json or in files of their own.

    Raises:
        ValueError: A file is broken; the message names it.
    """
    found: dict[str, str] = {}
    for file in ("chat_template.json", "tokenizer_config.json"):
        told = object_in(folder / file).get("chat_template")
        if isinstance(told, list) and all(map(_is_named, told)):
            found |= {one["name"]: one["template"] for one in told}
        elif isinstance(told, str):
            found["default"] = told
        else:
            rule = "be a text, or names and templates"
            require(told is None, f"{folder / file}: chat_template", rule, repr(told)[:60])
    own = folder / "chat_template.jinja"
    named = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    files = named | ({"default": own} if own.exists() else {})
    return found | {name: text_in(path) for name, path in files.items()}


def text_in(path: pathlib.Path) -> str:
    """A file's text.

    Raises:
        ValueError: It is none; the message names the file.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} must be UTF-8, got {error}.") from error


def _is_named(told: Any) -> bool:
    """Whether it is a template with its name."""
    return isinstance(told, dict) and all(isinstance(told.get(key), str) for key in ("name", "template"))
