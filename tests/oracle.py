"""Attention one query and one head at a time, in float64 numpy: what every implementation is judged by."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import ml_dtypes
import numpy as np

# float32 results may differ from float64's by this much of a typical value; the one place that says so.
F32_TOLERANCE = 3e-5


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

    def sees(self, spec, r: int, head: int, i: int, j: np.ndarray) -> np.ndarray:
        """Which keys j the query of request r at position i sees."""
        ok = sees(spec, head, i, j, self.is_decode[r])
        return ok if self.mask is None else ok & np.array([self.mask(r, head, i, key) for key in j], bool)


def sees(spec, head: int, i: int, j: np.ndarray, is_decode: bool) -> np.ndarray:
    """Which keys j the query at position i sees."""
    ok = np.ones(len(j), bool)
    if spec.causal:
        ok &= j <= i
    left, right = spec.window or (None, None)
    ok &= (left is None) | (j >= i - (left or 0)) if left is not None else ok
    ok &= (j <= i + right) if right is not None else ok
    if spec.chunk_size is not None:
        ok &= np.array([key // spec.chunk_size == i // spec.chunk_size for key in j], bool)
    p = spec.sparsity
    if p is not None:
        total_q, total_kv = spec.num_q_heads * p.tp_size, spec.num_kv_heads * p.tp_size
        global_head = p.tp_rank * spec.num_q_heads + head
        group = spec.num_q_heads // spec.num_kv_heads
        if p.homo_head:
            shift = 0
        elif p.homo_head_group and (is_decode or not p.vllm_prefill_heads):
            shift = (global_head // group) * max(1, p.vert_stride // total_kv)
        else:
            shift = global_head * max(1, p.vert_stride // total_q)
        a, b = i // p.block_size, j // p.block_size
        ok &= (b <= a) & ((a - b < p.local_blocks) | ((b + shift + 1) % p.vert_stride == 0))
    return ok


def bias(spec, slope: float, i: int, j: np.ndarray) -> np.ndarray:
    if spec.sqrt_alibi:
        return -slope * np.sqrt(np.maximum(i - j, 0))
    return slope * (j - i)


def attention(spec, step: Step, round_to=None):
    """Lists of out [query_len, q_heads, head_dim] and lse [query_len, q_heads], one a request.

    round_to: a 16-bit dtype in which scores, probabilities and output are rounded, as a plain 16-bit
    implementation does: the yardstick for the error that a kernel may make.
    """
    rounded = (lambda x: x) if round_to is None else (lambda x: np.asarray(x, round_to).astype(np.float64))
    outs, lses = [], []
    group = spec.num_q_heads // spec.num_kv_heads
    for r, q in enumerate(step.q):
        out = np.zeros(q.shape)
        lse = np.full(q.shape[:2], -np.inf)
        seq_len = len(step.k[r])
        j = np.arange(seq_len)
        for t in range(len(q)):
            for h in range(q.shape[1]):
                if seq_len == 0:
                    continue
                i = seq_len - len(q) + t
                keys = j[step.sees(spec, r, h, i, j)]
                s = rounded(step.k[r][keys, h // group] @ q[t, h]) * spec.softmax_scale
                if spec.soft_cap is not None:
                    s = spec.soft_cap * np.tanh(s / spec.soft_cap)
                if step.alibi_slopes is not None:
                    s = s + bias(spec, step.alibi_slopes[h], i, keys)
                sink = [] if step.sinks is None else [step.sinks[h]]
                everything = np.concatenate([s, sink])
                if everything.size == 0:
                    continue
                top = everything.max()
                total = np.exp(everything - top).sum()
                p = rounded(np.exp(s - top) / total)
                out[t, h] = rounded(p @ step.v[r][keys, h // group])
                lse[t, h] = top + np.log(total)
        outs.append(out)
        lses.append(lse)
    return outs, lses


def reachable(spec, step: Step) -> list[np.ndarray]:
    """For each request, bool [seq_len, kv_heads]: some query reads this key."""
    group = spec.num_q_heads // spec.num_kv_heads
    found = []
    for r, q in enumerate(step.q):
        seq_len = len(step.k[r])
        j = np.arange(seq_len)
        hit = np.zeros((seq_len, spec.num_kv_heads), bool)
        for t in range(len(q)):
            for h in range(spec.num_q_heads):
                hit[:, h // group] |= step.sees(spec, r, h, seq_len - len(q) + t, j)
        found.append(hit)
    return found


def allowed_error(spec, step: Step, dtype) -> float:
    """The largest error that an implementation in `dtype` may make against float64."""
    if jnp.dtype(dtype).itemsize >= 4:
        return F32_TOLERANCE
    exact, _ = attention(spec, step)
    plain, _ = attention(spec, step, round_to=dtype)
    worst = max((np.abs(a - b).max(initial=0.0) for a, b in zip(exact, plain, strict=True)), default=0.0)
    return 2 * worst + 4 * float(ml_dtypes.finfo(dtype).eps) * 1e-1
