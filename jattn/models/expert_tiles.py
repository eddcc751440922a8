"""Experts for many tokens: rows sorted by expert, in tiles of one expert each.

XLA's own product of such rows, `jax.lax.ragged_dot`, takes a copy of each row for every expert on an H200:
34 GB for 8k tokens at Qwen3-30B-A3B's widths (jax 0.11.2).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from jattn.models.expert_parts import Choices, How, Weights, activate, scaled_bias
from pallas_kernels import support
from pallas_kernels.grouped_matmul import TILE_ROWS, grouped_matmul

MIN_TILE, MAX_TILE = 16, 512  # rows of one expert that XLA multiplies at once
MAX_COPIED_BYTES = 2**28  # of the weights of the tiles that XLA computes at once


class Tiles(NamedTuple):
    """Rows in tiles of one expert each. A row is a token with one of its experts.

    Attributes:
        expert: Of each tile; -1 of those behind the last.
        row: That lies at each place; num_rows where none does.
        place: Of each row, counted through all tiles.
    """

    expert: Int32[Array, " tiles"]
    row: Int32[Array, "tiles tile"]
    place: Int32[Array, " rows"]

    def taken(self, x: Float[Array, "tokens width"], num_chosen: int) -> Float[Array, "places width"]:
        """What each place's row has of its token; 0 where there is no row."""
        return x.at[self.row.reshape(-1) // num_chosen].get(mode="fill", fill_value=0)

    def scores(self, choices: Choices) -> Float32[Array, "places 1"]:
        """Of each place's row; 0 where there is none."""
        return choices.scores.reshape(-1).at[self.row.reshape(-1)].get(mode="fill", fill_value=0)[:, None]

    def summed(self, out: Float[Array, "places width"], choices: Choices) -> Float32[Array, "tokens width"]:
        """Each token's sum over its rows."""
        own = out[self.place].reshape(*choices.experts.shape, out.shape[-1])
        return jnp.sum(own, axis=1, dtype=jnp.float32)


def tiles_of(choices: Choices, num_experts: int, tile: int, num_tiles: int) -> Tiles:
    """Rows by expert, each expert's from the start of a tile on, with static sizes.

    Args:
        choices: The tokens' experts.
        num_experts: To choose from.
        tile: Rows of a tile.
        num_tiles: At least `num_rows // tile + num_experts`.
    """
    experts = choices.experts.reshape(-1)
    in_order = jnp.arange(len(experts), dtype=jnp.int32)
    order = jnp.argsort(experts, stable=True).astype(jnp.int32)
    num_rows = jnp.bincount(experts, length=num_experts).astype(jnp.int32)
    tile_ends = jnp.cumsum(-(-num_rows // tile), dtype=jnp.int32)
    tile_starts = tile_ends - -(-num_rows // tile)
    first_rows = jnp.cumsum(num_rows, dtype=jnp.int32) - num_rows
    place = in_order + (tile_starts * tile - first_rows)[experts[order]]
    tiles = jnp.arange(num_tiles, dtype=jnp.int32)
    expert = jnp.sum(tile_ends[None, :-1] <= tiles[:, None], axis=1, dtype=jnp.int32)
    row = jnp.full(num_tiles * tile, len(experts), jnp.int32).at[place].set(order)
    return Tiles(
        expert=jnp.where(tiles < tile_ends[-1], expert, -1),
        row=row.reshape(num_tiles, tile),
        place=jnp.zeros_like(order).at[order].set(place),
    )


def why_no_kernel(x: Array, weights: Weights) -> str | None:
    """Why `tiles_by_kernel` cannot run; None if it can."""
    _, intermediate, hidden = weights.down.shape
    sizes = ((hidden, 2 * intermediate), (intermediate, hidden))
    how = {"dtype": x.dtype, "weights_dtype": weights.down.dtype}
    reasons = [support.why_not_grouped_matmul(**how, inputs=i, outputs=o) for i, o in sizes]
    return support.why_not_on(x) or reasons[0] or reasons[1]


def num_kernel_rows(num_rows: int, num_experts: int) -> int:
    """Rows that `tiles_by_kernel` multiplies at most, filled up tiles among them."""
    return TILE_ROWS * (num_rows // TILE_ROWS + num_experts)


def tiles_by_kernel(
    x: Array, choices: Choices, weights: Weights, how: How, interpret: Any = None
) -> Float32[Array, "tokens hidden"]:
    """Each tile reads its expert's weights in place. Its gradients are `tiles_by_xla`'s, made of x anew.

    Args:
        x: Tokens.
        choices: Their experts.
        weights: Of all experts.
        how: Static; the products are of 16 bits, with sums in f32.
        interpret: As `grouped_matmul` has it.
    """
    static = choices.scales_input, how, interpret
    return _by_kernel(static, x, choices.experts, choices.scores, weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _by_kernel(
    static: tuple[bool, How, Any], x: Array, experts: Array, scores: Array, weights: Weights
) -> Array:
    """See tiles_by_kernel."""
    scales_input, how, interpret = static
    choices = Choices(experts, scores, scales_input)
    num_experts, intermediate, hidden = weights.down.shape
    num_rows = choices.experts.size
    num_tiles = num_kernel_rows(num_rows, num_experts) // TILE_ROWS
    tiles = tiles_of(choices, num_experts, TILE_ROWS, num_tiles)
    scores, expert = tiles.scores(choices), jnp.maximum(tiles.expert, 0)
    of_places = lambda array: None if array is None else jnp.repeat(array[expert], TILE_ROWS, axis=0)
    both = weights.gate_up.reshape(num_experts, 2 * intermediate, hidden)
    taken = tiles.taken(x, choices.experts.shape[1])
    gate_up = grouped_matmul(taken, both, tiles.expert, outputs_first=True, interpret=interpret)
    gate_up = gate_up.reshape(-1, 2, intermediate)
    inner = activate(gate_up, of_places(weights.gate_up_bias), scores, choices.scales_input, how)
    out = grouped_matmul(inner.astype(x.dtype), weights.down, tiles.expert, interpret=interpret)
    if weights.down_bias is not None:
        bias = scaled_bias(of_places(weights.down_bias), scores, choices.scales_input)
        out = (out.astype(jnp.float32) + bias).astype(x.dtype)
    return tiles.summed(out, choices)


def _forward(static: tuple[bool, How, Any], *given: Any) -> tuple[Array, tuple[Any, ...]]:
    return _by_kernel(static, *given), given


def _backward(static: tuple[bool, How, Any], given: tuple[Any, ...], grad: Array) -> tuple[Any, ...]:
    scales_input, how, _ = static

    def run(x: Array, experts: Array, scores: Array, weights: Weights) -> Array:
        return tiles_by_xla(x, Choices(experts, scores, scales_input), weights, how)

    _, pull_back = jax.vjp(run, *given)
    return pull_back(grad)


_by_kernel.defvjp(_forward, _backward)


def tiles_by_xla(x: Array, choices: Choices, weights: Weights, how: How) -> Float32[Array, "tokens hidden"]:
    """Some tiles at once, whose weights are copied before the product."""
    num_tokens, num_chosen = choices.experts.shape
    num_rows, num_experts = num_tokens * num_chosen, len(weights.down)
    tile = _tile_of(num_rows, num_experts)
    num_tiles = num_rows // tile + num_experts
    expert_bytes = (weights.gate_up.nbytes + weights.down.nbytes) // num_experts
    at_once = min(num_tiles, max(1, MAX_COPIED_BYTES // expert_bytes))
    tiles = tiles_of(choices, num_experts, tile, -(-num_tiles // at_once) * at_once)

    def run(tiles: Tiles) -> Float[Array, "places hidden"]:
        own = weights.of(jnp.maximum(tiles.expert, 0))
        in_tiles = lambda array: array.reshape(at_once, tile, -1)
        scores, taken = in_tiles(tiles.scores(choices)), in_tiles(tiles.taken(x, num_chosen))
        gate_up = jnp.einsum("nth,ngfh->ntgf", taken, own.gate_up, precision=how.precision)
        bias = None if own.gate_up_bias is None else own.gate_up_bias[:, None]
        inner = activate(gate_up, bias, scores, choices.scales_input, how).astype(x.dtype)
        wide = {"precision": how.precision, "preferred_element_type": jnp.float32}
        out = jnp.einsum("ntf,nfh->nth", inner, own.down, **wide)
        if own.down_bias is not None:
            bias = own.down_bias[:, None].astype(jnp.float32)
            out = out + (bias if choices.scales_input else bias * scores)
        return out.astype(x.dtype).reshape(at_once * tile, -1)

    parts = (tiles.expert.reshape(-1, at_once), tiles.row.reshape(-1, at_once, tile))
    out = jax.lax.map(lambda part: run(Tiles(expert=part[0], row=part[1], place=tiles.place)), parts)
    return tiles.summed(out.reshape(-1, out.shape[-1]), choices)


def _tile_of(num_rows: int, num_experts: int) -> int:
    """About an expert's share of rows: smaller tiles copy weights more often, larger multiply zeros."""
    share = max(1, num_rows // num_experts)
    return min(max(1 << (share.bit_length() - 1), MIN_TILE), MAX_TILE)
