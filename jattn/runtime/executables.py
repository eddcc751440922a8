"""Cache of executables per bucket, compiled in parallel, in the background, or on first use."""

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
    """Compiled and compiling executables by bucket; each is compiled once."""

    def __init__(self, options: Callable[[Bucket], dict[str, Any]]) -> None:
        """Create an empty cache; `options` returns the XLA compiler options of a bucket."""
        self._options = options
        self.ready: dict[Bucket, jax.stages.Compiled] = {}
        self._futures: dict[Bucket, concurrent.futures.Future[jax.stages.Compiled]] = {}
        self._lock = threading.Lock()
        self._background: threading.Thread | None = None
        self.error: BaseException | None = None  # of the background compilation

    @property
    def is_compiling(self) -> bool:
        """Whether buckets are being compiled in the background."""
        return self._background is not None and self._background.is_alive()

    def get(self, bucket: Bucket, lower: Lower) -> jax.stages.Compiled:
        """Return the executable of a bucket, compiling it here unless another thread already does."""
        future, is_mine = self._claim(bucket)
        if is_mine:
            self._compile(bucket, future, lambda: lower(bucket))
        return future.result()

    def compile_all(
        self,
        buckets: Sequence[Bucket],
        lower: Lower,
        *,
        lowers_in_threads: bool = False,
        workers: int,
        on_ready: Callable[[], Any],
    ) -> None:
        """Lower the buckets that no thread compiles yet, and compile them in other threads.

        Args:
            buckets: Buckets to compile.
            lower: Function that lowers a bucket.
            lowers_in_threads: Whether each thread lowers its bucket. False: this thread lowers them all.
            workers: Number of compiling threads; at most this many are lowered ahead.
            on_ready: Function to call when an executable is ready.
        """
        slots = threading.Semaphore(workers)

        def compile(bucket: Bucket, future: Any, lowered: jax.stages.Lowered | None) -> None:
            try:
                self._compile(bucket, future, lambda: lower(bucket) if lowered is None else lowered)
            finally:
                slots.release()
            on_ready()

        running = []
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            for bucket in buckets:
                slots.acquire()
                if _is_over():  # before claiming a bucket that would never be compiled
                    return
                future, is_mine = self._claim(bucket)
                running.append(future)
                if is_mine:
                    lowered = None if lowers_in_threads else self._lower(bucket, future, lower)
                    pool.submit(compile, bucket, future, lowered)
                else:
                    slots.release()
        for future in running:
            future.result()

    def compile_in_background(
        self, buckets: Sequence[Bucket], lower: Lower, *, lowers_in_threads: bool = False, progress: bool
    ) -> None:
        """Run `compile_all` in a background thread, on half of the cores.

        If this process lowers nothing, all cores but two are used.
        """
        num_cores = os.cpu_count() or 2
        workers = max(num_cores - 2 if lowers_in_threads else num_cores // 2, 1)

        def run() -> None:
            try:
                with progress_bar(len(buckets), progress) as on_ready:
                    self.compile_all(
                        buckets,
                        lower,
                        lowers_in_threads=lowers_in_threads,
                        workers=workers,
                        on_ready=on_ready,
                    )
            except BaseException as error:
                self.error = error

        # Not a daemon thread: a process that ends while the thread lowers would crash in JAX.
        self._background = threading.Thread(target=run, name="jattn-compile", daemon=False)
        self._background.start()

    def wait(self) -> None:
        """Wait for background compilation; raise its error, if any."""
        if self._background is not None:
            self._background.join()
        error, self.error = self.error, None
        if error is not None:
            raise error

    # --------------------------------------------------------------------------------------- inside
    def _claim(self, bucket: Bucket) -> tuple[concurrent.futures.Future[jax.stages.Compiled], bool]:
        """Return the future of an executable and whether the caller must compile it."""
        with self._lock:
            is_new = bucket not in self._futures
            return self._futures.setdefault(bucket, concurrent.futures.Future()), is_new

    def _lower(self, bucket: Bucket, future: Any, lower: Lower) -> jax.stages.Lowered:
        with self._give_up_on_error(bucket, future):
            return lower(bucket)

    def _compile(self, bucket: Bucket, future: Any, lower: Callable[[], jax.stages.Lowered]) -> None:
        with self._give_up_on_error(bucket, future):
            self.ready[bucket] = executable = lower().compile(self._options(bucket))
            future.set_result(executable)

    @contextlib.contextmanager
    def _give_up_on_error(self, bucket: Bucket, future: Any) -> Iterator[None]:
        """Pass an error to waiting threads and allow later calls to try again."""
        try:
            yield
        except BaseException as error:
            with self._lock:
                del self._futures[bucket]
            future.set_exception(error)
            raise


def _is_over() -> bool:
    """Return whether the main thread has ended."""
    return not threading.main_thread().is_alive()


@contextlib.contextmanager
def progress_bar(total: int, is_shown: bool) -> Iterator[Callable[[], Any]]:
    """Yield a function that advances a tqdm progress bar by one; it does nothing without tqdm."""
    if not (is_shown and total and importlib.util.find_spec("tqdm")):
        yield lambda: None
        return
    with importlib.import_module("tqdm").tqdm(
        total=total, desc="Compiling decode graphs", unit="bucket"
    ) as bar:
        yield bar.update
