"""Reference attention in float64 numpy, one request and one head at a time."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import ml_dtypes
import numpy as np

# Allowed difference of float32 results from float64, relative to their scale.
F32_TOLERANCE = 3e-5
GPU_TANH = 2.0**-10  # error of tanh.approx


@dataclasses.dataclass
class Step:
    """A step in host terms: request r has query_lens[r] new tokens, keys k[r] and values v[r].

    q[r] is [query_len, q_heads, head_dim]; k[r], v[r] are [seq_len, kv_heads, head_dim]; all float64 values
    of what is really stored.
    """

    q: list[np.ndarray]
    k: list[np.ndarray]
    v: list[np.ndarray]
    is_decode: list[bool]
    sinks: np.ndarray | None = None
    alibi_slopes: np.ndarray | None = None
    mask: Callable[[int, int, int, int], bool] | None = None  # (request, head, i, j): on top of the spec
    seen: list[np.ndarray] | None = None  # bool [q_heads, query_len, seq_len]: instead of spec and mask
    score_mod: Any = None  # (scores, request, head, i, j): the new scores; `derivative`: by the scores

    def sees_all(self, spec, r: int, head: int) -> np.ndarray:
        """Return which keys each query of request r attends to: bool [query_len, seq_len]."""
        if self.seen is not None:
            return self.seen[r][head]
        num_queries, seq_len = len(self.q[r]), len(self.k[r])
        j, first = np.arange(seq_len), seq_len - num_queries
        rows = [self._sees(spec, r, head, i, j) for i in range(first, seq_len)]
        return np.array(rows, bool).reshape(num_queries, seq_len)

    def _sees(self, spec, r: int, head: int, i: int, j: np.ndarray) -> np.ndarray:
        ok = visible(spec, head, i, j, self.is_decode[r])
        return ok if self.mask is None else ok & np.array([self.mask(r, head, i, key) for key in j], bool)


def visible(spec, head: int, i: int, j: np.ndarray, is_decode: bool) -> np.ndarray:
    """Return which keys j the query at position i attends to."""
    is_visible = np.ones(len(j), bool)
    if spec.causal:
        is_visible &= j <= i
    left, right = spec.window or (None, None)
    is_visible &= (left is None) | (j >= i - (left or 0)) if left is not None else is_visible
    is_visible &= (j <= i + right) if right is not None else is_visible
    if spec.chunk_size is not None:
        is_visible &= np.array([key // spec.chunk_size == i // spec.chunk_size for key in j], bool)
    sparsity = spec.sparsity
    if sparsity is not None:
        total_q, total_kv = spec.num_q_heads * sparsity.tp_size, spec.num_kv_heads * sparsity.tp_size
        global_head = sparsity.tp_rank * spec.num_q_heads + head
        group = spec.num_q_heads // spec.num_kv_heads
        if sparsity.homo_head:
            shift = 0
        elif sparsity.homo_head_group and (is_decode or not sparsity.vllm_prefill_heads):
            shift = (global_head // group) * max(1, sparsity.vert_stride // total_kv)
        else:
            shift = global_head * max(1, sparsity.vert_stride // total_q)
        a, b = i // sparsity.block_size, j // sparsity.block_size
        is_visible &= (b <= a) & (
            (a - b < sparsity.local_blocks) | ((b + shift + 1) % sparsity.vert_stride == 0)
        )
    return is_visible


def bias(spec, slope: float, i: int, j: np.ndarray) -> np.ndarray:
    """Return the ALiBi bias of keys j for the query at position i."""
    if spec.sqrt_alibi:
        return -slope * np.sqrt(np.maximum(i - j, 0))
    return slope * (j - i)


def biased_scores(spec, step: Step, r: int, h: int) -> tuple[np.ndarray, int, int, np.ndarray, np.ndarray]:
    """Return the arguments of `Step.score_mod` for head h of request r."""
    q, k = step.q[r][:, h], step.k[r][:, h // spec.q_heads_per_kv_head]
    positions, j = len(k) - len(q) + np.arange(len(q))[:, None], np.arange(len(k))[None, :]
    s = q @ k.T * spec.softmax_scale
    if spec.soft_cap is not None:
        s = spec.soft_cap * np.tanh(s / spec.soft_cap)
    if step.alibi_slopes is not None:
        s = s + bias(spec, step.alibi_slopes[h], positions, j)
    return s, r, h, positions, j


def weights(spec, step: Step, r: int, h: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the softmax weights [queries, keys] and the log-sum-exps [queries] of head h of request r.

    A row that attends to neither a key nor a sink has zeros and -inf.
    """
    q, k = step.q[r], step.k[r]
    s, *pairs = biased_scores(spec, step, r, h)
    if step.score_mod is not None:
        s = step.score_mod(s, *pairs)
    s = np.where(step.sees_all(spec, r, h), s, -np.inf)
    has_sink = step.sinks is not None and len(k) > 0
    sink = step.sinks[h] if has_sink else -np.inf
    row_max = np.maximum(s.max(axis=1, initial=-np.inf), sink)
    finite = np.where(np.isneginf(row_max), 0.0, row_max)
    p = np.exp(s - finite[:, None])
    row_sum = p.sum(axis=1) + np.exp(sink - finite)
    lse = finite + np.log(row_sum, where=row_sum > 0, out=np.full(len(q), -np.inf))
    return p / np.where(row_sum > 0, row_sum, 1.0)[:, None], lse


class Answer(NamedTuple):
    """Attention results of one request.

    `scale` is the largest sum of absolute terms of a row's outputs, the unit of rounding errors; it may be
    large where an output happens to be small.
    """

    out: np.ndarray  # [query_len, q_heads, head_dim]
    lse: np.ndarray  # [query_len, q_heads]
    scale: np.ndarray  # [query_len, q_heads]


