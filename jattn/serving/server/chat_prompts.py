"""A conversation as the tokens that the model is given."""

from typing import Any

from jattn.serving.engine.detokenizer import tokenize_async
from jattn.serving.server.errors import ApiError
from jattn.serving.server.protocol import ChatCompletionBody, ChatTemplateBody, Message
from jattn.serving.server.service import Service
from jattn.serving.server.tools import with_objects
from pallas_kernels.checks import require

MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # as transformers has it
TEXTS = ("text", "input_text", "output_text", "refusal")  # kinds of parts that are text


async def chat_tokens(service: Service, body: ChatTemplateBody) -> list[int]:
    """A conversation's tokens. The template writes the special ones, so that there is no second BOS.

    Raises:
        ApiError: The model has no template, or a message holds other things than text.
        ValueError: The template knows nothing of what it is told, or is told something twice.
        jinja2.TemplateError: The template refuses it.
    """
    template = service.chat_template
    if template is None:
        told = "the model has no chat template. Start the server with --chat-template FILE."
        raise ApiError(422, told, "messages", "unsupported")
    messages = [_plain(message, i) for i, message in enumerate(body.messages)]
    if "developer" not in template.source:  # OpenAI's newer name of who comes first
        messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
    own, others = _variables(service, body), dict(body.chat_template_kwargs or {})
    reserved = sorted({"messages", "add_generation_prompt", *own} & others.keys())
    require(not reserved, "chat_template_kwargs", "hold other names", reserved)
    is_either = not (body.continue_final_message and body.add_generation_prompt)
    require(is_either, "continue_final_message", "come with add_generation_prompt=false", True)
    if body.continue_final_message:
        messages[-1] = _marked(messages[-1])
    text = template.render(messages, add_generation_prompt=body.add_generation_prompt, **own, **others)
    if body.continue_final_message:
        text = _continued(text)
    (ids,) = await tokenize_async(service.tokenizer, [text], add_special_tokens=body.add_special_tokens)
    return ids


def _variables(service: Service, body: ChatTemplateBody) -> dict[str, Any]:
    """What the request tells the template besides the conversation.

    Raises:
        ValueError: The template does not ask for it.
    """
    own: dict[str, Any] = {}
    if body.tools and not (isinstance(body, ChatCompletionBody) and body.tool_choice == "none"):
        own["tools"] = [tool.model_dump(exclude_none=True) for tool in body.tools]
    asked = {"documents": body.documents or None, "reasoning_effort": getattr(body, "reasoning_effort", None)}
    for name, value in asked.items():
        if value is not None:
            assert service.chat_template is not None
            is_known = name in service.chat_template.variables
            require(is_known, name, "be null (the chat template does not know it)", repr(value))
            own[name] = value
    return own


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    """The last message of a conversation, with a mark where it goes on.

    Raises:
        ValueError: It says nothing.
    """
    content, rule = message.get("content") or "", "have a last message that says something"
    *others, last = content if isinstance(content, list) else [content]
    require(bool(last.strip()), "continue_final_message", rule, repr(last))
    marked = last + MARK
    return message | {"content": [*others, marked] if others else marked}


def _continued(text: str) -> str:
    """A conversation's text up to the mark. Without one, a last "d" would be found in an "<|im_end|>".

    Raises:
        ValueError: The template did not write the message as it is.

    Source: transformers `apply_chat_template(continue_final_message=True)`.
    """
    place = text.rfind(MARK.strip())
    rule = "have a last message that the template writes"
    require(place >= 0, "continue_final_message", rule, repr(text))
    is_whole = text.startswith(MARK, place)  # else the template strips what is behind a message
    return text[:place] if is_whole else text[:place].rstrip()


def _plain(message: Message, index: int) -> dict[str, Any]:
    """A message as `ChatTemplate.render` takes it: a text, or those of its parts."""
    told = message.model_dump(exclude_unset=True)
    # Clients write null for what is not there, and templates ask whether it is there.
    plain = {name: value for name, value in told.items() if value is not None or name == "content"}
    if isinstance(message.content, list):
        plain["content"] = [_text(part, f"messages[{index}].content") for part in message.content]
    elif message.content is None and not plain.get("tool_calls"):
        plain["content"] = ""  # templates would write "None"
    if "tool_calls" in plain:
        plain["tool_calls"] = with_objects(f"messages[{index}].tool_calls", plain["tool_calls"])
    return plain


def _text(part: str | dict[str, Any], name: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type")
    text = part.get("refusal" if kind == "refusal" else "text")
    if kind not in TEXTS or not isinstance(text, str):
        raise ApiError(422, f"{name}: only text is served, got {kind!r}.", "messages", "unsupported")
    return text
