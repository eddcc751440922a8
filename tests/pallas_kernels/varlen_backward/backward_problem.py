"""Packed requests for varlen_backward, with needles and poison; gradients by float64 and by 16 bits.

All queries have one direction in common, and in every 32 keys there is a needle: a key of that direction,
with a large value. In every 32 queries there is one whose output has a large gradient. So any 64 queries and
64 keys that see each other have a pair with a large part in all three gradients: no tile can be lost unseen.
What no request owns is NaN; a key that no query of its request sees scores high, with a huge value.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jattn.masks import Mask, Pairs
from pallas_kernels.shared.score import Score
from pallas_kernels.varlen_backward import reference
from pallas_kernels.varlen_prefill import key_range
from tests.attention_problems import NEEDLE_SCORE, UNSEEN_SCORE, UNSEEN_VALUE, along, needle_places

NEEDLE_EVERY = 32  # queries, and keys, of a request: tiles of 64 begin anywhere
NEEDLE_SIZE = 4.0  # of values and of outputs' gradients, by others'
GRADIENTS = ("query", "key", "value")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What a problem is made of.

    Attributes:
        query_lens: Queries of each request.
        seq_lens: Its keys.
        heads: Query heads and kv heads.
        gap: Rows of NaN behind each request's keys; and as many behind all queries.
        has_sinks: Heads have sinks, which are in the LSE.
        mask: jattn's, beyond the score's numbers.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    score: Score
    heads: tuple[int, int] = (2, 1)
    head_dim: int = 64
    dtype: str = "bfloat16"
    gap: int = 5
    has_alibi: bool = False
    has_sinks: bool = False
    has_grad_lse: bool = False
    mask: Mask | None = None
    seed: int = 0


class BackwardProblem:
    """A setting's arrays: `arguments` of varlen_backward, and what it should return."""

    def __init__(self, setting: Setting):
        self.setting, self.rng = setting, np.random.default_rng(setting.seed)
        (q_heads, kv_heads), gap, dim = setting.heads, setting.gap, setting.head_dim
        self.starts = np.concatenate([[0], np.cumsum(setting.query_lens)])
        kv_ends = np.cumsum(np.asarray(setting.seq_lens) + gap)
        self.kv_starts = kv_ends - gap - np.asarray(setting.seq_lens)
        tokens, keys = int(self.starts[-1]) + gap, int(kv_ends[-1])
        poison = lambda rows, heads: np.full((rows, heads, dim), np.nan, jnp.dtype(setting.dtype))
        self.arrays = {name: poison(tokens, q_heads) for name in ("query", "out", "grad_out")}
        self.arrays |= {name: poison(keys, kv_heads) for name in ("key", "value")}
        self.lse, self.grad_lse = (np.full((q_heads, tokens), np.nan, np.float32) for _ in range(2))
        draw = lambda *shape: self.rng.uniform(-1, 1, shape).astype(np.float32)
        # The last head of each group looks far.
        reach = np.where(np.arange(1, q_heads + 1) % (q_heads // kv_heads) == 0, 0.01, 0.25)
        self.slopes = (np.abs(draw(q_heads)) * reach).astype(np.float32) if setting.has_alibi else None
        self.sinks = 2 * draw(q_heads) if setting.has_sinks else None
        self.cancelling = 4.0  # no request's sums are taken for less
        self.want = {name: np.zeros(self.arrays[name].shape) for name in GRADIENTS}
        self.in_16_bits = {name: np.zeros(self.arrays[name].shape) for name in GRADIENTS}
        for r in range(len(setting.query_lens)):
            self._draw(r)

    @property
    def arguments(self):
        """Of varlen_backward."""
        found = {
            **self.arrays,
            "lse": self.lse,
            "grad_lse": self.grad_lse if self.setting.has_grad_lse else None,
            "query_start_loc": self.starts.astype(np.int32),
            "seq_lens": np.asarray(self.setting.seq_lens, np.int32),
            "kv_start_loc": self.kv_starts.astype(np.int32),
            "alibi_slopes": self.slopes,
        }
        return {name: jnp.asarray(x) for name, x in found.items() if x is not None}

    def check(self, grads):
        """Each gradient is within twice the error of 16 bits; what no request owns has none."""
        for name, actual in zip(GRADIENTS, grads, strict=True):
            actual, expected = np.asarray(actual, np.float64), self.want[name]
            assert actual.shape == expected.shape
            assert not np.isnan(actual).any(), f"{name}'s gradient is off by NaN"
            error, allowed = actual - expected, self.in_16_bits[name] - expected
            rounding = float(jnp.finfo(self.setting.dtype).eps) * np.abs(expected).max(initial=0.0)
            # A lone key's score has no gradient: two sums in float32 cancel, but for what they lose.
            cancelled = 4 * float(np.finfo(np.float32).eps) * self.cancelling
            bound = 2 * np.abs(allowed).max(initial=0.0) + max(rounding / 2, cancelled)
            off, mean_square = np.abs(error).max(initial=0.0), (error**2).mean()
            assert off <= bound, f"{name}'s gradient is off by {off}, more than {bound}"
            assert mean_square <= 2 * (allowed**2).mean() + cancelled**2, (
                f"{name}'s gradient is off by {mean_square}"
            )
            assert not actual[~self._is_live(name)].any(), (
                f"{name}'s gradient must come out 0 where nobody is"
            )

    def _is_live(self, name):
        live = np.zeros(len(self.arrays[name]), bool)
        starts = self.starts[:-1] if name == "query" else self.kv_starts
        lens = self.setting.query_lens if name == "query" else self.setting.seq_lens
        for start, n in zip(starts, lens, strict=True):
            live[start : start + n] = True
        return live

    def _draw(self, r):
        """A request's arrays, and its gradients."""
        setting, dtype = self.setting, jnp.dtype(self.setting.dtype)
        q_heads, score = setting.heads[0], setting.score
        num, keys = setting.query_lens[r], setting.seq_lens[r]
        tokens = slice(self.starts[r], self.starts[r] + num)
        mine = slice(self.kv_starts[r], self.kv_starts[r] + keys)
        grad_lse = self.rng.normal(size=(q_heads, num)).astype(np.float32)
        position = np.arange(num) + keys - num
        visible = sees_of(score, position, keys)
        if setting.mask is not None:
            head, query, key = np.ix_(range(q_heads), position, range(keys))
            pairs = (jnp.asarray(x, jnp.int32) for x in (head, np.full((1, 1, 1), r), query, key))
            visible = visible & np.asarray(setting.mask.visible(Pairs(*pairs, num_heads=setting.heads)))
        q, k, v, grad = (x.astype(dtype) for x in self._draw_arrays(visible))
        self.cancelling = max(self.cancelling, cancelling_of(q, k, v, grad, score.scale, visible))
        bias = None
        if self.slopes is not None:
            distance = position[:, None] - np.arange(keys)
            far = np.sqrt(np.maximum(distance, 0)) if score.sqrt_alibi else distance
            bias = -self.slopes[:, None, None].astype(np.float64) * far
        out, lse = forward(q, k, v, score, visible, bias, self.sinks)
        named = {"query": q, "key": k, "value": v, "grad_out": grad, "out": out.astype(dtype)}
        for name, x in named.items():
            self.arrays[name][mine if name in ("key", "value") else tokens] = x
        self.lse[:, tokens], self.grad_lse[:, tokens] = lse, grad_lse
        in_64 = lambda x: None if x is None else np.asarray(x, np.float64)
        round_to = lambda x: x.astype(dtype).astype(np.float64)
        arrays = [in_64(x) for x in (q, k, v, grad, grad_lse if setting.has_grad_lse else None)]
        options = {"scale": score.scale, "soft_cap": score.soft_cap, "visible": visible}
        options |= {"bias": in_64(bias), "sinks": in_64(self.sinks)}
        exact = reference.grads_of_request(*arrays, **options)
        rounded = reference.grads_of_request(*arrays, **options, rounded=round_to)
        for name, x, y in zip(GRADIENTS, exact, rounded, strict=True):
            here = tokens if name == "query" else mine
            self.want[name][here], self.in_16_bits[name][here] = x, round_to(y)

    def _draw_arrays(self, visible):
        """Queries, keys, values and gradients of outputs, in float64.

        Args:
            visible: Bool [queries, keys], or [q_heads, queries, keys].
        """
        (q_heads, kv_heads), dim, score = self.setting.heads, self.setting.head_dim, self.setting.score
        num, keys = visible.shape[-2:]
        draw = lambda rows, heads: self.rng.normal(size=(rows, heads, dim))
        q, grad, k, v = draw(num, q_heads), draw(num, q_heads), draw(keys, kv_heads), draw(keys, kv_heads)
        direction = self.rng.choice([-1.0, 1.0], dim) * dim**-0.5
        expected, cap = NEEDLE_SCORE, score.soft_cap
        if cap is not None:
            expected = cap * np.arctanh(min(NEEDLE_SCORE / cap, 0.9))
        length = (expected / score.scale) ** 0.5  # of queries and needles: their product is the score
        q = along(q, direction, length)
        group = q_heads // kv_heads
        of_heads = np.broadcast_to(visible, (q_heads, num, keys)).reshape(kv_heads, group, num, keys)
        for g, seen in enumerate(of_heads.any(axis=1)):
            of_keys, of_queries = seen.any(axis=0), seen.any(axis=1)
            needles = needle_places(of_keys, self.rng, NEEDLE_EVERY)
            k[:, g] = along(k[:, g], direction, 0.0)
            k[needles, g] += length * direction
            v[needles, g] *= NEEDLE_SIZE
            k[~of_keys, g] = UNSEEN_SCORE / score.scale / length * direction
            v[~of_keys, g] = UNSEEN_VALUE
            heads = slice(g * group, (g + 1) * group)
            grad[needle_places(of_queries, self.rng, NEEDLE_EVERY), heads] *= NEEDLE_SIZE
        return q, k, v, grad


def sees_of(score, position, keys):
    """Which keys a request's queries see: Bool [queries, keys]."""
    low, high = (np.asarray(x) for x in key_range(score, jnp.asarray(position, jnp.int32), jnp.int32(keys)))
    at = np.arange(keys)
    return (at >= low[:, None]) & (at < high[:, None])


def cancelling_of(q, k, v, grad, scale, visible):
    """The largest sum of |dO V| of a pair that is seen, times what its score's gradient is multiplied by."""
    group = q.shape[1] // k.shape[1]
    q, k, v, grad = (
        np.abs(np.asarray(x, np.float64)) for x in (q, np.repeat(k, group, 1), np.repeat(v, group, 1), grad)
    )
    sums = np.where(visible, products_of(grad, v), 0.0)
    of_keys = np.where(np.broadcast_to(visible, sums.shape).any(axis=1), k.max(axis=-1).T, 0.0)
    return float(sums.max(initial=0.0) * scale * max(q.max(initial=0.0), of_keys.max(initial=0.0)))


def products_of(x, y):
    """Of each head's rows of x with those of y, [heads, rows of x, rows of y]; einsum takes far longer."""
    return x.swapaxes(0, 1) @ y.transpose(1, 2, 0)


def forward(q, k, v, score, visible, bias, sinks):
    """Output and LSE of a request in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    s = products_of(q, np.repeat(k, group, 1)) * score.scale
    if score.soft_cap is not None:
        s = np.tanh(s / score.soft_cap) * score.soft_cap
    p = np.exp(np.where(visible, s if bias is None else s + bias, -np.inf))
    total = p.sum(-1) + (0 if sinks is None else np.exp(sinks.astype(np.float64))[:, None])
    with np.errstate(divide="ignore"):
        lse = np.log(total)
    p = p / np.where(total == 0, 1, total)[..., None]
    return (p @ np.repeat(v, group, 1).swapaxes(0, 1)).swapaxes(0, 1), lse
