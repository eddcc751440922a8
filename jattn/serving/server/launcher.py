"""Startup and shutdown of the server."""

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
from jattn.serving.server.app import PUBLIC_PATHS, build_app
from jattn.serving.server.http_process import HttpProcess, short_switch_interval
from jattn.serving.server.options import ServerOptions
from jattn.serving.server.responses import openai_types
from jattn.serving.server.service import Service

LOG = logging.getLogger("jattn.server")


def is_logged(record: logging.LogRecord) -> bool:
    """Return whether a line of uvicorn's access log is kept; requests of probes and scrapers are not."""
    path = record.args[2] if isinstance(record.args, tuple) and len(record.args) > 2 else ""
    return str(path).partition("?")[0] not in PUBLIC_PATHS


class Server(uvicorn.Server):
    """uvicorn server of an engine that exits with status 0 after SIGINT or SIGTERM.

    Attributes:
        service: State shared by the request handlers.
        failure: Error of a failed compilation, or None.
    """

    def __init__(self, engine: EngineClient, options: ServerOptions, *, log_level: str = "info") -> None:
        """Create the server; it does not listen yet.

        Args:
            engine: Engine to serve.
            options: Configuration of the server.
            log_level: uvicorn's log level.

        Raises:
            ValueError: If the model has no tokenizer, or the chat template is invalid.
        """
        self.service = Service(engine, options)
        self.failure: Exception | None = None
        config = uvicorn.Config(
            build_app(self.service, self._lifespan),
            host=options.host,
            port=options.port,
            http="h11",  # httptools does not limit the size of headers
            log_level=log_level,
            lifespan="on",
            server_header=False,
            timeout_graceful_shutdown=options.drain_seconds,
        )
        super().__init__(config)
        logging.getLogger("uvicorn.access").addFilter(is_logged)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Stop the server on SIGTERM and SIGINT; a second signal does not wait for requests."""
        with signal_handler(self.handle_exit):
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handle SIGTERM or SIGINT."""
        self.force_exit, self.should_exit = self.should_exit, True

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncGenerator[None]:
        precompilation = asyncio.create_task(self._precompile())
        try:
            # A forced shutdown cancels the body, which is not an error.
            with short_switch_interval(), contextlib.suppress(asyncio.CancelledError):
                yield
        finally:
            self.service.is_ready = False
            await self.service.engine.aclose()
            precompilation.cancel()
            await asyncio.gather(precompilation, return_exceptions=True)

    async def _precompile(self) -> None:
        """Compile what the first step may need; /health returns 503 until then."""
        progress = sys.stderr.isatty()
        try:
            imports = asyncio.to_thread(openai_types)
            await asyncio.gather(self.service.engine.precompile(progress=progress), imports)
            self.service.is_ready = True
            LOG.info("The server is ready.")
        except Exception as error:
            self.failure, self.should_exit = error, True


def serve(make_engine: Callable[[], Engine], options: ServerOptions, sock: socket.socket) -> None:
    """Serve an engine until SIGTERM or SIGINT, with HTTP in a child process.

    Args:
        make_engine: Function that creates the engine, while the HTTP process starts.
        options: Configuration of the server.
        sock: Socket to listen on, from `create_server_socket`.

    Raises:
        ValueError: If the model has no tokenizer, or the chat template is invalid.
        ChildProcessError: If the HTTP process failed.
        Exception: The error of a failed compilation.
    """
    with HttpProcess(options, sock) as http:
        http.serve(make_engine())
        access = "an API key is required" if options.api_keys else "no API key is required"
        print(f"Serving {options.served_model_names[0]} at {base_url(sock)}/v1 ({access})", flush=True)
        with signal_handler(lambda number, frame: forward_signal(http, number)):
            http.wait()


def forward_signal(http: HttpProcess, number: int) -> None:
    """Forward a signal to the HTTP process.

    If that process has ended, the engine's thread may be compiling for minutes, and no exception reaches it.
    Then the signal ends this process at once.
    """
    if http.has_ended:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    http.signal(number)


@contextlib.contextmanager
def signal_handler(handler: Callable[[int, FrameType | None], None]) -> Generator[None]:
    """Handle SIGTERM and SIGINT within a block. Does nothing outside the main thread, as Python requires."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {sig: signal.signal(sig, handler) for sig in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for sig, previous_handler in previous.items():
            signal.signal(sig, previous_handler)


def base_url(sock: socket.socket) -> str:
    """Return the URL of a listening socket; IPv6 addresses are in brackets."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def create_server_socket(options: ServerOptions) -> socket.socket:
    """Return a socket that listens on the configured address; call it before loading weights, which is slow.

    Raises:
        OSError: If the port is in use, or the host is not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    sock = socket.create_server((options.host, options.port), family=family)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # Detects clients that vanished.
    return sock
