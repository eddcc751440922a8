"""The thread that runs an engine: its steps, and between two of them what others ask of it."""

import concurrent.futures
import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

from jattn.serving.engine.engine import Engine
from jattn.serving.engine.input_processor import Prompt
from jattn.serving.engine.outputs import RequestError, RequestOutput
from jattn.serving.engine.sampling_params import SamplingParams
from pallas_kernels.checks import require

PAUSE_S = 0.05  # with nothing to do, before an executable runs on nothing


type Piece = tuple[Any, RequestOutput | Exception]  # a Listener, and what is news to it


@runtime_checkable
class Post(Protocol):
    """Takes news to where listeners are: an event loop, or another process."""

    def post(self, pieces: list[Piece]) -> None:
        """From any thread; never waits.

        Raises:
            RuntimeError: Nobody is there any more.
        """


@runtime_checkable
class Listener(Protocol):
    """Who wants to know what a request brings; the attributes are the thread's.

    Attributes:
        mailbox: By which its news go.
        request_id: As the engine calls the request; None = not added yet.
        unfinished: Completions that have more to come.
    """

    mailbox: Any
    request_id: int | str | None
    unfinished: set[int]


class EngineThread:
    """Owns an engine while it runs: nobody else may call its methods."""

    def __init__(self, engine: Engine) -> None:
        """Starts with the first task."""
        self._engine = engine
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._readers: dict[int | str, Listener] = {}  # touched by the thread alone
        self._silent: set[int | str] = set()  # of these, whose readers have heard nothing yet; likewise
        self._lock = threading.Lock()  # of the two below
        self._thread: threading.Thread | None = None
        self._is_closed = False

    # --------------------------------------------------------------------------------- from any thread
    def submit[T](self, function: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Runs a function between two steps."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def task() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:
                    future.set_exception(error)

        self._put(task)
        return future

    def add(
        self, reader: Listener, prompt: Prompt, params: SamplingParams, request_id: int | str | None
    ) -> None:
        """Adds a request before the next step; what it brings, an error of its own too, the reader finds."""

        def task() -> None:
            try:
                reader.request_id = self._engine.add_request(prompt, params, request_id)
            except Exception as error:
                self._tell([(reader, error)])
            else:
                self._readers[reader.request_id] = reader
                self._silent.add(reader.request_id)

        self._put(task)

    def drop(self, reader: Listener) -> None:
        """Drops a reader's request before the next step, if it is unfinished; the reader hears no more."""
        with contextlib.suppress(ValueError):  # closed: everything is dropped
            self._put(lambda: self._drop(reader))

    def abort(self, request_id: int | str) -> None:
        """Drops a request and tells its reader. To be submitted.

        Raises:
            ValueError: There is no such request, or it has ended.
        """
        reader = self._readers.get(request_id)
        require(reader is not None, "request_id", "be unfinished", repr(request_id))
        assert reader is not None
        ends = [
            RequestOutput(
                request_id=request_id, index=index, new_token_ids=[], new_text="", finish_reason="abort"
            )
            for index in sorted(reader.unfinished)
        ]
        self._drop(reader)
        self._tell((reader, end) for end in ends)

    def close(self) -> None:
        """Ends the thread behind the step that it is in; open requests end with an error. Waits for it."""
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
            thread = self._thread
        if thread is not None and is_first:
            self._tasks.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _put(self, task: Callable[[], object]) -> None:
        with self._lock:
            require(not self._is_closed, "async_engine", "be open", "a closed one")
            if self._thread is None:
                # A daemon: one that nobody closed must not keep the process from ending.
                self._thread = threading.Thread(target=self._run, name="jattn engine", daemon=True)
                self._thread.start()
            self._tasks.put(task)

    # --------------------------------------------------------------------------------- in the thread
    def _run(self) -> None:
        try:
            while self._run_tasks():
                if self._engine.has_unfinished_requests():
                    self._step()
        finally:
            self._end_all(RequestError("the engine was closed"))

    def _run_tasks(self) -> bool:
        """Runs what is there by now, no more: steps must go on. Waits where there is nothing else to do.

        Returns:
            False when the thread has to end.
        """
        count = self._tasks.qsize()
        is_idle = not count and not self._engine.has_unfinished_requests()
        for _ in range(max(count, is_idle)):
            task = self._awaited() if is_idle else self._tasks.get()
            if task is None:
                return False
            task()
        return True

    def _awaited(self) -> Callable[[], object] | None:
        """The next task. Meanwhile new executables run on nothing: those of decodes, in milliseconds."""
        engine = self._engine
        warm_up = functools.partial(engine.warm_up, max_tokens=engine.scheduler.max_num_seqs)
        while engine.graphs.is_compiling or warm_up(0):
            with contextlib.suppress(queue.Empty):
                return self._tasks.get(timeout=PAUSE_S)
            with contextlib.suppress(Exception):  # of the device, which ended all that was open: nothing
                warm_up(1)
        return self._tasks.get()

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:
            self._end_all(error)
            return
        news: list[Piece] = []
        firsts: list[
            Piece
        ] = []  # told before the others: of 130 streams the last waits for 5 ms of HTTP's work
        heard: set[int | str] = set()
        for output in outputs:
            reader = self._readers.get(output.request_id)
            if reader is None:  # of one that was added before the thread began
                continue
            is_first = output.request_id in self._silent
            (firsts if is_first else news).append((reader, output))
            heard.add(output.request_id)
            if output.finish_reason is not None:
                reader.unfinished.discard(output.index)
                if not reader.unfinished:
                    del self._readers[output.request_id]
        self._silent -= heard
        for reader in self._tell([*firsts, *news]):
            self._drop(reader)

    def _drop(self, reader: Listener) -> None:
        if reader.request_id is not None and self._readers.get(reader.request_id) is reader:
            del self._readers[reader.request_id]
            self._silent.discard(reader.request_id)
            self._engine.abort(reader.request_id)

    def _end_all(self, error: Exception) -> None:
        readers = list(self._readers.values())
        for reader in readers:
            self._drop(reader)
        self._tell((reader, error) for reader in readers)

    def _tell(self, news: Iterable[Piece]) -> list[Listener]:
        """Gives each mailbox what is its listeners'.

        Returns:
            Listeners whom nothing reaches any more.
        """
        of_mailboxes: dict[int, tuple[Post, list[Piece]]] = {}
        for reader, piece in news:
            _, pieces = of_mailboxes.setdefault(id(reader.mailbox), (reader.mailbox, []))
            pieces.append((reader, piece))
        gone = []
        for mailbox, pieces in of_mailboxes.values():
            try:
                mailbox.post(pieces)
            except RuntimeError:  # as asyncio says that a loop is closed
                gone += [reader for reader, _ in pieces]
        return gone
