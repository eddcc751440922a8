"""Message channel between the engine's process and the HTTP process."""

import collections
import contextlib
import logging
import os
import pickle
import queue
import select
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

LOG = logging.getLogger("jattn.server")
MAX_DIRECT_BYTES = 2**16  # A socket that accepts data has room for more than this.


class Channel:
    """One end of a socket pair that carries pickled messages.

    `post` never blocks. The posting thread sends the message if the socket has room, so that no other thread
    has to be scheduled first; otherwise a background thread sends it. A slow receiver catches up because it
    gets several messages at once.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Take ownership of a socket.

        Args:
            sock: One end of a socket pair.
        """
        self._socket, self._connection = sock, Connection(os.dup(sock.fileno()))
        self._can_read, self._can_send = select.poll(), select.poll()
        self._can_read.register(sock, select.POLLIN)
        self._can_send.register(sock, select.POLLOUT)
        self._outbox: collections.deque[bytes] = collections.deque()
        self._lock = threading.Lock()  # Guards sending and the attributes below.
        self._is_closed = False
        self._num_users = 1  # Users of the socket: the posting side and the reader thread.
        self._has_unsent: queue.SimpleQueue[bool] = queue.SimpleQueue()  # False ends the background thread.
        self._reader: threading.Thread | None = None
        threading.Thread(target=self._send_in_background, name="jattn channel, out", daemon=True).start()

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
                            while self._can_read.poll(0):
                                messages.append(self.read())
                        on_messages(messages)
            except Exception:
                LOG.exception("Failed to handle a message of the other process")
            self._disconnect()
            on_disconnect()
            self._release()

        self._num_users += 1
        self._reader = threading.Thread(target=receive, name="jattn channel, in", daemon=True)
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
        """Send a message, after those posted before it, without blocking."""
        try:
            self._outbox.append(pickle.dumps(message))
        except Exception:
            LOG.exception("Failed to send a message to the other process")
            self._disconnect()
            return
        if self._lock.acquire(blocking=False):
            try:
                self._send(blocks=False)
            finally:
                self._lock.release()
        if self._outbox:
            self._has_unsent.put(True)

    def close(self) -> None:
        """Send the messages that have been posted, and no further ones. Blocks until they are sent."""
        with self._lock:
            self._send(blocks=True)
            is_first, self._is_closed = not self._is_closed, True
        if is_first:
            self._has_unsent.put(False)
            self._release()

    def _send_in_background(self) -> None:
        while self._has_unsent.get():
            with self._lock:
                self._send(blocks=True)

    def _send(self, *, blocks: bool) -> None:
        """Send the posted messages, as many as the socket has room for if the call must not block."""
        with contextlib.suppress(OSError):  # The other end is closed, which the reader thread reports.
            while self._outbox and not self._is_closed:
                if not blocks and (len(self._outbox[0]) > MAX_DIRECT_BYTES or not self._can_send.poll(0)):
                    return
                self._connection.send_bytes(self._outbox.popleft())
            return
        self._outbox.clear()

    def _disconnect(self) -> None:
        """Shut the socket down: the readers of both ends then reach the end of the data."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _release(self) -> None:
        """Close the socket if this was its last user."""
        with self._lock:
            self._num_users -= 1
            if not self._num_users:
                self._connection.close()
                self._socket.close()
