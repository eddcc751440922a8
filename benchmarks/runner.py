"""Shared measurement code: kernel times by CUPTI, wall times, the read ceiling, and result files."""

import concurrent.futures
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
    """Run a function several times and return its result and its kernel times.

    Args:
        f: Function to measure. It is compiled first if it is not compiled yet.
        *args: Arguments of the function.
        iterations: Number of runs.

    Returns:
        The result of `f(*args)`, and a dict with "us", the median over runs of the sum of all kernel times in
        microseconds, "spread_us", the first and the last decile of that sum, and "kernels_us", the median
        time of each kernel.
    """
    result, runs = profiler.measure(f, aggregate=False, iterations=iterations)(*args)
    assert isinstance(runs, list)
    sums = [1e3 * sum(ms for _, ms in run) for run in runs]
    kernels: dict[str, float] = {}
    for index, (name, _) in enumerate(runs[0]):
        label = name if name not in kernels else f"{name}#{index}"
        kernels[label] = round(1e3 * statistics.median(run[index][1] for run in runs), 2)
    low, *_, high = statistics.quantiles(sums, n=10)
    return result, {"us": statistics.median(sums), "spread_us": [low, high], "kernels_us": kernels}


def wall_time(f: Callable[..., Any], first: Any, *rest: Any, layers: int = 4, rounds: int = 8) -> float:
    """Return the wall time in microseconds of one call in a chain of dependent calls.

    Each jitted function chains `layers` calls, and several of them are in flight at once, so the time
    contains the kernels and the gaps between them. XLA computes values that depend only on `rest`, such as a
    schedule, once per jitted function.

    Args:
        f: Function to measure. Its result has the structure and shapes of its first argument.
        first: First argument of the first call.
        *rest: Other arguments, the same for every call.
        layers: Number of calls per jitted function.
        rounds: Number of jitted calls in flight.
    """
    return wall_times({"": (f, first, *rest)}, layers=layers, rounds=rounds)[""]


def wall_times(calls: dict[str, tuple[Any, ...]], *, layers: int = 8, rounds: int = 8) -> dict[str, float]:
    """Return the wall times of several functions as `wall_time` does, measured in turn.

    Args:
        calls: Name of a time -> the function and its arguments.
        layers: Number of calls per jitted function.
        rounds: Number of jitted calls in flight.
    """

    def chain_of(f: Callable[..., Any]) -> Any:
        def chain(x: Any, *rest: Any) -> Any:
            for _ in range(layers):
                x = f(x, *rest)
            return x

        return jax.jit(chain)

    def seconds(name: str, count: int) -> float:
        _, x, *rest = calls[name]
        start = time.perf_counter()
        for _ in range(count):
            x = programs[name](x, *rest)
        jax.block_until_ready(x)
        return time.perf_counter() - start

    with concurrent.futures.ThreadPoolExecutor() as pool:
        lowered = {name: chain_of(f).lower(*arguments) for name, (f, *arguments) in calls.items()}
        programs = dict(zip(lowered, pool.map(lambda x: x.compile(), lowered.values()), strict=True))
    for name in calls:
        seconds(name, 1)
    runs: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(5):
        for name in calls:
            runs[name].append(seconds(name, rounds + 1) - seconds(name, 1))
    return {name: 1e6 * statistics.median(times) / rounds / layers for name, times in runs.items()}


def read_ceiling() -> float:
    """Return the read ceiling in GB/s: the rate at which XLA sums 4 GiB."""
    x = jax.random.bits(jax.random.key(0), (2**30,), jnp.uint32).view(jnp.float32)
    x = jnp.where(jnp.isfinite(x), x, 0.0).reshape(1024, -1)
    _, times = kernel_times(lambda x: jnp.sum(x, axis=1), x)
    return x.nbytes / times["us"] / 1e3


class Rows:
    """A result file, named after the suite, the GPU and the date."""

    def __init__(self, suite: str, out: str | None, *, gpu: str | None = None):
        """Create the directory of the file.

        Args:
            suite: Name of the suite, the first part of the file name.
            out: Directory of the file. Defaults to benchmarks/results.
            gpu: Device name to record. Defaults to the kind of JAX's first device.
        """
        self.gpu = gpu or jax.devices()[0].device_kind
        day = datetime.date.today().isoformat()
        name = f"{suite}-{self.gpu.replace(' ', '-').lower()}-{day}.jsonl"
        self.path = pathlib.Path(out or RESULTS) / name
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, **row: Any) -> None:
        """Print a row and append it to the file. Floats are rounded to three digits after the point."""
        row = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}
        line = json.dumps({"gpu": self.gpu, "jax": jax.__version__} | row)
        print(line, flush=True)
        with self.path.open("a") as file:
            file.write(line + "\n")


RESULTS = pathlib.Path(__file__).parent / "results"


def read_rows(file: str) -> list[dict[str, Any]]:
    """Return the rows of a file in benchmarks/results, in file order."""
    return [json.loads(line) for line in (RESULTS / file).read_text().splitlines()]


def run_date(file: str) -> str:
    """Return the date at the end of a result file's name."""
    (date,) = re.findall(r"-(\d{4}-\d\d-\d\d)\.jsonl$", file)
    return date
