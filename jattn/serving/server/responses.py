"""Responses to completion requests: complete, or streamed as server-sent events."""

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

from pydantic_core import to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from jattn.serving.engine.outputs import RequestOutput
from jattn.serving.engine.sampling_params import SamplingParams
from jattn.serving.server.errors import SHUTDOWN_ERROR, ApiError, to_api_error
from jattn.serving.server.event_stream import EventStream
from jattn.serving.server.protocol import ChatCompletionBody, CompletionBody
from jattn.serving.server.sampling_params import OutputConstraint
from jattn.serving.server.service import Service

DONE = b"data: [DONE]\n\n"  # The last event of a stream.


@runtime_checkable
class ResponseFormatter(Protocol):
    """Formatter of the choices in a response, which differ between text and chat completions.

    Attributes:
        id_prefix: Prefix of the response's id.
        object_name: "object" field of a complete response.
        response_type: Name of the type of a complete response in `openai.types`.
        chunk_object_name: "object" field of a stream's chunks.
    """

    id_prefix: str
    object_name: str
    response_type: str
    chunk_object_name: str

    def first_choice(self, index: int) -> dict[str, Any] | None:
        """Return the choice that precedes a completion's outputs in a stream, or None."""

    def choice(self, index: int, output: RequestOutput, *, is_chunk: bool) -> dict[str, Any]:
        """Return the choice for an output: one of a stream's, or a complete one."""

    def extra_fields(self, output: RequestOutput) -> dict[str, Any]:
        """Return further fields of a complete response or a stream's first chunk, from the first output."""


@dataclasses.dataclass(eq=False)
class CompletionResponder:
    """A validated request that generates its response.

    Attributes:
        service: State of the server.
        body: Request body.
        prompts: Token ids of each prompt.
        params: Sampling parameters.
        formatter: Formatter of the choices.
        constraint: Constraint on the output's structure, or None.
    """

    service: Service
    body: CompletionBody | ChatCompletionBody
    prompts: list[list[int]]
    params: SamplingParams
    formatter: ResponseFormatter
    constraint: OutputConstraint | None = None

    def __post_init__(self) -> None:
        self._id = f"{self.formatter.id_prefix}-{self.body.request_id or uuid.uuid4().hex}"
        self._created = int(time.time())
        self._num_generated = self._num_cached = 0
        # JSON that all chunks begin with, without its closing brace.
        self._chunk_head = to_json(self._envelope(self.formatter.chunk_object_name))[:-1]

    async def respond(self, request: Request) -> Response:
        """Return the response, complete or streamed; generation is cancelled if the client disconnects."""
        try:
            return await self._respond(request)
        except ValueError as error:
            if self.constraint is not None and str(error).startswith("structured_outputs"):
                message = str(error).replace("structured_outputs", self.constraint.param, 1)
                raise ApiError(400, message, self.constraint.param) from error
            raise

    async def _respond(self, request: Request) -> Response:
        outputs = self._generate()
        if not self.body.stream:
            fields = await _cancel_on_disconnect(request, self._complete_response(outputs))
            return openai_response(self.formatter.response_type, fields)
        try:  # Wait for the first output, so that early errors set the status.
            first = await _cancel_on_disconnect(request, anext(outputs))
        except BaseException:
            await outputs.aclose()
            raise
        return EventStream(
            self._events(first, outputs),
            send_timeout=self.service.options.stall_seconds,
            shutdown_event=_encode_event(SHUTDOWN_ERROR.body()) + DONE,
        )

    async def _generate(self) -> AsyncGenerator[tuple[int, RequestOutput]]:
        async with contextlib.aclosing(self.service.generate(self.prompts, self.params)) as outputs:
            async for index, output in outputs:
                self._num_generated += len(output.new_token_ids)
                if output.index == 0:  # The other completions of a prompt share what the first one computes.
                    self._num_cached += output.num_cached_tokens
                yield index, output

    async def _complete_response(self, outputs: AsyncGenerator[tuple[int, RequestOutput]]) -> dict[str, Any]:
        parts: list[list[RequestOutput]] = [[] for _ in range(len(self.prompts) * self.params.n)]
        async with contextlib.aclosing(outputs):
            async for index, output in outputs:
                parts[index].append(output)
        completions = self._select_best([_concatenate(outputs_of_one) for outputs_of_one in parts])
        choices = [self.formatter.choice(i, output, is_chunk=False) for i, output in enumerate(completions)]
        return {
            **self._envelope(self.formatter.object_name),
            "choices": choices,
            **self.formatter.extra_fields(completions[0]),
            "usage": self._usage(),
        }

    def _select_best(self, completions: list[RequestOutput]) -> list[RequestOutput]:
        """Return the `n` completions of each prompt with the highest mean log-probability (`best_of`)."""
        num_generated, num_returned = self.params.n, self.body.n or 1
        if num_generated == num_returned:
            return completions
        groups = [completions[i : i + num_generated] for i in range(0, len(completions), num_generated)]
        return [
            completion
            for group in groups
            for completion in sorted(group, key=_mean_logprob, reverse=True)[:num_returned]
        ]

    async def _events(
        self, first: tuple[int, RequestOutput], outputs: AsyncGenerator[tuple[int, RequestOutput]]
    ) -> AsyncGenerator[bytes]:
        async with contextlib.aclosing(outputs):
            try:
                extra_fields = self.formatter.extra_fields(first[1])
                for choice in (*self._first_choices(), self.formatter.choice(*first, is_chunk=True)):
                    if extra_fields or _has_content(choice):
                        yield self._chunk([choice], **extra_fields)
                        extra_fields = {}
                async for index, output in outputs:
                    choice = self.formatter.choice(index, output, is_chunk=True)
                    if _has_content(choice):
                        yield self._chunk([choice])
                if self._has_stream_option("include_usage"):
                    yield self._chunk([], usage=self._usage())
            except Exception as error:
                yield _encode_event(to_api_error(error).body())
        yield DONE

    def _first_choices(self) -> Iterator[dict[str, Any]]:
        for index in range(len(self.prompts) * self.params.n):
            choice = self.formatter.first_choice(index)
            if choice is not None:
                yield choice

    def _chunk(
        self, choices: list[dict[str, Any]], *, usage: dict[str, Any] | None = None, **extra_fields: Any
    ) -> bytes:
        chunk = {"choices": choices, **extra_fields}
        if self._has_stream_option("continuous_usage_stats"):
            usage = self._usage()
        if usage is not None or self._has_stream_option("include_usage"):
            chunk["usage"] = usage
        return b"data: %b,%b\n\n" % (self._chunk_head, to_json(chunk)[1:])

    def _has_stream_option(self, name: str) -> bool:
        return self.body.stream_options is not None and getattr(self.body.stream_options, name)

    def _envelope(self, object_name: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": object_name,
            "created": self._created,
            "model": self.service.model_name,
        }

    def _usage(self) -> dict[str, Any]:
        num_prompt = sum(map(len, self.prompts))
        # With max_tokens=0, one token is generated to score the prompt; it is not reported.
        num_new = 0 if self.body.max_tokens == 0 else self._num_generated
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
        }


