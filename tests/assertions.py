"""What interpret mode's race detector found."""

import contextlib
import re
from unittest import mock

import jax

import jattn


@contextlib.contextmanager
def none_in(kernels):
    """In so many kernels that run inside, to their end, with `detect_races=True`.

    JAX has no public way to ask, and keeps what it found in the last kernel alone.
    """
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    found = []
    right = gpu_callbacks.GPURaceDetectionState

    def noted(*args, **named):
        found.append(right(*args, **named))
        return found[-1]

    with mock.patch.object(gpu_callbacks, "GPURaceDetectionState", noted):
        yield
    assert [state.races_found for state in found] == [False] * kernels


def check_in_place(step, cache_spec, arguments):
    """A jitted step must alias its cache, hold no copy of it, and leave the caller's arrays deleted.

    Args:
        step: Returns the cache among its results.
        cache_spec: Of the cache.
        arguments: From a cache to the step's arguments.
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
    """Instructions of the compiled program that copy something of the array's shape."""
    shape = ",".join(map(str, array.shape))
    return re.findall(rf"\S+ = \w+\[{shape}\]\S* copy\(.*", compiled.as_text())


@contextlib.contextmanager
def compilations():
    """What is compiled inside, whoever asks for it: a list that grows."""
    names = []

    def note(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
