"""Cases in processes of their own, so that one that hangs or dies is one case's outcome."""

import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait

CASES_OF_A_PROCESS = 100  # what JAX keeps of each case is gone then


def work(connection: Connection, is_large: bool) -> None:
    """Answers each (kind, seed) with its outcome, until None."""
    import jax

    from tests.fuzz.cases import outcome_of

    while (job := connection.recv()) is not None:
        connection.send(outcome_of(*job, is_large=is_large))
        jax.clear_caches()


class Worker:
    """A process and the job that it has."""

    def __init__(self, *, is_large: bool):
        self.connection, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=work, args=(theirs, is_large), daemon=True)
        self.process.start()
        theirs.close()
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
    """The outcome of each job as it comes, until there are no more or the time is up.

    Args:
        jobs: (kind, seed).
        num_workers: Processes.
        case_seconds: A case that takes longer is a "timeout".
        seconds: No job begins after so many.
        is_large: Whether cases are as large as a GPU wants.
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
