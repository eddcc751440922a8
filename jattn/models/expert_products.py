"""The products of a mixture of experts in XLA: three ways, chosen by static sizes alone, with one result.

An expert's weights lie with `hidden` last, those of both products: all experts together are then one matrix
for the first product and one for the second, and nothing has to be transposed.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

# Beyond this many tokens, all tokens through all experts is bound by the products, not by the weights' bytes.
MAX_DENSE_TOKENS = 512
MIN_TILE, MAX_TILE = 16, 512  # rows of one expert that are multiplied at once
MAX_COPIED_BYTES = 2**28  # of the weights of the tiles that are computed at once
MAX_PARTS = 16  # sums over experts that are computed beside each other


class Choices(NamedTuple):
    """What a router chose.

    Attributes:
        experts: Of each token, the best first, none twice.
        scores: Their weights.
        scales_input: A score multiplies its expert's input; else its output.
    """

    experts: Int32[Array, "tokens chosen"]
    scores: Float32[Array, "tokens chosen"]
    scales_input: bool


class Weights(NamedTuple):
    """The experts' parameters."""

    gate_up: Float[Array, "experts 2 intermediate hidden"]
    gate_up_bias: Float[Array, "experts 2 intermediate"] | None
    down: Float[Array, "experts intermediate hidden"]
    down_bias: Float[Array, "experts hidden"] | None

    def of(self, experts: Int32[Array, "..."]) -> "Weights":
        """Those of some experts, or of one."""
        return jax.tree.map(lambda array: array[experts], self)


class How(NamedTuple):
    """What is static.

    Attributes:
        activation: Of gate and up, in f32.
        precision: Of the products, as in `jax.lax.dot`.
    """

    activation: Callable[[Array, Array], Array]
    precision: str | None


def run_experts(
    x: Float[Array, "tokens hidden"], choices: Choices, weights: Weights, how: How
) -> Float32[Array, "tokens hidden"]:
    """The weighted sum of each token's experts.

    One executable whatever the router chooses. By the sizes:

    - fewer rows (tokens times experts a token) than experts: each row reads its expert's weights in place;
    - up to MAX_DENSE_TOKENS tokens: all tokens through all experts. Nearly every expert is some token's, each
      is read once, in place;
    - more: rows sorted by expert, in tiles of one expert each, whose weights are copied before the product.

    Args:
        x: Tokens.
        choices: Their experts.
        weights: Of all experts.
        how: Static.
    """
    num_tokens, num_chosen = choices.experts.shape
    if num_tokens * num_chosen < weights.down.shape[0]:
        return _each_row(x, choices, weights, how)
    if num_tokens <= MAX_DENSE_TOKENS:
        return _all_experts(x, choices, weights, how)
    return _tiles(x, choices, weights, how)


def _each_row(x: Array, choices: Choices, weights: Weights, how: How) -> Float32[Array, "tokens hidden"]:
    """Sums of products, not matrix products: XLA reads an expert's weights inside them, without a copy."""
    own, num_chosen = weights.of(choices.experts.reshape(-1)), choices.experts.shape[1]
    scores = choices.scores.reshape(-1, 1)
    wide = jnp.repeat(x, num_chosen, axis=0).astype(jnp.float32)
    gate_up = jnp.sum(wide[:, None, None, :] * own.gate_up.astype(jnp.float32), axis=-1)
    inner = _activate(gate_up, own.gate_up_bias, scores, choices.scales_input, how).astype(x.dtype)
    out = jnp.sum(inner.astype(jnp.float32)[:, :, None] * own.down.astype(jnp.float32), axis=1)
    out = out + _scaled_bias(own.down_bias, scores, choices.scales_input)
    return jnp.sum(out.reshape(*choices.experts.shape, -1), axis=1)


def _all_experts(x: Array, choices: Choices, weights: Weights, how: How) -> Float32[Array, "tokens hidden"]:
    num_experts, _, hidden = weights.down.shape
    is_chosen, scores = _by_expert(choices, num_experts)
    gate_up = jnp.einsum("th,egfh->tegf", x, weights.gate_up, precision=how.precision)
    inner = _activate(gate_up, weights.gate_up_bias, scores[:, :, None], choices.scales_input, how)
    inner = jnp.where(is_chosen[:, :, None], inner, 0).astype(x.dtype)
    # A sum over all experts' neurons has few results and is long: parts of it keep the device busy.
    parts = max(n for n in range(1, MAX_PARTS + 1) if num_experts % n == 0)
    inner = inner.reshape(len(x), parts, -1)
    down = weights.down.reshape(parts, -1, hidden)
    how_summed = {"precision": how.precision, "preferred_element_type": jnp.float32}
    out = jnp.sum(jnp.einsum("tpf,pfh->pth", inner, down, **how_summed), axis=0)
    if weights.down_bias is None:
        return out
    scores = is_chosen.astype(jnp.float32) if choices.scales_input else scores
    return out + jnp.matmul(scores, weights.down_bias.astype(jnp.float32), precision="highest")


