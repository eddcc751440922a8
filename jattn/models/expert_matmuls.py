"""The matrix multiplications of a mixture of experts: several methods, selected by static sizes.

Both weights of an expert have `hidden` as their last axis: all experts together are then one matrix for the
first product and one for the second, and nothing has to be transposed.

For many tokens, rows are sorted by expert into tiles of one expert each. XLA's own product of such rows,
`jax.lax.ragged_dot`, copies each row for every expert on an H200: 34 GB for 8k tokens at Qwen3-30B-A3B's
widths (jax 0.11.2).
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from jattn.models.routing import TopKExperts
from pallas_kernels import support
from pallas_kernels.grouped_matmul import TILE_ROWS, grouped_matmul


class ExpertWeights(NamedTuple):
    """The experts' parameters."""

    gate_up: Float[Array, "experts 2 intermediate hidden"]
    gate_up_bias: Float[Array, "experts 2 intermediate"] | None
    down: Float[Array, "experts intermediate hidden"]
    down_bias: Float[Array, "experts hidden"] | None

    def take(self, experts: Int32[Array, "..."]) -> "ExpertWeights":
        """Return the parameters of some experts, or of one."""
        return jax.tree.map(lambda array: array[experts], self)


class ExpertStatics(NamedTuple):
    """Static arguments of the experts' computation.

    Attributes:
        activation: Function of gate and up, both f32.
        precision: Precision of the matrix products, as in `jax.lax.dot`.
    """

    activation: Callable[[Array, Array], Array]
    precision: str | None


def activate(
    gate_up: Float[Array, "*rows 2 intermediate"],
    bias: Float[Array, "... 2 intermediate"] | None,
    scores: Float32[Array, "*rows 1"],
    scales_input: bool,
    statics: ExpertStatics,
) -> Float32[Array, "*rows intermediate"]:
    """Apply bias, activation and score between the two products.

    A score that scales the input is applied to the first product, which is linear in the input.
    """
    gate_up = gate_up.astype(jnp.float32)
    gate_up = gate_up * scores[..., None] if scales_input else gate_up
    if bias is not None:
        bias = bias.astype(jnp.float32)
        gate_up = gate_up + bias.reshape((1,) * (gate_up.ndim - bias.ndim) + bias.shape)
    inner = statics.activation(gate_up[..., 0, :], gate_up[..., 1, :])
    return inner if scales_input else inner * scores


def scaled_bias(bias: Array | None, scores: Float32[Array, "rows 1"], scales_input: bool) -> Array:
    """Return what the second projection's bias adds to each row."""
    if bias is None:
        return jnp.zeros((1, 1), jnp.float32)
    bias = bias.astype(jnp.float32).reshape(-1, bias.shape[-1])
    return bias if scales_input else bias * scores


# Beyond this, running all tokens through all experts takes longer than copying weights.
MAX_DENSE_TOKENS = 512
# With the kernel, all tokens run through all experts up to this ratio of rows to the kernel's rows. On an
# H200 the kernel is faster from about 170 tokens at gpt-oss-20b's widths (1.15 times) and from about 290 at
# Qwen3-30B-A3B's (2 times).
MAX_DENSE_ROWS = 1.25
MAX_PARTS = 16  # maximum number of partial sums over experts that run in parallel


def run_experts(
    x: Float[Array, "tokens hidden"],
    top_k: TopKExperts,
    weights: ExpertWeights,
    statics: ExpertStatics,
    *,
    allow_kernel: bool = True,
) -> Float32[Array, "tokens hidden"]:
    """Return the weighted sum of each token's experts. One executable serves every routing.

    Args:
        x: Input of each token.
        top_k: Experts of each token and their scores.
        weights: Parameters of all experts.
        statics: Activation and precision.
        allow_kernel: Whether the grouped matmul kernel may be used; static.
    """
    num_tokens, num_selected = top_k.experts.shape
    sizes = {"num_tokens": num_tokens, "num_selected": num_selected, "num_experts": len(weights.down)}
    has_kernel = allow_kernel and why_not_expert_kernel(x, weights) is None
    return select_method(**sizes, has_kernel=has_kernel)(x, top_k, weights, statics)


