"""Server-sent events, sent as long as somebody takes them."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any, Self

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from jattn.serving.server.connections import WRITE


class EventStream(StreamingResponse):
    """Server-sent events, which end where the client has gone, or takes none for too long."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], *, seconds: float, stopped: bytes = b"") -> None:
        """Each event must be taken within so many seconds: they wait where a client's buffers are full.

        Args:
            events: These.
            seconds: As above.
            stopped: Sent in the place of what is left where the server ends first.
        """
        super().__init__(events)
        self._events, self._seconds, self._stopped = events, seconds, stopped
        self._is_open = False  # between the head and the end
        self._write: Callable[[bytes], bool] = lambda event: False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Of ASGI; events take the connection's short way where it has one."""
        self._write = scope.get("extensions", {}).get(WRITE, self._write)
        try:
            await super().__call__(scope, receive, send)
        except asyncio.CancelledError:  # by the server alone, at its end
            if not self._is_open:
                raise
            await send(_body(self._stopped, has_more=False))

    async def stream_response(self, send: Send) -> None:
        """Sends them; closes their source, whatever happens, so that its request is dropped at once."""
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        async with contextlib.aclosing(self._events):
            with contextlib.suppress(TimeoutError):
                async with Patience(send, self._seconds) as patience:
                    await patience.send(start)
                    self._is_open = True
                    async for event in self._events:
                        if not self._write(event):
                            await patience.send(_body(event, has_more=True))
                    self._is_open = False
                    await patience.send(_body(b"", has_more=False))


def _body(part: bytes, *, has_more: bool) -> Message:
    return {"type": "http.response.body", "body": part, "more_body": has_more}


class Patience:
    """Limits how long each message may take to be sent, by one timer for all of them."""

    def __init__(self, send: Send, seconds: float) -> None:
        """In the place of `send`; a TimeoutError ends the block."""
        self._send, self._seconds = send, seconds
        self._loop = asyncio.get_running_loop()
        self._begun: float | None = None  # when the message that is being sent was
        self._limit = asyncio.timeout(None)

    async def __aenter__(self) -> Self:
        await self._limit.__aenter__()
        self._timer = self._loop.call_later(self._seconds, self._look)
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._timer.cancel()
        await self._limit.__aexit__(*error)

    async def send(self, message: Message) -> None:
        """Sends one."""
        self._begun = self._loop.time()
        await self._send(message)
        self._begun = None

    def _look(self) -> None:
        now = self._loop.time()
        end = self._seconds + (now if self._begun is None else self._begun)
        if end <= now:
            self._limit.reschedule(now)
        else:
            self._timer = self._loop.call_at(end, self._look)
