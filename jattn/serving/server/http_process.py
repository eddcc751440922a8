"""The process that speaks HTTP, and the other side of its beginning and end.

It shares no interpreter lock with the engine: what parsing, tokenising and server-sent events cost is the
time of another core, as in vLLM, whose API server and engine core are two processes.
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

# Says that a second signal has come. The first may come twice: systemd tells all processes of a service.
FORCED = signal.SIGUSR1
LOST_S = 10.0  # in which what reads of a process that has ended sees that

# The device is the engine's: here JAX is what modules import, and must not take it.
CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
import jax
jax.config.update("jax_platforms", "cpu")
from jattn.serving.server.launcher import run_child
run_child(*map(int, sys.argv[2:]))
"""


class HttpProcess:
    """Serves an engine of this process over HTTP from another one, which a `with` block ends behind it.

    Attributes:
        pid: The other process.
    """

    def __init__(self, options: ServerOptions, sock: socket.socket, *, log_level: str = "info") -> None:
        """Starts it: it imports what it needs while the engine is made here."""
        ours, theirs = socket.socketpair()
        files = (theirs.fileno(), sock.fileno())
        here = str(pathlib.Path(__file__).parents[3])
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD, here, *map(str, files)],
            pass_fds=files,
            start_new_session=True,  # Ctrl-C comes here, and from here there, once
        )
        self.pid = self._process.pid
        theirs.close()
        self._options, self._log_level = options, log_level
        self._is_told = False  # to stop
        self._channel = Channel(ours)
        self._host: EngineHost | None = None

    def __enter__(self) -> "HttpProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # nothing where it has ended
        self._process.wait()
        if self._host is None:
            self._channel.close()

    def serve(self, engine: Engine) -> None:
        """Gives it an engine, and waits until it knows that it can serve; executables are made behind.

        Raises:
            ValueError: The model has no tokenizer, or the chat template is none.
            ChildProcessError: It ended before it could say so.
        """
        self._channel.post((EngineInfo.of(engine), self._options, self._log_level))
        try:
            refusal, *early = self._channel.read()
        except EOFError:
            raise ChildProcessError(self._told()) from None
        if refusal:
            raise ValueError(refusal)
        self._host = EngineHost(engine, self._channel, early)

    @property
    def has_ended(self) -> bool:
        """Whether the other process is no more; `wait` then says why."""
        return self._process.poll() is not None

    def signal(self, number: int) -> None:
        """Has it stop: the first lets requests finish, a second does not wait for them."""
        self._process.send_signal(FORCED if self._is_told else number)
        self._is_told = True

    def wait(self) -> None:
        """Until it has ended, serving; then the engine's thread ends, too.

        Raises:
            Exception: What compiling failed with.
            ChildProcessError: It ended for no reason that is known here.
        """
        assert self._host is not None
        try:
            self._process.wait()
        finally:
            self._process.kill()  # nothing where it has ended
            self._host.close()
            self._channel.wait_until_lost(LOST_S)
        if self._host.failure is not None:
            raise self._host.failure
        if self._process.returncode:
            raise ChildProcessError(self._told())

    def _told(self) -> str:
        code = self._process.wait()
        told = signal.Signals(-code).name if code < 0 else f"status {code}"
        return f"the process that speaks HTTP ended with {told}: what it printed says why"
