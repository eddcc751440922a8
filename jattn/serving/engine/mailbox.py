"""Delivery of outputs from the engine's thread to the tasks of an event loop."""

import asyncio
import time
from typing import TYPE_CHECKING

from jattn.serving.engine.engine_thread import OutputItem
from jattn.serving.engine.outputs import RequestError, RequestOutput, describe_error

# Readers get this fraction (1 / n) of the event loop's time, because the engine's thread needs the GIL to
# prepare the next step. 256 streams at 12 ms per step are then read every second or third step.
INVERSE_TIME_SHARE = 3


class Mailbox:
    """The outputs for all tasks of one event loop.

    If reading outputs takes more than its share of the loop's time, tasks get the tokens of several steps in
    one output. First tokens and errors are delivered at once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start without outputs."""
        self._loop = loop
        self._held: list[OutputItem] = []
        self._busy_until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def post(self, items: list[OutputItem]) -> None:
        """Deliver outputs from any thread. Wakes the event loop once for all of its tasks.

        Raises:
            RuntimeError: If the event loop is closed.
        """
        self._loop.call_soon_threadsafe(self._take, items)

    # --------------------------------------------------------------------------------- in the loop
    def _take(self, items: list[OutputItem]) -> None:
        is_urgent = any(isinstance(news, Exception) for _, news in items)
        if is_urgent or self._loop.time() >= self._busy_until:
            self._held += items
            self._hand_out()
            return
        for reader, news in items:
            if reader.has_news:
                self._held.append((reader, news))
            else:
                reader.put(news)
        if self._held and self._timer is None:
            self._timer = self._loop.call_at(self._busy_until, self._hand_out)

    def _hand_out(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        items, self._held = self._held, []
        start = time.thread_time()
        for reader, news in items:
            reader.put(news)
        self._loop.call_soon(self._set_busy_until, start)  # Runs after the woken tasks.

    def _set_busy_until(self, start: float) -> None:
        duration = time.thread_time() - start
        self._busy_until = self._loop.time() + (INVERSE_TIME_SHARE - 1) * duration


if TYPE_CHECKING:
    from jattn.serving.engine.mailbox import Mailbox


class RequestOutputCollector:
    """The unread outputs of one task's request. Only the task's event loop calls `put`.

    Unread outputs of a completion are merged: a slow reader finds one output per completion, regardless of
    the number of steps, and delays nobody.

    Attributes:
        loop: The event loop of the task.
        mailbox: The event loop's mailbox, which the engine's thread posts to; None if no thread does.
        request_id: The engine's identifier of the request; None before the request is added.
        has_news: Whether an output has arrived.
        num_unread: Number of completions whose last output has not been read.
        unfinished: Indices of the completions that are unfinished, owned by the engine's thread.

    Source: vLLM `RequestOutputCollector`.
    """

    def __init__(self, num_completions: int, mailbox: "Mailbox | None" = None) -> None:
        """Create a collector for the running task."""
        self.mailbox = mailbox
        self.loop = asyncio.get_running_loop()
        self.request_id: int | str | None = None
        self.has_news, self.num_unread = False, num_completions
        self.unfinished = set(range(num_completions))
        self._outputs: dict[int, RequestOutput] = {}  # unread outputs, by completion
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, news: RequestOutput | Exception) -> None:
        """Add an output, or the error that ends the request."""
        self.has_news = True
        if isinstance(news, Exception):
            self._error = news if isinstance(news, ValueError) else self._request_error(news)
        elif news.error is not None:
            self._error = self._request_error(news.error)
        else:
            unread = self._outputs.setdefault(news.index, news)
            if unread is not news:
                unread.extend(news)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> RequestOutput:
        """Return the merged unread output of one completion.

        Raises:
            ValueError: If the request cannot be served.
            RequestError: If the request could not be finished.
        """
        while not self._outputs:
            if self._error is not None:
                raise self._error
            self._waiter = self.loop.create_future()
            await self._waiter
        output = self._outputs.pop(next(iter(self._outputs)))
        self.num_unread -= output.finish_reason is not None
        return output

    def _request_error(self, error: Exception) -> RequestError:
        request_error = RequestError(
            f"request {self.request_id!r} could not be finished: {describe_error(error)}"
        )
        request_error.__cause__ = error
        return request_error
