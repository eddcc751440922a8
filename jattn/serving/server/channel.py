"""Messages between the process of HTTP and that of the engine."""

import contextlib
import logging
import os
import pickle
import queue
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

LOG = logging.getLogger("jattn.server")


class Channel:
    """One end of a pair of sockets.

    `post` never waits: what the other end has not taken goes out together, as one message. So an engine pays
    for one short call a step, whatever the number of its requests, and a process that is late catches up.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Takes the socket over; nothing runs yet."""
        self._connection = Connection(sock.detach())
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send, name="jattn channel, out", daemon=True)
        self._sender.start()

    def read(self) -> Any:
        """Waits for the next messages; for use before `start` alone.

        Raises:
            EOFError: The other process has ended.
        """
        try:
            return pickle.loads(self._connection.recv_bytes())
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

        threading.Thread(target=receive, name="jattn channel, in", daemon=True).start()

    def post(self, message: Any) -> None:
        """Sends a message, behind those before it; None is not one."""
        self._outbox.put(message)

    def close(self) -> None:
        """Sends what was posted, and no more; waits for it."""
        self._outbox.put(None)
        if threading.current_thread() is not self._sender:
            self._sender.join()

    def _send(self) -> None:
        is_open = True
        while is_open:
            messages = [self._outbox.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    messages.append(self._outbox.get_nowait())
            is_open = None not in messages
            try:
                self._connection.send_bytes(pickle.dumps([one for one in messages if one is not None]))
            except OSError:  # the other end is no more; who reads hears of it
                return
            except Exception:
                LOG.exception("a message to the other process could not be sent")
                self._hang_up()
                return

    def _hang_up(self) -> None:
        """Both ends' readers come to the end of what was sent."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as sock:
            sock.shutdown(socket.SHUT_RDWR)