def openai_response(type_name: str, fields: Mapping[str, Any]) -> Response:
    """Return a response with an object of a type in `openai.types`, whose fields may include vLLM's.

    Chunks of streams are not made this way: it would take 10 us of the 24 us that an event takes.

    Args:
        type_name: Name of the type.
        fields: Fields of the object.
    """
    response_type = getattr(openai_types(), type_name)
    # `construct` keeps values that OpenAI's API does not have, such as the finish reason "abort".
    content = response_type.construct(**fields).model_dump_json(exclude_unset=True, warnings=False)
    return Response(content, media_type="application/json")


@functools.cache
def openai_types() -> SimpleNamespace:
    """Return the types of the openai package. Importing them takes 0.6 s, so a server does it at startup."""
    types, chat = importlib.import_module("openai.types"), importlib.import_module("openai.types.chat")
    return SimpleNamespace(Completion=types.Completion, Model=types.Model, ChatCompletion=chat.ChatCompletion)


def _has_content(choice: dict[str, Any]) -> bool:
    """Return whether a chunk's choice has content. A token may be a part of a character or of a call."""
    if choice.get("text") or choice["finish_reason"] or choice["logprobs"] or choice.get("token_ids"):
        return True
    return any(choice.get("delta", {}).values())


def _encode_event(data: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % to_json(data)


def _mean_logprob(output: RequestOutput) -> float:
    """Return the mean log-probability of a completion's tokens."""
    positions = zip(output.new_token_ids, output.logprobs or (), strict=True)
    logprobs = [position[token].logprob for token, position in positions]
    return sum(logprobs) / max(len(logprobs), 1)


def _concatenate(outputs: list[RequestOutput]) -> RequestOutput:
    """Concatenate the outputs of a completion into the first one."""
    first, *later_outputs = outputs
    for output in later_outputs:
        first.extend(output)
    return first


async def _cancel_on_disconnect[T](request: Request, work: Awaitable[T]) -> T:
    """Return the result of an awaitable, which is cancelled if the client disconnects.

    Raises:
        ClientDisconnect: If the client has disconnected.
    """
    work_task = asyncio.ensure_future(work)
    disconnect_task = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait((work_task, disconnect_task), return_when=asyncio.FIRST_COMPLETED)
        if work_task.done():
            return work_task.result()
        raise ClientDisconnect
    finally:
        for task in (work_task, disconnect_task):
            task.cancel()
        await asyncio.gather(work_task, disconnect_task, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    """Wait until the client disconnects. The body must have been read, so that no other message arrives."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
