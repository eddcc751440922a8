"""The chat completions endpoint, `POST /v1/chat/completions`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from jattn.serving.engine.outputs import Logprobs, RequestOutput
from jattn.serving.engine.sampling_params import MAX_LOGPROBS
from jattn.serving.server.chat_prompts import encode_chat, require_chat_template
from jattn.serving.server.logprobs import TokenFormatter
from jattn.serving.server.protocol import ChatCompletionBody, read_body
from jattn.serving.server.reasoning import NUM_TAIL_TOKENS
from jattn.serving.server.responses import CompletionResponder
from jattn.serving.server.sampling_params import (
    OutputConstraint,
    check_context_length,
    check_supported,
    output_constraint,
    to_sampling_params,
    truncate_prompt,
)
from jattn.serving.server.service import Service
from jattn.serving.server.tool_call_parser import ParsedDelta, ToolCallParser, merge_tool_call_deltas
from jattn.serving.server.tools import resolve_tool_calling
from pallas_kernels.checks import require_positive

# Known parameters of chats that are not supported, with the values that have no effect and are accepted.
CHAT_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **{"modalities": (["text"],), "echo": (False,), "include_reasoning": (True,)},
    **dict.fromkeys(("audio", "prediction", "web_search_options", "functions", "function_call"), ()),
    **dict.fromkeys(("moderation", "mm_processor_kwargs", "chat_template"), ()),
    "verbosity": ("medium",),
}


class ChatFormatter:
    """`ResponseFormatter` of chat completions."""

    id_prefix, object_name, chunk_object_name = "chatcmpl", "chat.completion", "chat.completion.chunk"
    response_type = "ChatCompletion"

    def __init__(
        self,
        token_formatter: TokenFormatter,
        body: ChatCompletionBody,
        prompt: list[int],
        make_parser: Callable[[], ToolCallParser] | None,
    ) -> None:
        """Create the formatter of one request.

        Args:
            token_formatter: Formatter of tokens.
            body: Request body.
            prompt: Token ids of the prompt.
            make_parser: Function that makes the tool-call parser of a completion; None if no tool can be
                called.
        """
        self._tokens, self._body, self._prompt = token_formatter, body, prompt
        self._num_logprobs = num_top_logprobs(body)
        self._make_parser, self._parsers = make_parser, dict[int, ToolCallParser]()

    def first_choice(self, index: int) -> dict[str, Any]:
        """Return a choice with the assistant's role."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def extra_fields(self, output: RequestOutput) -> dict[str, Any]:
        """Return the prompt's tokens and log-probabilities, if requested."""
        fields: dict[str, Any] = {}
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = self._prompt
        if self._body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = self._tokens.prompt_logprobs(output.prompt_logprobs or ())
        return fields

    def choice(self, index: int, output: RequestOutput, *, is_chunk: bool) -> dict[str, Any]:
        """Return the message or delta, its log-probabilities and the finish reason."""
        (content, tool_calls, reasoning), finish_reason = self._parse(index, output)
        message: dict[str, Any] = {}
        if not is_chunk:
            message = {"role": "assistant", "refusal": None}
        if content or not (tool_calls or reasoning):
            message["content"] = content
        elif not is_chunk:
            message["content"] = None
        if reasoning:
            message["reasoning_content"] = reasoning
        if tool_calls:
            calls = merge_tool_call_deltas(tool_calls)
            message["tool_calls"] = calls if is_chunk else [_without_index(call) for call in calls]
        token_ids = {"token_ids": output.new_token_ids} if self._body.return_token_ids else {}
        return token_ids | {
            "index": index,
            "delta" if is_chunk else "message": message,
            "logprobs": self._logprobs(output.new_token_ids, output.logprobs),
            "finish_reason": finish_reason,
            "stop_reason": output.stop_reason,
        }

    def _parse(self, index: int, output: RequestOutput) -> tuple[ParsedDelta, str | None]:
        """Return the content, tool calls, reasoning and finish reason of an output."""
        if self._make_parser is None:
            return ParsedDelta(output.new_text), output.finish_reason
        if index not in self._parsers:
            self._parsers[index] = self._make_parser()
        parser = self._parsers[index]
        delta = parser.feed(output.new_text, output.new_token_ids)
        if output.finish_reason is None:
            return delta, None
        last = parser.end()
        merged = ParsedDelta(
            delta.content + last.content, delta.tool_calls + last.tool_calls, delta.reasoning + last.reasoning
        )
        is_stop = output.finish_reason == "stop"
        return merged, parser.finish_reason if is_stop else output.finish_reason

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[Logprobs] | None) -> dict[str, Any] | None:
        if self._num_logprobs is None or logprobs is None:
            return None
        content = []
        for token, position in zip(ids, logprobs, strict=True):
            ranked = sorted(position.items(), key=lambda item: item[1].rank)[: self._num_logprobs]
            top_logprobs = [self._tokens.chat_logprob(i, logprob) for i, logprob in ranked]
            content.append(self._tokens.chat_logprob(token, position[token]) | {"top_logprobs": top_logprobs})
        return {"content": content, "refusal": None}


