"""References of all_reduce and all_reduce_rms_norm in float64, rounded where the kernels round."""

import numpy as np


def rounded(x, dtype):  # type: ignore[no-untyped-def]
    """Round to a dtype and convert back to float64."""
    return np.asarray(np.asarray(x, np.float64).astype(dtype), np.float64)


def all_reduce(parts):  # type: ignore[no-untyped-def]
    """Return the sum of arrays [devices, rows, width]."""
    return rounded(np.asarray(parts, np.float64).sum(axis=0), parts.dtype)


def all_reduce_rms_norm(parts, residual, weight, *, eps, is_offset=False, rounds_once=False):  # type: ignore[no-untyped-def]
    """Return the residual plus the sum, and its RMS norm."""
    residual_out = rounded(all_reduce(parts) + np.asarray(residual, np.float64), parts.dtype)
    normed = residual_out / np.sqrt(np.mean(residual_out * residual_out, axis=-1, keepdims=True) + eps)
    if not rounds_once:
        normed = rounded(normed, parts.dtype)
    return residual_out, rounded(normed * (np.asarray(weight, np.float64) + is_offset), parts.dtype)
