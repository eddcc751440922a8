"""Cache of executables per bucket, compiled in parallel, in the background, or on first use.

A process has a single set of LLVM options at any time. XLA and Mosaic GPU set different ones, so no kernel
compiles while XLA generates code for another executable, and the other way round. Threads that compile
modules with kernels therefore mostly wait for each other: 28 steps of an 8B model took 70 s on 14 threads.
`compile_groups_in_background` compiles the kernels beforehand, and XLA finds them in Mosaic's cache.
"""

import concurrent.futures
import contextlib
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jattn.batch.bucket import Bucket

type Lower = Callable[[Bucket], jax.stages.Lowered]
type LowerOrLoad = Callable[[Bucket], jax.stages.Lowered | jax.stages.Compiled]
type OnCompiled = Callable[[Bucket, jax.stages.Compiled], Any]
type Claim = tuple[Bucket, concurrent.futures.Future[jax.stages.Compiled]]

KERNEL_CALL = "mosaic_gpu_v2"  # the custom call of Mosaic GPU kernels
NICENESS = 10  # of processes and threads that lower and compile steps
CODEGEN_LOCK = threading.Lock()  # held by the group that compiles, of all caches in the process
# Held by a background thread for work that keeps the interpreter lock. A thread that runs steps then waits
# for one such thread, not for a dozen.
LONG_PYTHON_LOCK = threading.Lock()
# Seconds until a thread asks for the interpreter lock, while others compile. A thread that runs steps waits
# as long for each thread before it, and Python's default is 5 ms.
SWITCH_INTERVAL = 0.0005