def select_method(
    *, num_tokens: int, num_selected: int, num_experts: int, has_kernel: bool
) -> Callable[..., Array]:
    """Select how experts are computed, by static sizes.

    - Fewer rows (tokens times experts per token) than experts: each row reads its expert's weights in place.
    - Few tokens: all tokens run through all experts. Nearly every expert is selected by some token, and each
      expert's weights are read once, in place.
    - More tokens: rows are sorted by expert into tiles of one expert each. The kernel computes them where it
      is supported and has far fewer rows to multiply; else XLA copies a tile's weights before the product.
    """
    num_rows = num_tokens * num_selected
    if num_rows < num_experts:
        return run_rows
    if has_kernel:
        is_dense = num_tokens * num_experts <= MAX_DENSE_ROWS * num_kernel_rows(num_rows, num_experts)
        return run_all_experts if is_dense else run_tiles_mosaic
    return run_all_experts if num_tokens <= MAX_DENSE_TOKENS else run_tiles_xla


def run_rows(
    x: Array, top_k: TopKExperts, weights: ExpertWeights, statics: ExpertStatics
) -> Float32[Array, "tokens hidden"]:
    """Compute each row as sums of products, in which XLA reads the expert's weights without a copy."""
    row_weights, num_selected = weights.take(top_k.experts.reshape(-1)), top_k.experts.shape[1]
    scores = top_k.scores.reshape(-1, 1)
    rows = jnp.repeat(x, num_selected, axis=0).astype(jnp.float32)
    gate_up = jnp.sum(rows[:, None, None, :] * row_weights.gate_up.astype(jnp.float32), axis=-1)
    inner = activate(gate_up, row_weights.gate_up_bias, scores, top_k.scales_input, statics).astype(x.dtype)
    out = jnp.sum(inner.astype(jnp.float32)[:, :, None] * row_weights.down.astype(jnp.float32), axis=1)
    out = out + scaled_bias(row_weights.down_bias, scores, top_k.scales_input)
    return jnp.sum(out.reshape(*top_k.experts.shape, out.shape[-1]), axis=1)


