"""What add_norm computes, in float64 but for the rounding of the sum."""

import numpy as np


def add_norm(x, delta, weight, eps, *, is_offset):  # type: ignore[no-untyped-def]
    """The sum in x.dtype, and its RMS norm, times weight or 1 + weight; [rows, width] in float64."""
    wide = np.asarray(x, np.float64)
    if delta is not None:
        wide = np.asarray(np.asarray(x, np.float32) + np.asarray(delta, np.float32)).astype(x.dtype)
        wide = wide.astype(np.float64)
    factor = np.asarray(weight, np.float64) + is_offset
    return wide, wide / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + eps) * factor
