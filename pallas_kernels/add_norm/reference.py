"""Reference of add_norm in float64, except for the rounding of the sum."""

import numpy as np


def add_norm(x, sublayer_out, weight, eps, *, is_offset):  # type: ignore[no-untyped-def]
    """Return the sum, rounded to x.dtype, and its RMS norm times weight or 1 + weight; both in float64."""
    sums = np.asarray(x, np.float64)
    if sublayer_out is not None:
        sums = np.asarray(np.asarray(x, np.float32) + np.asarray(sublayer_out, np.float32)).astype(x.dtype)
        sums = sums.astype(np.float64)
    factor = np.asarray(weight, np.float64) + is_offset
    return sums, sums / np.sqrt(np.mean(sums * sums, axis=-1, keepdims=True) + eps) * factor
