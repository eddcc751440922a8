"""From the engine's outputs to an answer: at once, or in chunks as they come."""

import asyncio
import contextlib
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Iterator
from typing import Any, Protocol, runtime_checkable

from pydantic_core import to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from jattn.serving.engine.outputs import RequestOutput
from jattn.serving.engine.sampling_params import SamplingParams
from jattn.serving.server.errors import STOPPED, ApiError, as_api_error
from jattn.serving.server.event_stream import EventStream
from jattn.serving.server.protocol import ChatCompletionBody, CompletionBody
from jattn.serving.server.sampling_params import Form
from jattn.serving.server.service import Service

DONE = b"data: [DONE]\n\n"  # the last event of a stream


@runtime_checkable
class Shape(Protocol):
    """What distinguishes the kinds of completions.

    Attributes:
        prefix: Of an answer's name.
        whole: What a whole answer calls itself.
        chunk: What a part of one does.
    """

    prefix: str
    whole: str
    chunk: str

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice that a stream begins with; None = none."""

    def choice(self, index: int, output: RequestOutput, *, is_chunk: bool) -> dict[str, Any]:
        """What outputs look like, one of them or all of a completion put together."""

    def added(self, output: RequestOutput) -> dict[str, Any]:
        """What a whole answer, or a stream's first chunk, has besides choices, by its first output."""


@dataclasses.dataclass(eq=False)
class Job:
    """A request under way.

    Attributes:
        service: Who serves it.
        body: What was asked.
        prompts: Tokens, one list a prompt.
        params: How they go on.
        shape: What answers look like.
        form: As `wanted_form` has it.
    """

    service: Service
    body: CompletionBody | ChatCompletionBody
    prompts: list[list[int]]
    params: SamplingParams
    shape: Shape
    form: Form | None = None

    def __post_init__(self) -> None:
        self._name = f"{self.shape.prefix}-{self.body.request_id or uuid.uuid4().hex}"
        self._created = int(time.time())
        self._num_generated = 0
        self._head = to_json(self._envelope(self.shape.chunk))[:-1]  # what all chunks begin with

    async def answer(self, request: Request) -> Response:
        """The answer, whole or as a stream; nothing where the client has gone."""
        try:
            return await self._answer(request)
        except ValueError as error:
            if self.form is not None and str(error).startswith("structured_outputs "):
                raise ApiError(400, str(error), self.form[0]) from error
            raise

    async def _answer(self, request: Request) -> Response:
        outputs = self._outputs()
        if not self.body.stream:
            return JSONResponse(await _unless_gone(request, self._whole(outputs)))
        try:  # what is wrong at once is told by the status
            first = await _unless_gone(request, anext(outputs))
        except BaseException:
            await outputs.aclose()
            raise
        seconds, stopped = self.service.options.stall_seconds, _line(STOPPED.body()) + DONE
        return EventStream(self._events(first, outputs), seconds=seconds, stopped=stopped)

    async def _outputs(self) -> AsyncGenerator[tuple[int, RequestOutput]]:
        async with contextlib.aclosing(self.service.outputs(self.prompts, self.params)) as outputs:
            async for index, output in outputs:
                self._num_generated += len(output.new_token_ids)
                yield index, output

    async def _whole(self, outputs: AsyncGenerator[tuple[int, RequestOutput]]) -> dict[str, Any]:
        pieces: list[list[RequestOutput]] = [[] for _ in range(len(self.prompts) * self.params.n)]
        async with contextlib.aclosing(outputs):
            async for index, output in outputs:
                pieces[index].append(output)
        chosen = self._best([_joined(some) for some in pieces])
        choices = [self.shape.choice(i, output, is_chunk=False) for i, output in enumerate(chosen)]
        added = self.shape.added(chosen[0])
        return {**self._envelope(self.shape.whole), "choices": choices, **added, "usage": self._usage()}

    def _best(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Of each prompt's completions as many as are wanted: those whose tokens are likeliest on average."""
        made, wanted = self.params.n, self.body.n or 1
        if made == wanted:
            return outputs
        groups = [outputs[first : first + made] for first in range(0, len(outputs), made)]
        return [one for group in groups for one in sorted(group, key=_mean_logprob, reverse=True)[:wanted]]

    async def _events(
        self, first: tuple[int, RequestOutput], outputs: AsyncGenerator[tuple[int, RequestOutput]]
    ) -> AsyncGenerator[bytes]:
        async with contextlib.aclosing(outputs):
            try:
                added = self.shape.added(first[1])
                for choice in (*self._openings(), self.shape.choice(*first, is_chunk=True)):
                    if added or _says_something(choice):
                        yield self._event([choice], **added)
                        added = {}
                async for index, output in outputs:
                    choice = self.shape.choice(index, output, is_chunk=True)
                    if _says_something(choice):
                        yield self._event([choice])
                if self._wants("include_usage"):
                    yield self._event([], usage=self._usage())
            except Exception as error:
                yield _line(as_api_error(error).body())
        yield DONE

    def _openings(self) -> Iterator[dict[str, Any]]:
        for index in range(len(self.prompts) * self.params.n):
            opening = self.shape.opening(index)
            if opening is not None:
                yield opening

    def _event(
        self, choices: list[dict[str, Any]], *, usage: dict[str, int] | None = None, **added: Any
    ) -> bytes:
        chunk = {"choices": choices, **added}
        if self._wants("continuous_usage_stats"):
            usage = self._usage()
        if usage is not None or self._wants("include_usage"):
            chunk["usage"] = usage
        return b"data: %b,%b\n\n" % (self._head, to_json(chunk)[1:])

    def _wants(self, option: str) -> bool:
        return self.body.stream_options is not None and getattr(self.body.stream_options, option)

    def _envelope(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._name,
            "object": kind,
            "created": self._created,
            "model": self.service.model_name,
        }

    def _usage(self) -> dict[str, int]:
        num_prompt = sum(map(len, self.prompts))
        num_new = 0 if self.body.max_tokens == 0 else self._num_generated  # what scored a prompt is not told
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
        }


def _says_something(choice: dict[str, Any]) -> bool:
    """Whether a client has something to see in it; a token may be a part of a character, or of a call."""
    if choice.get("text") or choice["finish_reason"] or choice["logprobs"] or choice.get("token_ids"):
        return True
    return any(choice.get("delta", {}).values())


def _line(data: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % to_json(data)


def _mean_logprob(output: RequestOutput) -> float:
    """Of a completion's tokens."""
    places = zip(output.new_token_ids, output.logprobs or (), strict=True)
    logprobs = [place[token].logprob for token, place in places]
    return sum(logprobs) / max(len(logprobs), 1)


def _joined(outputs: list[RequestOutput]) -> RequestOutput:
    """All of a completion's outputs as one."""
    first, *others = outputs
    for output in others:
        first.extend(output)
    return first


async def _unless_gone[T](request: Request, work: Awaitable[T]) -> T:
    """What the work brings; it is cancelled where the client hangs up.

    Raises:
        ClientDisconnect: It has.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(request: Request) -> None:
    """Returns when the client has hung up. The body has been read: nothing else can come."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
