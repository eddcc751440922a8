"""One engine in several processes: process 0 chooses the steps, and all processes run them.

Messages use a standard-library socket and do not wait for the devices. A process learns at once that another
one has failed, even if it waits in a collective; it has a few seconds to end by itself before it is ended.
"""

import atexit
import contextlib
import multiprocessing.connection
import os
import pickle
import queue
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

GRACE_S = 3.0  # time to exit after another process has failed
END, FAILED, MEET = "end", "failed", "meet"
_NAME_BYTES = 256


class ProcessError(RuntimeError):
    """Raised if a process of the engine has failed. The message contains its error."""


def make_process_group(mesh: Mesh) -> "ProcessGroup | None":
    """Connect the processes that own a mesh's devices. Return None if there is one process.

    Args:
        mesh: Mesh of the model.

    Raises:
        ValueError: If a process of `jax.distributed` owns none of the devices.
    """
    if jax.process_count() == 1:
        return None
    process_indices = {device.process_index for device in mesh.devices.flat}
    if len(process_indices) != jax.process_count():
        raise ValueError(
            f"mesh has devices of the processes {sorted(process_indices)} only, but there are "
            f"{jax.process_count()} processes. Build the mesh from jax.devices()."
        )
    return ProcessGroup()


def require_leader(processes: "ProcessGroup | None") -> None:
    """Raise ValueError in a process that can only follow."""
    is_leader = processes is None or processes.is_leader
    if not is_leader:
        raise ValueError(
            f"Only process 0 runs requests. Call engine.follow() in process {jax.process_index()}."
        )


def require_follower(processes: "ProcessGroup | None") -> None:
    """Raise ValueError in a process that cannot follow."""
    if processes is None or processes.is_leader:
        raise ValueError(
            f"Process {jax.process_index()} cannot call follow(). It requires a mesh with devices of several "
            "processes, and is for all of them except process 0."
        )


