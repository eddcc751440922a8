"""Fuzzer cases in subprocesses, so that a case that hangs or crashes does not end the run."""

import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait

CASES_OF_A_PROCESS = 100  # a new process frees what JAX caches for each case


def work(connection: Connection, is_large: bool) -> None:
    """Answer each (kind, seed) with its outcome until None is received."""
    import jax

    from tests.fuzz.cases import outcome_of

    while (job := connection.recv()) is not None:
        connection.send(outcome_of(*job, is_large=is_large))
        jax.clear_caches()


class Worker:
    """A process and its current job."""

    def __init__(self, *, is_large: bool):
        self.connection, worker_connection = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=work, args=(worker_connection, is_large), daemon=True)
        self.process.start()
        worker_connection.close()
        self.job: tuple[str, int] | None = None
        self.since, self.num_cases = 0.0, 0

    def give(self, job: tuple[str, int]) -> None:
        self.job, self.since = job, time.monotonic()
        self.num_cases += 1
        self.connection.send(job)

    def is_late(self, limit: float) -> bool:
        starting = 60.0 if self.num_cases == 1 else 0.0
        return time.monotonic() - self.since > limit + starting

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def outcomes(
    jobs: Iterator[tuple[str, int]], *, num_workers: int, case_seconds: float, seconds: float, is_large: bool
) -> Iterator[dict]:
    """Yield the outcome of each job until the jobs or the time are used up.

    Args:
        jobs: Pairs of (kind, seed).
        num_workers: Number of processes.
        case_seconds: Time limit per case; a slower case is a "timeout".
        seconds: No job starts after this time.
        is_large: Whether cases are as large as for a GPU.
    """
    end = time.monotonic() + seconds
    workers: list[Worker] = []
    following = next(jobs, None)
    while True:
        while following and len(workers) < num_workers and time.monotonic() < end:
            workers.append(Worker(is_large=is_large))
            workers[-1].give(following)
            following = next(jobs, None)
        if not workers:
            return
        ready = wait([w.connection for w in workers], timeout=1.0)
        for worker in list(workers):
            if worker.connection in ready:
                outcome = _answer(worker)
            elif worker.is_late(case_seconds):
                outcome = _ended(worker, "timeout", f"took longer than {case_seconds:.0f} s")
            else:
                continue
            yield outcome
            # A GPU's context may not survive a crash.
            is_spent = outcome["outcome"] in ("crashed", "timeout") or worker.num_cases >= CASES_OF_A_PROCESS
            if is_spent or following is None or time.monotonic() >= end:
                worker.stop()
                workers.remove(worker)
            else:
                worker.give(following)
                following = next(jobs, None)


def _answer(worker: Worker) -> dict:
    try:
        return worker.connection.recv()
    except (EOFError, ConnectionError):
        worker.process.join(5)
        return _ended(worker, "crashed", f"the process died with exit code {worker.process.exitcode}")


def _ended(worker: Worker, outcome: str, detail: str) -> dict:
    assert worker.job is not None
    kind, seed = worker.job
    seconds = round(time.monotonic() - worker.since, 2)
    return {
        "kind": kind,
        "seed": seed,
        "outcome": outcome,
        "detail": detail,
        "seconds": seconds,
        "case": None,
    }
