"""What all_reduce and all_reduce_rms_norm compute, in float64 but for the roundings that they name."""

import numpy as np


def rounded(x, dtype):  # type: ignore[no-untyped-def]
    """To the nearest number of a dtype, and float64 again."""
    return np.asarray(np.asarray(x, np.float64).astype(dtype), np.float64)


def all_reduce(parts):  # type: ignore[no-untyped-def]
    """The sum of [devices, rows, width]."""
    return rounded(np.asarray(parts, np.float64).sum(axis=0), parts.dtype)


def all_reduce_rms_norm(parts, residual, weight, *, eps, is_offset=False, rounds_once=False):  # type: ignore[no-untyped-def]
    """The stream behind the sum, and that normalised."""
    stream = rounded(all_reduce(parts) + np.asarray(residual, np.float64), parts.dtype)
    wide = stream / np.sqrt(np.mean(stream * stream, axis=-1, keepdims=True) + eps)
    if not rounds_once:
        wide = rounded(wide, parts.dtype)
    return stream, rounded(wide * (np.asarray(weight, np.float64) + is_offset), parts.dtype)
