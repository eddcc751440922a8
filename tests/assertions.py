"""Assertions about compiled and interpreted programs: no races, updates in place, no extra compilations."""

import contextlib
import re
from unittest import mock

import jax

import jattn


@contextlib.contextmanager
def assert_no_races(num_kernels):
    """Assert that exactly `num_kernels` kernels run inside with `detect_races=True`, none with a data race.

    JAX has no public API for the result and keeps it for the last kernel only.
    """
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    states = []
    original = gpu_callbacks.GPURaceDetectionState

    def record(*args, **kwargs):
        states.append(original(*args, **kwargs))
        return states[-1]

    with mock.patch.object(gpu_callbacks, "GPURaceDetectionState", record):
        yield
    assert [state.races_found for state in states] == [False] * num_kernels


def assert_updates_in_place(step, cache_spec, arguments):
    """Assert that a jitted step aliases its cache, never copies it, and deletes the caller's arrays.

    Args:
        step: Jitted function that donates the cache and returns it among its results.
        cache_spec: CacheSpec of the cache.
        arguments: Function from a cache to the step's arguments.
    """
    cache = jattn.PagedCache.create(cache_spec)
    compiled = step.lower(*arguments(cache)).compile()
    assert compiled.memory_analysis().alias_size_in_bytes >= cache_spec.num_bytes
    assert "input_output_alias" in compiled.as_text()
    assert copies_of(compiled, cache.k) == []
    step(*arguments(cache))
    assert cache.k.is_deleted()
    assert cache.v.is_deleted()


def copies_of(compiled, array):
    """Return the compiled program's copy instructions whose result has the array's shape."""
    shape = ",".join(map(str, array.shape))
    return re.findall(rf"\S+ = \w+\[{shape}\]\S* copy\(.*", compiled.as_text())


@contextlib.contextmanager
def record_compilations():
    """Yield a list that gets one entry, the seconds taken, for each program that XLA compiles inside."""
    durations = []

    def record(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            durations.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(record)
    try:
        yield durations
    finally:
        jax.monitoring.unregister_event_duration_listener(record)
