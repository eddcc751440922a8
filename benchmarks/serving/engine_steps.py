"""Step times of nano-vllm's workload by bucket, beside those of `engine_model`, and kernels of some steps."""

import collections
import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax

from benchmarks.models.step_profile import profile_steps
from benchmarks.serving.engine_model import MEASURED, Costs
from benchmarks.serving.nano_workload import nano_workload
from jattn.batch.bucket import Bucket
from jattn.serving import Engine, SamplingParams

PROFILED_AT = (60, 250, 550, 800)  # numbers of steps after which steps are profiled: 256 rows, then fewer
NUM_PROFILED = 10


class StepMonitor(contextlib.ExitStack):
    """Context manager that records the bucket, the expected time and the waits of an engine's last step.

    Attributes:
        bucket: Bucket of the last step.
        expected_ms: Milliseconds that `costs` predicts for the last step.
        waited: Seconds that the host has waited for the device since the attribute was last set to 0.
    """

    def __init__(self, engine: Engine, costs: Costs = MEASURED) -> None:
        """Start recording.

        Args:
            engine: Engine to watch.
            costs: Costs that predict step times.
        """
        super().__init__()
        self.waited, self.expected_ms, self.bucket, self._costs = 0.0, 0.0, Bucket(), costs
        graphs, scheduler = engine.graphs, engine.scheduler
        for owner, name, wrap in (
            (graphs, "choose_for", self._wrap_choose),
            (scheduler, "schedule", self._wrap_schedule),
            (jax, "device_get", self._wrap_device_get),
        ):
            self.enter_context(mock.patch.object(owner, name, wrap(getattr(owner, name))))

    def _wrap_schedule(self, schedule: Any) -> Any:
        def record_step(*arguments: Any) -> Any:
            self._step = schedule(*arguments)
            return self._step

        return record_step

    def _wrap_choose(self, choose: Any) -> Any:
        def record_bucket(*arguments: Any) -> Bucket:
            self.bucket = choose(*arguments)
            self.expected_ms = self._costs.step_ms(self._step, self.bucket)
            return self.bucket

        return record_bucket

    def _wrap_device_get(self, device_get: Any) -> Any:
        def record_wait(arrays: Any) -> Any:
            start = time.perf_counter()
            result = device_get(arrays)
            self.waited += time.perf_counter() - start
            return result

        return record_wait


def step_times_by_bucket(engine: Engine) -> dict[str, Any]:
    """Serve the workload and return its seconds, in total and by bucket.

    The list of a bucket has its number of steps, their milliseconds, the milliseconds that the host waited
    for the device, and the expected milliseconds. The host limits a step in which it does not wait.
    """
    sums: dict[str, list[float]] = collections.defaultdict(lambda: [0.0] * 4)
    with StepMonitor(engine) as monitor:
        add_workload(engine, 2)
        while engine.has_unfinished_requests():
            start, monitor.waited = time.perf_counter(), 0.0
            engine.step()
            ms = 1e3 * (time.perf_counter() - start), 1e3 * monitor.waited, monitor.expected_ms
            bucket_sums = sums[f"{monitor.bucket.max_decodes}+{monitor.bucket.max_prefill_tokens}"]
            bucket_sums[:] = [total + value for total, value in zip(bucket_sums, (1, *ms), strict=True)]
    totals = [sum(values) / 1e3 for values in zip(*sums.values(), strict=True)]
    rounded = {bucket: [round(value, 1) for value in values] for bucket, values in sums.items()}
    return {"s": totals[1], "waited_s": totals[2], "expected_s": totals[3], "by_bucket": rounded}


def kernels_of_steps(engine: Engine, step_numbers: Sequence[int] = PROFILED_AT) -> Iterator[dict[str, Any]]:
    """Serve the workload and yield a row with the kernels of some steps after each step number."""
    num_steps = 0
    with StepMonitor(engine) as monitor:
        add_workload(engine, 3)
        for step_number in step_numbers:
            for _ in range(step_number - num_steps):
                engine.step()
            row = profile_steps(lambda: [engine.step() for _ in range(NUM_PROFILED)], NUM_PROFILED)
            num_steps = step_number + NUM_PROFILED
            rows, expected_ms = monitor.bucket.max_decodes, monitor.expected_ms
            yield {"behind": step_number, "rows": rows, "expected_ms": expected_ms} | row
        while engine.has_unfinished_requests():
            engine.step()


def add_workload(engine: Engine, run: int) -> None:
    """Add the requests of a run of the workload."""
    for prompt, count in zip(*nano_workload(run), strict=True):
        engine.add_request(prompt, SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=count))