def answers(spec, step: Step, rounded=lambda x: x) -> list[Answer]:
    """Return each request's results; `rounded` rounds queries, keys, values, probabilities and output."""
    step = dataclasses.replace(step, **{name: [rounded(x) for x in getattr(step, name)] for name in "qkv"})
    results = []
    for r, q in enumerate(step.q):
        out, scale = np.zeros(q.shape), np.zeros(q.shape[:2])
        lse = np.full(q.shape[:2], -np.inf)
        for h in range(q.shape[1]):
            probs, lse[:, h] = weights(spec, step, r, h)
            values = step.v[r][:, h // spec.q_heads_per_kv_head]
            out[:, h] = rounded(rounded(probs) @ values)
            scale[:, h] = (probs @ np.abs(values)).max(axis=1, initial=0.0)
        results.append(Answer(out, lse, scale))
    return results


def attention(spec, step: Step) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return out [query_len, q_heads, head_dim] and lse [query_len, q_heads] of each request."""
    exact = answers(spec, step)
    return [a.out for a in exact], [a.lse for a in exact]


def reachable(spec, step: Step) -> list[np.ndarray]:
    """Return for each request which keys some query attends to: bool [seq_len, kv_heads]."""
    per_request = []
    for r, k in enumerate(step.k):
        by_head = np.array([step.sees_all(spec, r, h).any(axis=0) for h in range(spec.num_q_heads)])
        by_head = by_head.reshape(spec.num_kv_heads, spec.q_heads_per_kv_head, len(k))
        per_request.append(by_head.any(axis=1).T)
    return per_request


class Allowed(NamedTuple):
    """Allowed errors of an implementation against float64, for each row of a request."""

    out: np.ndarray  # [query_len, q_heads]
    lse: np.ndarray  # [query_len, q_heads]


def allowed_errors(spec, step: Step, dtype, exact: list[Answer]) -> list[Allowed]:
    """Return the largest errors that an implementation in `dtype` may have; only those of LSEs are absolute.

    In 16 bits: twice the error, relative to the output's scale, of an implementation that rounds queries,
    keys, values, probabilities and output, plus one rounding. Scores are f32 everywhere, but a GPU's tanh has
    11 bits.
    """
    if jnp.dtype(dtype).itemsize >= 4:
        return [Allowed(F32_TOLERANCE * a.scale, F32_TOLERANCE * (1 + np.abs(a.lse))) for a in exact]
    plain = answers(spec, step, lambda x: np.asarray(x, dtype).astype(np.float64))
    worst, worst_lse = 0.0, 0.0
    for a, b in zip(exact, plain, strict=True):
        error = np.abs(a.out - b.out).max(axis=-1)
        worst = max(worst, np.max(error / np.where(a.scale > 0, a.scale, 1.0), initial=0.0))
        lse_error = [np.where(np.isneginf(a.lse), 0.0, x.lse) for x in (a, b)]
        worst_lse = max(worst_lse, np.abs(np.subtract(*lse_error)).max(initial=0.0))
    tanh_error = GPU_TANH * (spec.soft_cap or 0.0)
    relative = 2 * worst + float(ml_dtypes.finfo(dtype).eps) + tanh_error
    in_lse = lambda lse: 2 * worst_lse + tanh_error + F32_TOLERANCE * (1 + np.abs(lse))
    return [Allowed(relative * a.scale, in_lse(a.lse)) for a in exact]


def check(spec, step: Step, dtype, starts, out: np.ndarray, lse: np.ndarray | None) -> None:
    """Assert that a step's outputs and LSEs are right, and those of padding 0 and -inf.

    Args:
        spec: Specification of the layer.
        step: The step.
        dtype: Dtype in which the implementation computes.
        starts: Index of the first token of each request.
        out: [tokens, q_heads, head_dim]
        lse: [tokens, q_heads], or None if it was not requested.
    """
    exact = answers(spec, step)
    is_padding = np.ones(len(out), bool)
    for start, a, allowed in zip(starts, exact, allowed_errors(spec, step, dtype, exact), strict=True):
        token_slice = slice(start, start + len(a.out))
        is_padding[token_slice] = False
        tokens = f"token {start} onward"
        _check_rows(
            f"out of {tokens}", np.abs(out[token_slice] - a.out).max(axis=-1, initial=0.0), allowed.out
        )
        if lse is not None:
            is_empty = np.isneginf(a.lse)
            np.testing.assert_array_equal(
                np.isneginf(lse[token_slice]), is_empty, f"which LSEs of {tokens} are -inf"
            )
            finite = [np.where(is_empty, 0.0, x) for x in (lse[token_slice], a.lse)]
            _check_rows(
                f"LSE of {tokens}", np.abs(np.subtract(*finite)), np.where(is_empty, 0.0, allowed.lse)
            )
    assert (out[is_padding] == 0).all(), "padding must come out as zeros"
    assert lse is None or np.isneginf(lse[is_padding]).all(), "the LSE of padding must be -inf"


def _check_rows(name: str, error: np.ndarray, bound: np.ndarray) -> None:
    """Assert that errors [queries, q_heads] are within bounds."""
    if not (error <= bound).all():
        index = np.unravel_index(np.argmax(np.nan_to_num(error - bound, nan=np.inf)), error.shape)
        count = f"{(~(error <= bound)).sum()} of {error.size} rows"
        worst = f"the worst is query {index[0]}, head {index[1]}"
        raise AssertionError(
            f"{name} is off by {error[index]:.3g}, allowed are {bound[index]:.3g} ({count}; {worst})"
        )
