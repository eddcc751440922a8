"""Delivery of outputs from the engine's thread to the tasks of an event loop."""

import asyncio

from jattn.serving.engine.engine_thread import OutputItem, OutputListener
from jattn.serving.engine.outputs import RequestError, RequestOutput, describe_error


class Mailbox:
    """The channel from the engine's thread to the tasks of one event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Deliver to an event loop."""
        self._loop = loop

    def post(self, items: list[OutputItem]) -> None:
        """Deliver outputs from any thread. Wakes the event loop once for all of its tasks.

        Raises:
            RuntimeError: If the event loop is closed.
        """
        self._loop.call_soon_threadsafe(_hand_out, items)


def _hand_out(items: list[OutputItem]) -> None:
    for reader, news in items:
        reader.put(news)


class RequestOutputCollector(OutputListener):
    """The unread outputs of one task's request. Only the task's event loop calls `put`.

    Unread outputs of a completion are merged: a slow reader finds one output per completion, regardless of
    the number of steps, and delays nobody.

    Attributes:
        loop: The event loop of the task.
        num_unread: Number of completions whose last output has not been read.

    Source: vLLM `RequestOutputCollector`.
    """

    def __init__(self, num_completions: int, mailbox: Mailbox | None = None) -> None:
        """Create a collector for the running task.

        Args:
            num_completions: Number of completions of the request.
            mailbox: Mailbox of the event loop; None if no engine's thread posts to it.
        """
        super().__init__(mailbox, num_completions)
        self.loop, self.num_unread = asyncio.get_running_loop(), num_completions
        self._outputs: dict[int, RequestOutput] = {}  # unread outputs, by completion
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, news: RequestOutput | Exception) -> None:
        """Add an output, or the error that ends the request."""
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
