"""Executables of steps in files, so that later processes neither lower nor compile them.

JAX's compilation cache writes an executable right after its compilation and holds the interpreter lock
meanwhile: half a second for a step of an 8B model, in which the thread that runs steps waits. It finds an
executable by its lowered module, so a later process must still lower each step. These files are found by the
request to lower a step, and are written while no step runs.
"""

import collections
import functools
import hashlib
import importlib.metadata
import logging
import os
import pathlib
import pickle
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental import serialize_executable

from jattn.runtime.executables import CODEGEN_LOCK
from jattn.runtime.lowering import LoweringRequest
from pallas_kernels import support

FOLDER = "jattn-executables"
# A file is written when no step has begun for QUIET_SECONDS, or after BUSY_SECONDS of steps; half a second of
# 20 is 2.5 %. When the process ends, EXIT_SECONDS are left for the others.
QUIET_SECONDS, BUSY_SECONDS, EXIT_SECONDS = 1.0, 20.0, 10.0

log = logging.getLogger(__name__)


class ExecutableFiles:
    """A folder of executables. Methods may be called from several threads.

    Attributes:
        last_step: `time.monotonic()` at the beginning of the last step. Whoever runs steps sets it.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """Create nothing yet.

        Args:
            folder: Folder of the files, usually that of JAX's compilation cache. Processes may share it, and
                whoever can write to it can run code in them.
        """
        self.last_step = 0.0
        self._folder, self._versions = pathlib.Path(folder) / FOLDER, _versions()
        self._waiting: collections.deque[tuple[pathlib.Path, jax.stages.Compiled, Any]] = collections.deque()
        self._lock = threading.Lock()
        self._writer: threading.Thread | None = None

    def file_of(self, request: LoweringRequest, options: Mapping[str, Any]) -> pathlib.Path:
        """Return the file of an executable.

        Args:
            request: What the step is lowered from.
            options: XLA's compiler options.
        """
        device = request.step.device
        target = (device.platform, device.device_kind, device.id, device.client.platform_version)
        settings = (os.environ.get("XLA_FLAGS"), sorted(options.items()))
        digest = hashlib.sha256(repr((self._versions, target, settings)).encode())
        digest.update(request.step.data)
        digest.update(request.inputs)
        return self._folder / digest.hexdigest()

    def load(
        self, file: pathlib.Path, device: jax.Device, arguments: tuple[Any, ...]
    ) -> jax.stages.Compiled | None:
        """Return the executable in a file; None if there is no file, or it is damaged.

        Args:
            file: File of the executable.
            device: Device that runs the executable.
            arguments: Arguments of the step, as ShapeDtypeStructs.
        """
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            return None
        size = hashlib.sha256().digest_size
        if hashlib.sha256(content[size:]).digest() == content[:size]:
            try:
                data, results = pickle.loads(content[size:])
                return serialize_executable.deserialize_and_load(
                    data,
                    jax.tree.structure((arguments, {})),
                    jax.tree.structure(results),
                    backend=device.client,
                    execution_devices=[device],
                )
            except Exception as error:  # whatever XLA and the results' classes raise
                log.info("The executable in %s cannot be loaded: %s", file, error)
        warnings.warn(f"The file {file} is damaged and will be replaced.", stacklevel=2)
        return None

    def write_later(self, file: pathlib.Path, executable: jax.stages.Compiled, results: Any) -> None:
        """Write an executable to a file, in another thread, when that delays no step.

        Args:
            file: File of the executable.
            executable: Compiled step.
            results: Results of the step, as ShapeDtypeStructs.
        """
        with self._lock:
            self._waiting.append((file, executable, results))
            if self._writer is None:
                # Not a daemon thread: a process that ends while XLA serializes would crash.
                self._writer = threading.Thread(target=self._write_all, name="jattn-write", daemon=False)
                self._writer.start()

    def wait(self) -> None:
        """Wait until all files are written."""
        while (writer := self._writer) is not None:
            writer.join()

    # --------------------------------------------------------------------------------------- inside
    def _write_all(self) -> None:
        """Write the waiting executables. Once the process ends, it waits for them EXIT_SECONDS at most."""
        deadline = float("inf")
        while time.monotonic() < deadline:
            with self._lock:
                if not self._waiting:
                    self._writer = None
                    return
                job = self._waiting.popleft()
            if not self._wait_for_pause() and deadline == float("inf"):
                deadline = time.monotonic() + EXIT_SECONDS
            _write(*job)

    def _wait_for_pause(self) -> bool:
        """Wait until nothing compiles and no step runs; return False if the process ends."""
        start = time.monotonic()
        while threading.main_thread().is_alive():
            now = time.monotonic()
            is_quiet = now - self.last_step > QUIET_SECONDS or now - start > BUSY_SECONDS
            if is_quiet and not CODEGEN_LOCK.locked():
                return True
            time.sleep(0.05)
        return False


def _write(file: pathlib.Path, executable: jax.stages.Compiled, results: Any) -> None:
    """Write an executable so that other processes see the whole file or none."""
    try:
        data, _, _ = serialize_executable.serialize(executable)
        content = pickle.dumps((data, results))
    except Exception as error:  # XLA cannot serialize all executables from JAX's cache on every platform.
        log.info("An executable is not kept in %s: %s", file, error)
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as temporary:
        temporary.write(hashlib.sha256(content).digest() + content)
    os.replace(temporary.name, file)


@functools.cache
def _versions() -> bytes:
    """Return the versions of the packages that an executable depends on, and the hash of jattn's sources."""
    digest = hashlib.sha256()
    for folder in (pathlib.Path(__file__).parents[1], pathlib.Path(support.__file__).parent):
        for source in sorted(folder.rglob("*.py")):
            digest.update(source.read_bytes())
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax")]
    return repr((versions, digest.digest())).encode()