async def create_chat_completion(request: Request) -> Response:
    """Complete a conversation with an assistant's message."""
    service: Service = request.app.state.service
    body: ChatCompletionBody = await read_body(request, ChatCompletionBody)
    service.check_model(body.model)
    check_supported(body, CHAT_UNSUPPORTED)
    require_chat_template(service)
    tool_calling = resolve_tool_calling(
        body, service.tool_call_format, service.tokenizer, service.reasoning_format
    )
    max_tokens = _max_tokens(body)
    prompt = truncate_prompt(body, await encode_chat(service, body), service.info.longest, max_tokens)
    if not prompt:
        raise ValueError("messages must contain at least one token after the chat template is applied.")
    check_context_length("messages", len(prompt), max_tokens, service.info.max_model_len)
    num_remaining = max(service.info.longest - len(prompt), 1)
    overrides: dict[str, Any] = {"max_tokens": num_remaining if max_tokens is None else max_tokens}
    constraint = output_constraint(body, tool_calling.constraint)
    overrides["logprobs"] = num_top_logprobs(body)
    make_parser, keeps_special_tokens = tool_calling.make_parser, tool_calling.keeps_special_tokens
    reasoning = service.reasoning_format
    # A constraint does not allow gpt-oss's channels.
    if reasoning is not None and (constraint is None or reasoning.make_harmony_parser is None):
        keeps_special_tokens |= reasoning.keeps_special_tokens
        tail = service.decode_tokens("messages", prompt[-NUM_TAIL_TOKENS:])
        make_parser = functools.partial(reasoning.make_parser, tail, tool_calling.make_parser)
        if constraint is not None:
            constraint = OutputConstraint(
                constraint.param, reasoning.constrain(tail, constraint.structured_outputs)
            )
    if keeps_special_tokens:
        overrides["skip_special_tokens"] = False
    params = to_sampling_params(body, service.default_sampling, constraint, **overrides)
    formatter = ChatFormatter(service.token_formatter_for(body), body, prompt, make_parser)
    responder = CompletionResponder(service, body, [prompt], params, formatter, constraint)
    return await responder.respond(request)


def _without_index(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call without its index, which only stream chunks contain."""
    return {name: value for name, value in call.items() if name != "index"}


def _max_tokens(body: ChatCompletionBody) -> int | None:
    """Return max_completion_tokens, or its deprecated form max_tokens."""
    max_tokens = body.max_completion_tokens
    if max_tokens is None:
        return body.max_tokens
    require_positive(max_completion_tokens=max_tokens)
    if body.max_tokens not in (None, max_tokens):
        raise ValueError(
            f"max_tokens={body.max_tokens} contradicts max_completion_tokens={max_tokens}. Omit max_tokens."
        )
    return max_tokens


def num_top_logprobs(body: ChatCompletionBody) -> int | None:
    """Return how many of the most likely tokens to return per position; None for no log-probabilities.

    Raises:
        ValueError: If top_logprobs is out of range, or is set without logprobs.
    """
    if body.top_logprobs:
        if not body.logprobs:
            raise ValueError("top_logprobs requires logprobs=true.")
        if not 0 <= body.top_logprobs <= MAX_LOGPROBS:
            raise ValueError(f"top_logprobs must be in [0, {MAX_LOGPROBS}], got {body.top_logprobs}.")
    return (body.top_logprobs or 0) if body.logprobs else None
