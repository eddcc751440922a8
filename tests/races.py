"""What interpret mode's race detector found."""

import contextlib
from unittest import mock


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
