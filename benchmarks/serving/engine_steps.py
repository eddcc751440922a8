"""Where nano-vllm's workload spends its time: steps by bucket beside what a table expects, and kernels."""

import collections
import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax

from benchmarks.models.step_profile import traced
from benchmarks.serving.engine_model import MEASURED, Costs
from benchmarks.serving.nano_workload import nano_workload
from jattn.batch.bucket import Bucket
from jattn.serving import Engine, SamplingParams

TRACED = (60, 250, 550, 800)  # steps behind which some are traced: 256 rows, then fewer and fewer
NUM_TRACED = 10


class Watch(contextlib.ExitStack):
    """While open, knows of an engine's last step its bucket, what a table expects of it, and the waits.

    Attributes:
        bucket: Of the last step.
        expected: Milliseconds by the table.
        waited: Seconds that the host waited for the device since it was last set to 0.
    """

    def __init__(self, engine: Engine, costs: Costs = MEASURED) -> None:
        """Opens at once."""
        super().__init__()
        self.waited, self.expected, self.bucket, self._costs = 0.0, 0.0, Bucket(), costs
        graphs, scheduler = engine.graphs, engine.scheduler
        for owner, name in ((graphs, "choose"), (scheduler, "schedule"), (jax, "device_get")):
            wrapped = getattr(self, f"_{name}")
            self.enter_context(mock.patch.object(owner, name, wrapped(getattr(owner, name))))

    def _schedule(self, schedule: Any) -> Any:
        def scheduled(*arguments: Any) -> Any:
            self._step = schedule(*arguments)
            return self._step

        return scheduled

    def _choose(self, choose: Any) -> Any:
        def chosen(*arguments: Any, **sizes: Any) -> Bucket:
            self.bucket = choose(*arguments, **sizes)
            self.expected = self._costs.of(self._step, self.bucket)
            return self.bucket

        return chosen

    def _device_get(self, get: Any) -> Any:
        def waited(arrays: Any) -> Any:
            start = time.perf_counter()
            got = get(arrays)
            self.waited += time.perf_counter() - start
            return got

        return waited


def by_bucket(engine: Engine) -> dict[str, Any]:
    """Seconds of the workload, and of them by bucket: steps, ms, ms that the host waited, ms by the table.

    Steps whose host does not wait are the host's: the device is done before the next one comes.
    """
    sums: dict[str, list[float]] = collections.defaultdict(lambda: [0.0] * 4)
    with Watch(engine) as watch:
        begin(engine, 2)
        while engine.has_unfinished_requests():
            start, watch.waited = time.perf_counter(), 0.0
            engine.step()
            ms = 1e3 * (time.perf_counter() - start), 1e3 * watch.waited, watch.expected
            kind = sums[f"{watch.bucket.max_decodes}+{watch.bucket.max_prefill_tokens}"]
            kind[:] = [old + new for old, new in zip(kind, (1, *ms), strict=True)]
    of_all = [sum(values) / 1e3 for values in zip(*sums.values(), strict=True)]
    rounded = {kind: [round(value, 1) for value in values] for kind, values in sums.items()}
    return {"s": of_all[1], "waited_s": of_all[2], "expected_s": of_all[3], "by_bucket": rounded}


def kernels_on_the_way(engine: Engine, places: Sequence[int] = TRACED) -> Iterator[dict[str, Any]]:
    """The kernels of some steps behind each of these steps of the workload."""
    done = 0
    with Watch(engine) as watch:
        begin(engine, 3)
        for place in places:
            for _ in range(place - done):
                engine.step()
            row = traced(lambda: [engine.step() for _ in range(NUM_TRACED)], NUM_TRACED)
            done = place + NUM_TRACED
            yield {"behind": place, "rows": watch.bucket.max_decodes, "expected_ms": watch.expected} | row
        while engine.has_unfinished_requests():
            engine.step()


def begin(engine: Engine, run: int) -> None:
    """Puts a run of the workload in the queue."""
    for prompt, count in zip(*nano_workload(run), strict=True):
        engine.add_request(prompt, SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=count))