class ExecutableCache:
    """Compiled and compiling executables by bucket; each is compiled once."""

    def __init__(self, options: Callable[[Bucket], dict[str, Any]]) -> None:
        """Create an empty cache; `options` returns the XLA compiler options of a bucket."""
        self.options = options
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
            with self._abandon_on_error([(bucket, future)]):
                self._compile(bucket, future, lower(bucket))
        return future.result()

    def compile_all(
        self, buckets: Sequence[Bucket], lower: Lower, *, workers: int, on_ready: Callable[[], Any]
    ) -> None:
        """Lower the buckets that no thread compiles yet in this thread, and compile them in other threads.

        Args:
            buckets: Buckets to compile.
            lower: Function that lowers a bucket.
            workers: Number of compiling threads; at most this many buckets are lowered ahead.
            on_ready: Function to call when an executable is ready.
        """
        slots = threading.Semaphore(workers)

        def compile(bucket: Bucket, future: Any, lowered: jax.stages.Lowered) -> None:
            try:
                with self._abandon_on_error([(bucket, future)]):
                    self._compile(bucket, future, lowered)
            finally:
                slots.release()
            on_ready()

        running = []
        with concurrent.futures.ThreadPoolExecutor(workers) as pool:
            for bucket in buckets:
                slots.acquire()
                if _has_main_thread_ended():  # before claiming a bucket that would never be compiled
                    return
                future, is_mine = self._claim(bucket)
                running.append(future)
                if is_mine:
                    with self._abandon_on_error([(bucket, future)]):
                        lowered = lower(bucket)
                    pool.submit(compile, bucket, future, lowered)
                else:
                    slots.release()
        for future in running:
            future.result()

    def _compile_groups(
        self,
        groups: Sequence[Sequence[Claim]],
        others: Iterable[concurrent.futures.Future[jax.stages.Compiled]],
        lower: LowerOrLoad,
        *,
        lowering_threads: int,
        workers: int,
        on_ready: Callable[[], Any],
        on_compiled: OnCompiled,
        kept: Collection[Bucket],
    ) -> None:
        """Lower or load all buckets in threads. Then compile, group by group, kernels and executables.

        Args:
            groups: Groups of claimed buckets, the most urgent first.
            others: Executables that other threads compile, to wait for at the end.
            lower: Function that lowers a bucket or loads its executable. Several threads call it at a time.
            lowering_threads: Number of these threads, which take the most urgent buckets first.
            workers: Number of threads that compile.
            on_ready: Function to call when an executable is ready.
            on_compiled: Function to call with a compiled bucket and its executable.
            kept: Buckets whose executables `on_compiled` writes to files; buckets may be added while they are
                lowered. JAX's cache is not written for groups that contain no others.
        """

        def lower_or_load(claim: Claim) -> jax.stages.Lowered | None:
            step = lower(claim[0])
            if isinstance(step, jax.stages.Lowered):
                return step
            self._finish(*claim, step)
            on_ready()
            return None

        def compile(claim: Claim, lowered: jax.stages.Lowered) -> None:
            self._compile(*claim, lowered)
            on_ready()
            on_compiled(claim[0], self.ready[claim[0]])

        all_claims = [claim for group in groups for claim in group]
        with (
            self._abandon_on_error(all_claims),
            _cancelling_pool(lowering_threads) as lowering_pool,
            _cancelling_pool(workers) as pool,
        ):
            lowering = {claim[0]: lowering_pool.submit(lower_or_load, claim) for claim in all_claims}
            for group in groups:
                steps = [(claim, _result(lowering.pop(claim[0]))) for claim in group]
                to_compile = [(claim, lowered) for claim, lowered in steps if lowered is not None]
                del steps
                with CODEGEN_LOCK:
                    compile_kernels([lowered for _, lowered in to_compile])
                    is_kept = all(claim[0] in kept for claim, _ in to_compile)
                    with _no_cache_writes() if is_kept else contextlib.nullcontext():
                        for job in [pool.submit(compile, *pair) for pair in to_compile]:
                            _result(job)
        for executable in others:
            _result(executable)

    def compile_in_background(self, buckets: Sequence[Bucket], lower: Lower, *, progress: bool) -> None:
        """Run `compile_all` in a background thread, on half of the cores."""
        workers = max(available_cores() // 2, 1)
        self._start(
            lambda on_ready: self.compile_all(buckets, lower, workers=workers, on_ready=on_ready),
            len(buckets),
            progress,
        )

    def compile_groups_in_background(
        self,
        groups: Sequence[Sequence[Bucket]],
        lower: LowerOrLoad,
        *,
        lowering_threads: int,
        progress: bool,
        on_compiled: OnCompiled = lambda bucket, executable: None,
        kept: Collection[Bucket] = (),
    ) -> None:
        """Run `_compile_groups` in a background thread, on all cores but two.

        The buckets are claimed before this returns, so that `wait_for` finds them.
        """
        workers = max(available_cores() - 2, 1)
        claims: list[list[Claim]] = [[] for _ in groups]
        others = []  # which other threads compile
        for buckets, group in zip(groups, claims, strict=True):
            for bucket in buckets:
                future, is_mine = self._claim(bucket)
                if is_mine:
                    group.append((bucket, future))
                else:
                    others.append(future)
        self._start(
            lambda on_ready: self._compile_groups(
                claims,
                others,
                lower,
                lowering_threads=lowering_threads,
                workers=workers,
                on_ready=on_ready,
                on_compiled=on_compiled,
                kept=kept,
            ),
            sum(map(len, groups)),
            progress,
        )

    def wait(self) -> None:
        """Wait for background compilation; raise its error, if any."""
        if self._background is not None:
            self._background.join()
        error, self.error = self.error, None
        if error is not None:
            raise error

    def wait_for(self, buckets: Iterable[Bucket]) -> None:
        """Wait until some buckets that compile in the background are ready; raise its error, if any."""
        with self._lock:
            futures = [self._futures[bucket] for bucket in buckets if bucket in self._futures]
        concurrent.futures.wait(futures)
        if any(future.exception() for future in futures):
            self.wait()

    # --------------------------------------------------------------------------------------- inside
    def _start(self, compile: Callable[[Callable[[], Any]], None], total: int, progress: bool) -> None:
        def run() -> None:
            try:
                with progress_bar(total, progress) as on_ready, SHORT_SWITCH_INTERVAL:
                    compile(on_ready)
            except BaseException as error:
                self.error = error

        # Not a daemon thread: a process that ends while the thread lowers would crash in JAX.
        self._background = threading.Thread(target=run, name="jattn-compile", daemon=False)
        self._background.start()

    def _claim(self, bucket: Bucket) -> tuple[concurrent.futures.Future[jax.stages.Compiled], bool]:
        """Return the future of an executable and whether the caller must compile it."""
        with self._lock:
            is_new = bucket not in self._futures
            return self._futures.setdefault(bucket, concurrent.futures.Future()), is_new

    def _compile(self, bucket: Bucket, future: Any, lowered: jax.stages.Lowered) -> None:
        self._finish(bucket, future, lowered.compile(self.options(bucket)))

    def _finish(self, bucket: Bucket, future: Any, executable: jax.stages.Compiled) -> None:
        self.ready[bucket] = executable
        future.set_result(executable)

    @contextlib.contextmanager
    def _abandon_on_error(self, claims: Sequence[Claim]) -> Iterator[None]:
        """Pass an error to the threads that wait for unfinished claims, and let later calls try again."""
        try:
            yield
        except BaseException as error:
            unfinished = [claim for claim in claims if not claim[1].done()]
            with self._lock:
                for bucket, _ in unfinished:
                    del self._futures[bucket]
            for _, future in unfinished:
                future.set_exception(error)
            raise


def compile_kernels(modules: Iterable[jax.stages.Lowered]) -> None:
    """Compile the distinct Mosaic GPU kernels of lowered modules in parallel.

    Each is compiled as the only operation of a module that never runs. XLA then finds it in the cache of
    Mosaic, which belongs to the process, by the hash in its custom call.
    """
    kernels: dict[bytes, dict[str, Any]] = {}
    for module in modules:
        ir_module: Any = module.compiler_ir("stablehlo")
        for config in _kernel_configs(ir_module.operation):
            if (key := config["kernel_hash"].value_bytes) not in kernels:
                kernels[key] = {entry.name: _value(entry.attr) for entry in config}
    call = jax.ffi.ffi_call(KERNEL_CALL, jax.ShapeDtypeStruct((1,), jnp.float32))

    def compile(kernel: dict[str, Any]) -> None:
        with LONG_PYTHON_LOCK:
            lowered = jax.jit(lambda: call(**kernel)).lower()
        lowered.compile()

    # A thread for each, because a finished kernel's thread waits for the others: XLA then generates code.
    with _cancelling_pool(len(kernels)) as pool:
        for future in [pool.submit(compile, kernel) for kernel in kernels.values()]:
            _result(future)


def _kernel_configs(operation: Any) -> Iterator[Any]:
    """Yield the attributes of each kernel call within an MLIR operation."""
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield from _kernel_configs(inner)
                if inner.operation.name == "stablehlo.custom_call":
                    attributes = inner.attributes
                    if attributes["call_target_name"].value == KERNEL_CALL:
                        yield attributes["mhlo.backend_config"]


def _value(attribute: Any) -> Any:
    """Return the value of an MLIR attribute: a bool, a number, or a string as bytes."""
    return attribute.value_bytes if hasattr(attribute, "value_bytes") else attribute.value


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class ShortSwitchInterval:
    """Context in which threads wait less for the interpreter lock. Several threads may enter it at a time."""

    def __init__(self) -> None:
        """Change nothing yet."""
        self._lock, self._count, self._before = threading.Lock(), 0, 0.0

    def __enter__(self) -> None:
        """Set the interval, for the first thread that enters."""
        with self._lock:
            if not self._count:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, SWITCH_INTERVAL))
            self._count += 1

    def __exit__(self, *error: object) -> None:
        """Restore the interval, for the last thread that leaves."""
        with self._lock:
            self._count -= 1
            if not self._count:
                sys.setswitchinterval(self._before)


