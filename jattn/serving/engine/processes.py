"""Engines of several processes as one: process 0 says what runs, and the others do the same.

Words go by a socket of the standard library, beside the devices: what is on its way to these is not waited
for. Each process hears at once that another has failed, be it stuck in a sum over devices meanwhile: it has
some seconds to end by itself, and is ended then.
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

from pallas_kernels.checks import require

GRACE_S = 3.0  # to end by itself for a process that hears of another's failure
END, FAILED, MEET = "end", "failed", "meet"
_NAME_BYTES = 256


class ProcessError(RuntimeError):
    """A process of the engine has failed; the message has its error."""


def processes_of(mesh: Mesh | None) -> "Processes | None":
    """The processes that a mesh's devices belong to; None where it is this one alone.

    Args:
        mesh: The model's.

    Raises:
        ValueError: A process of `jax.distributed` has none of them.
    """
    if mesh is None or jax.process_count() == 1:
        return None
    held = {device.process_index for device in mesh.devices.flat}
    rule = f"have devices of all {jax.process_count()} processes (jax.process_count())"
    require(len(held) == jax.process_count(), "mesh", rule, f"those of {sorted(held)}")
    return Processes()


def must_lead(processes: "Processes | None") -> None:
    """Raises ValueError on a process that can only follow."""
    leads = processes is None or processes.leads
    require(leads, "the process", "be 0 (the others call engine.follow())", jax.process_index())


def must_follow(processes: "Processes | None") -> None:
    """Raises ValueError where there is nobody to follow."""
    rule = "be one of several that the model's mesh has devices of, and not the first, which leads"
    require(processes is not None and not processes.leads, "follow()'s process", rule, jax.process_index())


class Processes:
    """This process and the others, connected. All make it at the same time, as their engines are made.

    Attributes:
        leads: This is process 0.
    """

    def __init__(self) -> None:
        """Waits for all of them."""
        self.leads = jax.process_index() == 0
        self.error: str | None = None  # that ended it
        self._is_closed = False
        self._heard: queue.SimpleQueue[tuple[int, str, tuple[Any, ...]]] = queue.SimpleQueue()
        self._others = _meet()
        self._listeners = [
            threading.Thread(target=self._listen, args=other, name="jattn-processes", daemon=True)
            for other in self._others.items()
        ]
        # It waits from now on: where an error ends the interpreter, no thread can be started.
        self._is_over = threading.Event()
        threading.Thread(target=self._end_soon, name="jattn-end", daemon=True).start()
        for thread in self._listeners:
            thread.start()
        atexit.register(self._at_exit)  # before jax.distributed's own, which waits for all

    def agree(self, num_blocks: int, options: Mapping[str, str]) -> int:
        """The fewest blocks that a process has room for.

        Args:
            num_blocks: Of this process.
            options: What must be the same in all of them, by name, in words.

        Raises:
            ValueError: It is not; all of them get the same error.
        """
        if self.leads:
            everyone = [(num_blocks, options), *(self._next(MEET) for _ in self._others)]
            self.send(MEET, everyone)
        else:
            self.send(MEET, num_blocks, options)
            (everyone,) = self._next(MEET)
        require_alike([options for _, options in everyone])
        return min(num for num, _ in everyone)

    def send(self, what: str, *arguments: Any) -> None:
        """Says it to the others: process 0 to all, they to process 0.

        Raises:
            ProcessError: One of them has failed.
        """
        self.check()
        message = pickle.dumps((what, arguments), protocol=pickle.HIGHEST_PROTOCOL)
        for other in self._others.values():
            try:
                other.send_bytes(message)
            except OSError as error:
                raise ProcessError(self.error or f"a process is gone: {error}") from error

    def heard(self) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """What process 0 says, until its engine is closed.

        Raises:
            ProcessError: Another process has failed.
        """
        while True:
            _, what, arguments = self._heard.get()
            if what == FAILED:
                raise ProcessError(arguments[0])
            if what == END:
                return
            yield what, arguments

    def check(self) -> None:
        """Raises ProcessError if another process has failed."""
        if self.error is not None:
            raise ProcessError(self.error)

    def fail(self, error: BaseException) -> None:
        """Says to the others that this one has failed."""
        if self.error is None and not self._is_closed:
            text = f"process {jax.process_index()} failed: {type(error).__name__}: {error}"
            self._tell_quietly(FAILED, text)
            self._end_with(text)

    def failure_elsewhere(self) -> str | None:
        """The error of another process, which may come a little later than what it does to the devices."""
        for _ in range(10):
            if self.error is not None:
                return self.error
            time.sleep(GRACE_S / 20)
        return self.error

    def close(self) -> None:
        """Lets the others go, where this is process 0."""
        if not self._is_closed:
            self._is_closed = True
            self._is_over.set()
            if self.leads and self.error is None:
                self._tell_quietly(END)
            for other in self._others.values():
                other.close()

    # --------------------------------------------------------------------------------------- inside
    def _at_exit(self) -> None:
        error = getattr(sys, "last_exc", None)
        if error is None:
            self.close()
        else:
            self.fail(error)

    def _end_with(self, text: str) -> None:
        self.error = text
        self._is_over.set()

    def _end_soon(self) -> None:
        """Ends a process that waits: nobody can interrupt a wait for devices, or for others at the exit."""
        self._is_over.wait()
        if self.error is not None:  # else it is closed
            time.sleep(GRACE_S)
            print(f"jattn: {self.error}; this process ends.", file=sys.stderr, flush=True)
            os._exit(1)

    def _next(self, wanted: str) -> Any:
        _, what, arguments = self._heard.get()
        if what == FAILED:
            raise ProcessError(arguments[0])
        assert what == wanted, (what, wanted)
        return arguments

    def _listen(self, index: int, other: Any) -> None:
        """Hears what another says, in a thread: an error of its own, or that it is gone, at any time."""
        while True:
            try:
                what, arguments = pickle.loads(other.recv_bytes())
            except (EOFError, OSError):
                if self._is_closed:
                    return
                what, arguments = FAILED, (f"process {index} ended without a word",)
            self._heard.put((index, what, arguments))
            if what == END:
                self._is_closed = True
                self._is_over.set()
                return
            if what == FAILED:
                self._heard_of_failure(arguments[0])
                return

    def _heard_of_failure(self, text: str) -> None:
        """Passes it on, and sees to it that this process ends: it may wait for devices that never answer."""
        if self.error is None:
            if self.leads:
                self._tell_quietly(FAILED, text)
            self._end_with(text)

    def _tell_quietly(self, what: str, *arguments: Any) -> None:
        message = pickle.dumps((what, arguments))
        for other in self._others.values():
            with contextlib.suppress(OSError):  # it is gone, as its listener knows
                other.send_bytes(message)


def require_alike(options: Sequence[Mapping[str, str]]) -> None:
    """What several processes were told must be the same, but for what only some have a word of.

    Args:
        options: Of each process, by name.

    Raises:
        ValueError: It is not; the message names what differs.
    """
    said = {name: dict.fromkeys(each[name] for each in options if name in each) for name in options[0]}
    different = [f"{name} {' and '.join(values)}" for name, values in said.items() if len(values) > 1]
    require(not different, "the engine", "be made alike on all processes", "; ".join(different))


def _meet() -> dict[int, Any]:
    """Connections: process 0's to all others by their number, theirs to it."""
    count, own = jax.process_count(), jax.process_index()
    name = np.zeros(_NAME_BYTES, np.uint8)
    encoded = socket.gethostname().encode()[:_NAME_BYTES]
    name[: len(encoded)] = list(encoded)
    hosts = [bytes(host).rstrip(b"\0").decode() for host in multihost_utils.process_allgather(name)]
    is_one_host = len(set(hosts)) == 1
    host = "127.0.0.1" if is_one_host else hosts[0]
    listener = None
    door = np.zeros(1 + 32, np.int32)  # the port, and what who comes in must know
    if own == 0:
        secret = secrets.token_bytes(32)
        place = (host if is_one_host else "", 0)
        listener = multiprocessing.connection.Listener(place, backlog=count, authkey=secret)
        door[0], door[1:] = listener.address[1], list(secret)
    door = np.asarray(multihost_utils.broadcast_one_to_all(door))
    if listener is not None:
        others: dict[int, Any] = {}
        while len(others) < count - 1:
            connection = listener.accept()
            others[connection.recv()] = connection
        listener.close()
        return others
    connection = multiprocessing.connection.Client((host, int(door[0])), authkey=bytes(door[1:].tolist()))
    connection.send(own)
    return {0: connection}
