"""Chat templates of checkpoints, found and rendered as transformers does."""

import datetime
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from jattn.models.loading.files import read_json_if_exists
from jattn.models.loading.tokenizer import read_special_tokens

PROBE = "What a user says."  # Content of a message that tests how a template handles content.


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` tag, which marks the assistant's text for training; only its text is rendered."""

    tags = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        """Return the statements between the tags."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class ChatTemplate:
    """A compiled chat template.

    Attributes:
        source: Source of the template, followed by the source of the template for tools.
        variables: Names of the variables that the templates use.
        expects_parts: Whether the template expects a message's content as a list of parts, as templates of
            multimodal models do, and ignores plain text.

    Source: transformers `render_jinja_template`: a sandbox in which the arguments cannot be changed. vLLM
    `--chat-template-content-format auto`, which inspects the template's loops.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, *, tool_use: str | None = None
    ) -> None:
        """Compile the template.

        Args:
            source: Source of the template.
            special_tokens: Texts of the special tokens, by variable name.
            tool_use: Source of the template for conversations with tools; None for the same one.

        Raises:
            ValueError: If a template is not valid Jinja.
        """
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = _compile(environment, source)
        self._tool_use = self._template if tool_use is None else _compile(environment, tool_use)
        self._special_tokens = dict(special_tokens or {})
        self.source = source if tool_use is None else f"{source}\n{tool_use}"
        self.variables = jinja2.meta.find_undeclared_variables(environment.parse(self.source))
        self.expects_parts = False
        if not self._renders_content():
            self.expects_parts = True
            self.expects_parts = self._renders_content()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: Messages with "role", "content" (a text or a list of texts), and other fields that the
                template supports.
            add_generation_prompt: Whether the text ends with the beginning of an assistant message.
            variables: Further variables of the template.

        Raises:
            jinja2.TemplateError: If the template rejects the messages (`raise_exception`) or fails.
        """
        values = {"tools": None, "documents": None, **self._special_tokens, **variables}
        formatted = [self._format_content(message) for message in messages]
        values |= {"messages": formatted, "add_generation_prompt": add_generation_prompt}
        try:
            return (self._template if values["tools"] is None else self._tool_use).render(values)
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError, MemoryError) as error:
            raise jinja2.TemplateRuntimeError(f"{type(error).__name__}: {error}") from error

    def _format_content(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message with the content as the template expects it: parts, or lines of one text."""
        content = message.get("content")
        texts: list[str] = content if isinstance(content, list) else [content]  # type: ignore[list-item]
        if content is None or not all(isinstance(text, str) for text in texts):
            return message
        parts = [{"type": "text", "text": text} for text in texts]
        return {**message, "content": parts if self.expects_parts else "\n".join(texts)}

    def _renders_content(self) -> bool:
        """Return whether the rendered text contains a user's message."""
        try:
            return PROBE in self.render([{"role": "user", "content": PROBE}])
        except Exception:  # The template rejects this conversation, which says nothing about the content.
            return False


def load_chat_template(folder: pathlib.Path | None, file: pathlib.Path | None = None) -> ChatTemplate | None:
    """Return the chat template of a checkpoint, or None if it has none.

    Args:
        folder: Folder of the checkpoint, or None.
        file: Template file that replaces the folder's template.

    Raises:
        ValueError: If the folder has several templates and none is the default, or a template is invalid.
    """
    special_tokens = {} if folder is None else read_special_tokens(folder)
    if file is not None:
        if not file.is_file():
            raise ValueError(f"chat_template {file} is not a file. Pass the path of a Jinja file.")
        return ChatTemplate(_read_text(file), special_tokens)
    templates = {} if folder is None else find_templates(folder)
    if not templates:
        return None
    if "default" not in templates:
        raise ValueError(
            f"chat_template is ambiguous: the model has the templates {sorted(templates)} and none is named"
            " default. Pass --chat-template FILE."
        )
    return ChatTemplate(templates["default"], special_tokens, tool_use=templates.get("tool_use"))


def find_templates(folder: pathlib.Path) -> dict[str, str]:
    """Return the templates of a folder by name, as transformers finds them; "default" is the unnamed one.

    chat_template.jinja takes precedence over tokenizer_config.json, and that over chat_template.json, which
    older processors have. Named templates are in tokenizer_config.json or in additional_chat_templates.

    Raises:
        ValueError: If a file is invalid; the message names it.
    """
    templates: dict[str, str] = {}
    for file in ("chat_template.json", "tokenizer_config.json"):
        value = read_json_if_exists(folder / file).get("chat_template")
        if isinstance(value, list) and all(map(_is_named_template, value)):
            templates |= {entry["name"]: entry["template"] for entry in value}
        elif isinstance(value, str):
            templates["default"] = value
        elif value is not None:
            raise ValueError(
                f"{folder / file}: chat_template must be a text or a list of named templates,"
                f" got {repr(value)[:60]}."
            )
    default = folder / "chat_template.jinja"
    named_files = {path.stem: path for path in sorted(folder.glob("additional_chat_templates/*.jinja"))}
    files = named_files | ({"default": default} if default.exists() else {})
    return templates | {name: _read_text(path) for name, path in files.items()}


def _read_text(path: pathlib.Path) -> str:
    """Return the text of a UTF-8 file.

    Raises:
        ValueError: If the file is not UTF-8; the message names it.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not valid UTF-8: {error}. Save it as UTF-8.") from error


def _is_named_template(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("name", "template"))


def _compile(environment: jinja2.Environment, source: str) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        message = f"chat_template is not a valid Jinja template: line {error.lineno}: {error.message}"
        raise ValueError(message) from error


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **kwargs: Any) -> str:
    """Encode a value as JSON, without the HTML escapes of jinja2's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **kwargs)
