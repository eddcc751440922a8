"""Device time by CUPTI, the machine's read ceiling, and where rows go."""

import datetime
import json
import pathlib
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import profiler


def kernel_times(f: Callable[..., Any], *args: Any, iterations: int = 15) -> tuple[Any, dict[str, Any]]:
    """The result of `f(*args)`, and its microseconds: median and spread of the sum, median of each kernel.

    `f` is compiled here if it is not yet.
    """
    result, runs = profiler.measure(f, aggregate=False, iterations=iterations)(*args)
    assert isinstance(runs, list)
    sums = [1e3 * sum(ms for _, ms in run) for run in runs]
    kernels: dict[str, float] = {}
    for nth, (name, _) in enumerate(runs[0]):
        label = name if name not in kernels else f"{name}#{nth}"
        kernels[label] = round(1e3 * statistics.median(run[nth][1] for run in runs), 2)
    low, *_, high = statistics.quantiles(sums, n=10)
    return result, {"us": statistics.median(sums), "spread_us": [low, high], "kernels_us": kernels}


def wall_time(f: Callable[..., Any], first: Any, *rest: Any, layers: int = 4, rounds: int = 8) -> float:
    """Microseconds of a call in a chain: `layers` calls in one jit, each fed by the last, jits in flight.

    What the kernels take and what lies between them; a schedule that `rest` alone decides is made once.
    """

    @jax.jit
    def chain(x: Any, *rest: Any) -> Any:
        for _ in range(layers):
            x = f(x, *rest)
        return x

    def seconds(count: int) -> float:
        start = time.perf_counter()
        x = first
        for _ in range(count):
            x = chain(x, *rest)
        x.block_until_ready()
        return time.perf_counter() - start

    seconds(1)
    runs = [seconds(rounds + 1) - seconds(1) for _ in range(5)]
    return 1e6 * statistics.median(runs) / rounds / layers


def read_ceiling() -> float:
    """GB/s of the fastest plain read that XLA has: the sum of 4 GiB."""
    x = jax.random.bits(jax.random.key(0), (2**30,), jnp.uint32).view(jnp.float32)
    x = jnp.where(jnp.isfinite(x), x, 0.0).reshape(1024, -1)
    _, taken = kernel_times(lambda x: jnp.sum(x, axis=1), x)
    return x.nbytes / taken["us"] / 1e3


class Rows:
    """Prints rows and appends them to a file named for the suite, the GPU and the day."""

    def __init__(self, suite: str, out: str | None, *, gpu: str | None = None):
        self.gpu = gpu or jax.devices()[0].device_kind
        day = datetime.date.today().isoformat()
        name = f"{suite}-{self.gpu.replace(' ', '-').lower()}-{day}.jsonl"
        self.path = pathlib.Path(out or RESULTS) / name
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, **row: Any) -> None:
        """One row: floats rounded to what the clock is good for."""
        row = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
        line = json.dumps({"gpu": self.gpu, "jax": jax.__version__} | row)
        print(line, flush=True)
        with self.path.open("a") as file:
            file.write(line + "\n")


RESULTS = pathlib.Path(__file__).parent / "results"


def rows_of(file: str) -> list[dict[str, Any]]:
    """The rows of a file, in their order."""
    return [json.loads(line) for line in (RESULTS / file).read_text().splitlines()]


def date_of(file: str) -> str:
    """The day of the run that made a file, which its name ends with."""
    (date,) = re.findall(r"-(\d{4}-\d\d-\d\d)\.jsonl$", file)
    return date
