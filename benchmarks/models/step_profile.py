"""Kernels of a decode step and idle time of the device, from JAX's profiler."""

import collections
import gzip
import json
import pathlib
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import jax

MAX_KERNELS = 24  # kernel names listed on their own; the others are summed
MAX_GAPS = 4  # pairs of consecutive kernels with the longest gaps that are listed


def profile_steps(run: Callable[[], Any], steps: int) -> dict[str, Any]:
    """Profile a function and return what the device did per step.

    Args:
        run: Function that runs the steps.
        steps: Number of steps that `run` runs.

    Returns:
        A dict of values per step: "kernels_us", kernel name -> (microseconds, launches); "busy_us", the time
        in which at least one kernel ran; "idle_us", the time between the first and the last kernel in which
        none ran; "gaps_us", the longest idle times, "kernel before > kernel after" -> (microseconds,
        occurrences).
    """
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder)
        run()
        jax.profiler.stop_trace()
        (file,) = pathlib.Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return sum_by_name(list(device_events(events)), steps)


def device_events(events: list[dict[str, Any]]) -> Iterable[tuple[float, float, str]]:
    """Yield start and duration in microseconds, and the name, of each event on a GPU stream."""
    metadata = [event for event in events if event.get("ph") == "M"]
    devices = {
        e["pid"] for e in metadata if e["name"] == "process_name" and "/device:GPU" in e["args"]["name"]
    }
    streams = {
        (e["pid"], e["tid"])
        for e in metadata
        if e["name"] == "thread_name" and e["pid"] in devices and "Stream" in e["args"]["name"]
    }
    for event in events:
        if event.get("ph") == "X" and (event["pid"], event["tid"]) in streams:
            yield event["ts"], event["dur"], event["name"]


def sum_by_name(events: list[tuple[float, float, str]], steps: int) -> dict[str, Any]:
    """Return the sums of events and of the gaps between them per step, in the format of `profile_steps`.

    Raises:
        SystemExit: There are no events.
    """
    if not events:
        raise SystemExit("The profiler recorded no kernel.")
    sums: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0])
    gaps: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0])
    first_start, _, last_name = min(events)
    busy, end = 0.0, first_start
    for start, duration, name in sorted(events):
        sums[name][0] += duration
        sums[name][1] += 1
        busy += max(0.0, start + duration - max(start, end))
        if start > end:
            gap = gaps[f"{last_name} > {name}"]
            gap[:] = gap[0] + start - end, gap[1] + 1
        if start + duration > end:
            end, last_name = start + duration, name
    longest = sorted(sums.items(), key=lambda item: -item[1][0])
    others = sum(us for _, (us, _) in longest[MAX_KERNELS:])
    longest_gaps = sorted(gaps.items(), key=lambda item: -item[1][0])[:MAX_GAPS]
    return {
        "kernels_us": _per_step(longest[:MAX_KERNELS], steps) | {"others": (round(others / steps, 1), None)},
        "busy_us": busy / steps,
        "idle_us": (end - first_start - busy) / steps,
        "gaps_us": _per_step(longest_gaps, steps),
    }


def _per_step(sums: Iterable[tuple[str, list[float]]], steps: int) -> dict[str, tuple[float, float | None]]:
    return {name: (round(us / steps, 1), round(count / steps, 1)) for name, (us, count) in sums}
