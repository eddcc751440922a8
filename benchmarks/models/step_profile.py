"""The kernels of a decode step as JAX's profiler saw them, and how long the device was idle."""

import collections
import gzip
import json
import pathlib
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import jax

SHOWN = 24  # names; the rest is a sum
GAPS = 4  # of the longest, by what ran before and behind


def traced(run: Callable[[], Any], steps: int) -> dict[str, Any]:
    """What the device did in `run()`, which does `steps` steps, by step.

    Returns:
        "kernels_us", name to (microseconds, launches); "busy_us", in which at least one ran; "idle_us", in
        which none did between the first and the last; "gaps_us", where most of that was: "before > behind" to
        (microseconds, how often), by step, too.
    """
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder)
        run()
        jax.profiler.stop_trace()
        (file,) = pathlib.Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return by_name(list(device_events(events)), steps)


def device_events(events: list[dict[str, Any]]) -> Iterable[tuple[float, float, str]]:
    """(start, microseconds, name) of what ran on a GPU's streams."""
    named = [event for event in events if event.get("ph") == "M"]
    devices = {e["pid"] for e in named if e["name"] == "process_name" and "/device:GPU" in e["args"]["name"]}
    streams = {
        (e["pid"], e["tid"])
        for e in named
        if e["name"] == "thread_name" and e["pid"] in devices and "Stream" in e["args"]["name"]
    }
    for event in events:
        if event.get("ph") == "X" and (event["pid"], event["tid"]) in streams:
            yield event["ts"], event["dur"], event["name"]


def by_name(events: list[tuple[float, float, str]], steps: int) -> dict[str, Any]:
    """Sums of the events, by step."""
    if not events:
        raise SystemExit("the profiler saw no kernel")
    sums: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0])
    gaps: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0])
    first, _, before = min(events)
    busy, end = 0.0, first
    for start, length, name in sorted(events):
        sums[name][0] += length
        sums[name][1] += 1
        busy += max(0.0, start + length - max(start, end))
        if start > end:
            gap = gaps[f"{before} > {name}"]
            gap[:] = gap[0] + start - end, gap[1] + 1
        if start + length > end:
            end, before = start + length, name
    longest = sorted(sums.items(), key=lambda item: -item[1][0])
    rest = sum(us for _, (us, _) in longest[SHOWN:])
    by_step = lambda found: {
        name: (round(us / steps, 1), round(count / steps, 1)) for name, (us, count) in found
    }
    return {
        "kernels_us": by_step(longest[:SHOWN]) | {"others": (round(rest / steps, 1), None)},
        "busy_us": busy / steps,
        "idle_us": (end - first - busy) / steps,
        "gaps_us": by_step(sorted(gaps.items(), key=lambda item: -item[1][0])[:GAPS]),
    }
