"""Connections that bring no request in time are closed, so that nobody holds them for nothing."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol


class PunctualProtocol(H11Protocol):
    """uvicorn's, but a request's head must come within the service's `body_seconds`, as its body must."""

    def __init__(self, *args: Any, **named: Any) -> None:
        """As uvicorn makes it."""
        super().__init__(*args, **named)
        self._seconds = self.config.app.state.service.options.body_seconds  # type: ignore[union-attr]
        self._limit: asyncio.TimerHandle | None = None

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
