"""Reference of qkv_write in float64."""

import numpy as np


def apply_rope(x, cos, sin):  # type: ignore[no-untyped-def]
    """Rotate pairs (i, i + head_dim / 2) of [tokens, heads, head_dim] by angles [tokens, head_dim / 2]."""
    first, second = np.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def apply_norm(x, weight, eps, *, is_offset):  # type: ignore[no-untyped-def]
    """Divide each head by its root mean square and multiply by the weight."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * (weight + is_offset)


def qkv_write(qkv, cos=None, sin=None, q_norm=None, k_norm=None, eps=0.0, is_offset=False):  # type: ignore[no-untyped-def]
    """Return queries [tokens, kv_heads * group, head_dim], keys and values [tokens, kv_heads, head_dim]."""
    qkv_f64 = np.asarray(qkv, np.float64)
    tokens, _, _, head_dim = qkv_f64.shape
    query, key, value = qkv_f64[:, :, :-2].reshape(tokens, -1, head_dim), qkv_f64[:, :, -2], qkv_f64[:, :, -1]
    if q_norm is not None:
        query = apply_norm(query, np.asarray(q_norm, np.float64), eps, is_offset=is_offset)
    if k_norm is not None:
        key = apply_norm(key, np.asarray(k_norm, np.float64), eps, is_offset=is_offset)
    if cos is not None:
        angles = np.asarray(cos, np.float64), np.asarray(sin, np.float64)
        query, key = apply_rope(query, *angles), apply_rope(key, *angles)
    return query, key, value
