"""How what a step brings comes from the engine's thread to an event loop's readers."""

import asyncio
import time

from jattn.serving.engine.engine_thread import Piece

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
