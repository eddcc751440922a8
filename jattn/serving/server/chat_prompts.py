"""Conversion of a chat request's messages to prompt tokens."""

from typing import Any

from jattn.serving.engine.detokenizer import tokenize_async
from jattn.serving.server.chat_template import ChatTemplate
from jattn.serving.server.errors import ApiError
from jattn.serving.server.protocol import ChatCompletionBody, ChatTemplateBody, Message
from jattn.serving.server.service import Service
from jattn.serving.server.tools import parse_call_arguments

RESERVED = (  # Arguments of transformers' `render_jinja_template` that are not variables, and messages.
    *("messages", "conversations", "add_generation_prompt", "continue_final_message", "chat_template"),
    "return_assistant_tokens_mask",
)
TEXT_PARTS = ("text", "input_text", "output_text", "refusal")  # Types of content parts that are text.


def require_chat_template(service: Service) -> ChatTemplate:
    """Return the model's chat template.

    Raises:
        ApiError: If the model has none.
    """
    if service.chat_template is None:
        message = "The model has no chat template. Start the server with --chat-template FILE."
        raise ApiError(422, message, "messages", "unsupported")
    return service.chat_template


async def encode_chat(service: Service, body: ChatTemplateBody) -> list[int]:
    """Return the prompt tokens of a conversation.

    The template writes the special tokens, so the tokenizer adds no second BOS by default.

    Raises:
        ApiError: If the model has no chat template, or a message contains other content than text.
        ValueError: If the template does not support a parameter, or parameters contradict each other.
        jinja2.TemplateError: If the template rejects the messages.
    """
    template = require_chat_template(service)
    messages = [_template_message(message, i) for i, message in enumerate(body.messages)]
    if "developer" not in template.source:  # OpenAI's newer name of the system role.
        messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
    variables, kwargs = _template_variables(service, body), dict(body.chat_template_kwargs or {})
    reserved = sorted({*RESERVED, *variables} & kwargs.keys())
    if reserved:
        raise ValueError(f"chat_template_kwargs cannot contain {reserved}. Use the request's own parameters.")
    if body.continue_final_message and body.add_generation_prompt:
        raise ValueError("continue_final_message requires add_generation_prompt=false.")
    if body.continue_final_message:
        content = messages[-1].get("content") or ""
        if not (content[-1] if isinstance(content, list) else content).strip():
            raise ValueError("continue_final_message requires a last message that is not empty.")
    text = template.render(
        messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        **variables,
        **kwargs,
    )
    (ids,) = await tokenize_async(service.tokenizer, [text], add_special_tokens=body.add_special_tokens)
    return ids


def _template_variables(service: Service, body: ChatTemplateBody) -> dict[str, Any]:
    """Return the template variables that the request sets in addition to the messages.

    Raises:
        ValueError: If the template does not use one of them.
    """
    variables: dict[str, Any] = {}
    if body.tools and not (isinstance(body, ChatCompletionBody) and body.tool_choice == "none"):
        variables["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
    optional = {
        "documents": body.documents or None,
        "reasoning_effort": getattr(body, "reasoning_effort", None),
    }
    for name, value in optional.items():
        if value is not None:
            assert service.chat_template is not None
            if name not in service.chat_template.source:
                raise ValueError(f"{name} is not supported by this model's chat template. Omit it.")
            variables[name] = value
    return variables


def _template_message(message: Message, index: int) -> dict[str, Any]:
    """Return a message as `ChatTemplate.render` takes it: its content is a text or a list of texts."""
    fields = message.model_dump(exclude_unset=True)
    # Clients send null for missing fields, and templates test whether a field is defined.
    fields = {name: value for name, value in fields.items() if value is not None or name == "content"}
    if isinstance(message.content, list):
        fields["content"] = [_part_text(part, f"messages[{index}].content") for part in message.content]
    elif message.content is None and not fields.get("tool_calls"):
        fields["content"] = ""  # Templates would write "None".
    if "tool_calls" in fields:
        fields["tool_calls"] = parse_call_arguments(f"messages[{index}].tool_calls", fields["tool_calls"])
    return fields


def _part_text(part: str | dict[str, Any], param: str) -> str:
    if isinstance(part, str):
        return part
    part_type = part.get("type")
    text = part.get("refusal" if part_type == "refusal" else "text")
    if part_type not in TEXT_PARTS or not isinstance(text, str):
        message = f"{param}: Only text content is supported, got type {part_type!r}."
        raise ApiError(422, message, "messages", "unsupported")
    return text
