"""Server-sent events with a time limit for the client."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send


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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response (ASGI)."""
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
            await send(start)
            self._is_open = True
            with contextlib.suppress(TimeoutError):
                async for event in self._events:
                    async with asyncio.timeout(self._send_timeout):
                        await send(_body(event, has_more=True))
                self._is_open = False
                await send(_body(b"", has_more=False))


def _body(part: bytes, *, has_more: bool) -> Message:
    return {"type": "http.response.body", "body": part, "more_body": has_more}
