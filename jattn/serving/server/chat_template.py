"""Conversations as text: a checkpoint's own template, rendered as transformers renders it."""

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

from jattn.models.loading.files import object_in
from jattn.models.loading.tokenizer import special_tokens_of
from pallas_kernels.checks import require

PROBE = "What a user says."


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`: marks what the assistant said, for training; here its text and no more."""

    tags = {"generation"}  # noqa: RUF012  (as jinja2 has it)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class ChatTemplate:
    """A template, the special tokens that it may name, and another one for conversations with tools.

    Attributes:
        source: It, and behind it the one for tools.
        variables: Names that they ask for.
        wants_parts: It looks for a message's text in a list of parts, as those of models with images do, and
            would leave out a text that stands alone.

    Source: transformers `render_jinja_template`: a sandbox in which nothing given can be changed. vLLM
    `--chat-template-content-format auto`, which reads what the template loops over.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, *, tool_use: str | None = None
    ) -> None:
        """Compiles it.

        Args:
            source: The template.
            special_tokens: Name to text.
            tool_use: What is rendered where there are tools; None = the same.

        Raises:
            ValueError: One is none.
        """
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = _compiled(environment, source)
        self._tool_use = self._template if tool_use is None else _compiled(environment, tool_use)
        self._special_tokens = dict(special_tokens or {})
        self.source = source if tool_use is None else f"{source}\n{tool_use}"
        self.variables = jinja2.meta.find_undeclared_variables(environment.parse(self.source))
        self.wants_parts = False
        if not self._writes_texts():
            self.wants_parts = True
            self.wants_parts = self._writes_texts()

    def render(
        self, messages: Sequence[Mapping[str, Any]], /, *, add_generation_prompt: bool = True, **others: Any
    ) -> str:
        """The text of a conversation.

        Args:
            messages: Each with "role" and "content", a text or several, and what else the template knows.
            add_generation_prompt: The text ends where the assistant's answer begins.
            others: Variables of the template, whatever they are called.

        Raises:
            jinja2.TemplateError: The template refuses them (`raise_exception`), or fails over them.
        """
        names = {"tools": None, "documents": None, **self._special_tokens, **others}
        told = [self._written(message) for message in messages]
        names |= {"messages": told, "add_generation_prompt": add_generation_prompt}
        try:
            return (self._template if names["tools"] is None else self._tool_use).render(names)
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError, MemoryError) as error:
            raise jinja2.TemplateRuntimeError(f"{type(error).__name__}: {error}") from error

    def _written(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A message with its texts as the template wants them: parts, or joined by line ends, as in vLLM."""
        content = message.get("content")
        texts: list[str] = content if isinstance(content, list) else [content]  # type: ignore[list-item]
        if content is None or not all(isinstance(text, str) for text in texts):
            return message
        parts = [{"type": "text", "text": text} for text in texts]
        return {**message, "content": parts if self.wants_parts else "\n".join(texts)}

    def _writes_texts(self) -> bool:
        """Whether what a user says comes out."""
        try:
            return PROBE in self.render([{"role": "user", "content": PROBE}])
        except Exception:  # of a conversation that it refuses: nothing is known
            return False


def load_chat_template(folder: pathlib.Path | None, file: pathlib.Path | None = None) -> ChatTemplate | None:
    """A folder's template; None where it has none.

    Args:
        folder: Of the checkpoint.
        file: A template to take in the place of the folder's.

    Raises:
        ValueError: The folder has several, and does not say which is meant; or what it has is none.
    """
    special = {} if folder is None else special_tokens_of(folder)
    if file is not None:
        require(file.is_file(), "chat_template", "be a file", file)
        return ChatTemplate(text_in(file), special)
    named = {} if folder is None else templates_of(folder)
    if not named:
        return None
    rule = "be one, or have one that is named default (or give --chat-template FILE)"
    require("default" in named, "chat_template", rule, sorted(named))
    return ChatTemplate(named["default"], special, tool_use=named.get("tool_use"))


def _compiled(environment: jinja2.Environment, source: str) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        told = f"in line {error.lineno}: {error.message}"
        raise ValueError(f"chat_template must be a Jinja2 template, got {told}.") from error


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **others: Any) -> str:
    """As json has it: jinja2's own escapes what HTML would read."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **others)


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
