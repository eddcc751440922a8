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

from pallas_kernels.checks import require

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`: marks what the assistant said, for training; here its text and no more."""

    tags = {"generation"}  # noqa: RUF012  (as jinja2 has it)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node | list[jinja2.nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


class ChatTemplate:
    """A template, and the special tokens that it may name.

    Attributes:
        source: It.
        variables: Names that it asks for.

    Source: transformers `render_jinja_template`: a sandbox in which nothing given can be changed.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Compiles it.

        Raises:
            ValueError: It is none.
        """
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            require(
                False, "chat_template", "be a Jinja2 template", f"in line {error.lineno}: {error.message}"
            )
        self._special_tokens = dict(special_tokens or {})
        self.source = source
        self.variables = jinja2.meta.find_undeclared_variables(environment.parse(source))

    def render(
        self, messages: Sequence[Mapping[str, Any]], /, *, add_generation_prompt: bool = True, **others: Any
    ) -> str:
        """The text of a conversation.

        Args:
            messages: Each with "role" and "content", and what else the template knows.
            add_generation_prompt: The text ends where the assistant's answer begins.
            others: Variables of the template, whatever they are called.

        Raises:
            jinja2.TemplateError: The template refuses them (`raise_exception`), or fails over them.
        """
        names = {"tools": None, "documents": None, **self._special_tokens, **others}
        names |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(names)
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError, MemoryError) as error:
            raise jinja2.TemplateRuntimeError(f"{type(error).__name__}: {error}") from error


def load_chat_template(folder: pathlib.Path | None, file: pathlib.Path | None = None) -> ChatTemplate | None:
    """A folder's template: chat_template.jinja, or what tokenizer_config.json has; None where it has none.

    Args:
        folder: Of the checkpoint.
        file: A template to take in the place of the folder's.
    """
    config = _tokenizer_config(folder)
    special = {name: _content(config[name]) for name in SPECIAL_TOKENS if config.get(name)}
    own = folder and folder / "chat_template.jinja"
    if file is not None:
        source: Any = file.read_text()
    elif own and own.exists():
        source = own.read_text()
    else:
        source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {one["name"]: one["template"] for one in source}
        source = named.get("default")
    return None if source is None else ChatTemplate(source, special)


def _tokenizer_config(folder: pathlib.Path | None) -> dict[str, Any]:
    path = folder and folder / "tokenizer_config.json"
    return json.loads(path.read_text()) if path and path.exists() else {}


def _content(token: Any) -> str:
    """A special token is its text, or an object that has it."""
    return token["content"] if isinstance(token, dict) else token


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **others: Any) -> str:
    """As json has it: jinja2's own escapes what HTML would read."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **others)