SHORT_SWITCH_INTERVAL = ShortSwitchInterval()


@contextlib.contextmanager
def _no_cache_writes() -> Iterator[None]:
    """Keep JAX from writing executables to its cache, also those that other threads compile meanwhile."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    try:
        yield
    finally:
        jax.config.update(name, before)


def _has_main_thread_ended() -> bool:
    """Return whether the main thread has ended."""
    return not threading.main_thread().is_alive()


def _result[T](future: concurrent.futures.Future[T]) -> T:
    """Wait for a future's result.

    Raises:
        CancelledError: The main thread has ended.
    """
    while not _has_main_thread_ended():
        with contextlib.suppress(TimeoutError):
            return future.result(timeout=1)
    raise concurrent.futures.CancelledError


def _leave_cores() -> None:
    """Lower the priority of this thread, and of what it starts, below that of threads that run steps."""
    if sys.platform == "linux":  # Elsewhere threads have no priorities of their own.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


@contextlib.contextmanager
def _cancelling_pool(workers: int) -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    """Yield a pool of threads that leave the cores to others, and whose waiting calls an error cancels."""
    pool = concurrent.futures.ThreadPoolExecutor(max(workers, 1), initializer=_leave_cores)
    try:
        yield pool
    except BaseException:
        pool.shutdown(cancel_futures=True)
        raise
    pool.shutdown()


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
