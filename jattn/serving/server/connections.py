"""Connections that bring no request in time are closed, and that take a stream's events by a short way."""

import asyncio
from typing import Any

from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

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
