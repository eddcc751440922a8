"""The engine's process: it starts the HTTP process, runs the engine for it, and forwards signals.

HTTP runs in a separate process so that it does not share an interpreter lock with the engine: parsing,
tokenization and server-sent events use another core, as in vLLM, whose API server and engine core are two
processes.
"""

import concurrent.futures
import contextlib
import gc
import pathlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any

from jattn.serving.engine.engine import Engine
from jattn.serving.engine.engine_client import EngineInfo
from jattn.serving.engine.engine_thread import EngineThread, OutputItem, OutputListener
from jattn.serving.engine.input_processor import Prompt
from jattn.serving.engine.outputs import RequestError, RequestOutput, describe_error
from jattn.serving.engine.sampling_params import SamplingParams, StructuredOutputsParams
from jattn.serving.server.channel import Channel
from jattn.serving.server.options import ServerOptions

# Signal of a forced shutdown, sent on the second SIGINT or SIGTERM. The first one may reach the HTTP process
# twice, since systemd signals all processes of a service.
FORCED = signal.SIGUSR1
READER_TIMEOUT = 10.0  # Seconds in which the reader thread notices that the other process has ended.

# The device belongs to the engine's process. The HTTP process only imports JAX and must not initialize it.
CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
import jax
jax.config.update("jax_platforms", "cpu")
from jattn.serving.server.remote_engine import run_http_process
run_http_process(*map(int, sys.argv[2:]))
"""

# Python's GIL switch interval while a server runs. With the default of 5 ms, a thread that a message wakes
# waits for the engine's thread in the middle of a step, and the engine's thread waits for compiling threads
# whenever it returns from a device. Measured on two slow cores: with 256 streams in one process, a token
# every 16 ms and 6 ms of the engine's own work in 40 pieces, a step took 29 ms with 5 ms and 20 ms with
# 0.5 ms. A byte echoed by a thread beside a busy one took 7.1 ms with 5 ms, 0.60 ms with 0.5 ms and 0.19 ms
# with 0.1 ms. Three busy threads lose 10% of their throughput with either.
SWITCH_SECONDS = 0.0001


@contextlib.contextmanager
def short_switch_interval() -> Generator[None]:
    """Shorten the GIL switch interval within a block."""
    previous = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(previous)


def freeze_gc_heap() -> None:
    """Exclude the objects that exist before the first request from garbage collection.

    These are modules, the model and JAX's traces, which stay until the process ends. With the engine of
    `benchmarks host`, a full collection, which blocks all threads, traversed 237,000 objects in 220 ms on a
    slow core; with a frozen heap it takes 0.2 ms.

    Source: vLLM `freeze_gc_heap`.
    """
    gc.collect()
    gc.freeze()


class RemoteReader(OutputListener):
    """A request whose reader is in the HTTP process; the `EngineHost` is its mailbox.

    Attributes:
        number: Number of the request in both processes.
        is_dropped: Whether the reader needs no further outputs.
    """

    def __init__(self, host: "EngineHost", number: int, num_completions: int) -> None:
        super().__init__(host, num_completions)
        self.number, self.is_dropped = number, False


class EngineHost:
    """Runner of an engine for the HTTP process: handles its messages and sends the outputs of steps.

    Attributes:
        failure: Error of a failed compilation, or None.
    """

    def __init__(self, engine: Engine, channel: Channel) -> None:
        """Start serving, until the HTTP process ends or `close` is called.

        Args:
            engine: Engine to run; nothing else may use it meanwhile.
            channel: Channel to the HTTP process.
        """
        self.failure: Exception | None = None
        self._exit_stack = contextlib.ExitStack()
        self._exit_stack.enter_context(short_switch_interval())
        self._engine, self._channel = engine, channel
        self._thread = EngineThread(engine)
        self._readers: dict[int, RemoteReader] = {}  # Used by the channel's thread only.
        self._lock = threading.Lock()  # Guards is_dropped: grammars are compiled in other threads.
        self._pool = concurrent.futures.ThreadPoolExecutor(2, "jattn grammars")
        channel.start(self._handle_messages, self._drop_all)

    def close(self) -> None:
        """End the engine's thread after its current step."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._thread.close()
        self._channel.close()
        self._exit_stack.close()
        gc.unfreeze()

    def post(self, pieces: list[OutputItem]) -> None:
        """Send the outputs of a step as one message; may be called from any thread.

        Args:
            pieces: Pairs of a reader and its output or error.
        """
        self._channel.post(("outputs", [(reader.number, _picklable(output)) for reader, output in pieces]))

    # The methods below run in the channel's thread.

    def _handle_messages(self, messages: list[Any]) -> None:
        handlers: dict[str, Callable[..., None]] = {"add": self._add, "drop": self._drop, "call": self._call}
        for message_type, *args in messages:
            try:
                handlers[message_type](*args)
            except ValueError:  # The engine's thread is closed; its requests have ended with an error.
                return

    def _add(self, number: int, prompt: Prompt, params: SamplingParams) -> None:
        reader = self._readers[number] = RemoteReader(self, number, params.n)

        def add() -> None:
            with self._lock:
                if not reader.is_dropped:
                    self._thread.add(reader, prompt, params, number)

        def compile_grammar_and_add(structured_outputs: StructuredOutputsParams) -> None:
            try:
                self._engine.grammars.mask(structured_outputs)
                add()
            except Exception as error:
                self._channel.post(("outputs", [(number, _picklable(error))]))

        if params.structured_outputs is None:
            add()
        else:  # Compile the grammar in the pool, where it does not delay steps.
            self._pool.submit(compile_grammar_and_add, params.structured_outputs)

    def _drop(self, number: int) -> None:
        """Remove a request whose reader has everything or needs nothing more."""
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
        freeze_gc_heap()
        threading.Thread(target=self._report_full_speed, daemon=True).start()

    def _report_full_speed(self) -> None:
        """Wait for background compilation, and print that it has ended."""
        try:
            self._engine.graphs.wait()
            text = f"all {self._engine.graphs.num_compiles} steps are compiled, and run at full speed"
        except Exception as error:
            text = f"some steps could not be compiled in the background: {describe_error(error)}"
        if threading.main_thread().is_alive():  # Otherwise the process is ending, which stops compilation.
            print(f"jattn: {text}", file=sys.stderr, flush=True)

    def _call(self, number: int, name: str, *args: Any) -> None:
        if name == "read_stats":  # Answered at once: a scrape must not wait for the end of a step.
            self._channel.post(("result", number, self._engine.stats, None))
            return
        engine = self._engine
        functions: dict[str, Callable[..., None]] = {
            "precompile": self._precompile,
            "reset_prefix_cache": lambda: engine.scheduler.reset_prefix_cache(),
        }

        def send_result(future: concurrent.futures.Future[None]) -> None:
            error = future.exception()
            if name == "precompile" and isinstance(error, Exception):
                self.failure = error
            picklable = _picklable(error) if isinstance(error, Exception) else None
            self._channel.post(("result", number, None, picklable))

        self._thread.submit(lambda: functions[name](*args)).add_done_callback(send_result)


