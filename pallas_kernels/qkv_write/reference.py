"""What qkv_write computes, in float64 but for the roundings that it names."""

import numpy as np


def turned(x, cos, sin):  # type: ignore[no-untyped-def]
    """[tokens, heads, head_dim], pairs (i, i + head_dim / 2) turned by angles [tokens, head_dim / 2]."""
    first, second = np.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def normed(x, weight, eps, *, is_offset):  # type: ignore[no-untyped-def]
    """Each head divided by its root mean square."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * (weight + is_offset)


def qkv_write(qkv, cos=None, sin=None, q_norm=None, k_norm=None, eps=0.0, is_offset=False):  # type: ignore[no-untyped-def]
    """Queries [tokens, kv_heads * group, head_dim], keys and values [tokens, kv_heads, head_dim]."""
    wide = np.asarray(qkv, np.float64)
    tokens, _, _, head_dim = wide.shape
    query, key, value = wide[:, :, :-2].reshape(tokens, -1, head_dim), wide[:, :, -2], wide[:, :, -1]
    if q_norm is not None:
        query = normed(query, np.asarray(q_norm, np.float64), eps, is_offset=is_offset)
    if k_norm is not None:
        key = normed(key, np.asarray(k_norm, np.float64), eps, is_offset=is_offset)
    if cos is not None:
        angles = np.asarray(cos, np.float64), np.asarray(sin, np.float64)
        query, key = turned(query, *angles), turned(key, *angles)
    return query, key, value
