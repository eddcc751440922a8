"""Packed requests for varlen_backward, with needles and poison; gradients in float64 and in 16 bits.

All queries share one direction, and every 32 keys contain a needle: a key along that direction with a large
value. In every 32 queries one output has a large gradient. Any 64 queries and 64 keys that see each other
therefore contain a pair with a large contribution to all three gradients, so no lost tile goes unnoticed.
Rows of no request are NaN; keys that no query of their request sees have a high score and a huge value.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jattn.masks import Mask, Pairs
from pallas_kernels.shared.score import Score
from pallas_kernels.varlen_backward import reference
from pallas_kernels.varlen_prefill import key_range
from tests.attention_problems import NEEDLE_SCORE, UNSEEN_SCORE, UNSEEN_VALUE, along, needle_positions

NEEDLE_EVERY = 32  # queries, and keys, of a request: tiles of 64 may start at any row
NEEDLE_SIZE = 4.0  # factor by which needles exceed other values and gradients of outputs
GRADIENTS = ("query", "key", "value")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Parameters of a problem.

    Attributes:
        query_lens: Number of queries of each request.
        seq_lens: Number of keys of each request.
        heads: Numbers of query heads and KV heads.
        gap: Number of NaN rows after the keys of each request, and after all queries.
        is_aligned: Whether queries and keys of each request start at multiples of 8, for which more NaN rows
            follow the keys.
        has_sinks: Whether heads have sinks, which are part of the LSE.
        mask: Mask that is applied in addition to the score.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    score: Score
    heads: tuple[int, int] = (2, 1)
    head_dim: int = 64
    dtype: str = "bfloat16"
    gap: int = 5
    is_aligned: bool = False
    has_alibi: bool = False
    has_sinks: bool = False
    has_grad_lse: bool = False
    mask: Mask | None = None
    seed: int = 0


class BackwardProblem:
    """The arrays of a setting: `arguments` of varlen_backward, and the expected gradients."""

    def __init__(self, setting: Setting):
        self.setting, self.rng = setting, np.random.default_rng(setting.seed)
        (q_heads, kv_heads), gap, dim = setting.heads, setting.gap, setting.head_dim
        self.starts = np.concatenate([[0], np.cumsum(setting.query_lens)])
        room = np.asarray(setting.seq_lens) + gap
        if setting.is_aligned:
            assert setting.query_lens == setting.seq_lens
            assert not (self.starts[:-1] % 8).any()
            room += -room % 8
        kv_ends = np.cumsum(room)
        self.kv_starts = kv_ends - room
        tokens, keys = int(self.starts[-1]) + gap, int(kv_ends[-1])
        poison = lambda rows, heads: np.full((rows, heads, dim), np.nan, jnp.dtype(setting.dtype))
        self.arrays = {name: poison(tokens, q_heads) for name in ("query", "out", "grad_out")}
        self.arrays |= {name: poison(keys, kv_heads) for name in ("key", "value")}
        self.lse, self.grad_lse = (np.full((q_heads, tokens), np.nan, np.float32) for _ in range(2))
        draw = lambda *shape: self.rng.uniform(-1, 1, shape).astype(np.float32)
        # The last head of each group has a small slope.
        reach = np.where(np.arange(1, q_heads + 1) % (q_heads // kv_heads) == 0, 0.01, 0.25)
        self.slopes = (np.abs(draw(q_heads)) * reach).astype(np.float32) if setting.has_alibi else None
        self.sinks = 2 * draw(q_heads) if setting.has_sinks else None
        self.largest_sum = 4.0  # lower bound
        self.expected = {name: np.zeros(self.arrays[name].shape) for name in GRADIENTS}
        self.in_16_bits = {name: np.zeros(self.arrays[name].shape) for name in GRADIENTS}
        for r in range(len(setting.query_lens)):
            self._draw(r)

    @property
    def arguments(self):
        """Return the arguments of varlen_backward."""
        arrays = {
            **self.arrays,
            "lse": self.lse,
            "grad_lse": self.grad_lse if self.setting.has_grad_lse else None,
            "query_start_loc": self.starts.astype(np.int32),
            "seq_lens": np.asarray(self.setting.seq_lens, np.int32),
            "kv_start_loc": self.kv_starts.astype(np.int32),
            "alibi_slopes": self.slopes,
        }
        return {name: jnp.asarray(x) for name, x in arrays.items() if x is not None}

    def check(self, grads):
        """Assert that each gradient has at most twice the error of 16 bits, and is 0 outside of requests."""
        for name, actual in zip(GRADIENTS, grads, strict=True):
            actual, expected = np.asarray(actual, np.float64), self.expected[name]
            assert actual.shape == expected.shape
            assert not np.isnan(actual).any(), f"{name}'s gradient is off by NaN"
            error, allowed = actual - expected, self.in_16_bits[name] - expected
            rounding = float(jnp.finfo(self.setting.dtype).eps) * np.abs(expected).max(initial=0.0)
            # The score of a single key has no gradient: two float32 sums cancel up to rounding error.
            cancellation = 4 * float(np.finfo(np.float32).eps) * self.largest_sum
            bound = 2 * np.abs(allowed).max(initial=0.0) + max(rounding / 2, cancellation)
            largest_error, mean_square = np.abs(error).max(initial=0.0), (error**2).mean()
            assert largest_error <= bound, f"{name}'s gradient is off by {largest_error}, more than {bound}"
            assert mean_square <= 2 * (allowed**2).mean() + cancellation**2, (
                f"{name}'s gradient is off by {mean_square}"
            )
            assert not actual[~self._is_live(name)].any(), (
                f"{name}'s gradient must be 0 for rows of no request"
            )

    def _is_live(self, name):
        live = np.zeros(len(self.arrays[name]), bool)
        starts = self.starts[:-1] if name == "query" else self.kv_starts
        lens = self.setting.query_lens if name == "query" else self.setting.seq_lens
        for start, n in zip(starts, lens, strict=True):
            live[start : start + n] = True
        return live

    def _draw(self, r):
        """Draw the arrays of a request and compute its gradients."""
        setting, dtype = self.setting, jnp.dtype(self.setting.dtype)
        q_heads, score = setting.heads[0], setting.score
        num, keys = setting.query_lens[r], setting.seq_lens[r]
        token_slice = slice(self.starts[r], self.starts[r] + num)
        key_slice = slice(self.kv_starts[r], self.kv_starts[r] + keys)
        grad_lse = self.rng.normal(size=(q_heads, num)).astype(np.float32)
        position = np.arange(num) + keys - num
        visible = visible_keys(score, position, keys)
        if setting.mask is not None:
            head, query, key = np.ix_(range(q_heads), position, range(keys))
            pairs = (jnp.asarray(x, jnp.int32) for x in (head, np.full((1, 1, 1), r), query, key))
            visible = visible & np.asarray(setting.mask.visible(Pairs(*pairs, num_heads=setting.heads)))
        q, k, v, grad = (x.astype(dtype) for x in self._draw_arrays(visible))
        self.largest_sum = max(self.largest_sum, largest_cancelled_sum(q, k, v, grad, score.scale, visible))
        bias = None
        if self.slopes is not None:
            distance = position[:, None] - np.arange(keys)
            far = np.sqrt(np.maximum(distance, 0)) if score.sqrt_alibi else distance
            bias = -self.slopes[:, None, None].astype(np.float64) * far
        out, lse = forward(q, k, v, score, visible, bias, self.sinks)
        arrays_by_name = {"query": q, "key": k, "value": v, "grad_out": grad, "out": out.astype(dtype)}
        for name, x in arrays_by_name.items():
            self.arrays[name][key_slice if name in ("key", "value") else token_slice] = x
        self.lse[:, token_slice], self.grad_lse[:, token_slice] = lse, grad_lse
        in_64 = lambda x: None if x is None else np.asarray(x, np.float64)
        round_to = lambda x: x.astype(dtype).astype(np.float64)
        arrays = [in_64(x) for x in (q, k, v, grad, grad_lse if setting.has_grad_lse else None)]
        options = {"scale": score.scale, "soft_cap": score.soft_cap, "visible": visible}
        options |= {"bias": in_64(bias), "sinks": in_64(self.sinks)}
        exact = reference.grads_of_request(*arrays, **options)
        rounded = reference.grads_of_request(*arrays, **options, rounded=round_to)
        for name, x, y in zip(GRADIENTS, exact, rounded, strict=True):
            rows = token_slice if name == "query" else key_slice
            self.expected[name][rows], self.in_16_bits[name][rows] = x, round_to(y)

    def _draw_arrays(self, visible):
        """Return queries, keys, values and gradients of outputs in float64.

        Args:
            visible: Bool [queries, keys], or [q_heads, queries, keys].
        """
        (q_heads, kv_heads), dim, score = self.setting.heads, self.setting.head_dim, self.setting.score
        num, keys = visible.shape[-2:]
        draw = lambda rows, heads: self.rng.normal(size=(rows, heads, dim))
        q, grad, k, v = draw(num, q_heads), draw(num, q_heads), draw(keys, kv_heads), draw(keys, kv_heads)
        direction = self.rng.choice([-1.0, 1.0], dim) * dim**-0.5
        needle_score, cap = NEEDLE_SCORE, score.soft_cap
        if cap is not None:
            needle_score = cap * np.arctanh(min(NEEDLE_SCORE / cap, 0.9))
        length = (needle_score / score.scale) ** 0.5  # of queries and needles: their product is the score
        q = along(q, direction, length)
        group = q_heads // kv_heads
        visible_by_head = np.broadcast_to(visible, (q_heads, num, keys)).reshape(kv_heads, group, num, keys)
        for g, seen in enumerate(visible_by_head.any(axis=1)):
            is_key_visible, is_query_visible = seen.any(axis=0), seen.any(axis=1)
            needles = needle_positions(is_key_visible, self.rng, NEEDLE_EVERY)
            k[:, g] = along(k[:, g], direction, 0.0)
            k[needles, g] += length * direction
            v[needles, g] *= NEEDLE_SIZE
            k[~is_key_visible, g] = UNSEEN_SCORE / score.scale / length * direction
            v[~is_key_visible, g] = UNSEEN_VALUE
            heads = slice(g * group, (g + 1) * group)
            grad[needle_positions(is_query_visible, self.rng, NEEDLE_EVERY), heads] *= NEEDLE_SIZE
        return q, k, v, grad


def visible_keys(score, position, keys):
    """Return which keys each query of a request sees: bool [queries, keys]."""
    low, high = (np.asarray(x) for x in key_range(score, jnp.asarray(position, jnp.int32), jnp.int32(keys)))
    positions = np.arange(keys)
    return (positions >= low[:, None]) & (positions < high[:, None])


def largest_cancelled_sum(q, k, v, grad, scale, visible):
    """Return the largest sum |dO V| of a visible pair times the factor of its score's gradient."""
    group = q.shape[1] // k.shape[1]
    q, k, v, grad = (
        np.abs(np.asarray(x, np.float64)) for x in (q, np.repeat(k, group, 1), np.repeat(v, group, 1), grad)
    )
    sums = np.where(visible, head_products(grad, v), 0.0)
    largest_keys = np.where(np.broadcast_to(visible, sums.shape).any(axis=1), k.max(axis=-1).T, 0.0)
    return float(sums.max(initial=0.0) * scale * max(q.max(initial=0.0), largest_keys.max(initial=0.0)))


def head_products(x, y):
    """Return x @ y.T of each head: [heads, rows of x, rows of y]. einsum is much slower."""
    return x.swapaxes(0, 1) @ y.transpose(1, 2, 0)


def forward(q, k, v, score, visible, bias, sinks):
    """Return the output and LSE of a request in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    s = head_products(q, np.repeat(k, group, 1)) * score.scale
    if score.soft_cap is not None:
        s = np.tanh(s / score.soft_cap) * score.soft_cap
    p = np.exp(np.where(visible, s if bias is None else s + bias, -np.inf))
    row_sum = p.sum(-1) + (0 if sinks is None else np.exp(sinks.astype(np.float64))[:, None])
    with np.errstate(divide="ignore"):
        lse = np.log(row_sum)
    p = p / np.where(row_sum == 0, 1, row_sum)[..., None]
    return (p @ np.repeat(v, group, 1).swapaxes(0, 1)).swapaxes(0, 1), lse
