"""What a checkpoint's folder has for conversations: templates by name."""

import pathlib

from jattn.models.json_files import object_in


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
        if isinstance(told, list):
            found |= {one["name"]: one["template"] for one in told}
        elif told is not None:
            found["default"] = told
    own = folder / "chat_template.jinja"
    named = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    files = named | ({"default": own} if own.exists() else {})
    return found | {name: path.read_text(encoding="utf-8") for name, path in files.items()}
