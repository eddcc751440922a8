"""Message channel between the engine's process and the HTTP process."""

import contextlib
import logging
import pickle
import queue
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

LOG = logging.getLogger("jattn.server")
LENGTH = struct.Struct("!Q")  # Header of a message: its length in bytes.
READ_BUFFER_BYTES = 2**16


class Channel:
    """One end of a socket pair that carries pickled messages.

    `post` never blocks. The posting thread sends as much as the socket accepts, so that no other thread has
    to be scheduled first. A background thread sends the remainder, together with the messages posted in the
    meantime. The cost to an engine is one short call per step, whatever the number of its requests, and a
    slow receiver catches up because it gets several messages at once.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Take ownership of a socket.

        Args:
            sock: One end of a socket pair.
        """
        self._socket, self._incoming = sock, sock.makefile("rb", READ_BUFFER_BYTES)
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._send_lock = threading.Lock()  # Guards the socket's sending side and the attributes below.
        self._unsent = memoryview(b"")  # Remainder of the message that is being sent.
        self._is_open = True  # Whether messages are still sent.
        self._is_closed = False  # Whether `close` has been called.
        self._num_users = 1  # Users of the socket: the posting side and the reader thread.
        self._has_unsent: queue.SimpleQueue[bool] = queue.SimpleQueue()  # False ends the background thread.
        self._reader: threading.Thread | None = None
        threading.Thread(target=self._send_in_background, name="jattn channel, out", daemon=True).start()

    def read(self) -> Any:
        """Block until messages arrive and return them. Use it only before `start`.

        Raises:
            EOFError: If the other process has ended.
        """
        try:
            (length,) = LENGTH.unpack(self._read_bytes(LENGTH.size))
            return pickle.loads(self._read_bytes(length))
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
                        on_messages(self.read())
            except Exception:
                LOG.exception("Failed to handle a message of the other process")
            self._shut_down_socket()
            on_disconnect()
            self._release_socket()

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
        self._outbox.put(message)
        if not self._send(blocks=False):
            self._has_unsent.put(True)

    def close(self) -> None:
        """Send the messages that have been posted, and no further ones. Blocks until they are sent."""
        with self._send_lock:
            self._send_outbox(flags=0)
            is_first, self._is_closed, self._is_open = not self._is_closed, True, False
        if is_first:
            self._has_unsent.put(False)
            self._release_socket()

    def _send_in_background(self) -> None:
        while self._has_unsent.get():
            self._send(blocks=True)

    def _send(self, *, blocks: bool) -> bool:
        """Send the posted messages, unless another thread is sending, which then sends them, too.

        Returns:
            False if the socket accepts no more data now and the call does not block.
        """
        while self._is_open and self._has_data() and self._send_lock.acquire(blocking=blocks):
            try:
                if not self._send_outbox(0 if blocks else socket.MSG_DONTWAIT):
                    return False
            finally:
                self._send_lock.release()
        return True

    def _send_outbox(self, flags: int) -> bool:
        try:
            while self._is_open and self._has_data():
                self._unsent = self._unsent or self._encode_outbox()
                num_sent = self._socket.send(self._unsent, flags)
                self._unsent = self._unsent[num_sent:]
        except BlockingIOError:
            return False
        except OSError:  # The other end is closed, which the reader thread reports.
            self._is_open = False
        except Exception:
            LOG.exception("Failed to send a message to the other process")
            self._is_open = False
            self._shut_down_socket()
        return True

    def _has_data(self) -> bool:
        return bool(self._unsent) or not self._outbox.empty()

    def _encode_outbox(self) -> memoryview:
        messages = []
        with contextlib.suppress(queue.Empty):
            while True:
                messages.append(self._outbox.get_nowait())
        data = pickle.dumps(messages)
        return memoryview(LENGTH.pack(len(data)) + data)

    def _release_socket(self) -> None:
        """Close the socket if this was its last user."""
        with self._send_lock:
            self._num_users -= 1
            is_last = not self._num_users
        if is_last:
            self._incoming.close()
            self._socket.close()

    def _read_bytes(self, count: int) -> bytes:
        data = self._incoming.read(count)
        if len(data) < count:
            raise EOFError
        return data

    def _shut_down_socket(self) -> None:
        """Shut the socket down: the readers of both ends then reach the end of the data."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
