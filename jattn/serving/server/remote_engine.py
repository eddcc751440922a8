"""An engine in another process, as a server uses it."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable
from typing import Any

from jattn.serving.engine.engine_client import EngineInfo
from jattn.serving.engine.input_processor import Prompt
from jattn.serving.engine.mailbox import RequestOutputCollector
from jattn.serving.engine.outputs import RequestError, RequestOutput
from jattn.serving.engine.sampling_params import SamplingParams
from jattn.serving.engine.stats import EngineStats
from jattn.serving.server.channel import Channel

LOST = "the engine's process has ended"


class RemoteEngine:
    """The other end of `EngineHost`: an `EngineClient` of one event loop.

    What a step brings comes as one message, and is put to its readers in one turn of the loop.
    """

    def __init__(self, channel: Channel, info: EngineInfo, lost: Callable[[], None]) -> None:
        """Over a channel; `lost` is called in the loop if the engine's process ends before this is closed."""
        self.info = info
        self._channel, self._lost = channel, lost
        self._numbers = itertools.count()
        self._readers: dict[int, RequestOutputCollector] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: int | str | None = None
    ) -> AsyncGenerator[RequestOutput]:
        """As `AsyncEngine.generate`; the engine calls requests by numbers of its own.

        Raises:
            ValueError: The prompt cannot be served.
            RequestError: It could not be finished: a step failed, or the engine's process ended.
        """
        self._start()
        params = self.info.default_sampling_params if params is None else params
        number, reader = next(self._numbers), RequestOutputCollector(params.n)
        reader.request_id = number if request_id is None else request_id
        self._readers[number] = reader
        try:
            if self._is_closed:
                raise RequestError(LOST)
            self._channel.post(("add", number, prompt, params))
            while reader.num_unread:
                yield await reader.get()
        finally:
            del self._readers[number]
            self._channel.post(("drop", number))

    async def precompile(self, *, progress: bool) -> None:
        """As `EngineClient` has it."""
        await self._call("precompile", progress)

    async def reset_prefix_cache(self) -> None:
        """As `EngineClient` has it."""
        await self._call("reset_prefix_cache")

    async def read_stats(self) -> EngineStats:
        """As `EngineClient` has it."""
        stats: EngineStats = await self._call("read_stats")
        return stats

    async def aclose(self) -> None:
        """The engine hears no more."""
        self._is_closed = True
        await asyncio.to_thread(self._channel.close)

    async def _call(self, name: str, *words: Any) -> Any:
        self._start()
        if self._is_closed:
            raise RequestError(LOST)
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._channel.post(("call", number, name, *words))
        try:
            return await answer
        finally:
            del self._answers[number]

    def _start(self) -> None:
        """Listens from the first use on, since only then there is a loop."""
        if self._loop is None:
            loop = self._loop = asyncio.get_running_loop()
            self._channel.start(
                lambda messages: _in(loop, self._take, messages), lambda: _in(loop, self._end_all)
            )

    # --------------------------------------------------------------------------------- in the loop
    def _take(self, messages: list[Any]) -> None:
        for what, *rest in messages:
            if what == "news":
                (pieces,) = rest
                for number, news in pieces:
                    reader = self._readers.get(number)
                    if reader is not None:
                        reader.put(news)
            else:
                self._answer(*rest)

    def _answer(self, number: int, value: Any, error: Exception | None) -> None:
        answer = self._answers.get(number)
        if answer is None or answer.done():
            return
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)

    def _end_all(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for reader in self._readers.values():
            reader.put(RequestError(LOST))
        for number in list(self._answers):
            self._answer(number, None, RequestError(LOST))
        self._lost()


def _in(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *values: Any) -> None:
    """Calls a function in a loop, unless that has ended."""
    try:
        loop.call_soon_threadsafe(function, *values)
    except RuntimeError:  # as asyncio says that it is closed
        return
