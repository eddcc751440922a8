"""How what a step brings comes from the engine's thread to an event loop's readers."""

import asyncio
import time
from typing import TYPE_CHECKING

from jattn.serving.engine.engine_thread import Piece
from jattn.serving.engine.outputs import RequestError, RequestOutput, in_words

# Of the loop's time its readers get one part in so many: Python runs one thread at a time, and the engine's
# must prepare the next step meanwhile. 256 streams at 12 ms a step are read every second or third step.
PARTS = 3


class Mailbox:
    """One event loop's.

    Readers that cost the loop more than their part of the time get several steps' tokens together, as one
    output; who waits for the first one, or for an error, gets it at once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Empty."""
        self._loop = loop
        self._held: list[Piece] = []
        self._rests_until = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def post(self, pieces: list[Piece]) -> None:
        """From any thread; wakes the loop once, whatever the number of its readers.

        Raises:
            RuntimeError: The loop is closed: nobody will read what is theirs.
        """
        self._loop.call_soon_threadsafe(self._take, pieces)

    # --------------------------------------------------------------------------------- in the loop
    def _take(self, pieces: list[Piece]) -> None:
        is_urgent = any(isinstance(news, Exception) for _, news in pieces)
        if is_urgent or self._loop.time() >= self._rests_until:
            self._held += pieces
            self._hand_out()
            return
        for reader, news in pieces:
            if reader.has_news:
                self._held.append((reader, news))
            else:
                reader.put(news)
        if self._held and self._timer is None:
            self._timer = self._loop.call_at(self._rests_until, self._hand_out)

    def _hand_out(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        pieces, self._held = self._held, []
        start = time.thread_time()
        for reader, news in pieces:
            reader.put(news)
        self._loop.call_soon(self._rest, start)  # behind the tasks that this wakes

    def _rest(self, start: float) -> None:
        taken = time.thread_time() - start
        self._rests_until = self._loop.time() + (PARTS - 1) * taken


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
