"""The HTTP process, as the engine's process starts, signals and awaits it.

HTTP runs in a separate process so that it does not share an interpreter lock with the engine: parsing,
tokenization and server-sent events use another core, as in vLLM, whose API server and engine core are two
processes.
"""

import pathlib
import signal
import socket
import subprocess
import sys

from jattn.serving.engine.engine import Engine
from jattn.serving.engine.engine_client import EngineInfo
from jattn.serving.server.channel import Channel
from jattn.serving.server.engine_host import EngineHost
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
from jattn.serving.server.launcher import run_http_process
run_http_process(*map(int, sys.argv[2:]))
"""


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
            error, *messages = self._channel.read()
        except EOFError:
            raise ChildProcessError(self._exit_message()) from None
        if error:
            raise ValueError(error)
        self._host = EngineHost(engine, self._channel, messages)

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
