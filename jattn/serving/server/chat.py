"""`POST /v1/chat/completions`."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jattn.serving.outputs import Logprobs, RequestOutput
from jattn.serving.server.answers import Job
from jattn.serving.server.bodies import read
from jattn.serving.server.errors import ApiError
from jattn.serving.server.protocol import ChatCompletionBody, ChatTemplateBody, Message
from jattn.serving.server.sampling import refuse, sampling_params
from jattn.serving.server.service import Service
from jattn.serving.server.token_texts import TokenTexts
from pallas_kernels.checks import require

SERVED = {"tools": ([],), "tool_choice": ("none", "auto"), "modalities": (["text"],)}


class ChatShape:
    """What an assistant says."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, texts: TokenTexts, num_logprobs: int | None):
        """`num_logprobs`: likeliest tokens to tell of; None = nothing."""
        self._texts, self._num_logprobs = texts, num_logprobs

    def opening(self, index: int) -> dict[str, Any]:
        """Who speaks."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def choice(self, index: int, output: RequestOutput, *, is_chunk: bool) -> dict[str, Any]:
        """What is said."""
        said: dict[str, Any] = {"content": output.new_text}
        if not is_chunk:
            said |= {"role": "assistant", "refusal": None}
        return {
            "index": index,
            "delta" if is_chunk else "message": said,
            "logprobs": self._logprobs(output.new_token_ids, output.logprobs),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        }

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[Logprobs] | None) -> dict[str, Any] | None:
        if self._num_logprobs is None or logprobs is None:
            return None
        content = []
        for token, place in zip(ids, logprobs, strict=True):
            ranked = sorted(place.items(), key=lambda item: item[1].rank)[: self._num_logprobs]
            top = [self._texts.described(i, one) for i, one in ranked]
            content.append(self._texts.described(token, place[token]) | {"top_logprobs": top})
        return {"content": content, "refusal": None}


async def create_chat_completion(request: Request) -> Response:
    """Says what an assistant would say next."""
    service: Service = request.app.state.service
    body: ChatCompletionBody = await read(request, ChatCompletionBody)
    service.check_model(body.model)
    refuse(body, SERVED)
    prompt = chat_tokens(service, body)
    num = _num_logprobs(body)
    params = sampling_params(body, service.default_sampling, max_tokens=_max_tokens(body), logprobs=num)
    return await Job(service, body, [prompt], params, ChatShape(service.token_texts, num)).answer(request)


def _max_tokens(body: ChatCompletionBody) -> int | None:
    newer = body.max_completion_tokens
    if newer is None:
        return body.max_tokens
    is_same = body.max_tokens in (None, newer)
    require(is_same, "max_tokens", f"be max_completion_tokens ({newer}) or nothing", body.max_tokens)
    return newer


def _num_logprobs(body: ChatCompletionBody) -> int | None:
    if body.top_logprobs is not None:
        require(bool(body.logprobs), "top_logprobs", "come with logprobs=true", body.top_logprobs)
    return (body.top_logprobs or 0) if body.logprobs else None


def chat_tokens(service: Service, body: ChatTemplateBody, *, add_special_tokens: bool = False) -> list[int]:
    """A conversation's tokens. The template writes the special ones, so that there is no second BOS.

    Raises:
        ApiError: The model has no template, or a message holds other things than text.
        jinja2.TemplateError: The template refuses it.
    """
    if service.chat_template is None:
        told = "the model has no chat template. Start the server with --chat-template FILE."
        raise ApiError(422, told, "messages", "unsupported")
    messages = [_plain(message, i) for i, message in enumerate(body.messages)]
    others = body.chat_template_kwargs or {}
    reserved = sorted({"messages", "add_generation_prompt"} & others.keys())
    require(not reserved, "chat_template_kwargs", "hold other names", reserved)
    text = service.chat_template.render(messages, add_generation_prompt=body.add_generation_prompt, **others)
    return service.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


def _plain(message: Message, index: int) -> dict[str, Any]:
    """A message as templates want it: its parts of text joined by line ends, as vLLM does."""
    plain = message.model_dump(exclude_unset=True)
    if isinstance(message.content, list):
        for part in message.content:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                told = f"messages[{index}].content: only text is served, got {part.get('type')!r}."
                raise ApiError(422, told, "messages", "unsupported")
        plain["content"] = "\n".join(part["text"] for part in message.content)
    return plain