class ProcessGroup:
    """The connections of this process to the engine's other processes.

    All processes create it when they create their engines.

    Attributes:
        is_leader: Whether this is process 0.
    """

    def __init__(self) -> None:
        """Connect to all processes. Waits for them."""
        self.is_leader = jax.process_index() == 0
        self.error: str | None = None  # the failure that ended the group
        self._is_closed = False
        self._inbox: queue.SimpleQueue[tuple[int, str, tuple[Any, ...]]] = queue.SimpleQueue()
        self._connections = _connect()
        self._listeners = [
            threading.Thread(target=self._listen, args=connection, name="jattn-processes", daemon=True)
            for connection in self._connections.items()
        ]
        # Started now, because no thread can be started while the interpreter exits.
        self._finished = threading.Event()
        threading.Thread(target=self._exit_after_failure, name="jattn-end", daemon=True).start()
        for thread in self._listeners:
            thread.start()
        atexit.register(self._at_exit)  # Runs before jax.distributed's handler, which waits for all.

    def agree_on_num_blocks(self, num_blocks: int, options: Mapping[str, str]) -> int:
        """Return the smallest number of blocks of all processes.

        Args:
            num_blocks: Number of blocks that fit this process's memory.
            options: Options that must be equal in all processes, by name.

        Raises:
            ValueError: If the options differ. All processes raise the same error.
        """
        if self.is_leader:
            offers = [(num_blocks, options), *(self._next(MEET) for _ in self._connections)]
            self.send(MEET, offers)
        else:
            self.send(MEET, num_blocks, options)
            (offers,) = self._next(MEET)
        require_same_options([options for _, options in offers])
        return min(num for num, _ in offers)

    def send(self, command: str, *arguments: Any) -> None:
        """Send a command from process 0 to all other processes, or from another process to process 0.

        Raises:
            ProcessError: If another process has failed.
        """
        self.check()
        message = pickle.dumps((command, arguments), protocol=pickle.HIGHEST_PROTOCOL)
        for connection in self._connections.values():
            try:
                connection.send_bytes(message)
            except OSError as error:
                raise ProcessError(
                    self.error or f"The connection to another process was lost: {error}"
                ) from error

    def receive_commands(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """Yield the commands of process 0 until its engine is closed.

        Raises:
            ProcessError: If another process has failed.
        """
        while True:
            _, command, arguments = self._inbox.get()
            if command == FAILED:
                raise ProcessError(arguments[0])
            if command == END:
                return
            yield command, arguments

    def check(self) -> None:
        """Raise ProcessError if another process has failed."""
        if self.error is not None:
            raise ProcessError(self.error)

    def fail(self, error: BaseException) -> None:
        """Report to all other processes that this process has failed."""
        if self.error is None and not self._is_closed:
            text = f"process {jax.process_index()} failed: {type(error).__name__}: {error}"
            self._send_ignoring_errors(FAILED, text)
            self._record_failure(text)

    def remote_failure(self) -> str | None:
        """Return the error of another process, or None.

        Waits briefly, since device errors can arrive first.
        """
        for _ in range(10):
            if self.error is not None:
                return self.error
            time.sleep(GRACE_S / 20)
        return self.error

    def close(self) -> None:
        """Close the connections. In process 0, this ends `follow` in all other processes."""
        if not self._is_closed:
            self._is_closed = True
            self._finished.set()
            if self.is_leader and self.error is None:
                self._send_ignoring_errors(END)
            for connection in self._connections.values():
                connection.close()

    # --------------------------------------------------------------------------------------- inside
    def _at_exit(self) -> None:
        error = getattr(sys, "last_exc", None)
        if error is None:
            self.close()
        else:
            self.fail(error)

    def _record_failure(self, text: str) -> None:
        self.error = text
        self._finished.set()

    def _exit_after_failure(self) -> None:
        """End this process after a failure, because a wait for devices or at exit cannot be interrupted."""
        self._finished.wait()
        if self.error is not None:  # Otherwise the group was closed.
            time.sleep(GRACE_S)
            print(f"jattn: {self.error}; this process ends.", file=sys.stderr, flush=True)
            os._exit(1)

    def _next(self, expected: str) -> Any:
        _, command, arguments = self._inbox.get()
        if command == FAILED:
            raise ProcessError(arguments[0])
        assert command == expected, (command, expected)
        return arguments

    def _listen(self, index: int, connection: Any) -> None:
        """Receive another process's messages in a thread, including its failure or exit."""
        while True:
            try:
                command, arguments = pickle.loads(connection.recv_bytes())
            except (EOFError, OSError):
                if self._is_closed:
                    return
                command, arguments = FAILED, (f"process {index} ended without an error message",)
            self._inbox.put((index, command, arguments))
            if command == END:
                self._is_closed = True
                self._finished.set()
                return
            if command == FAILED:
                self._handle_remote_failure(arguments[0])
                return

    def _handle_remote_failure(self, text: str) -> None:
        """Forward a failure, and make this process end even if it waits for its devices."""
        if self.error is None:
            if self.is_leader:
                self._send_ignoring_errors(FAILED, text)
            self._record_failure(text)

    def _send_ignoring_errors(self, command: str, *arguments: Any) -> None:
        message = pickle.dumps((command, arguments))
        for connection in self._connections.values():
            with contextlib.suppress(OSError):  # Its listener thread reports the lost connection.
                connection.send_bytes(message)


def require_same_options(options: Sequence[Mapping[str, str]]) -> None:
    """Check that options are equal in all processes. Options that only some processes have are ignored.

    Args:
        options: Options of each process, by name.

    Raises:
        ValueError: If an option differs. The message names it.
    """
    values_by_name = {
        name: dict.fromkeys(process_options[name] for process_options in options if name in process_options)
        for name in options[0]
    }
    differences = [
        f"{name} {' and '.join(values)}" for name, values in values_by_name.items() if len(values) > 1
    ]
    if differences:
        raise ValueError(
            f"The engine's options differ between processes: {'; '.join(differences)}. "
            "Pass the same options to every process."
        )


def _connect() -> dict[int, Any]:
    """Connect process 0 to all others. Return the connections by process index."""
    count, rank = jax.process_count(), jax.process_index()
    name = np.zeros(_NAME_BYTES, np.uint8)
    encoded = socket.gethostname().encode()[:_NAME_BYTES]
    name[: len(encoded)] = list(encoded)
    hosts = [bytes(host).rstrip(b"\0").decode() for host in multihost_utils.process_allgather(name)]
    is_one_host = len(set(hosts)) == 1
    host = "127.0.0.1" if is_one_host else hosts[0]
    listener = None
    address_and_secret = np.zeros(1 + 32, np.int32)  # port, then the authentication key
    if rank == 0:
        secret = secrets.token_bytes(32)
        address = (host if is_one_host else "", 0)
        listener = multiprocessing.connection.Listener(address, backlog=count, authkey=secret)
        address_and_secret[0], address_and_secret[1:] = listener.address[1], list(secret)
    address_and_secret = np.asarray(multihost_utils.broadcast_one_to_all(address_and_secret))
    if listener is not None:
        connections: dict[int, Any] = {}
        while len(connections) < count - 1:
            connection = listener.accept()
            connections[connection.recv()] = connection
        listener.close()
        return connections
    connection = multiprocessing.connection.Client(
        (host, int(address_and_secret[0])), authkey=bytes(address_and_secret[1:].tolist())
    )
    connection.send(rank)
    return {0: connection}
