"""The thread that runs an engine: its steps, and other threads' calls between two steps."""

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

PAUSE_S = 0.05  # idle time before an executable is warmed up


type OutputItem = tuple[Any, RequestOutput | Exception]  # (OutputListener, its output)


@runtime_checkable
class OutputChannel(Protocol):
    """Delivers outputs to listeners in an event loop or in another process."""

    def post(self, items: list[OutputItem]) -> None:
        """Deliver outputs. Can be called from any thread, and never waits.

        Raises:
            RuntimeError: If the receiver is closed.
        """


class OutputListener:
    """A receiver of one request's outputs. The engine's thread owns the attributes.

    Attributes:
        mailbox: Channel that delivers the outputs.
        request_id: The engine's identifier of the request; None before the request is added.
        unfinished: Indices of the completions that are unfinished.
    """

    def __init__(self, mailbox: OutputChannel | None, num_completions: int) -> None:
        """Create the receiver of a request that has not been added."""
        self.mailbox: Any = mailbox
        self.request_id: int | str | None = None
        self.unfinished = set(range(num_completions))


class EngineThread:
    """A thread that owns an engine. While it runs, other threads must not call the engine's methods."""

    def __init__(self, engine: Engine) -> None:
        """Prepare the thread. It starts with the first call."""
        self._engine = engine
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._listeners: dict[int | str, OutputListener] = {}  # used only by the thread
        self._without_output: set[int | str] = (
            set()
        )  # requests without an output so far; used only by the thread
        self._lock = threading.Lock()  # protects _thread and _is_closed
        self._thread: threading.Thread | None = None
        self._is_closed = False

    # --------------------------------------------------------------------------------- from any thread
    def submit[T](self, function: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Run a function in the engine's thread between two steps, and return its future."""
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
        self, listener: OutputListener, prompt: Prompt, params: SamplingParams, request_id: int | str | None
    ) -> None:
        """Add a request before the next step.

        The listener receives its outputs, or the error that prevents it.
        """

        def task() -> None:
            try:
                listener.request_id = self._engine.add_request(prompt, params, request_id)
            except Exception as error:
                self._deliver([(listener, error)])
            else:
                self._listeners[listener.request_id] = listener
                self._without_output.add(listener.request_id)

        self._put(task)

    def drop(self, listener: OutputListener) -> None:
        """Abort a listener's request before the next step if it is unfinished.

        The listener gets no more outputs.
        """
        with contextlib.suppress(ValueError):  # If closed, everything has been dropped.
            self._put(lambda: self._drop(listener))

    def abort(self, request_id: int | str) -> None:
        """End a request with finish_reason "abort". Must run in the engine's thread (see `submit`).

        Raises:
            ValueError: If there is no such unfinished request.
        """
        listener = self._listeners.get(request_id)
        if listener is None:
            raise ValueError(
                f"Request {request_id!r} is unknown or has finished. Pass the id of a submitted request."
            )
        ends = [
            RequestOutput(
                request_id=request_id, index=index, new_token_ids=[], new_text="", finish_reason="abort"
            )
            for index in sorted(listener.unfinished)
        ]
        self._drop(listener)
        self._deliver((listener, end) for end in ends)

    def close(self) -> None:
        """Stop the thread after its current step, and wait for it. Unfinished requests end with an error."""
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
            thread = self._thread
        if thread is not None and is_first:
            self._tasks.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _put(self, task: Callable[[], object]) -> None:
        with self._lock:
            if self._is_closed:
                raise ValueError("This AsyncEngine is closed. Create a new AsyncEngine to send requests.")
            if self._thread is None:
                # A daemon thread does not keep the process alive.
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
            self._end_all(RequestError("AsyncEngine was closed"))

    def _run_tasks(self) -> bool:
        """Run the tasks that are queued now, but none that arrive later; wait if there is nothing else to do.

        Returns:
            False when the thread has to end.
        """
        count = self._tasks.qsize()
        is_idle = not count and not self._engine.has_unfinished_requests()
        for _ in range(max(count, is_idle)):
            task = self._next_task() if is_idle else self._tasks.get()
            if task is None:
                return False
            task()
        return True

    def _next_task(self) -> Callable[[], object] | None:
        """Wait for the next task.

        Meanwhile, warm up new executables of decode steps, which takes milliseconds.
        """
        engine = self._engine
        warm_up = functools.partial(engine.warm_up, max_tokens=engine.scheduler.max_num_seqs)
        while engine.graphs.is_compiling or warm_up(0):
            with contextlib.suppress(queue.Empty):
                return self._tasks.get(timeout=PAUSE_S)
            with contextlib.suppress(Exception):  # A device error; no request is unfinished.
                warm_up(1)
        return self._tasks.get()

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:
            self._end_all(error)
            return
        outputs_by_listener: list[OutputItem] = []
        first_outputs: list[OutputItem] = []  # delivered first: HTTP work for 130 streams takes 5 ms
        request_ids: set[int | str] = set()
        for output in outputs:
            listener = self._listeners.get(output.request_id)
            if listener is None:  # It was added before the thread started.
                continue
            is_first = output.request_id in self._without_output
            (first_outputs if is_first else outputs_by_listener).append((listener, output))
            request_ids.add(output.request_id)
            if output.finish_reason is not None:
                listener.unfinished.discard(output.index)
                if not listener.unfinished:
                    del self._listeners[output.request_id]
        self._without_output -= request_ids
        for listener in self._deliver([*first_outputs, *outputs_by_listener]):
            self._drop(listener)

    def _drop(self, listener: OutputListener) -> None:
        if listener.request_id is not None and self._listeners.get(listener.request_id) is listener:
            del self._listeners[listener.request_id]
            self._without_output.discard(listener.request_id)
            self._engine.abort(listener.request_id)

    def _end_all(self, error: Exception) -> None:
        listeners = list(self._listeners.values())
        for listener in listeners:
            self._drop(listener)
        self._deliver((listener, error) for listener in listeners)

    def _deliver(self, outputs_by_listener: Iterable[OutputItem]) -> list[OutputListener]:
        """Post outputs to the mailboxes of their listeners.

        Returns:
            Listeners whose mailbox is closed.
        """
        by_mailbox: dict[int, tuple[OutputChannel, list[OutputItem]]] = {}
        for listener, item in outputs_by_listener:
            _, items = by_mailbox.setdefault(id(listener.mailbox), (listener.mailbox, []))
            items.append((listener, item))
        gone = []
        for mailbox, items in by_mailbox.values():
            try:
                mailbox.post(items)
            except RuntimeError:  # The event loop is closed.
                gone += [listener for listener, _ in items]
        return gone
