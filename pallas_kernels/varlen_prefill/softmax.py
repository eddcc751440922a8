"""The online softmax of one warpgroup's rows, a tile of keys at a time."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.ptx import warp_votes
from pallas_kernels.shared.softmax import LOG2E
from pallas_kernels.shared.types import Rows, Scalar, Tile
from pallas_kernels.varlen_prefill.bias import score_factor
from pallas_kernels.varlen_prefill.spec import ROW, M, PrefillSpec, W, f32

LANE_COLUMNS = 8  # a thread holds two neighbours of each eight columns of a tile


class SoftmaxStep(NamedTuple):
    """What a tile of keys brings.

    Attributes:
        p: Probabilities, not normalized.
        sums: Theirs, as far as each thread can add them alone: [64, LANE_COLUMNS].
        top: What scores were less, of each row.
        shrink: What sums from before are to be multiplied by; see tops.Exponents, as for needs_rescale.
        needs_rescale: Whether that is anything but 1.
    """

    p: Tile
    sums: Tile
    top: Rows
    shrink: Rows
    needs_rescale: Scalar | None


class SoftmaxState(NamedTuple):
    """What rows have seen, but for the values of the last tile.

    Attributes:
        accs: P V, a chunk of a head each.
        total: Sums of probabilities, [64, LANE_COLUMNS].
        top: Of each row.
        p: The last tile's probabilities, in 16 bits.
    """

    accs: tuple[Tile, ...]
    total: Tile
    top: Rows
    p: Tile


class Softmax:
    """Scores to probabilities; see tops.py for what scores are less.

    Scores come but for a factor, with a term of each row or None: Bias.added's. `mask` puts -inf where a
    query does not see a key.
    """

    def __init__(self, spec: PrefillSpec):
        self.policy, self.spec = row_max_policy(spec), spec

    def first(self, s: Tile, row_term: Rows | None, mask: Callable[[Tile], Tile]) -> SoftmaxState:
        """Rows that have seen the scores of their first tile."""
        y, top, _, _ = self.policy.first(s, row_term, mask, self.policy.start())
        p, sums = probabilities(y)
        zeros = lambda: plgpu.layout_cast(jnp.zeros(self.spec.acc_shape, f32), W)
        accs = tuple(zeros() for _ in range(self.spec.shape.cut.num_chunks))
        return SoftmaxState(accs, sums, top, p.astype(self.spec.dtype))

    def step(
        self,
        s: Tile,
        row_term: Rows | None,
        mask: Callable[[Tile], Tile],
        top: Rows,
        before_exponents: Callable[[], None],
    ) -> SoftmaxStep:
        """What a later tile brings to rows with tops from before."""
        y, top, shrink, needs_rescale = self.policy.next(s, row_term, mask, top)
        before_exponents()
        p, sums = probabilities(y)
        return SoftmaxStep(p, sums, top, shrink, needs_rescale)

    def empty_step(self, top: Rows) -> SoftmaxStep:
        """A Step for accumulators to hold until there is one."""
        zeros = plgpu.layout_cast(jnp.zeros(self.spec.s_shape, f32), W)
        return SoftmaxStep(zeros, zeros[:, :LANE_COLUMNS], top, top, self.policy.no_answer())

    def joined(self, accs: tuple[Tile, ...], total: Tile, step: SoftmaxStep) -> SoftmaxState:
        """Rows whose sums the step joins."""
        *accs_shrunk, total = self.policy.shrunk(step.shrink, step.needs_rescale, (*accs, total))
        return SoftmaxState(tuple(accs_shrunk), total + step.sums, step.top, step.p.astype(self.spec.dtype))


def probabilities(y: Tile) -> tuple[Tile, Tile]:
    """2 ** y, and the sums of what each thread has of it."""
    p = jnp.exp2(y)
    sums = p[:, :LANE_COLUMNS]
    for at in range(LANE_COLUMNS, p.shape[1], LANE_COLUMNS):
        sums = sums + p[:, at : at + LANE_COLUMNS]
    return p, sums


# A row's top lies so many powers of two above its largest score when it is chosen, and serves until a score
# reaches it. bf16 has the exponents of f32; probabilities of f16 must not fall below its own.
HEADROOM = {jnp.dtype(jnp.bfloat16): 80.0, jnp.dtype(jnp.float16): 4.0}
# With a bias tops rise from tile to tile. 8 x 2k: 480 us with the largest score as the top, 488 with room for
# 40 powers of two, 470 for 80, 461 for 100. In tiles of 128 keys they rise too far: 669 us with the largest,
# 695 with room for 80.
BIASED_HEADROOM = 100.0
MAX_BIASED_TILE_KV = 64


class ShiftedScores(NamedTuple):
    """What a policy makes of a tile's scores.

    Attributes:
        y: Probabilities are 2 ** y.
        top: Of each row, from now on.
        shrink: What a row's sums from before are to be multiplied by.
        needs_rescale: Whether that is anything but 1 in the warp; None: nobody has asked.
    """

    y: Tile
    top: Rows
    shrink: Rows
    needs_rescale: Scalar | None = None


@runtime_checkable
class RowMaxPolicy(Protocol):
    """Which top a row's scores are less. Scores are given but for `factor_of`, masked by `mask`.

    `row_term` is what is to be added to all of a row's scores, or None.
    """

    def start(self) -> Rows:
        """The tops of rows that have seen no tile."""

    def first(self, s: Tile, row_term: Rows | None, mask: Callable[[Tile], Tile], top: Rows) -> ShiftedScores:
        """Of a row's first tile, whose top is `start`'s; shrink has no meaning."""

    def next(self, s: Tile, row_term: Rows | None, mask: Callable[[Tile], Tile], top: Rows) -> ShiftedScores:
        """Of a later tile."""

    def no_answer(self) -> Scalar | None:
        """A False where needs_rescale is a Scalar."""

    def shrunk(self, shrink: Rows, needs_rescale: Scalar | None, sums: Sequence[Tile]) -> Sequence[Tile]:
        """What sums from before are from now on."""


def row_max_policy(spec: PrefillSpec) -> RowMaxPolicy:
    """The policy of a kernel."""
    soft_cap = spec.score.soft_cap
    is_small = soft_cap is not None and soft_cap * LOG2E <= HEADROOM[spec.dtype]
    if is_small and not spec.has_alibi:
        return NoRowMax(spec)
    # KeptTops rounds a row's first scores once in the tile's first step, twice where it sees nothing before.
    must_round_alike = spec.sizes.batch_invariant and (spec.has_window or spec.has_lists)
    rises_little = spec.dtype == jnp.bfloat16 and spec.sizes.tile_kv <= MAX_BIASED_TILE_KV
    if must_round_alike or (spec.has_alibi and not rises_little):
        return RunningRowMax(spec)
    room = BIASED_HEADROOM if spec.has_alibi else HEADROOM[spec.dtype]
    return LazyRescale(spec, room)


class NoRowMax:
    """Scores as they are."""

    def __init__(self, spec: PrefillSpec):
        self.factor = score_factor(spec)

    def start(self) -> Rows:
        """See TopPolicy."""
        return full_rows(0.0)

    def first(self, s: Tile, row_term: Rows | None, mask: Callable[[Tile], Tile], top: Rows) -> ShiftedScores:
        """See TopPolicy."""
        return self.next(s, row_term, mask, top)

    def next(self, s: Tile, row_term: Rows | None, mask: Callable[[Tile], Tile], top: Rows) -> ShiftedScores:
        """See TopPolicy."""
        return ShiftedScores(mask(s * self.factor), top, top)

    def no_answer(self) -> Scalar | None:
        """See TopPolicy."""
        return None

    def shrunk(self, shrink: Rows, needs_rescale: Scalar | None, sums: Sequence[Tile]) -> Sequence[Tile]:
        """See TopPolicy."""
        return sums


class RunningRowMax(NoRowMax):
    """The largest score that a row has seen, or `room` above it."""

    def __init__(self, spec: PrefillSpec, room: float = 0.0):
        super().__init__(spec)
        self.room = room

    def start(self) -> Rows:
        """See TopPolicy."""
        return full_rows(-jnp.inf)

    def next(self, s: Tile, row_term: Rows | None, mask: Callable[[Tile], Tile], top: Rows) -> ShiftedScores:
        """See TopPolicy."""
        return self.with_largest(mask(s), row_term, top)

    def with_largest(self, s: Tile, row_term: Rows | None, top: Rows) -> ShiftedScores:
        """Scores less a top by the largest that a row has seen."""
        tile_top = s.max(axis=1) * self.factor + (0.0 if row_term is None else row_term)
        new_top = jnp.maximum(top, tile_top + self.room)
        base = finite_row_max(new_top)
        y = s * self.factor - broadcast_rows(base if row_term is None else base - row_term, s)
        return ShiftedScores(y, new_top, jnp.exp2(top - base))

    def shrunk(self, shrink: Rows, needs_rescale: Scalar | None, sums: Sequence[Tile]) -> Sequence[Tile]:
        """See TopPolicy."""
        return tuple(x * broadcast_rows(shrink, x) for x in sums)


class LazyRescale(RunningRowMax):
    """A top stays until one of the row's scores reaches it; then one is chosen `room` above the largest.

    Looked at only by warps of which a row needs it.
    """

    def __init__(self, spec: PrefillSpec, room: float = 0.0):
        super().__init__(spec, room)
        self.is_interpreted = spec.is_interpreted

    def first(self, s: Tile, row_term: Rows | None, mask: Callable[[Tile], Tile], top: Rows) -> ShiftedScores:
        """See TopPolicy."""
        return self.with_largest(mask(s), row_term, top)

    def next(self, s: Tile, row_term: Rows | None, mask: Callable[[Tile], Tile], top: Rows) -> ShiftedScores:
        """See TopPolicy."""
        base = finite_row_max(top) if row_term is None else finite_row_max(top) - row_term
        y = mask(s * self.factor - broadcast_rows(base, s))
        needs_rescale = warp_votes.needs_rescale(y, top, is_interpreted=self.is_interpreted)
        y, top, shrink = lax.cond(needs_rescale, self.with_new, lambda y, top: (y, top, top), y, top)
        return ShiftedScores(y, top, shrink, needs_rescale)

    def with_new(self, y: Tile, top: Rows) -> tuple[Tile, Rows, Rows]:
        """Scores less a new top for rows that need one, the tops, by what sums from before shrink.

        Which rows do is for each to say, not for its neighbours.
        """
        tile_top, base = y.max(axis=1), finite_row_max(top)
        needs_rescale = (tile_top >= 0) | (top == -jnp.inf)
        new_top = jnp.where(needs_rescale, tile_top + base + self.room, top)
        new_base = finite_row_max(new_top)
        return y - broadcast_rows(new_base - base, y), new_top, jnp.exp2(top - new_base)

    def no_answer(self) -> Scalar | None:
        """See TopPolicy."""
        return jnp.bool_(False)

    def shrunk(self, shrink: Rows, needs_rescale: Scalar | None, sums: Sequence[Tile]) -> Sequence[Tile]:
        """See TopPolicy."""
        rescaled = lambda *sums: super(LazyRescale, self).shrunk(shrink, needs_rescale, sums)
        return lax.cond(needs_rescale, rescaled, lambda *sums: sums, *sums)


def full_rows(value: float) -> Rows:
    """The same number for each row."""
    return plgpu.layout_cast(jnp.full((M,), value, f32), ROW)


def broadcast_rows(x: Rows, like: Tile) -> Tile:
    """One value a row to a tile."""
    return lax.broadcast_in_dim(x, like.shape, [0])


def finite_row_max(top: Rows) -> Rows:
    """The top, or 0 for rows that have seen no key yet, whose top is -inf."""
    return jnp.where(top == -jnp.inf, 0.0, top)