def run_all_experts(
    x: Array, top_k: TopKExperts, weights: ExpertWeights, statics: ExpertStatics
) -> Float32[Array, "tokens hidden"]:
    """Run all tokens through all experts with two matrix products, and zero what was not selected."""
    num_experts, _, hidden = weights.down.shape
    is_selected, scores = _by_expert(top_k, num_experts)
    gate_up = jnp.einsum("th,egfh->tegf", x, weights.gate_up, precision=statics.precision)
    inner = activate(gate_up, weights.gate_up_bias, scores[:, :, None], top_k.scales_input, statics)
    inner = jnp.where(is_selected[:, :, None], inner, 0).astype(x.dtype)
    # The sum over all experts' neurons is long and has few results: partial sums keep the device busy.
    parts = max(n for n in range(1, MAX_PARTS + 1) if num_experts % n == 0)
    inner = inner.reshape(len(x), parts, math.prod(inner.shape[1:]) // parts)
    down = weights.down.reshape(parts, -1, hidden)
    einsum_args = {"precision": statics.precision, "preferred_element_type": jnp.float32}
    out = jnp.sum(jnp.einsum("tpf,pfh->pth", inner, down, **einsum_args), axis=0)
    if weights.down_bias is None:
        return out
    scores = is_selected.astype(jnp.float32) if top_k.scales_input else scores
    return out + jnp.matmul(scores, weights.down_bias.astype(jnp.float32), precision="highest")


def _by_expert(
    top_k: TopKExperts, num_experts: int
) -> tuple[Bool[Array, "tokens experts"], Float32[Array, "tokens experts"]]:
    """Return whether each token selects each expert, and its score, or 0 where it does not."""
    is_match = top_k.experts[:, :, None] == jnp.arange(num_experts, dtype=jnp.int32)[None, None]
    return is_match.any(axis=1), jnp.sum(jnp.where(is_match, top_k.scores[:, :, None], 0), axis=1)


MIN_TILE, MAX_TILE = 16, 512  # number of rows per tile when XLA computes tiles
MAX_COPIED_BYTES = 2**28  # maximum size of the weights that XLA copies at once


class ExpertTiles(NamedTuple):
    """Rows sorted into tiles of one expert each. A row is a token with one of its experts.

    Attributes:
        expert: Expert of each tile; -1 for unused tiles.
        row: Row at each position of each tile; num_rows where there is none.
        position: Position of each row, counted through all tiles.
    """

    expert: Int32[Array, " tiles"]
    row: Int32[Array, "tiles tile"]
    position: Int32[Array, " rows"]

    def gather(self, x: Float[Array, "tokens width"], num_selected: int) -> Float[Array, "positions width"]:
        """Return the token of each position's row; 0 where there is no row."""
        return x.at[self.row.reshape(-1) // num_selected].get(mode="fill", fill_value=0)

    def scores(self, top_k: TopKExperts) -> Float32[Array, "positions 1"]:
        """Return the score of each position's row; 0 where there is no row."""
        return top_k.scores.reshape(-1).at[self.row.reshape(-1)].get(mode="fill", fill_value=0)[:, None]

    def sum_rows(
        self, out: Float[Array, "positions width"], top_k: TopKExperts
    ) -> Float32[Array, "tokens width"]:
        """Return each token's sum over its rows."""
        rows = out[self.position].reshape(*top_k.experts.shape, out.shape[-1])
        return jnp.sum(rows, axis=1, dtype=jnp.float32)


def sort_rows_into_tiles(top_k: TopKExperts, num_experts: int, tile_rows: int, num_tiles: int) -> ExpertTiles:
    """Sort rows by expert, with each expert's rows starting at a tile boundary.

    Args:
        top_k: Experts of each token.
        num_experts: Number of experts.
        tile_rows: Number of rows per tile.
        num_tiles: Number of tiles, at least `num_rows // tile_rows + num_experts`.
    """
    experts = top_k.experts.reshape(-1)
    in_order = jnp.arange(len(experts), dtype=jnp.int32)
    order = jnp.argsort(experts, stable=True).astype(jnp.int32)
    num_rows = jnp.bincount(experts, length=num_experts).astype(jnp.int32)
    tile_ends = jnp.cumsum(-(-num_rows // tile_rows), dtype=jnp.int32)
    tile_starts = tile_ends - -(-num_rows // tile_rows)
    first_rows = jnp.cumsum(num_rows, dtype=jnp.int32) - num_rows
    position = in_order + (tile_starts * tile_rows - first_rows)[experts[order]]
    tiles = jnp.arange(num_tiles, dtype=jnp.int32)
    expert = jnp.sum(tile_ends[None, :-1] <= tiles[:, None], axis=1, dtype=jnp.int32)
    row = jnp.full(num_tiles * tile_rows, len(experts), jnp.int32).at[position].set(order)
    return ExpertTiles(
        expert=jnp.where(tiles < tile_ends[-1], expert, -1),
        row=row.reshape(num_tiles, tile_rows),
        position=jnp.zeros_like(order).at[order].set(position),
    )


def why_not_expert_kernel(x: Array, weights: ExpertWeights) -> str | None:
    """Return why `run_tiles_mosaic` cannot be used, or None if it can."""
    _, intermediate, hidden = weights.down.shape
    sizes = ((hidden, 2 * intermediate), (intermediate, hidden))
    dtypes = {"dtype": x.dtype, "weights_dtype": weights.down.dtype}
    reasons = [support.why_not_grouped_matmul(**dtypes, inputs=i, outputs=o) for i, o in sizes]
    return support.why_not_kernel_on("grouped_matmul", x) or reasons[0] or reasons[1]


def num_kernel_rows(num_rows: int, num_experts: int) -> int:
    """Return the maximum number of rows that `run_tiles_mosaic` multiplies, including padding of tiles."""
    return TILE_ROWS * (num_rows // TILE_ROWS + num_experts)


def run_tiles_mosaic(
    x: Array, top_k: TopKExperts, weights: ExpertWeights, statics: ExpertStatics, interpret: Any = None
) -> Float32[Array, "tokens hidden"]:
    """Compute tiles with the grouped matmul kernel, which reads each expert's weights in place.

    The gradients equal `run_tiles_xla`'s and are recomputed from x.

    Args:
        x: Input of each token.
        top_k: Experts of each token and their scores.
        weights: Parameters of all experts.
        statics: Activation and precision. The products are 16-bit with f32 accumulation.
        interpret: Interpret mode of the kernel; see `grouped_matmul`.
    """
    static = top_k.scales_input, statics, interpret
    return _mosaic_tiles(static, x, top_k.experts, top_k.scores, weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mosaic_tiles(
    static: tuple[bool, ExpertStatics, Any], x: Array, experts: Array, scores: Array, weights: ExpertWeights
) -> Array:
    """Run `run_tiles_mosaic` with its static arguments in one tuple."""
    scales_input, statics, interpret = static
    top_k = TopKExperts(experts, scores, scales_input)
    num_experts, intermediate, hidden = weights.down.shape
    num_rows = top_k.experts.size
    num_tiles = num_kernel_rows(num_rows, num_experts) // TILE_ROWS
    tiles = sort_rows_into_tiles(top_k, num_experts, TILE_ROWS, num_tiles)
    scores, expert = tiles.scores(top_k), jnp.maximum(tiles.expert, 0)

    def repeat_per_row(bias: Array | None) -> Array | None:
        return None if bias is None else jnp.repeat(bias[expert], TILE_ROWS, axis=0)

    gate_up_weights = weights.gate_up.reshape(num_experts, 2 * intermediate, hidden)
    rows = tiles.gather(x, top_k.experts.shape[1])
    gate_up = grouped_matmul(rows, gate_up_weights, tiles.expert, outputs_first=True, interpret=interpret)
    gate_up = gate_up.reshape(-1, 2, intermediate)
    inner = activate(gate_up, repeat_per_row(weights.gate_up_bias), scores, top_k.scales_input, statics)
    out = grouped_matmul(inner.astype(x.dtype), weights.down, tiles.expert, interpret=interpret)
    if weights.down_bias is not None:
        bias = scaled_bias(repeat_per_row(weights.down_bias), scores, top_k.scales_input)
        out = (out.astype(jnp.float32) + bias).astype(x.dtype)
    return tiles.sum_rows(out, top_k)


def _forward(static: tuple[bool, ExpertStatics, Any], *args: Any) -> tuple[Array, tuple[Any, ...]]:
    return _mosaic_tiles(static, *args), args


def _backward(
    static: tuple[bool, ExpertStatics, Any], args: tuple[Any, ...], grad_out: Array
) -> tuple[Any, ...]:
    scales_input, statics, _ = static

    def run(x: Array, experts: Array, scores: Array, weights: ExpertWeights) -> Array:
        return run_tiles_xla(x, TopKExperts(experts, scores, scales_input), weights, statics)

    _, pull_back = jax.vjp(run, *args)
    return pull_back(grad_out)


_mosaic_tiles.defvjp(_forward, _backward)


def run_tiles_xla(
    x: Array, top_k: TopKExperts, weights: ExpertWeights, statics: ExpertStatics
) -> Float32[Array, "tokens hidden"]:
    """Compute some tiles at a time with XLA, which copies their weights before the product."""
    num_tokens, num_selected = top_k.experts.shape
    num_rows, num_experts = num_tokens * num_selected, len(weights.down)
    tile = _num_tile_rows(num_rows, num_experts)
    num_tiles = num_rows // tile + num_experts
    expert_bytes = (weights.gate_up.nbytes + weights.down.nbytes) // num_experts
    at_once = min(num_tiles, max(1, MAX_COPIED_BYTES // expert_bytes))
    tiles = sort_rows_into_tiles(top_k, num_experts, tile, -(-num_tiles // at_once) * at_once)

    def run(tiles: ExpertTiles) -> Float[Array, "positions hidden"]:
        tile_weights = weights.take(jnp.maximum(tiles.expert, 0))
        scores = tiles.scores(top_k).reshape(at_once, tile, -1)
        rows = tiles.gather(x, num_selected).reshape(at_once, tile, -1)
        gate_up = jnp.einsum("nth,ngfh->ntgf", rows, tile_weights.gate_up, precision=statics.precision)
        bias = None if tile_weights.gate_up_bias is None else tile_weights.gate_up_bias[:, None]
        inner = activate(gate_up, bias, scores, top_k.scales_input, statics).astype(x.dtype)
        out = jnp.einsum(
            "ntf,nfh->nth",
            inner,
            tile_weights.down,
            precision=statics.precision,
            preferred_element_type=jnp.float32,
        )
        if tile_weights.down_bias is not None:
            bias = tile_weights.down_bias[:, None].astype(jnp.float32)
            out = out + (bias if top_k.scales_input else bias * scores)
        return out.astype(x.dtype).reshape(at_once * tile, -1)

    parts = (tiles.expert.reshape(-1, at_once), tiles.row.reshape(-1, at_once, tile))
    out = jax.lax.map(
        lambda part: run(ExpertTiles(expert=part[0], row=part[1], position=tiles.position)), parts
    )
    return tiles.sum_rows(out.reshape(-1, out.shape[-1]), top_k)


def _num_tile_rows(num_rows: int, num_experts: int) -> int:
    """Return the power of two nearest below the average number of rows per expert.

    Smaller tiles copy weights more often, larger ones multiply more padding.
    """
    share = max(1, num_rows // num_experts)
    return min(max(1 << (share.bit_length() - 1), MIN_TILE), MAX_TILE)
