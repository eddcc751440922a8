"""A call of varlen_backward: whether it may be, and the kernel's inputs made of it."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.checks import (
    require,
    require_arrays,
    require_axes,
    require_built_for,
    require_positive,
    require_shape,
    unsupported,
)
from pallas_kernels.derivatives import forbid_kernel_derivative
from pallas_kernels.shared.head_dims import UNIT, head_chunks
from pallas_kernels.shared.memory import copy_if_unaligned
from pallas_kernels.shared.score import Score
from pallas_kernels.shared.softmax import LOG2E
from pallas_kernels.support import why_not_backward
from pallas_kernels.varlen_backward.refs import DkDvInputs, DkDvScheduleRefs, DqInputs, QueryListRefs
from pallas_kernels.varlen_backward.schedule import BackwardSchedule, make_schedule, max_tiles, schedule_key
from pallas_kernels.varlen_backward.sizes import BackwardSizes, default_layer_sizes
from pallas_kernels.varlen_backward.spec import BackwardSpec
from pallas_kernels.varlen_backward.tile_lists import BackwardMask, BackwardTileLists
from pallas_kernels.varlen_prefill.refs import KvRefs, PrefillInputs
from pallas_kernels.varlen_prefill.schedule import ALIGN, TABLE_WIDTH, heads_per_l2_group
from pallas_kernels.varlen_prefill.spec import PrefillShape, PrefillSpec
from pallas_kernels.varlen_prefill.tile_lists import schedule_refs


@dataclasses.dataclass(frozen=True, kw_only=True)
class BackwardCall:
    """Arguments of varlen_backward, of the same names.

    The gradient of a head's sink is the sum over its tokens of `exp(sink - lse) * (grad_lse - expected)`;
    `expected` is a token's sum of `out * grad_out`.

    Attributes:
        query: Tokens of all requests.
        key: Keys of all requests.
        value: As key.
        out: As query.
        lse: [q_heads, tokens].
        grad_out: As query.
        grad_lse: As lse, or None.
        query_start_loc: First token of each request, and one past the last.
        seq_lens: Keys of each request.
        kv_start_loc: First key of each request.
        alibi_slopes: Slope of each head.
        lists: make_lists' for the call's schedule: each head's tiles of queries. Of a listed tile, rows of
            the request must be finite even where the mask hides them.
        mask: Which pairs see each other in tiles that are listed as seen in part. Only with lists.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    out: jax.Array
    lse: jax.Array
    grad_out: jax.Array
    grad_lse: jax.Array | None
    query_start_loc: jax.Array
    seq_lens: jax.Array
    kv_start_loc: jax.Array
    alibi_slopes: jax.Array | None
    lists: BackwardTileLists | None
    mask: BackwardMask | None

    def check(self) -> None:
        """Raises what varlen_backward raises, but for what a schedule is given."""
        require_axes(
            3, query=self.query, key=self.key, value=self.value, out=self.out, grad_out=self.grad_out
        )
        require_axes(2, lse=self.lse)
        require_arrays(grad_lse=self.grad_lse, alibi_slopes=self.alibi_slopes)
        bounds = {"query_start_loc": self.query_start_loc, "kv_start_loc": self.kv_start_loc}
        require_axes(1, seq_lens=self.seq_lens, **bounds)
        (tokens, q_heads, head_dim), (_, kv_heads, _) = self.query.shape, self.key.shape
        (reqs,) = self.seq_lens.shape
        require_positive(kv_heads=kv_heads, q_heads=q_heads)
        require(q_heads % kv_heads == 0, "q_heads", f"be a multiple of kv_heads ({kv_heads})", q_heads)
        require_shape("key's head_dim", self.key.shape[-1:], (head_dim,), "as query")
        require_shape("value", self.value.shape, self.key.shape, "as key")
        for name in ("out", "grad_out"):
            require_shape(name, getattr(self, name).shape, self.query.shape, "as query")
        for name in ("lse", "grad_lse"):
            stats = getattr(self, name)
            if stats is not None:
                require_shape(name, stats.shape, (q_heads, tokens), "q_heads, tokens")
        require_shape("query_start_loc", self.query_start_loc.shape, (reqs + 1,), "reqs + 1")
        require_shape("kv_start_loc", self.kv_start_loc.shape, (reqs,), "reqs")
        if self.alibi_slopes is not None:
            require_shape("alibi_slopes", self.alibi_slopes.shape, (q_heads,), "q_heads")
        require(self.lists is not None or self.mask is None, "lists", "be given with a mask", None)
        dtypes = {name: getattr(self, name).dtype for name in ("query", "key", "value", "out", "grad_out")}
        reason = why_not_backward(dtypes=dtypes, head_dim=head_dim)
        if reason is not None:
            raise unsupported("varlen_backward", reason, "Use another implementation")

    def forbid_kernel_derivative(self) -> "BackwardCall":
        """The same call, which refuses to be differentiated."""
        names = ("query", "key", "value", "out", "lse", "grad_out", "grad_lse", "alibi_slopes")
        arrays = {name: getattr(self, name) for name in names}
        way_out = "Ask attend for implementation='reference'"
        return dataclasses.replace(self, **forbid_kernel_derivative(arrays, "varlen_backward", way_out))

    def default_sizes(
        self, schedule: BackwardSchedule | None, score: Score, *, deterministic: bool
    ) -> BackwardSizes:
        """Where the caller names none: what lists or a schedule are made for, or what suits the shapes."""
        head_dim, given = self.query.shape[2], schedule if self.lists is None else self.lists
        if given is not None:
            return given.built_for.sizes
        mean_len = self.query.shape[0] // self.seq_lens.shape[0]
        return default_layer_sizes(head_dim, score, mean_len=mean_len, deterministic=deterministic)

    def check_queries(self, sizes: BackwardSizes, *, deterministic: bool) -> None:
        """Refuses the absence of the kernel of the queries' gradient, or of its lists, where it is needed."""
        has_kernel = sizes.dq_sizes is not None
        require(has_kernel or not deterministic, "sizes.dq_sizes", "be given with deterministic", None)
        if self.lists is None:
            return
        if not has_kernel:  # whose lists say more of a tile
            require(self.lists.dq_lists is None, "sizes.dq_sizes", "be given with lists.dq_lists", None)
            return
        require(self.lists.dq_lists is not None, "lists.dq_lists", "be given with sizes.dq_sizes", None)
        has_mask = self.mask is None or self.mask.dq_mask is not None
        require(has_mask, "mask.dq_mask", "be given with sizes.dq_sizes", None)

    @property
    def is_empty(self) -> bool:
        """Nobody sees a key, as shapes tell."""
        return 0 in (self.query.shape[0], self.key.shape[0], self.seq_lens.shape[0])

    def make_schedule(self, score: Score, sizes: BackwardSizes) -> BackwardSchedule:
        """Its own."""
        return make_schedule(
            self.query_start_loc,
            self.seq_lens,
            self.kv_start_loc,
            kv_tokens=self.key.shape[0],
            kv_heads=self.key.shape[1],
            head_dim=self.key.shape[2],
            score=score,
            sizes=sizes,
            num_tokens=self.query.shape[0],
        )

    def check_schedule(self, schedule: BackwardSchedule, score: Score, sizes: BackwardSizes) -> None:
        """Refuses a schedule, or lists, made for other keys, requests, masks or tiles."""
        (kv_tokens, kv_heads, _), reqs, q_heads = self.key.shape, self.seq_lens.shape[0], self.query.shape[1]
        wanted = schedule_key(kv_tokens, kv_heads, score, sizes, self.query.shape[0])
        require_built_for("schedule", schedule.built_for, wanted)
        what, rows = f"{kv_tokens} keys of {reqs} requests", max_tiles(kv_tokens, reqs)
        require_shape("schedule.table", schedule.table.shape, (rows, TABLE_WIDTH), what)
        if self.lists is not None:
            require_built_for("lists", self.lists.built_for, wanted)
            what = f"{rows} tiles of keys, {q_heads} query heads, {kv_heads} kv heads"
            require_shape("lists.order", self.lists.order.shape, (rows * kv_heads,), what)
            require_shape("lists.entries", self.lists.entries.shape[:1], (rows * q_heads,), what)
            if self.lists.dq_lists is not None and schedule.dq_schedule is not None:
                built_for = self.lists.dq_lists.built_for
                require_built_for("lists.dq_lists", built_for, schedule.dq_schedule.built_for)
                rows = schedule.dq_schedule.table.shape[0] * q_heads
                what = f"tiles of {self.query.shape[0]} queries, {q_heads} heads"
                require_shape("lists.dq_lists", self.lists.dq_lists.table.shape, (rows, TABLE_WIDTH), what)

    def inputs(self, schedule: BackwardSchedule, spec: BackwardSpec) -> DkDvInputs:
        """The kernel's; gradients of queries begin as zeros."""
        as_copied = lambda x: spec.cut.split(_whole_rows(x, axis=0))
        tokens = self.query.shape[0]
        rows = tokens + -tokens % ALIGN + spec.sizes.tile_q
        zeros = lambda: jnp.zeros((self.query.shape[1], spec.units, rows, UNIT), jnp.float32)
        slopes = self.alibi_slopes
        return DkDvInputs(
            query=as_copied(self.query),
            key=as_copied(self.key),
            value=as_copied(self.value),
            grad_out=as_copied(self.grad_out),
            stats=self.stats(more_rows=0 if spec.adds_grad_query else UNIT, sizes=spec.sizes),
            slopes=None if slopes is None else slopes.astype(jnp.float32) * LOG2E,
            schedule=self._schedule_refs(schedule),
            mask=() if spec.mask is None else spec.mask.arrays,
            grad_query=zeros() if spec.adds_grad_query else None,
        )

    def _schedule_refs(self, schedule: BackwardSchedule) -> DkDvScheduleRefs:
        if self.lists is None:
            return DkDvScheduleRefs(schedule.table, schedule.num_valid, schedule.order, None)
        lists = QueryListRefs(self.lists.entries, self.lists.num_partial, self.lists.num_full)
        return DkDvScheduleRefs(schedule.table, schedule.num_valid, self.lists.order, lists)

    def query_inputs(
        self, inputs: DkDvInputs, schedule: BackwardSchedule, spec: PrefillSpec, *, fuses_delta: bool
    ) -> DqInputs:
        """Those of the kernel of the queries' gradient, from the other's."""
        assert schedule.dq_schedule is not None
        as_copied = lambda x: spec.shape.cut.split(_whole_rows(x, axis=0))
        lists = None if self.lists is None else self.lists.dq_lists
        attention = PrefillInputs(
            query=as_copied(self.query),
            cache=KvRefs(as_copied(self.key), as_copied(self.value), None),
            slopes=inputs.slopes,
            sinks=None,
            schedule=schedule_refs(schedule.dq_schedule, lists),
            mask=() if spec.mask is None else spec.mask.arrays,
        )
        out = as_copied(self.out) if fuses_delta else None
        return DqInputs(attention, as_copied(self.grad_out), inputs.stats, out)

    def query_spec(self, schedule: BackwardSchedule, spec: BackwardSpec) -> PrefillSpec:
        """What that kernel is compiled for."""
        (_, q_heads, head_dim), (kv_tokens, kv_heads, _) = self.query.shape, self.key.shape
        sizes = spec.sizes.dq_sizes
        assert sizes is not None
        assert schedule.dq_schedule is not None
        rows, kv_bytes = len(schedule.dq_schedule.table), 4 * kv_tokens * head_dim
        shape = PrefillShape(
            q_heads=q_heads, group=spec.group, cut=head_chunks(head_dim), in_cache=None,
            heads_at_once=heads_per_l2_group(q_heads, kv_heads, kv_bytes=kv_bytes, rows=rows, sizes=sizes),
        )  # fmt: skip
        mask = None if self.mask is None else self.mask.dq_mask
        return PrefillSpec(
            shape=shape, score=spec.score, sizes=sizes, dtype=spec.dtype, mask=mask,
            has_lists=spec.has_lists, has_alibi=spec.has_alibi, returns_lse=False, interpret=spec.interpret,
        )  # fmt: skip

    def stats(self, *, more_rows: int, sizes: BackwardSizes) -> jax.Array:
        """What scores and gradients of probabilities are less, of each row: [q_heads, 2, tokens] f32.

        Args:
            more_rows: Static: behind the tokens.
            sizes: With fuses_delta the second row is 0 and grad_lse, if there is one, a third.
        """
        as_f32 = lambda x: x.astype(jnp.float32)
        lse = as_f32(self.lse)
        less = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E)  # a row without keys has probabilities of 0
        stacked = lambda *rows: _whole_rows(jnp.stack([less, *rows], axis=1), axis=2, more=more_rows)
        if sizes.fuses_delta:
            return stacked(jnp.zeros_like(less), *(() if self.grad_lse is None else (as_f32(self.grad_lse),)))
        # A kernel of its own: summed where the two are stacked, a thread would read a whole head.
        products = as_f32(self.out) * as_f32(self.grad_out)
        expected = jax.lax.optimization_barrier(products.sum(axis=-1)).T
        if self.grad_lse is not None:
            expected = expected - as_f32(self.grad_lse)
        return stacked(expected)

    def grad_query(self, summed: jax.Array, spec: BackwardSpec) -> jax.Array:
        """From [q_heads, units, rows, 64] f32, but for the scale, to what query is."""
        tokens, q_heads, head_dim = self.query.shape
        scaled = (summed[:, :, :tokens, : spec.cut.chunk_dim] * spec.score.scale).astype(self.query.dtype)
        return scaled.transpose(2, 0, 1, 3).reshape(tokens, q_heads, head_dim)


def _whole_rows(x: jax.Array, *, axis: int, more: int = 0) -> jax.Array:
    """Tokens padded to what TMA takes."""
    missing = -x.shape[axis] % ALIGN + more
    return (
        jnp.pad(x, [(0, missing if n == axis else 0) for n in range(x.ndim)])
        if missing
        else copy_if_unaligned(x)
    )
