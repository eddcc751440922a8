"""Gradients of attention as the paper has them, one request at a time: what the kernel is compared with."""

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
    """Gradients of one request's queries, keys and values, in the precision of its arrays.

    Args:
        query: [tokens, q_heads, head_dim].
        key: [keys, kv_heads, head_dim].
        value: As key.
        grad_out: As query.
        grad_lse: [q_heads, tokens]: of the natural log of the softmax's denominator; None = 0.
        scale: Of scores.
        visible: Bool [tokens, keys], or [q_heads, tokens, keys].
        soft_cap: Of scaled scores.
        bias: [q_heads, tokens, keys]: added to scores behind the cap.
        sinks: [q_heads]: one more score of each head, without a value.
        rounded: What becomes of the output, of probabilities and of gradients of scores before they are
            multiplied.
    """
    keys, kv_heads, _ = key.shape
    group = query.shape[1] // kv_heads
    q, grad = (x.swapaxes(0, 1) for x in (query, grad_out))
    k, v = (np.repeat(x.swapaxes(0, 1), group, axis=0) for x in (key, value))
    transposed = lambda x: x.swapaxes(1, 2)
    scores = q @ transposed(k) * scale
    slope = np.full_like(scores, scale)
    if soft_cap is not None:
        bent = np.tanh(scores / soft_cap)
        scores, slope = bent * soft_cap, (1 - bent * bent) * scale
    scores = np.where(visible, scores if bias is None else scores + bias, -np.inf)
    columns = scores
    if sinks is not None:
        columns = np.pad(scores, ((0, 0), (0, 0), (0, 1)))
        columns[:, :, keys] = sinks[:, None]
    top = np.max(columns, axis=2, keepdims=True, initial=np.finfo(scores.dtype).min)
    total = np.exp(columns - top).sum(axis=2, keepdims=True)
    p = np.exp(scores - top) / np.where(total == 0, 1, total)
    expected = (rounded(p @ v) * grad).sum(axis=2, keepdims=True)
    if grad_lse is not None:
        expected = expected - grad_lse[:, :, None]
    grad_s = rounded(p * (grad @ transposed(v) - expected) * slope)
    of_kv_heads = lambda x: x.reshape(kv_heads, group, *x.shape[1:]).sum(axis=1)
    grad_k, grad_v = of_kv_heads(transposed(grad_s) @ q), of_kv_heads(transposed(rounded(p)) @ grad)
    return (grad_s @ k).swapaxes(0, 1), grad_k.swapaxes(0, 1), grad_v.swapaxes(0, 1)
