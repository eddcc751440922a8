"""Where a task finds what its request brings."""

import asyncio
from typing import TYPE_CHECKING

from jattn.serving.engine.outputs import RequestError, RequestOutput, in_words

if TYPE_CHECKING:
    from jattn.serving.engine.mailbox import Mailbox


class Reader:
    """One task's, in the event loop that it runs in; `put` and `fail` are that loop's, too.

    What the task has not read is put together: a reader that is late finds one output a completion, however
    many steps have passed, and so catches up. It holds nobody up.

    Attributes:
        loop: Which runs the task.
        mailbox: The loop's, by which an engine's thread reaches it; None = nobody's thread does.
        request_id: As the engine calls the request; None = not added yet.
        has_news: Whether anything has come.
        num_unread: Completions whose ends the task has not read.
        unfinished: The engine thread's: completions that have more to come.

    Source: vLLM `RequestOutputCollector`.
    """

    def __init__(self, num_completions: int, mailbox: "Mailbox | None" = None) -> None:
        """For the task that is running."""
        self.mailbox = mailbox
        self.loop = asyncio.get_running_loop()
        self.request_id: int | str | None = None
        self.has_news, self.num_unread = False, num_completions
        self.unfinished = set(range(num_completions))
        self._outputs: dict[int, RequestOutput] = {}  # unread, by completion
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, news: RequestOutput | Exception) -> None:
        """Takes what a step brought, or why there will be nothing more."""
        self.has_news = True
        if isinstance(news, Exception):
            self._error = news if isinstance(news, ValueError) else self._request_error(news)
        elif news.error is not None:
            self._error = self._request_error(news.error)
        else:
            before = self._outputs.setdefault(news.index, news)
            if before is not news:
                before.extend(news)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> RequestOutput:
        """What one completion was brought since it was last read.

        Raises:
            ValueError: The request cannot be served.
            RequestError: It could not be finished.
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
        whole = RequestError(f"request {self.request_id!r} could not be finished: {in_words(error)}")
        whole.__cause__ = error
        return whole