def _by_expert(
    choices: Choices, num_experts: int
) -> tuple[Bool[Array, "tokens experts"], Float32[Array, "tokens experts"]]:
    """Whether each expert is a token's, and its score; 0 where it is not."""
    is_it = choices.experts[:, :, None] == jnp.arange(num_experts, dtype=jnp.int32)[None, None]
    return is_it.any(axis=1), jnp.sum(jnp.where(is_it, choices.scores[:, :, None], 0), axis=1)


def _tiles(x: Array, choices: Choices, weights: Weights, how: How) -> Float32[Array, "tokens hidden"]:
    num_tokens, num_chosen = choices.experts.shape
    num_rows, num_experts = num_tokens * num_chosen, len(weights.down)
    tile = _tile_of(num_rows, num_experts)
    num_tiles = num_rows // tile + num_experts
    expert_bytes = (weights.gate_up.nbytes + weights.down.nbytes) // num_experts
    at_once = min(num_tiles, max(1, MAX_COPIED_BYTES // expert_bytes))
    num_tiles = -(-num_tiles // at_once) * at_once
    expert_of_tile, place_of_row = _places(choices.experts.reshape(-1), num_experts, tile, num_tiles)
    row_of_place = jnp.full(num_tiles * tile, num_rows, jnp.int32)  # no row
    row_of_place = row_of_place.at[place_of_row].set(jnp.arange(num_rows, dtype=jnp.int32))

    def run_tile(expert: Array, rows: Int32[Array, " tile"]) -> Float[Array, "tile hidden"]:
        own = weights.of(expert)
        scores = choices.scores.reshape(-1).at[rows].get(mode="fill", fill_value=0)[:, None]
        taken = x.at[rows // num_chosen].get(mode="fill", fill_value=0)
        gate_up = jnp.einsum("th,gfh->tgf", taken, own.gate_up, precision=how.precision)
        inner = _activate(gate_up, own.gate_up_bias, scores, choices.scales_input, how).astype(x.dtype)
        wide = {"precision": how.precision, "preferred_element_type": jnp.float32}
        out = jnp.matmul(inner, own.down, **wide)
        return (out + _scaled_bias(own.down_bias, scores, choices.scales_input)).astype(x.dtype)

    tiles = (expert_of_tile.reshape(-1, at_once), row_of_place.reshape(-1, at_once, tile))
    out = jax.lax.map(lambda some: jax.vmap(run_tile)(*some), tiles).reshape(num_tiles * tile, -1)
    return jnp.sum(out[place_of_row].reshape(num_tokens, num_chosen, -1), axis=1, dtype=jnp.float32)


def _tile_of(num_rows: int, num_experts: int) -> int:
    """About an expert's share of rows: smaller tiles copy weights more often, larger multiply zeros."""
    share = max(1, num_rows // num_experts)
    return min(max(1 << (share.bit_length() - 1), MIN_TILE), MAX_TILE)


def _places(
    experts: Int32[Array, " rows"], num_experts: int, tile: int, num_tiles: int
) -> tuple[Int32[Array, " tiles"], Int32[Array, " rows"]]:
    """Each tile's expert, and each row's place in the tiles: experts in order, each from a tile's start."""
    order = jnp.argsort(experts, stable=True).astype(jnp.int32)
    num_rows = jnp.bincount(experts, length=num_experts).astype(jnp.int32)
    tile_ends = jnp.cumsum(-(-num_rows // tile), dtype=jnp.int32)
    tile_starts = tile_ends - -(-num_rows // tile)
    first_rows = jnp.cumsum(num_rows, dtype=jnp.int32) - num_rows
    in_order = jnp.arange(len(experts), dtype=jnp.int32)
    place = in_order + (tile_starts * tile - first_rows)[experts[order]]
    tiles = jnp.arange(num_tiles, dtype=jnp.int32)
    expert_of_tile = jnp.sum(tile_ends[None, :-1] <= tiles[:, None], axis=1, dtype=jnp.int32)
    return expert_of_tile, jnp.zeros_like(order).at[order].set(place)


def _activate(
    gate_up: Float[Array, "*rows 2 intermediate"],
    bias: Float[Array, "... 2 intermediate"] | None,
    scores: Float32[Array, "*rows 1"],
    scales_input: bool,
    how: How,
) -> Float32[Array, "*rows intermediate"]:
    """What lies between the products, scaled: a score of an input scales its first product as well."""
    gate_up = gate_up.astype(jnp.float32)
    gate_up = gate_up * scores[..., None] if scales_input else gate_up
    if bias is not None:
        bias = bias.astype(jnp.float32)
        gate_up = gate_up + bias.reshape((1,) * (gate_up.ndim - bias.ndim) + bias.shape)
    inner = how.activation(gate_up[..., 0, :], gate_up[..., 1, :])
    return inner if scales_input else inner * scores


def _scaled_bias(bias: Array | None, scores: Float32[Array, "rows 1"], scales_input: bool) -> Array:
    """What the second product's bias adds to each row."""
    if bias is None:
        return jnp.zeros((1, 1), jnp.float32)
    bias = bias.astype(jnp.float32).reshape(-1, bias.shape[-1])
    return bias if scales_input else bias * scores
