"""Reference outputs and gradients of sampled queries and keys, in float32."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.cases import PrefillCase
from jattn.masks import Pairs
from pallas_kernels.shared import Score

NUM_SAMPLES = 12  # sampled rows of queries and of keys


class Layer(NamedTuple):
    """The static properties of a layer: numbers of heads, and what happens to scores."""

    q_heads: int
    kv_heads: int
    score: Score


class RowRange(NamedTuple):
    """A range of rows of a request in packed arrays.

    Attributes:
        first: First row; may be traced.
        size: Number of rows; static.
        start: First row of the request; may be traced.
    """

    first: Any
    size: int
    start: Any

    def slice(self, x: jax.Array, axis: int = 0) -> jax.Array:
        """Return these rows of an array in float32."""
        return jax.lax.dynamic_slice_in_dim(x, self.first, self.size, axis).astype(jnp.float32)

    @property
    def positions(self) -> jax.Array:
        """Return the positions of the rows in the request."""
        return jnp.arange(self.size, dtype=jnp.int32) + (self.first - self.start)


def max_errors(
    results: dict[str, jax.Array], arrays: dict[str, Any], case: PrefillCase, score: Score
) -> dict[str, float]:
    """Return the largest error of each array in sampled rows, relative to its largest sampled value.

    The error of NaN is infinite.

    Args:
        results: Arrays by the names of REFERENCES: output, log-sum-exps [tokens, heads], and gradients.
        arrays: Inputs, with "mask", "sinks", "alibi_slopes" and "score_mod" if the layer has them.
        case: Requests without context.
        score: What the layer does to scores.
    """
    layer = Layer(case.q_heads, case.kv_heads, score)
    starts = np.concatenate([[0], np.cumsum(case.query_lens)])
    samples = np.random.default_rng(1).integers(0, starts[-1], NUM_SAMPLES)
    rows = sorted({0, int(starts[-1]) - 1, *map(int, samples)})
    errors = {}
    for name, result in results.items():
        max_difference, max_value = 0.0, 0.0
        for row in rows:
            r = int(np.searchsorted(starts, row, side="right")) - 1
            size = int(starts[r + 1] - starts[r])
            expected = np.asarray(
                _reference(arrays, row, int(starts[r]), layer=layer, size=size, compute=REFERENCES[name]),
                np.float32,
            )
            actual = np.asarray(result[row], np.float32)
            difference = np.where(np.isnan(actual), np.inf, np.abs(actual - expected))
            max_difference = max(max_difference, float(difference.max()))
            max_value = max(max_value, float(np.abs(expected).max()))
        errors[name] = max_difference / max_value
    return errors


@functools.partial(jax.jit, static_argnames=("layer", "size", "compute"))
def _reference(
    arrays: dict[str, Any], row: int, start: int, *, layer: Layer, size: int, compute: Callable[..., Any]
) -> jax.Array:
    return compute(arrays, layer, RowRange(row, 1, start), RowRange(start, size, start))


def scores(
    arrays: dict[str, Any], layer: Layer, queries: RowRange, keys: RowRange
) -> tuple[jax.Array, jax.Array]:
    """Return scores and their derivatives by the product of query and key: [q_heads, queries, keys].

    Scores of pairs that do not see each other are -inf.

    Args:
        arrays: Inputs of the layer.
        layer: Static properties of the layer.
        queries: Rows of the queries.
        keys: Rows of the keys.
    """
    score = layer.score
    k = jnp.repeat(keys.slice(arrays["key"]), layer.q_heads // layer.kv_heads, axis=1)
    s = jnp.einsum("qhd,khd->hqk", queries.slice(arrays["query"]), k, precision="highest") * score.scale
    derivative = jnp.full_like(s, score.scale)
    if score.soft_cap is not None:
        tanh = jnp.tanh(s / score.soft_cap)
        s, derivative = tanh * score.soft_cap, derivative * (1 - tanh**2)
    query, key = queries.positions[None, :, None], keys.positions[None, None, :]
    distance = query - key
    if "alibi_slopes" in arrays:
        s = s - arrays["alibi_slopes"][:, None, None] * distance
    if "score_mod" in arrays:
        head = jnp.arange(layer.q_heads, dtype=jnp.int32)[:, None, None]
        pair = jnp.int32(0), head, query, key
        s, slope = jax.jvp(lambda s: arrays["score_mod"](s, *pair), (s,), (jnp.ones_like(s),))
        derivative = derivative * slope
    visible = (distance >= 0) if score.causal else jnp.full_like(distance, True, bool)
    if score.window[0] is not None:
        visible = visible & (distance <= score.window[0])
    if "mask" in arrays:
        head = jnp.arange(layer.q_heads, dtype=jnp.int32)[:, None, None]
        pairs = Pairs(head, jnp.int32(0), query, key, num_heads=(layer.q_heads, layer.kv_heads))
        visible = visible & arrays["mask"].visible(pairs)
    return jnp.where(visible, s, -jnp.inf), derivative


def pairs(
    arrays: dict[str, Any], layer: Layer, queries: RowRange, keys: RowRange
) -> tuple[jax.Array, jax.Array]:
    """Return the probabilities P and the gradient dS of the products: [q_heads, queries, keys]."""
    s, derivative = scores(arrays, layer, queries, keys)
    lse = queries.slice(arrays["lse"], axis=1)[:, :, None]
    p = jnp.where(jnp.isneginf(s), 0.0, jnp.exp(s - lse))
    v = jnp.repeat(keys.slice(arrays["value"]), layer.q_heads // layer.kv_heads, axis=1)
    einsum = functools.partial(jnp.einsum, precision="highest")
    grad_out, out = queries.slice(arrays["grad_out"]), queries.slice(arrays["out"])
    grad_p = einsum("qhd,khd->hqk", grad_out, v)
    return p, p * (grad_p - einsum("qhd,qhd->hq", grad_out, out)[:, :, None]) * derivative


def reference_lse(arrays: dict[str, Any], layer: Layer, row: RowRange, request: RowRange) -> jax.Array:
    """Return the log-sum-exp of a query, including its sink: [q_heads]."""
    lse = jax.nn.logsumexp(scores(arrays, layer, row, request)[0][:, 0], axis=1)
    return jnp.logaddexp(lse, arrays["sinks"]) if "sinks" in arrays else lse


def reference_out(arrays: dict[str, Any], layer: Layer, row: RowRange, request: RowRange) -> jax.Array:
    """Return the output of a query."""
    p, _ = pairs(arrays, layer, row, request)
    return _sum_keys(p, request.slice(arrays["value"]), layer)


def query_gradient(arrays: dict[str, Any], layer: Layer, row: RowRange, request: RowRange) -> jax.Array:
    """Return the gradient of a query."""
    _, ds = pairs(arrays, layer, row, request)
    return _sum_keys(ds, request.slice(arrays["key"]), layer)


def key_gradient(arrays: dict[str, Any], layer: Layer, row: RowRange, request: RowRange) -> jax.Array:
    """Return the gradient of a key."""
    _, ds = pairs(arrays, layer, request, row)
    return _sum_group(ds[:, :, 0], request.slice(arrays["query"]), layer)


def value_gradient(arrays: dict[str, Any], layer: Layer, row: RowRange, request: RowRange) -> jax.Array:
    """Return the gradient of a value."""
    p, _ = pairs(arrays, layer, request, row)
    return _sum_group(p[:, :, 0], request.slice(arrays["grad_out"]), layer)


def _sum_keys(weights: jax.Array, rows: jax.Array, layer: Layer) -> jax.Array:
    """Return the sum of the keys' rows weighted by [q_heads, 1, keys]."""
    repeated = jnp.repeat(rows, layer.q_heads // layer.kv_heads, axis=1)
    return jnp.einsum("hk,khd->hd", weights[:, 0], repeated, precision="highest")


def _sum_group(weights: jax.Array, rows: jax.Array, layer: Layer) -> jax.Array:
    """Return the sum of rows weighted by [q_heads, queries], over the queries and the heads of each group."""
    head_sums = jnp.einsum("hq,qhd->hd", weights, rows, precision="highest")
    return head_sums.reshape(layer.kv_heads, -1, head_sums.shape[-1]).sum(axis=1)


GRADIENTS: dict[str, Callable[..., Any]] = {
    "query": query_gradient,
    "key": key_gradient,
    "value": value_gradient,
}
REFERENCES = {"out": reference_out, "lse": reference_lse, **GRADIENTS}
