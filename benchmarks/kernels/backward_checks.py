"""Outputs and gradients of a few queries and keys in float32: what a kernel's are compared with."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jattn.masks import Pairs
from pallas_kernels.cases import PrefillCase
from pallas_kernels.shared import Score

SAMPLES = 12  # queries, and keys, that are looked at


class Layer(NamedTuple):
    """What is static of a layer: heads, and what becomes of scores."""

    q_heads: int
    kv_heads: int
    score: Score


class Neighbours(NamedTuple):
    """Neighbours among the rows of a request.

    Attributes:
        first: The first one; traced.
        size: How many; static.
        start: The request's first row; traced.
    """

    first: Any
    size: int
    start: Any

    def of(self, x: jax.Array, axis: int = 0) -> jax.Array:
        """Theirs, in f32."""
        return jax.lax.dynamic_slice_in_dim(x, self.first, self.size, axis).astype(jnp.float32)

    @property
    def positions(self) -> jax.Array:
        """Theirs, in the request."""
        return jnp.arange(self.size, dtype=jnp.int32) + (self.first - self.start)


def worst_errors(
    found: dict[str, jax.Array], arrays: dict[str, Any], case: PrefillCase, score: Score
) -> dict[str, float]:
    """Of a few rows, each array's error by its largest number looked at; NaN is off by infinity.

    Args:
        found: Of WANTED's names: outputs, log-sum-exps with tokens first, and gradients.
        arrays: What they were made of; "mask", "sinks" and "alibi_slopes" where there are some.
        case: Requests without context.
        score: The layer's.
    """
    layer = Layer(case.q_heads, case.kv_heads, score)
    starts = np.concatenate([[0], np.cumsum(case.query_lens)])
    drawn = np.random.default_rng(1).integers(0, starts[-1], SAMPLES)
    rows = sorted({0, int(starts[-1]) - 1, *map(int, drawn)})
    errors = {}
    for name, got in found.items():
        off, top = 0.0, 0.0
        for row in rows:
            r = int(np.searchsorted(starts, row, side="right")) - 1
            size = int(starts[r + 1] - starts[r])
            want = np.asarray(
                _wanted(arrays, row, int(starts[r]), layer=layer, size=size, of=WANTED[name]), np.float32
            )
            here = np.asarray(got[row], np.float32)
            off = max(off, float(np.where(np.isnan(here), np.inf, np.abs(here - want)).max()))
            top = max(top, float(np.abs(want).max()))
        errors[name] = off / top
    return errors


@functools.partial(jax.jit, static_argnames=("layer", "size", "of"))
def _wanted(
    arrays: dict[str, Any], row: int, start: int, *, layer: Layer, size: int, of: Callable[..., Any]
) -> jax.Array:
    return of(arrays, layer, Neighbours(row, 1, start), Neighbours(start, size, start))


def scores(
    arrays: dict[str, Any], layer: Layer, queries: Neighbours, keys: Neighbours
) -> tuple[jax.Array, jax.Array]:
    """Scores of some queries and keys of a request, -inf where they do not see each other, and their slopes.

    Both are [q_heads, queries, keys].
    """
    score = layer.score
    k = jnp.repeat(keys.of(arrays["key"]), layer.q_heads // layer.kv_heads, axis=1)
    s = jnp.einsum("qhd,khd->hqk", queries.of(arrays["query"]), k, precision="highest") * score.scale
    slope = jnp.full_like(s, score.scale)
    if score.soft_cap is not None:
        bent = jnp.tanh(s / score.soft_cap)
        s, slope = bent * score.soft_cap, slope * (1 - bent**2)
    query, key = queries.positions[None, :, None], keys.positions[None, None, :]
    away = query - key
    if "alibi_slopes" in arrays:
        s = s - arrays["alibi_slopes"][:, None, None] * away
    visible = (away >= 0) if score.causal else jnp.full_like(away, True, bool)
    visible = visible & (away <= (score.window[0] if score.window[0] is not None else away))
    if "mask" in arrays:
        head = jnp.arange(layer.q_heads, dtype=jnp.int32)[:, None, None]
        pairs = Pairs(head, jnp.int32(0), query, key, num_heads=(layer.q_heads, layer.kv_heads))
        visible = visible & arrays["mask"].visible(pairs)
    return jnp.where(visible, s, -jnp.inf), slope


def pairs(
    arrays: dict[str, Any], layer: Layer, queries: Neighbours, keys: Neighbours
) -> tuple[jax.Array, jax.Array]:
    """P and dS of some queries and keys of a request: [q_heads, queries, keys]."""
    s, slope = scores(arrays, layer, queries, keys)
    lse = queries.of(arrays["lse"], axis=1)[:, :, None]
    p = jnp.where(jnp.isneginf(s), 0.0, jnp.exp(s - lse))
    v = jnp.repeat(keys.of(arrays["value"]), layer.q_heads // layer.kv_heads, axis=1)
    dot = functools.partial(jnp.einsum, precision="highest")
    grad_out, out = queries.of(arrays["grad_out"]), queries.of(arrays["out"])
    grad_p = dot("qhd,khd->hqk", grad_out, v)
    return p, p * (grad_p - dot("qhd,qhd->hq", grad_out, out)[:, :, None]) * slope


def lse_of_query(arrays: dict[str, Any], layer: Layer, row: Neighbours, mine: Neighbours) -> jax.Array:
    """The logarithm of a query's denominator, a sink's part of it included: [q_heads]."""
    lse = jax.nn.logsumexp(scores(arrays, layer, row, mine)[0][:, 0], axis=1)
    return jnp.logaddexp(lse, arrays["sinks"]) if "sinks" in arrays else lse


def out_of_query(arrays: dict[str, Any], layer: Layer, row: Neighbours, mine: Neighbours) -> jax.Array:
    """The output of a query."""
    p, _ = pairs(arrays, layer, row, mine)
    return _of_keys(p, mine.of(arrays["value"]), layer)


def of_query(arrays: dict[str, Any], layer: Layer, row: Neighbours, mine: Neighbours) -> jax.Array:
    """The gradient of a query."""
    _, ds = pairs(arrays, layer, row, mine)
    return _of_keys(ds, mine.of(arrays["key"]), layer)


def of_key(arrays: dict[str, Any], layer: Layer, row: Neighbours, mine: Neighbours) -> jax.Array:
    """The gradient of a key."""
    _, ds = pairs(arrays, layer, mine, row)
    return _of_group(ds[:, :, 0], mine.of(arrays["query"]), layer)


def of_value(arrays: dict[str, Any], layer: Layer, row: Neighbours, mine: Neighbours) -> jax.Array:
    """The gradient of a value."""
    p, _ = pairs(arrays, layer, mine, row)
    return _of_group(p[:, :, 0], mine.of(arrays["grad_out"]), layer)


def _of_keys(weights: jax.Array, rows: jax.Array, layer: Layer) -> jax.Array:
    """Keys' rows weighed by [q_heads, 1, keys]."""
    spread = jnp.repeat(rows, layer.q_heads // layer.kv_heads, axis=1)
    return jnp.einsum("hk,khd->hd", weights[:, 0], spread, precision="highest")


def _of_group(weights: jax.Array, rows: jax.Array, layer: Layer) -> jax.Array:
    """Rows weighed by [q_heads, queries], summed over the queries and the heads of each group."""
    of_heads = jnp.einsum("hq,qhd->hd", weights, rows, precision="highest")
    return of_heads.reshape(layer.kv_heads, -1, of_heads.shape[-1]).sum(axis=1)


GRADIENTS: dict[str, Callable[..., Any]] = {"query": of_query, "key": of_key, "value": of_value}
WANTED = {"out": out_of_query, "lse": lse_of_query, **GRADIENTS}
