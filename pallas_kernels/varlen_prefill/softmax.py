"""The online softmax of one warpgroup's rows, a tile of keys at a time."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.types import Rows, Scalar, Tile
from pallas_kernels.varlen_prefill.spec import PrefillSpec, W, f32
from pallas_kernels.varlen_prefill.tops import policy_of

LANE_COLUMNS = 8  # a thread holds two neighbours of each eight columns of a tile


class Step(NamedTuple):
    """What a tile of keys brings.

    Attributes:
        p: Probabilities, not normalized.
        sums: Theirs, as far as each thread can add them alone: [64, LANE_COLUMNS].
        top: What scores were less, of each row.
        shrink: What sums from before are to be multiplied by; see tops.Exponents, as for is_due.
        is_due: Whether that is anything but 1.
    """

    p: Tile
    sums: Tile
    top: Rows
    shrink: Rows
    is_due: Scalar | None


class State(NamedTuple):
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
        self.policy, self.spec = policy_of(spec), spec

    def first(self, s: Tile, row_term: Rows | None, mask: Callable[[Tile], Tile]) -> State:
        """Rows that have seen the scores of their first tile."""
        y, top, _, _ = self.policy.first(s, row_term, mask, self.policy.start())
        p, sums = probabilities(y)
        zeros = lambda: plgpu.layout_cast(jnp.zeros(self.spec.acc_shape, f32), W)
        accs = tuple(zeros() for _ in range(self.spec.shape.cut.chunks))
        return State(accs, sums, top, p.astype(self.spec.dtype))

    def step(
        self,
        s: Tile,
        row_term: Rows | None,
        mask: Callable[[Tile], Tile],
        top: Rows,
        before_exponents: Callable[[], None],
    ) -> Step:
        """What a later tile brings to rows with tops from before."""
        y, top, shrink, is_due = self.policy.next(s, row_term, mask, top)
        before_exponents()
        p, sums = probabilities(y)
        return Step(p, sums, top, shrink, is_due)

    def empty_step(self, top: Rows) -> Step:
        """A Step for accumulators to hold until there is one."""
        zeros = plgpu.layout_cast(jnp.zeros(self.spec.s_shape, f32), W)
        return Step(zeros, zeros[:, :LANE_COLUMNS], top, top, self.policy.no_answer())

    def joined(self, accs: tuple[Tile, ...], total: Tile, step: Step) -> State:
        """Rows whose sums the step joins."""
        *accs_shrunk, total = self.policy.shrunk(step.shrink, step.is_due, (*accs, total))
        return State(tuple(accs_shrunk), total + step.sums, step.top, step.p.astype(self.spec.dtype))


def probabilities(y: Tile) -> tuple[Tile, Tile]:
    """2 ** y, and the sums of what each thread has of it."""
    p = jnp.exp2(y)
    sums = p[:, :LANE_COLUMNS]
    for at in range(LANE_COLUMNS, p.shape[1], LANE_COLUMNS):
        sums = sums + p[:, at : at + LANE_COLUMNS]
    return p, sums
