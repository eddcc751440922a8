"""Executables of buckets, compiled in threads: all at once, behind what runs, or when first needed."""

import concurrent.futures
import contextlib
import importlib
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from jattn.batch.bucket import Bucket

type Lower = Callable[[Bucket], jax.stages.Lowered]


class ExecutableCache:
    """What is compiled, and what is being compiled: nothing is compiled twice."""

    def __init__(self, options: Callable[[Bucket], dict[str, Any]]) -> None:
        """Begins with none; `options` says what XLA is told for a bucket."""
        self._options = options
        self.ready: dict[Bucket, jax.stages.Compiled] = {}
        self._begun: dict[Bucket, concurrent.futures.Future[jax.stages.Compiled]] = {}
        self._lock = threading.Lock()
        self._behind: threading.Thread | None = None
        self.error: BaseException | None = None  # that ended the work behind

    @property
    def is_compiling(self) -> bool:
        """Whether some are being compiled behind what runs."""
        return self._behind is not None and self._behind.is_alive()

    def get(self, bucket: Bucket, lower: Lower) -> jax.stages.Compiled:
        """The executable of a bucket, compiled in this thread unless another has begun to."""
        future, is_mine = self._claim(bucket)
        if is_mine:
            self._compile(bucket, future, lambda: lower(bucket))
        return future.result()

    def compile_all(
        self, buckets: Sequence[Bucket], lower: Lower, *, workers: int, moved: Callable[[], Any]
    ) -> None:
        """Compiles those that nobody has begun; lowered in this thread, compiled in `workers` others.

        Args:
            buckets: Which.
            lower: Makes what is compiled.
            workers: Threads; no more than so many are lowered ahead.
            moved: Called when one is ready.
        """
        slots = threading.Semaphore(workers)

        def compile(bucket: Bucket, future: Any, lowered: jax.stages.Lowered) -> None:
            try:
                self._compile(bucket, future, lambda: lowered)
            finally:
                slots.release()
            moved()

        running = []
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            for bucket in buckets:
                slots.acquire()
                if _is_over():  # before a claim that nobody would make good
                    return
                future, is_mine = self._claim(bucket)
                running.append(future)
                if is_mine:
                    pool.submit(compile, bucket, future, self._lowered(bucket, future, lower))
                else:
                    slots.release()
        for future in running:
            future.result()

    def compile_in_background(self, buckets: Sequence[Bucket], lower: Lower, *, progress: bool) -> None:
        """`compile_all` in a thread of its own, on half of the cores: the other half serves."""
        workers = max((os.cpu_count() or 2) // 2, 1)

        def run() -> None:
            try:
                with progress_bar(len(buckets), progress) as moved:
                    self.compile_all(buckets, lower, workers=workers, moved=moved)
            except BaseException as error:
                self.error = error

        # No daemon, though the thread that asks may be one: a process that ended while it lowers would take
        # JAX away from under it, and crash.
        self._behind = threading.Thread(target=run, name="jattn-compile", daemon=False)
        self._behind.start()

    def wait(self) -> None:
        """Returns when nothing is being compiled behind; raises what ended that work, if something did."""
        if self._behind is not None:
            self._behind.join()
        error, self.error = self.error, None
        if error is not None:
            raise error

    # --------------------------------------------------------------------------------------- inside
    def _claim(self, bucket: Bucket) -> tuple[concurrent.futures.Future[jax.stages.Compiled], bool]:
        """Where the executable will be, and whether it is the caller who must bring it."""
        with self._lock:
            is_new = bucket not in self._begun
            return self._begun.setdefault(bucket, concurrent.futures.Future()), is_new

    def _lowered(self, bucket: Bucket, future: Any, lower: Lower) -> jax.stages.Lowered:
        with self._given_up_on_error(bucket, future):
            return lower(bucket)

    def _compile(self, bucket: Bucket, future: Any, lower: Callable[[], jax.stages.Lowered]) -> None:
        with self._given_up_on_error(bucket, future):
            self.ready[bucket] = executable = lower().compile(self._options(bucket))
            future.set_result(executable)

    @contextlib.contextmanager
    def _given_up_on_error(self, bucket: Bucket, future: Any) -> Iterator[None]:
        """Those who wait get the error; whoever asks next tries anew."""
        try:
            yield
        except BaseException as error:
            with self._lock:
                del self._begun[bucket]
            future.set_exception(error)
            raise


def _is_over() -> bool:
    """Whether the process waits for its threads to end."""
    return not threading.main_thread().is_alive()


@contextlib.contextmanager
def progress_bar(total: int, is_shown: bool) -> Iterator[Callable[[], Any]]:
    """A tqdm bar as the function that moves it on by one; nothing where there is no tqdm."""
    if not (is_shown and total and importlib.util.find_spec("tqdm")):
        yield lambda: None
        return
    with importlib.import_module("tqdm").tqdm(
        total=total, desc="Compiling decode graphs", unit="bucket"
    ) as shown:
        yield shown.update
