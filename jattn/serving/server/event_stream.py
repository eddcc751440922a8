"""Server-sent events, sent as long as somebody takes them."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any, Self

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol


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


WRITE = "jattn.write"  # an extension of ASGI's scope: `Connection.write`


class Connection(H11Protocol):
    """uvicorn's, but for two things.

    A request's head must come within the service's `body_seconds`, as its body must; and a stream's events
    may go straight to the socket.
    """

    def __init__(self, *args: Any, **named: Any) -> None:
        """As uvicorn makes it."""
        super().__init__(*args, **named)
        self._seconds = self.config.app.state.service.options.body_seconds  # type: ignore[union-attr]
        self._limit: asyncio.TimerHandle | None = None
        inner = self.app

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await inner({**scope, "extensions": {WRITE: self.write}}, receive, send)

        self.app = app

    def write(self, part: bytes) -> bool:
        """Sends a part of a body that has no length, behind the answer's head, if it can go at once.

        For less than half the time that ASGI's `send` takes, which asks h11 and all between: to them the body
        is empty.

        Returns:
            False: the client is slow or gone; `send` waits for it.
        """
        cycle = self.cycle
        if self.flow.write_paused or cycle is None or cycle.disconnected or cycle.response_complete:
            return False
        is_chunked = cycle.scope["http_version"] == "1.1"
        self.transport.write(b"%x\r\n%b\r\n" % (len(part), part) if is_chunked else part)
        return True

    def connection_made(self, transport: Any) -> None:  # uvloop's are no asyncio.Transport
        """Of asyncio."""
        super().connection_made(transport)
        self._wait_for_a_request()

    def connection_lost(self, exc: Exception | None) -> None:
        """Of asyncio."""
        self._cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Of uvicorn: another request may come."""
        self._wait_for_a_request()
        super().on_response_complete()

    def _wait_for_a_request(self) -> None:
        self._cancel()
        self._limit = self.loop.call_later(self._seconds, self._close_unless_asked)

    def _close_unless_asked(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def _cancel(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
