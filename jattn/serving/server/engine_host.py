"""The engine's end of the channel to the process of HTTP."""

import concurrent.futures
import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

from jattn.serving.engine.engine import Engine
from jattn.serving.engine.engine_thread import EngineThread, OutputItem
from jattn.serving.engine.input_processor import Prompt
from jattn.serving.engine.outputs import RequestError, RequestOutput, describe_error
from jattn.serving.engine.sampling_params import SamplingParams, StructuredOutputsParams
from jattn.serving.server.channel import Channel


class RemoteReader:
    """A request whose reader is in another process.

    Attributes:
        mailbox: By which its news go.
        number: Its name there. What the engine refuses, too, is told by it.
        request_id: The same number in the engine; None = not added yet.
        unfinished: Completions that have more to come.
        is_dropped: Whether its reader wants no more.
    """

    def __init__(self, mailbox: "Outbox", number: int, num_completions: int) -> None:
        """Not added yet."""
        self.mailbox, self.number = mailbox, number
        self.request_id: int | str | None = None
        self.unfinished = set(range(num_completions))
        self.is_dropped = False


class Outbox:
    """Sends what a step brought as one message."""

    def __init__(self, channel: Channel) -> None:
        """Over a channel."""
        self._channel = channel

    def post(self, pieces: list[OutputItem]) -> None:
        """From any thread."""
        self._channel.post(("news", [(reader.number, _sendable(news)) for reader, news in pieces]))


class EngineHost:
    """Does what the other process asks of an engine, and sends it what steps bring.

    Attributes:
        failure: Why executables could not be made; None = they could, or nobody has asked yet.
    """

    def __init__(self, engine: Engine, channel: Channel, early: Sequence[Any] = ()) -> None:
        """Serves from now on, until the other process has ended or this is closed.

        Args:
            engine: Nobody else may use it meanwhile.
            channel: To the other process.
            early: Messages of it that have been read.
        """
        self.failure: Exception | None = None
        self._until_closed = contextlib.ExitStack()
        self._until_closed.enter_context(short_turns())
        self._engine, self._channel = engine, channel
        self._thread, self._outbox = EngineThread(engine), Outbox(channel)
        self._readers: dict[int, RemoteReader] = {}  # touched by the channel's thread alone
        self._lock = threading.Lock()  # of is_dropped: a request's grammar is made in a thread
        self._pool = concurrent.futures.ThreadPoolExecutor(2, "jattn grammars")
        self._take(list(early))
        channel.start(self._take, self._drop_all)

    def close(self) -> None:
        """Ends the engine's thread behind the step that it is in."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._thread.close()
        self._channel.close()
        self._until_closed.close()
        gc.unfreeze()

    # ------------------------------------------------------------------- in the channel's thread
    def _take(self, messages: list[Any]) -> None:
        asked: dict[str, Callable[..., None]] = {"add": self._add, "drop": self._drop, "call": self._call}
        for what, *rest in messages:
            try:
                asked[what](*rest)
            except ValueError:  # the engine's thread is closed: its requests have ended with an error
                return

    def _add(self, number: int, prompt: Prompt, params: SamplingParams) -> None:
        reader = self._readers[number] = RemoteReader(self._outbox, number, params.n)

        def add() -> None:
            with self._lock:
                if not reader.is_dropped:
                    self._thread.add(reader, prompt, params, number)

        def with_grammar(form: StructuredOutputsParams) -> None:
            try:
                self._engine.grammars.mask(form)
                add()
            except Exception as error:
                self._channel.post(("news", [(number, _sendable(error))]))

        if params.structured_outputs is None:
            add()
        else:  # compiled here, not where steps wait for it
            self._pool.submit(with_grammar, params.structured_outputs)

    def _drop(self, number: int) -> None:
        """The other process has no reader any more: it has all, or wants no more."""
        reader = self._readers.pop(number)
        with self._lock:
            reader.is_dropped = True
            if reader.unfinished:
                self._thread.drop(reader)

    def _drop_all(self) -> None:
        for number in list(self._readers):
            self._drop(number)

    def _precompile(self, progress: bool) -> None:
        self._engine.precompile(progress=progress, wait=False)
        spare_old_objects()

    def _call(self, number: int, name: str, *words: Any) -> None:
        if name == "read_stats":  # in the midst of a step, too: a scrape must not wait
            self._channel.post(("answer", number, self._engine.stats, None))
            return
        engine = self._engine
        functions: dict[str, Callable[..., None]] = {
            "precompile": self._precompile,
            "reset_prefix_cache": lambda: engine.scheduler.reset_prefix_cache(),
        }

        def answer(future: concurrent.futures.Future[None]) -> None:
            error = future.exception()
            if name == "precompile" and isinstance(error, Exception):
                self.failure = error
            told = _sendable(error) if isinstance(error, Exception) else None
            self._channel.post(("answer", number, None, told))

        self._thread.submit(lambda: functions[name](*words)).add_done_callback(answer)


def _sendable(news: RequestOutput | Exception) -> RequestOutput | Exception:
    """An error in words: those of libraries cannot always be made again in another process."""
    if isinstance(news, RequestOutput):
        if news.error is not None:
            return _sendable(news.error)
        return news
    if isinstance(news, ValueError):
        return ValueError(str(news))
    return RequestError(describe_error(news))


def spare_old_objects() -> None:
    """Has Python's collector leave out what the first request finds: modules, the model, what JAX traced.

    It stays to the end. With the engine of `benchmarks host` a full collection, which lets no other thread
    run, walked through 237,000 objects for 220 ms of a slow core; frozen it takes 0.2 ms.

    Source: vLLM `freeze_gc_heap`.
    """
    gc.collect()
    gc.freeze()


# With Python's own, 5 ms, a thread that a message has woken waits for the engine's, in the midst of a step's
# work, and the engine's for those that compile, whenever it comes back from a device. With 256 streams in one
# process, a token every 16 ms and 6 ms of the engine's own work in 40 pieces, a step took 29 ms on two slow
# cores, with 0.5 ms 20. A byte that a thread sends back beside one that never rests: 7.1 ms, with 0.5 0.60,
# with 0.1 0.19. Three threads that never rest do 10 % less than with 5 ms, by either.
SWITCH_SECONDS = 0.0001


@contextlib.contextmanager
def short_turns() -> Generator[None]:
    """Within it threads of this process wait for each other no longer; behind it as long as before."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
