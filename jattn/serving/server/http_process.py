"""The process that speaks HTTP, and the other side of its beginning and end.

It shares no interpreter lock with the engine: what parsing, tokenising and server-sent events cost is the
time of another core, as in vLLM, whose API server and engine core are two processes.
"""

import pathlib
import signal
import socket
import subprocess
import sys

from jattn.serving.engine import Engine
from jattn.serving.engine_client import EngineInfo
from jattn.serving.server.channel import Channel
from jattn.serving.server.engine_host import EngineHost
from jattn.serving.server.options import ServerOptions

# The device is the engine's: here JAX is what modules import, and must not take it.
CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
import jax
jax.config.update("jax_platforms", "cpu")
from jattn.serving.server.lifecycle import run_child
run_child(*map(int, sys.argv[2:]))
"""


class HttpProcess:
    """Serves an engine of this process over HTTP from another one.

    Attributes:
        pid: The other process.
    """

    def __init__(
        self, engine: Engine, options: ServerOptions, sock: socket.socket, *, log_level: str = "info"
    ) -> None:
        """Starts it, and waits until it knows that it can serve; executables are made behind.

        Raises:
            ValueError: The model has no tokenizer, or the chat template is none.
            ChildProcessError: It ended before it could say so.
        """
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
        channel = Channel(ours)
        channel.post((EngineInfo.of(engine), options, log_level))
        try:
            refusal, *early = channel.read()
        except EOFError:
            raise ChildProcessError(self._told()) from None
        if refusal:
            channel.close()
            self._process.wait()
            raise ValueError(refusal)
        self._host = EngineHost(engine, channel, early)

    @property
    def has_ended(self) -> bool:
        """Whether the other process is no more; `wait` then says why."""
        return self._process.poll() is not None

    def signal(self, number: int) -> None:
        """Has it stop: the first lets requests finish, a second does not wait for them."""
        self._process.send_signal(number)

    def wait(self) -> None:
        """Until it has ended; then the engine's thread ends, too.

        Raises:
            Exception: What compiling failed with.
            ChildProcessError: It ended for no reason that is known here.
        """
        try:
            self._process.wait()
        finally:
            self._process.kill()  # nothing where it has ended
            self._host.close()
        if self._host.failure is not None:
            raise self._host.failure
        if self._process.returncode:
            raise ChildProcessError(self._told())

    def _told(self) -> str:
        code = self._process.wait()
        told = signal.Signals(-code).name if code < 0 else f"status {code}"
        return f"the process that speaks HTTP ended with {told}: what it printed says why"
