"""Messages between the process of HTTP and that of the engine."""

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
LENGTH = struct.Struct("!Q")  # of what follows it
READ_AT_ONCE = 2**16  # bytes


class Channel:
    """One end of a pair of sockets.

    `post` never waits. The thread that posts sends what the socket takes at once, so that no other one must
    get a turn first; the rest goes out from one that waits, and what was posted meanwhile behind it, as one
    message. So an engine pays for one short call a step, whatever the number of its requests, and a process
    that is late catches up.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Takes the socket over; nothing runs yet."""
        self._socket, self._incoming = sock, sock.makefile("rb", READ_AT_ONCE)
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._turn = threading.Lock()  # of who sends, and of what follows
        self._unsent = memoryview(b"")  # of the message that is going out
        self._is_open, self._is_closed = True, False  # whether messages go out; whether `close` was called
        self._users = 1  # of the socket: who may post, and who reads
        self._late: queue.SimpleQueue[bool] = queue.SimpleQueue()  # whether more comes
        self._reader: threading.Thread | None = None
        threading.Thread(target=self._send_late, name="jattn channel, out", daemon=True).start()

    def read(self) -> Any:
        """Waits for the next messages; for use before `start` alone.

        Raises:
            EOFError: The other process has ended.
        """
        try:
            (length,) = LENGTH.unpack(self._bytes(LENGTH.size))
            return pickle.loads(self._bytes(length))
        except OSError as error:
            raise EOFError from error

    def start(self, take: Callable[[list[Any]], None], lost: Callable[[], None]) -> None:
        """From now on a thread calls `take` with what comes, and `lost` once the other end is no more.

        What cannot be read or taken ends both ends, too: a request whose news are lost would wait for ever.
        """

        def receive() -> None:
            try:
                with contextlib.suppress(EOFError):
                    while True:
                        take(self.read())
            except Exception:
                LOG.exception("a message of the other process could not be taken")
            self._hang_up()
            lost()
            self._leave()

        self._users += 1
        self._reader = threading.Thread(target=receive, name="jattn channel, in", daemon=True)
        self._reader.start()

    def wait_until_lost(self, seconds: float) -> None:
        """Where the other process has ended: until the thread that `start` began has, too, or so long.

        It may be the last to hold what it was given, and an engine's arrays that are dropped while the
        interpreter ends abort the process.
        """
        if self._reader is not None:
            self._reader.join(seconds)

    def post(self, message: Any) -> None:
        """Sends a message, behind those before it."""
        self._outbox.put(message)
        if not self._send(waits=False):
            self._late.put(True)

    def close(self) -> None:
        """Sends what was posted, and no more; waits for it."""
        with self._turn:
            self._put_through(flags=0)
            is_first, self._is_closed, self._is_open = not self._is_closed, True, False
        if is_first:
            self._late.put(False)
            self._leave()

    def _send_late(self) -> None:
        while self._late.get():
            self._send(waits=True)

    def _send(self, *, waits: bool) -> bool:
        """Sends what was posted, if nobody else does; who does sends this, too.

        Returns:
            False: the socket takes no more now, and this does not wait.
        """
        while self._is_open and self._has_more() and self._turn.acquire(blocking=waits):
            try:
                if not self._put_through(0 if waits else socket.MSG_DONTWAIT):
                    return False
            finally:
                self._turn.release()
        return True

    def _put_through(self, flags: int) -> bool:
        try:
            while self._is_open and self._has_more():
                self._unsent = self._unsent or self._packed()
                sent = self._socket.send(self._unsent, flags)
                self._unsent = self._unsent[sent:]
        except BlockingIOError:
            return False
        except OSError:  # the other end is no more; who reads hears of it
            self._is_open = False
        except Exception:
            LOG.exception("a message to the other process could not be sent")
            self._is_open = False
            self._hang_up()
        return True

    def _has_more(self) -> bool:
        return bool(self._unsent) or not self._outbox.empty()

    def _packed(self) -> memoryview:
        messages = []
        with contextlib.suppress(queue.Empty):
            while True:
                messages.append(self._outbox.get_nowait())
        data = pickle.dumps(messages)
        return memoryview(LENGTH.pack(len(data)) + data)

    def _leave(self) -> None:
        with self._turn:
            self._users -= 1
            is_last = not self._users
        if is_last:
            self._incoming.close()
            self._socket.close()

    def _bytes(self, count: int) -> bytes:
        data = self._incoming.read(count)
        if len(data) < count:
            raise EOFError
        return data

    def _hang_up(self) -> None:
        """Both ends' readers come to the end of what was sent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
