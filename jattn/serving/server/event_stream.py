"""HTTP connections with time limits, and server-sent events over them."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any, Self

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

WRITE_EXTENSION = "jattn.write"  # Name of the ASGI extension that holds `HttpConnection.write`.


class HttpConnection(H11Protocol):
    """uvicorn's HTTP protocol with a time limit for requests and a fast path for the events of a stream.

    A request's head must arrive within `ServerOptions.body_seconds`; otherwise the connection is closed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timeout = self.config.app.state.service.options.body_seconds  # type: ignore[union-attr]
        self._timer: asyncio.TimerHandle | None = None
        inner = self.app

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await inner({**scope, "extensions": {WRITE_EXTENSION: self.write}}, receive, send)

        self.app = app

    def write(self, part: bytes) -> bool:
        """Send a part of a body without a content length directly to the socket, if it accepts data now.

        This takes less than half the time of ASGI's `send`, which goes through h11 and the layers above it.
        For them the body stays empty.

        Returns:
            False if the client is slow or gone. Then use `send`, which waits for it.
        """
        cycle = self.cycle
        if self.flow.write_paused or cycle is None or cycle.disconnected or cycle.response_complete:
            return False
        is_chunked = cycle.scope["http_version"] == "1.1"
        self.transport.write(b"%x\r\n%b\r\n" % (len(part), part) if is_chunked else part)
        return True

    def connection_made(self, transport: Any) -> None:  # uvloop's transports are not asyncio.Transport.
        """Start the time limit of the first request (asyncio callback)."""
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the time limit (asyncio callback)."""
        self._cancel_timer()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Start the time limit of the next request (uvicorn callback)."""
        self._start_timer()
        super().on_response_complete()

    def _start_timer(self) -> None:
        self._cancel_timer()
        self._timer = self.loop.call_later(self._timeout, self._close_if_idle)

    def _close_if_idle(self) -> None:
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


class EventStream(StreamingResponse):
    """Response of server-sent events that ends if the client disconnects or stops reading."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes], *, send_timeout: float, shutdown_event: bytes = b""
    ) -> None:
        """Create the response.

        Args:
            events: Encoded events.
            send_timeout: Time limit for sending each event, in seconds. Sending blocks while the client's
                buffers are full.
            shutdown_event: Encoded events that replace the remaining ones if the server shuts down.
        """
        super().__init__(events)
        self._events, self._send_timeout, self._shutdown_event = events, send_timeout, shutdown_event
        self._is_open = False  # Whether the head has been sent and the end has not.
        self._write: Callable[[bytes], bool] = _cannot_write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response (ASGI), by the connection's fast path if it has one."""
        self._write = scope.get("extensions", {}).get(WRITE_EXTENSION, self._write)
        try:
            await super().__call__(scope, receive, send)
        except asyncio.CancelledError:  # Only the server cancels, at shutdown.
            if not self._is_open:
                raise
            await send(_body(self._shutdown_event, has_more=False))

    async def stream_response(self, send: Send) -> None:
        """Send the events. The generator is always closed, so that its request is aborted at once."""
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        async with contextlib.aclosing(self._events):
            with contextlib.suppress(TimeoutError):
                async with TimeLimitedSender(send, self._send_timeout) as sender:
                    await sender.send(start)
                    self._is_open = True
                    async for event in self._events:
                        if not self._write(event):
                            await sender.send(_body(event, has_more=True))
                    self._is_open = False
                    await sender.send(_body(b"", has_more=False))


def _cannot_write(event: bytes) -> bool:
    return False


def _body(part: bytes, *, has_more: bool) -> Message:
    return {"type": "http.response.body", "body": part, "more_body": has_more}


class TimeLimitedSender:
    """Context manager that limits the time to send each message, with one timer for all of them.

    A message that exceeds the limit ends the block with a TimeoutError.
    """

    def __init__(self, send: Send, seconds: float) -> None:
        """Wrap an ASGI `send` function.

        Args:
            send: Function to wrap.
            seconds: Time limit per message, in seconds.
        """
        self._send, self._seconds = send, seconds
        self._loop = asyncio.get_running_loop()
        self._send_start: float | None = None  # Start time of the message that is being sent.
        self._timeout = asyncio.timeout(None)

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._timer = self._loop.call_later(self._seconds, self._check)
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._timer.cancel()
        await self._timeout.__aexit__(*error)

    async def send(self, message: Message) -> None:
        """Send a message."""
        self._send_start = self._loop.time()
        await self._send(message)
        self._send_start = None

    def _check(self) -> None:
        now = self._loop.time()
        deadline = self._seconds + (now if self._send_start is None else self._send_start)
        if deadline <= now:
            self._timeout.reschedule(now)
        else:
            self._timer = self._loop.call_at(deadline, self._check)
