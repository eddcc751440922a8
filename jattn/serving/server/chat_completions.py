"""`POST /v1/chat/completions`."""

from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jattn.serving.engine.outputs import Logprobs, RequestOutput
from jattn.serving.engine.sampling_params import MAX_LOGPROBS
from jattn.serving.server.chat_prompts import chat_tokens
from jattn.serving.server.logprobs import TokenTexts
from jattn.serving.server.protocol import ChatCompletionBody, read
from jattn.serving.server.responses import Job
from jattn.serving.server.sampling_params import (
    refuse,
    require_place,
    sampling_params,
    truncated,
    wanted_form,
)
from jattn.serving.server.service import Service, texts_of
from jattn.serving.server.tool_call_parser import ToolReader, merged_calls
from jattn.serving.server.tools import calling
from pallas_kernels.checks import require, require_positive

# What is known of chats alone and not served, with the values that ask for nothing.
OFF: dict[str, tuple[Any, ...]] = {
    **{"modalities": (["text"],), "echo": (False,), "include_reasoning": (True,)},
    **dict.fromkeys(("audio", "prediction", "web_search_options", "functions", "function_call"), ()),
    **dict.fromkeys(("moderation", "mm_processor_kwargs", "chat_template"), ()),
    "verbosity": ("medium",),
}


class ChatShape:
    """What an assistant says."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        texts: TokenTexts,
        body: ChatCompletionBody,
        prompt: list[int],
        make_reader: Callable[[], ToolReader] | None,
    ) -> None:
        """For one request.

        Args:
            texts: Of tokens.
            body: What was asked.
            prompt: Its tokens.
            make_reader: Makes what finds a completion's calls of tools; None = there are none.
        """
        self._texts, self._body, self._prompt = texts, body, prompt
        self._num_logprobs = num_logprobs(body)
        self._make_reader, self._readers = make_reader, dict[int, ToolReader]()

    def opening(self, index: int) -> dict[str, Any]:
        """Who speaks."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def added(self, output: RequestOutput) -> dict[str, Any]:
        """Tokens of the prompt, and what was likely there, for those who asked."""
        told: dict[str, Any] = {}
        if self._body.return_token_ids:
            told["prompt_token_ids"] = self._prompt
        if self._body.prompt_logprobs is not None:
            told["prompt_logprobs"] = self._texts.of_prompt(output.prompt_logprobs or ())
        return told

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
        ids = {"token_ids": output.new_token_ids} if self._body.return_token_ids else {}
        return ids | {
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
    refuse(body, OFF)
    how = calling(body, service.call_format, service.tokenizer)
    max_tokens = _max_tokens(body)
    prompt = truncated(body, await chat_tokens(service, body), service.info.longest, max_tokens)
    require(len(prompt) > 0, "messages", "become at least one token", prompt)
    require_place("messages", len(prompt), max_tokens, service.info.max_model_len)
    rest = max(service.info.longest - len(prompt), 1)
    own: dict[str, Any] = {"max_tokens": rest if max_tokens is None else max_tokens}
    form, own["logprobs"] = wanted_form(body, how.form), num_logprobs(body)
    if how.has_special_tokens:
        own["skip_special_tokens"] = False
    params = sampling_params(body, service.default_sampling, form, **own)
    shape = ChatShape(texts_of(service, body), body, prompt, how.make_reader)
    return await Job(service, body, [prompt], params, shape, form).answer(request)


def _without_index(call: dict[str, Any]) -> dict[str, Any]:
    """A call of a whole answer, where its place tells which it is."""
    return {name: value for name, value in call.items() if name != "index"}


def _max_tokens(body: ChatCompletionBody) -> int | None:
    newer = body.max_completion_tokens
    if newer is None:
        return body.max_tokens
    require_positive(max_completion_tokens=newer)
    is_same = body.max_tokens in (None, newer)
    require(is_same, "max_tokens", f"be max_completion_tokens ({newer}) or nothing", body.max_tokens)
    return newer


def num_logprobs(body: ChatCompletionBody) -> int | None:
    """How many of the likeliest tokens an answer tells of; None = it tells of none, nor of its own.

    Raises:
        ValueError: They are wanted, and log-probabilities are not; or too many are.
    """
    if body.top_logprobs:
        require(bool(body.logprobs), "top_logprobs", "come with logprobs=true", body.top_logprobs)
        is_known = 0 <= body.top_logprobs <= MAX_LOGPROBS
        require(is_known, "top_logprobs", f"be in [0, {MAX_LOGPROBS}]", body.top_logprobs)
    return (body.top_logprobs or 0) if body.logprobs else None
