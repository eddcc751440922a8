"""Message channel between the engine's process and the HTTP process."""

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

LOG = logging.getLogger("jattn.server")


class Channel:
    """One end of a socket pair that carries pickled messages.

    A slow receiver catches up because it gets several messages at once.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Take ownership of a socket.

        Args:
            sock: One end of a socket pair.
        """
        self._socket, self._connection = sock, Connection(os.dup(sock.fileno()))
        self._lock = threading.Lock()  # Guards sending and closing.
        self._reader: threading.Thread | None = None

    def read(self) -> Any:
        """Block until a message arrives and return it. Use it only before `start`.

        Raises:
            EOFError: If the other process has ended.
        """
        try:
            return self._connection.recv()
        except OSError as error:
            raise EOFError from error

    def start(self, on_messages: Callable[[list[Any]], None], on_disconnect: Callable[[], None]) -> None:
        """Start a thread that reads messages.

        An exception while reading or in `on_messages` disconnects both ends: a request whose outputs are
        lost would otherwise wait forever.

        Args:
            on_messages: Function called with each list of messages.
            on_disconnect: Function called once when the other end is closed.
        """

        def receive() -> None:
            try:
                with contextlib.suppress(EOFError):
                    while True:
                        messages = [self.read()]
                        with contextlib.suppress(EOFError):  # The next read raises it again.
                            while self._connection.poll():
                                messages.append(self.read())
                        on_messages(messages)
            except Exception:
                LOG.exception("Failed to handle a message of the other process")
            self._disconnect()
            on_disconnect()

        self._reader = threading.Thread(target=receive, name="jattn channel", daemon=True)
        self._reader.start()

    def join_reader(self, seconds: float) -> None:
        """Wait until the reader thread has ended, which it does when the other process ends.

        The thread may hold the last references to an engine's arrays. If it dropped them while the
        interpreter exits, the process would abort.

        Args:
            seconds: Maximum time to wait, in seconds.
        """
        if self._reader is not None:
            self._reader.join(seconds)

    def post(self, message: Any) -> None:
        """Send a message from any thread.

        This blocks only while the socket is full, which the other end's reader thread soon changes.
        """
        try:
            with self._lock, contextlib.suppress(OSError):  # The reader thread reports a closed end.
                self._connection.send(message)
        except Exception:
            LOG.exception("Failed to send a message to the other process")
            self._disconnect()

    def close(self) -> None:
        """Close the channel. Messages that have been posted still arrive."""
        self._disconnect()
        if threading.current_thread() is not self._reader:
            self.join_reader(1.0)
        with self._lock:
            self._connection.close()
            self._socket.close()

    def _disconnect(self) -> None:
        """Shut the socket down: the readers of both ends then reach the end of the data."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
