"""Chat templates of checkpoints, found and rendered by transformers."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from jattn.models.loading.files import optional_module, read_json_if_exists
from jattn.models.loading.tokenizer import read_tokenizer

PROBE = "What a user says."  # Content of a message that tests how a template handles content.


class ChatTemplate:
    """A chat template.

    Attributes:
        source: Source of the template, followed by the source of the template for tools.
        expects_parts: Whether the template expects a message's content as a list of parts, as templates of
            multimodal models do, and ignores plain text.

    Source: vLLM `--chat-template-content-format auto`, which inspects the template's loops.
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
        self._template, self._tool_use = source, source if tool_use is None else tool_use
        self._special_tokens = dict(special_tokens or {})
        self.source = source if tool_use is None else f"{source}\n{tool_use}"
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
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """Return the text of a conversation.

        Args:
            messages: Messages with "role", "content" (a text or a list of texts), and other fields that the
                template supports.
            add_generation_prompt: Whether the text ends with the beginning of an assistant message.
            tools: Definitions of the tools that the model may call.
            continue_final_message: Whether the text ends with the content of the last message.
            **variables: Further variables of the template.

        Raises:
            jinja2.TemplateError: If the template rejects the messages (`raise_exception`) or fails.
            ValueError: If the last message is to be continued and the template does not render it unchanged.
        """
        try:
            texts, _ = optional_module("transformers.utils.chat_template_utils").render_jinja_template(
                [[self._format_content(message) for message in messages]],
                tools=tools,
                chat_template=self._template if tools is None else self._tool_use,
                continue_final_message=continue_final_message,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens | variables,
            )
        except (TypeError, ValueError, KeyError, AttributeError, RecursionError, MemoryError) as error:
            if "continue_final_message" in str(error):
                raise ValueError(
                    "continue_final_message is not supported by this chat template, which does not render the"
                    " last message unchanged. Omit it."
                ) from error
            raise jinja2.TemplateRuntimeError(f"{type(error).__name__}: {error}") from error
        return texts[0]

    def _format_content(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message with the content as the template expects it: parts, or lines of one text."""
        content = message.get("content")
        texts: list[str] = content if isinstance(content, list) else [content]  # type: ignore[list-item]
        if content is None or not all(isinstance(text, str) for text in texts):
            return message
        parts = [{"type": "text", "text": text} for text in texts]
        return {**message, "content": parts if self.expects_parts else "\n".join(texts)}

    def _renders_content(self) -> bool:
        """Return whether the rendered texts contain a user's message.

        Raises:
            ValueError: If a template is not valid Jinja.
        """
        message = {"role": "user", "content": PROBE}
        try:
            return PROBE in self.render([message]) or PROBE in self.render([message], tools=[])
        except jinja2.TemplateSyntaxError as error:
            rule = f"line {error.lineno}: {error.message}"
            raise ValueError(f"chat_template is not a valid Jinja template: {rule}") from error
        except Exception:  # The template rejects this conversation, which says nothing about the content.
            return False


def load_chat_template(folder: pathlib.Path | None, file: pathlib.Path | None = None) -> ChatTemplate | None:
    """Return the chat template of a checkpoint, or None if it has none.

    Processors of older multimodal models have it in chat_template.json, which transformers' tokenizers do not
    read.

    Args:
        folder: Folder of the checkpoint, or None.
        file: Template file that replaces the folder's template.

    Raises:
        ValueError: If the folder has several templates and none is the default, or a template is invalid.
    """
    tokenizer = None if folder is None else read_tokenizer(folder)
    special_tokens = {} if tokenizer is None else dict(tokenizer.special_tokens_map)
    if file is not None:
        if not file.is_file():
            raise ValueError(f"chat_template {file} is not a file. Pass the path of a Jinja file.")
        try:
            return ChatTemplate(file.read_text(encoding="utf-8"), special_tokens)
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not valid UTF-8: {error}. Save it as UTF-8.") from error
    if folder is None or tokenizer is None:
        return None
    found = tokenizer.chat_template or read_json_if_exists(folder / "chat_template.json").get("chat_template")
    templates = {"default": found} if found is None or isinstance(found, str) else found
    if templates == {"default": None}:
        return None
    if not isinstance(templates, dict) or not all(isinstance(text, str) for text in templates.values()):
        rule = "chat_template must be a text or a list of named templates"
        raise ValueError(f"{folder / 'tokenizer_config.json'}: {rule}, got {repr(found)[:60]}.")
    if "default" not in templates:
        raise ValueError(
            f"chat_template is ambiguous: the model has the templates {sorted(templates)} and none is named"
            " default. Pass --chat-template FILE."
        )
    return ChatTemplate(templates["default"], special_tokens, tool_use=templates.get("tool_use"))
