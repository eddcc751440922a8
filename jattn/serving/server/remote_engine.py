"""The HTTP process: a client of the engine in another process, and the server that it serves."""

import asyncio
import contextlib
import itertools
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Generator
from types import FrameType
from typing import Any

from jattn.serving.engine.engine_client import EngineInfo
from jattn.serving.engine.input_processor import Prompt
from jattn.serving.engine.mailbox import RequestOutputCollector
from jattn.serving.engine.outputs import RequestError, RequestOutput
from jattn.serving.engine.sampling_params import SamplingParams
from jattn.serving.engine.stats import EngineStats
from jattn.serving.server.channel import Channel
from jattn.serving.server.http_process import FORCED, freeze_gc_heap
from jattn.serving.server.launcher import Server

ENGINE_PROCESS_ENDED = "The engine process has ended."


class RemoteEngine:
    """`EngineClient` of an engine in another process, where an `EngineHost` runs it. For one event loop.

    The outputs of a step arrive as one message and reach their readers in one iteration of the loop.

    Attributes:
        info: Properties of the engine.
    """

    def __init__(self, channel: Channel, info: EngineInfo, on_disconnect: Callable[[], None]) -> None:
        """Connect to the engine.

        Args:
            channel: Channel to the engine's process.
            info: Properties of the engine.
            on_disconnect: Function called in the event loop if the engine's process ends before `aclose`.
        """
        self.info = info
        self._channel, self._on_disconnect = channel, on_disconnect
        self._numbers = itertools.count()
        self._readers: dict[int, RequestOutputCollector] = {}
        self._results: dict[int, asyncio.Future[Any]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, request_id: int | str | None = None
    ) -> AsyncGenerator[RequestOutput]:
        """Yield the outputs of a request, as `AsyncEngine.generate` does.

        Args:
            prompt: Text or token ids.
            params: Sampling parameters; None for the engine's defaults.
            request_id: Name of the request in error messages. The engine numbers requests by itself.

        Raises:
            ValueError: If the request is invalid.
            RequestError: If the request could not be finished: a step failed, or the engine's process ended.
        """
        self._start()
        params = self.info.default_sampling_params if params is None else params
        number, reader = next(self._numbers), RequestOutputCollector(params.n)
        reader.request_id = number if request_id is None else request_id
        self._readers[number] = reader
        try:
            if self._is_closed:
                raise RequestError(ENGINE_PROCESS_ENDED)
            self._channel.post(("add", number, prompt, params))
            while reader.num_unread:
                yield await reader.get()
        finally:
            del self._readers[number]
            self._channel.post(("drop", number))

    async def precompile(self, *, progress: bool) -> None:
        """Compile what the first step may need, as `EngineClient.precompile`."""
        await self._call("precompile", progress)

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, as `EngineClient.reset_prefix_cache`."""
        await self._call("reset_prefix_cache")

    async def read_stats(self) -> EngineStats:
        """Return the current statistics, as `EngineClient.read_stats`."""
        stats: EngineStats = await self._call("read_stats")
        return stats

    async def aclose(self) -> None:
        """Close the channel to the engine."""
        self._is_closed = True
        await asyncio.to_thread(self._channel.close)

    async def _call(self, name: str, *args: Any) -> Any:
        self._start()
        if self._is_closed:
            raise RequestError(ENGINE_PROCESS_ENDED)
        number = next(self._numbers)
        result = self._results[number] = asyncio.get_running_loop().create_future()
        self._channel.post(("call", number, name, *args))
        try:
            return await result
        finally:
            del self._results[number]

    def _start(self) -> None:
        """Start reading messages on the first use, when the event loop exists."""
        if self._loop is None:
            loop = self._loop = asyncio.get_running_loop()
            self._channel.start(
                lambda messages: _call_in_loop(loop, self._handle_messages, messages),
                lambda: _call_in_loop(loop, self._handle_disconnect),
            )

    # The methods below run in the event loop.

    def _handle_messages(self, messages: list[Any]) -> None:
        for message_type, *args in messages:
            if message_type == "outputs":
                (outputs,) = args
                for number, output in outputs:
                    reader = self._readers.get(number)
                    if reader is not None:
                        reader.put(output)
            else:
                self._set_result(*args)

    def _set_result(self, number: int, value: Any, error: Exception | None) -> None:
        result = self._results.get(number)
        if result is None or result.done():
            return
        if error is None:
            result.set_result(value)
        else:
            result.set_exception(error)

    def _handle_disconnect(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for reader in self._readers.values():
            reader.put(RequestError(ENGINE_PROCESS_ENDED))
        for number in list(self._results):
            self._set_result(number, None, RequestError(ENGINE_PROCESS_ENDED))
        self._on_disconnect()


class HttpProcessServer(Server):
    """Server in the HTTP process. A separate signal, FORCED, requests an immediate shutdown."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Handle SIGTERM, SIGINT and FORCED; ignore them after the server has stopped, until exit."""
        signals = signal.SIGTERM, signal.SIGINT, FORCED
        for sig in signals:
            signal.signal(sig, self.handle_exit)
        yield
        for sig in signals:
            signal.signal(sig, signal.SIG_IGN)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle a signal; repeated SIGTERM or SIGINT have no further effect."""
        self.should_exit, self.force_exit = True, self.force_exit or sig == FORCED


def run_http_process(channel_file: int, listening_file: int) -> None:
    """Run the process that `HttpProcess` starts; its exit status is 0 after a requested shutdown.

    Args:
        channel_file: File descriptor of the channel to the engine's process.
        listening_file: File descriptor of the listening socket.
    """
    channel = Channel(socket.socket(fileno=channel_file))
    try:
        info, options, log_level = channel.read()
    except EOFError:  # The engine could not be created; its process prints the error.
        sys.exit(1)

    def on_disconnect() -> None:
        server.failure, server.should_exit = RequestError(ENGINE_PROCESS_ENDED), True

    try:
        server = HttpProcessServer(RemoteEngine(channel, info, on_disconnect), options, log_level=log_level)
    except ValueError as error:
        channel.post(str(error))
        channel.close()
        sys.exit(1)
    channel.post("")  # No error.
    freeze_gc_heap()
    server.run(sockets=[socket.socket(fileno=listening_file)])
    if server.failure is not None:
        sys.exit(1)


def _call_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    """Call a function in an event loop, unless the loop is closed."""
    try:
        loop.call_soon_threadsafe(function, *args)
    except RuntimeError:  # The loop is closed.
        return
