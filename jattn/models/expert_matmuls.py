"""What a mixture of experts is computed of, and what lies between its products and behind them."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from jattn.models.routing import Choices
from pallas_kernels import support
from pallas_kernels.grouped_matmul import TILE_ROWS, grouped_matmul


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


def activate(
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


def scaled_bias(bias: Array | None, scores: Float32[Array, "rows 1"], scales_input: bool) -> Array:
    """What the second product's bias adds to each row."""
    if bias is None:
        return jnp.zeros((1, 1), jnp.float32)
    bias = bias.astype(jnp.float32).reshape(-1, bias.shape[-1])
    return bias if scales_input else bias * scores


# Beyond, all tokens through all experts takes longer than copies of the weights do.
MAX_DENSE_TOKENS = 512
# Beyond so many times the kernel's rows, too. On an H200 the kernel is faster from about 170 tokens on at
# gpt-oss-20b's widths (1.15 times), from about 290 at Qwen3-30B-A3B's (2 times).
MAX_DENSE_ROWS = 1.25
MAX_PARTS = 16  # sums over experts that are computed beside each other


def run_experts(
    x: Float[Array, "tokens hidden"],
    choices: Choices,
    weights: Weights,
    how: How,
    *,
    may_take_kernel: bool = True,
) -> Float32[Array, "tokens hidden"]:
    """The weighted sum of each token's experts: one executable whatever the router chooses.

    Args:
        x: Tokens.
        choices: Their experts.
        weights: Of all experts.
        how: Static.
        may_take_kernel: Static; False leaves the kernel out where there is one.
    """
    num_tokens, num_chosen = choices.experts.shape
    sizes = {"num_tokens": num_tokens, "num_chosen": num_chosen, "num_experts": len(weights.down)}
    has_kernel = may_take_kernel and why_no_kernel(x, weights) is None
    return way(**sizes, has_kernel=has_kernel)(x, choices, weights, how)


def way(*, num_tokens: int, num_chosen: int, num_experts: int, has_kernel: bool) -> Callable[..., Array]:
    """How experts are computed, by the sizes.

    - Fewer rows (tokens times experts a token) than experts: each row reads its expert's weights in place.
    - Few tokens: all of them through all experts. Nearly every expert is some token's; each is read once, in
      place.
    - More: rows sorted by expert, in tiles of one expert each, by the kernel where there is one and it has
      much fewer rows to multiply. Else XLA copies a tile's weights before the product.
    """
    num_rows = num_tokens * num_chosen
    if num_rows < num_experts:
        return each_row
    if has_kernel:
        is_dense = num_tokens * num_experts <= MAX_DENSE_ROWS * num_kernel_rows(num_rows, num_experts)
        return all_experts if is_dense else tiles_by_kernel
    return all_experts if num_tokens <= MAX_DENSE_TOKENS else tiles_by_xla


def each_row(x: Array, choices: Choices, weights: Weights, how: How) -> Float32[Array, "tokens hidden"]:
    """For few rows. Sums of products: XLA reads an expert's weights inside them, and makes no copy."""
    own, num_chosen = weights.of(choices.experts.reshape(-1)), choices.experts.shape[1]
    scores = choices.scores.reshape(-1, 1)
    wide = jnp.repeat(x, num_chosen, axis=0).astype(jnp.float32)
    gate_up = jnp.sum(wide[:, None, None, :] * own.gate_up.astype(jnp.float32), axis=-1)
    inner = activate(gate_up, own.gate_up_bias, scores, choices.scales_input, how).astype(x.dtype)
    out = jnp.sum(inner.astype(jnp.float32)[:, :, None] * own.down.astype(jnp.float32), axis=1)
    out = out + scaled_bias(own.down_bias, scores, choices.scales_input)
    return jnp.sum(out.reshape(*choices.experts.shape, out.shape[-1]), axis=1)


def all_experts(x: Array, choices: Choices, weights: Weights, how: How) -> Float32[Array, "tokens hidden"]:
    """All tokens through all experts: two matrix products, and zeros for what was not chosen."""
    num_experts, _, hidden = weights.down.shape
    is_chosen, scores = _by_expert(choices, num_experts)
    gate_up = jnp.einsum("th,egfh->tegf", x, weights.gate_up, precision=how.precision)
    inner = activate(gate_up, weights.gate_up_bias, scores[:, :, None], choices.scales_input, how)
    inner = jnp.where(is_chosen[:, :, None], inner, 0).astype(x.dtype)
    # A sum over all experts' neurons has few results and is long: parts of it keep the device busy.
    parts = max(n for n in range(1, MAX_PARTS + 1) if num_experts % n == 0)
    inner = inner.reshape(len(x), parts, math.prod(inner.shape[1:]) // parts)
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
