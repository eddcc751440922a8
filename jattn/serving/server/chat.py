"""`POST /v1/chat/completions`."""

from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jattn.serving.outputs import Logprobs, RequestOutput
from jattn.serving.server.answers import Job
from jattn.serving.server.bodies import read
from jattn.serving.server.call_reader import ToolReader, merged_calls
from jattn.serving.server.errors import ApiError
from jattn.serving.server.forms import wanted_form
from jattn.serving.server.protocol import (
    ChatCompletionBody,
    ChatTemplateBody,
    Message,
    Tool,
)
from jattn.serving.server.sampling import refuse, sampling_params
from jattn.serving.server.service import Service
from jattn.serving.server.token_texts import TokenTexts
from jattn.serving.server.tools import calling, with_objects
from pallas_kernels.checks import require

SERVED = {"modalities": (["text"],)}


class ChatShape:
    """What an assistant says."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self, texts: TokenTexts, num_logprobs: int | None, make_reader: Callable[[], ToolReader] | None
    ) -> None:
        """For one request.

        Args:
            texts: Of tokens.
            num_logprobs: Likeliest tokens to tell of; None = nothing.
            make_reader: Makes what finds a completion's calls of tools; None = there are none.
        """
        self._texts, self._num_logprobs = texts, num_logprobs
        self._make_reader, self._readers = make_reader, dict[int, ToolReader]()

    def opening(self, index: int) -> dict[str, Any]:
        """Who speaks."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def choice(self, index: int, output: RequestOutput, *, is_chunk: bool) -> dict[str, Any]:
        """What is said."""
        content, calls, reason = self._read(index, output)
        said: dict[str, Any] = {} if calls and not content and is_chunk else {"content": content}
        if calls:
            said["tool_calls"] = calls if is_chunk else [_without_index(call) for call in calls]
        if not is_chunk:
            said |= {
                "role": "assistant",
                "refusal": None,
                "content": content if content or not calls else None,
            }
        return {
            "index": index,
            "delta" if is_chunk else "message": said,
            "logprobs": self._logprobs(output.new_token_ids, output.logprobs),
            "finish_reason": reason,
            "stop_reason": output.stop_reason,
        }

    def _read(self, index: int, output: RequestOutput) -> tuple[str, list[dict[str, Any]], str | None]:
        """What is said to the user, what is called, and why nothing more comes."""
        if self._make_reader is None:
            return output.new_text, [], output.finish_reason
        if index not in self._readers:
            self._readers[index] = self._make_reader()
        reader = self._readers[index]
        content, calls = reader.feed(output.new_text)
        if output.finish_reason is None:
            return content, merged_calls(calls), None
        rest, more = reader.end()
        is_stop = output.finish_reason == "stop"
        calls = (*calls, *more)
        return content + rest, merged_calls(calls), reader.finish_reason if is_stop else output.finish_reason

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
    how = calling(body, service.call_format, service.tokenizer)
    prompt = chat_tokens(service, body, tools=body.tools if body.tool_choice != "none" else None)
    require(len(prompt) > 0, "messages", "become at least one token", prompt)
    num, form = _num_logprobs(body), wanted_form(body, how.form)
    params = sampling_params(body, service.default_sampling, form, max_tokens=_max_tokens(body), logprobs=num)
    shape = ChatShape(service.token_texts, num, how.make_reader)
    return await Job(service, body, [prompt], params, shape, form).answer(request)


def _without_index(call: dict[str, Any]) -> dict[str, Any]:
    """A call of a whole answer, where its place tells which it is."""
    return {name: value for name, value in call.items() if name != "index"}


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


def chat_tokens(
    service: Service,
    body: ChatTemplateBody,
    *,
    tools: Sequence[Tool] | None = None,
    add_special_tokens: bool = False,
) -> list[int]:
    """A conversation's tokens. The template writes the special ones, so that there is no second BOS.

    Raises:
        ApiError: The model has no template, or a message holds other things than text.
        jinja2.TemplateError: The template refuses it.
    """
    if service.chat_template is None:
        told = "the model has no chat template. Start the server with --chat-template FILE."
        raise ApiError(422, told, "messages", "unsupported")
    messages = [_plain(message, i) for i, message in enumerate(body.messages)]
    others = dict(body.chat_template_kwargs or {})
    own: dict[str, Any] = {}
    if tools is not None:
        own["tools"] = [tool.model_dump(exclude_none=True) for tool in tools]
    reserved = sorted({"messages", "add_generation_prompt", *own} & others.keys())
    require(not reserved, "chat_template_kwargs", "hold other names", reserved)
    others |= own
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
    if plain.get("tool_calls") is not None:
        plain["tool_calls"] = with_objects(f"messages[{index}].tool_calls", plain["tool_calls"])
    return plain
