"""From the first line on the terminal to exit status 0."""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from jattn.serving.engine.engine import Engine
from jattn.serving.engine.engine_client import EngineClient
from jattn.serving.engine.outputs import RequestError
from jattn.serving.server.app import OPEN_TO_ALL, build_app
from jattn.serving.server.channel import Channel
from jattn.serving.server.engine_host import short_turns, spare_old_objects
from jattn.serving.server.event_stream import Connection
from jattn.serving.server.http_process import FORCED, HttpProcess
from jattn.serving.server.options import ServerOptions
from jattn.serving.server.remote_engine import LOST, RemoteEngine
from jattn.serving.server.service import Service

LOG = logging.getLogger("jattn.server")


def is_told(record: logging.LogRecord) -> bool:
    """Whether a line of uvicorn's access log is worth one: not what machines ask every few seconds."""
    path = record.args[2] if isinstance(record.args, tuple) and len(record.args) > 2 else ""
    return str(path).partition("?")[0] not in OPEN_TO_ALL


class Server(uvicorn.Server):
    """uvicorn's, but for the end: who is told to stop and has stopped has done as told, and exits with 0."""

    def __init__(self, engine: EngineClient, options: ServerOptions, *, log_level: str = "info") -> None:
        """Listens nowhere yet.

        Raises:
            ValueError: The model has no tokenizer, or the chat template is none.
        """
        self.service = Service(engine, options)
        self.failure: Exception | None = None  # of the preparations
        config = uvicorn.Config(
            build_app(self.service, self._lifespan),
            host=options.host,
            port=options.port,
            http=Connection,
            log_level=log_level,
            lifespan="on",
            server_header=False,
            timeout_graceful_shutdown=options.drain_seconds,
        )
        super().__init__(config)
        logging.getLogger("uvicorn.access").addFilter(is_told)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """SIGTERM and SIGINT stop the server; a second one does not wait for requests."""
        with on_signals(self.handle_exit):
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Of a signal."""
        self.force_exit, self.should_exit = self.should_exit, True

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncGenerator[None]:
        preparing = asyncio.create_task(self._prepare())
        try:
            with short_turns(), contextlib.suppress(asyncio.CancelledError):  # of who does not wait
                yield
        finally:
            self.service.is_ready = False
            await self.service.engine.aclose()
            preparing.cancel()
            await asyncio.gather(preparing, return_exceptions=True)

    async def _prepare(self) -> None:
        """Compiles what a first step may need, while /health says that it is not done; the rest goes on."""
        progress = sys.stderr.isatty()
        try:
            await self.service.engine.precompile(progress=progress)
            self.service.is_ready = True
            LOG.info("ready")
        except Exception as error:
            self.failure, self.should_exit = error, True


class ChildServer(Server):
    """That of `HttpProcess`, which counts the signals and tells of a second one by another."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Behind the server they are ignored: more may come until the process has ended."""
        told = signal.SIGTERM, signal.SIGINT, FORCED
        for sig in told:
            signal.signal(sig, self.handle_exit)
        yield
        for sig in told:
            signal.signal(sig, signal.SIG_IGN)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Of a signal, however often it comes."""
        self.should_exit, self.force_exit = True, self.force_exit or sig == FORCED


def serve(make_engine: Callable[[], Engine], options: ServerOptions, sock: socket.socket) -> None:
    """Serves on a socket until it is told to stop; HTTP has a process of its own.

    Args:
        make_engine: Makes the engine, while the other process imports what it needs.
        options: Of the server.
        sock: From `listening`.

    Raises:
        ValueError: The model has no tokenizer, or the chat template is none.
        ChildProcessError: The process that speaks HTTP ended without being told to.
        Exception: What compiling failed with.
    """
    with HttpProcess(options, sock) as http:
        http.serve(make_engine())
        told = "with an API key" if options.api_keys else "without an API key: whoever reaches it may use it"
        print(f"Serving {options.served_model_names[0]} at {url_of(sock)}/v1, {told}", flush=True)
        with on_signals(lambda number, frame: stop(http, number)):
            http.wait()


def stop(http: HttpProcess, number: int) -> None:
    """What a signal does: the other process lets requests finish, at a second one it does not.

    Where that has ended, the engine's thread may be compiling for minutes more, and no exception reaches it:
    whoever asks again is obeyed at once.
    """
    if http.has_ended:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    http.signal(number)


def run_child(channel_file: int, listening_file: int) -> None:
    """The process that `HttpProcess` starts; its exit status is 0 where it was told to stop."""
    channel = Channel(socket.socket(fileno=channel_file))
    try:
        ((info, options, log_level),) = channel.read()
    except EOFError:  # no engine could be made, as is said there
        sys.exit(1)

    def lost() -> None:
        server.failure, server.should_exit = RequestError(LOST), True

    try:
        server = ChildServer(RemoteEngine(channel, info, lost), options, log_level=log_level)
    except ValueError as error:
        channel.post(str(error))
        channel.close()
        sys.exit(1)
    channel.post("")  # nothing to refuse
    spare_old_objects()
    server.run(sockets=[socket.socket(fileno=listening_file)])
    if server.failure is not None:
        sys.exit(1)


@contextlib.contextmanager
def on_signals(handler: Callable[[int, FrameType | None], None]) -> Generator[None]:
    """Has SIGTERM and SIGINT come to a handler, where this is the main thread: no other may say so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {sig: signal.signal(sig, handler) for sig in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for sig, earlier in before.items():
            signal.signal(sig, earlier)


def url_of(sock: socket.socket) -> str:
    """Where a socket listens, as clients are told it: an address of IPv6 stands in brackets."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def listening(options: ServerOptions) -> socket.socket:
    """A socket of the port: taken before weights are loaded, which takes long.

    Raises:
        OSError: The port is taken, or the host not of this machine.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    sock = socket.create_server((options.host, options.port), family=family)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # who has vanished is found out in the end
    return sock
