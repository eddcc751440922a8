"""Textbook gradients of attention of one request, against which the kernels are tested."""

from collections.abc import Callable

import numpy as np


def grads_of_request(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    grad_out: np.ndarray,
    grad_lse: np.ndarray | None = None,
    *,
    scale: float,
    visible: np.ndarray,
    soft_cap: float | None = None,
    bias: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    rounded: Callable[[np.ndarray], np.ndarray] = lambda x: x,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the gradients of one request's queries, keys and values, in the precision of its arrays.

    Args:
        query: Queries [tokens, q_heads, head_dim].
        key: Keys [keys, kv_heads, head_dim].
        value: Values, like `key`.
        grad_out: Gradient of the output, like `query`.
        grad_lse: Gradient of the log-sum-exp [q_heads, tokens]; None for 0.
        scale: Factor of the scores.
        visible: Which keys each query attends to, bool [tokens, keys] or [q_heads, tokens, keys].
        soft_cap: Soft cap of the scaled scores.
        bias: Bias [q_heads, tokens, keys] that is added to the capped scores.
        sinks: Attention sinks [q_heads].
        rounded: Rounds the output, the probabilities and the score gradients before they are multiplied.
    """
    keys, kv_heads, _ = key.shape
    group = query.shape[1] // kv_heads
    q, dout = (x.swapaxes(0, 1) for x in (query, grad_out))
    k, v = (np.repeat(x.swapaxes(0, 1), group, axis=0) for x in (key, value))
    scores = q @ k.swapaxes(1, 2) * scale
    slope = np.full_like(scores, scale)
    if soft_cap is not None:
        tanh = np.tanh(scores / soft_cap)
        scores, slope = tanh * soft_cap, (1 - tanh * tanh) * scale
    scores = np.where(visible, scores if bias is None else scores + bias, -np.inf)
    columns = scores
    if sinks is not None:
        columns = np.pad(scores, ((0, 0), (0, 0), (0, 1)))
        columns[:, :, keys] = sinks[:, None]
    row_max = np.max(columns, axis=2, keepdims=True, initial=np.finfo(scores.dtype).min)
    row_sum = np.exp(columns - row_max).sum(axis=2, keepdims=True)
    p = np.exp(scores - row_max) / np.where(row_sum == 0, 1, row_sum)
    delta = (rounded(p @ v) * dout).sum(axis=2, keepdims=True)
    if grad_lse is not None:
        delta = delta - grad_lse[:, :, None]
    ds = rounded(p * (dout @ v.swapaxes(1, 2) - delta) * slope)
    head_gradients = ds.swapaxes(1, 2) @ q, rounded(p).swapaxes(1, 2) @ dout
    dk, dv = (x.reshape(kv_heads, group, *x.shape[1:]).sum(axis=1) for x in head_gradients)
    return (ds @ k).swapaxes(0, 1), dk.swapaxes(0, 1), dv.swapaxes(0, 1)