class HttpProcess:
    """A child process that serves this process's engine over HTTP.

    Use it as a context manager, which kills the child process at the end.

    Attributes:
        pid: Process id of the child process.
    """

    def __init__(self, options: ServerOptions, sock: socket.socket, *, log_level: str = "info") -> None:
        """Start the child process, which imports its modules while the engine is created here.

        Args:
            options: Configuration of the server.
            sock: Socket to listen on, from `create_server_socket`.
            log_level: uvicorn's log level.
        """
        parent_end, child_end = socket.socketpair()
        files = (child_end.fileno(), sock.fileno())
        root = str(pathlib.Path(__file__).parents[3])
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD, root, *map(str, files)],
            pass_fds=files,
            start_new_session=True,  # Ctrl-C signals this process only, which forwards it once.
        )
        self.pid = self._process.pid
        child_end.close()
        self._options, self._log_level = options, log_level
        self._is_stopping = False
        self._channel = Channel(parent_end)
        self._host: EngineHost | None = None

    def __enter__(self) -> "HttpProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # Does nothing if it has ended.
        self._process.wait()
        if self._host is None:
            self._channel.close()

    def serve(self, engine: Engine) -> None:
        """Connect an engine and wait until the HTTP process accepts it; compilation continues afterwards.

        Args:
            engine: Engine to serve.

        Raises:
            ValueError: If the model has no tokenizer, or the chat template is invalid.
            ChildProcessError: If the HTTP process ended early.
        """
        self._channel.post((EngineInfo.from_engine(engine), self._options, self._log_level))
        try:
            error = self._channel.read()
        except EOFError:
            raise ChildProcessError(self._exit_message()) from None
        if error:
            raise ValueError(error)
        self._host = EngineHost(engine, self._channel)

    @property
    def has_ended(self) -> bool:
        """Whether the HTTP process has ended; `wait` then raises its error."""
        return self._process.poll() is not None

    def signal(self, number: int) -> None:
        """Stop the HTTP process: the first signal lets requests finish, a second one does not.

        Args:
            number: Signal number, SIGINT or SIGTERM.
        """
        self._process.send_signal(FORCED if self._is_stopping else number)
        self._is_stopping = True

    def wait(self) -> None:
        """Serve until the HTTP process ends, then end the engine's thread.

        Raises:
            Exception: The error of a failed compilation.
            ChildProcessError: If the HTTP process failed.
        """
        assert self._host is not None
        try:
            self._process.wait()
        finally:
            self._process.kill()  # Does nothing if it has ended.
            self._host.close()
            self._channel.join_reader(READER_TIMEOUT)
        if self._host.failure is not None:
            raise self._host.failure
        if self._process.returncode:
            raise ChildProcessError(self._exit_message())

    def _exit_message(self) -> str:
        code = self._process.wait()
        cause = signal.Signals(-code).name if code < 0 else f"status {code}"
        return f"The HTTP process ended with {cause}. See its output above for the reason."


def _picklable(output: RequestOutput | Exception) -> RequestOutput | Exception:
    """Replace an error by one that can be pickled, which errors of libraries do not always allow."""
    if isinstance(output, RequestOutput):
        if output.error is not None:
            return _picklable(output.error)
        return output
    if isinstance(output, ValueError):
        return ValueError(str(output))
    return RequestError(describe_error(output))
