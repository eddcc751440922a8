"""Arguments of a varlen_backward call: their validation, and their conversion to inputs of the kernels."""

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
from pallas_kernels.shared.head_dims import PANEL, head_chunks
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
    """Arguments of varlen_backward.

    The gradient of a head's sink is the sum over its tokens of `exp(sink - lse) * (grad_lse - delta)`, where
    `delta` is a token's sum of `out * grad_out`.

    Attributes:
        query: Queries [tokens, q_heads, head_dim].
        key: Packed keys [kv_tokens, kv_heads, head_dim].
        value: Values, like `key`.
        out: Output of attention, like `query`.
        lse: Log-sum-exp of attention, f32 [q_heads, tokens].
        grad_out: Gradient of the output, like `query`.
        grad_lse: Gradient of the log-sum-exp, like `lse`, or None.
        query_start_loc: First token of each request and one past the last, [reqs + 1].
        seq_lens: Number of keys of each request, [reqs].
        kv_start_loc: Index of the first key of each request, [reqs].
        alibi_slopes: ALiBi slope of each head, f32 [q_heads], or None.
        lists: Tile lists for the call's schedule, or None for all query tiles. All queries and keys of the
            tiles in the lists must be finite, even if the mask hides them.
        mask: Mask that applies to the partial tiles of the lists, or None.
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
        """Validate shapes, dtypes and kernel support; schedules and sizes are checked separately.

        Raises:
            ValueError: If the arguments do not fit together.
            NotImplementedError: If there is no kernel for the dtypes or head_dim.
        """
        require_axes(
            3, query=self.query, key=self.key, value=self.value, out=self.out, grad_out=self.grad_out
        )
        require_axes(2, lse=self.lse)
        require_arrays(grad_lse=self.grad_lse, alibi_slopes=self.alibi_slopes)
        require_axes(
            1, seq_lens=self.seq_lens, query_start_loc=self.query_start_loc, kv_start_loc=self.kv_start_loc
        )
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
        if self.lists is None and self.mask is not None:
            raise ValueError("mask requires lists. Build them with make_tile_lists.")
        dtypes = {name: getattr(self, name).dtype for name in ("query", "key", "value", "out", "grad_out")}
        reason = why_not_backward(dtypes=dtypes, head_dim=head_dim)
        if reason is not None:
            raise unsupported("varlen_backward", reason, "Call jattn.attend with implementation='xla'")

    def forbid_derivative(self) -> "BackwardCall":
        """Return a copy of the call that raises NotImplementedError if it is differentiated."""
        names = ("query", "key", "value", "out", "lse", "grad_out", "grad_lse", "alibi_slopes")
        arrays = {name: getattr(self, name) for name in names}
        fix = "Call attend with implementation='reference'"
        return dataclasses.replace(self, **forbid_kernel_derivative(arrays, "varlen_backward", fix))

    def default_sizes(
        self, schedule: BackwardSchedule | None, score: Score, *, deterministic: bool
    ) -> BackwardSizes:
        """Return the sizes of the lists or the schedule, or else the defaults for the shapes."""
        head_dim, prebuilt = self.query.shape[2], schedule if self.lists is None else self.lists
        if prebuilt is not None:
            return prebuilt.built_for.sizes
        mean_len = self.query.shape[0] // self.seq_lens.shape[0]
        return default_layer_sizes(head_dim, score, mean_len=mean_len, deterministic=deterministic)

    def check_dq(self, sizes: BackwardSizes, *, deterministic: bool) -> None:
        """Raise ValueError if sizes.dq_sizes do not match `deterministic`, the lists or the mask."""
        has_dq_kernel = sizes.dq_sizes is not None
        if deterministic and not has_dq_kernel:
            raise ValueError("deterministic=True requires a dq kernel. Set sizes.dq_sizes.")
        if self.lists is None:
            return
        if not has_dq_kernel:  # these lists would have bits per warpgroup, which only the dq kernel allows
            if self.lists.dq_lists is not None:
                raise ValueError("lists.dq_lists requires a dq kernel. Set sizes.dq_sizes.")
            return
        if self.lists.dq_lists is None:
            raise ValueError(
                "sizes.dq_sizes is set, so lists.dq_lists is required. Build it for schedule.dq_schedule."
            )
        if self.mask is not None and self.mask.dq_mask is None:
            raise ValueError(
                "sizes.dq_sizes is set, so mask.dq_mask is required. Pass the mask for the dq kernel."
            )

    @property
    def is_empty(self) -> bool:
        """Whether no query attends to any key, according to the shapes alone."""
        return 0 in (self.query.shape[0], self.key.shape[0], self.seq_lens.shape[0])

    def make_schedule(self, score: Score, sizes: BackwardSizes) -> BackwardSchedule:
        """Build the schedule of the call."""
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
        """Raise ValueError if a schedule or lists were built for other static arguments or shapes."""
        (kv_tokens, kv_heads, _), reqs, q_heads = self.key.shape, self.seq_lens.shape[0], self.query.shape[1]
        expected = schedule_key(kv_tokens, kv_heads, score, sizes, self.query.shape[0])
        require_built_for("schedule", schedule.built_for, expected)
        meaning, rows = f"{kv_tokens} keys of {reqs} requests", max_tiles(kv_tokens, reqs)
        require_shape("schedule.table", schedule.table.shape, (rows, TABLE_WIDTH), meaning)
        if self.lists is not None:
            require_built_for("lists", self.lists.built_for, expected)
            meaning = f"{rows} key tiles, {q_heads} query heads, {kv_heads} KV heads"
            require_shape("lists.order", self.lists.order.shape, (rows * kv_heads,), meaning)
            require_shape("lists.entries", self.lists.entries.shape[:1], (rows * q_heads,), meaning)
            if self.lists.dq_lists is not None and schedule.dq_schedule is not None:
                built_for = self.lists.dq_lists.built_for
                require_built_for("lists.dq_lists", built_for, schedule.dq_schedule.built_for)
                rows = schedule.dq_schedule.table.shape[0] * q_heads
                meaning = f"tiles of {self.query.shape[0]} queries, {q_heads} heads"
                require_shape("lists.dq_lists", self.lists.dq_lists.table.shape, (rows, TABLE_WIDTH), meaning)

    def dkdv_inputs(self, schedule: BackwardSchedule, spec: BackwardSpec) -> DkDvInputs:
        """Return the inputs of the dk/dv kernel; without a dq kernel they include a dq of zeros."""

        def kernel_array(x: jax.Array) -> jax.Array:
            return spec.head.split(_pad_rows(x, axis=0))

        tokens = self.query.shape[0]
        rows = tokens + -tokens % ALIGN + spec.sizes.tile_q
        dq = None
        if spec.adds_dq:
            dq = jnp.zeros((self.query.shape[1], spec.num_head_panels, rows, PANEL), jnp.float32)
        slopes = self.alibi_slopes
        return DkDvInputs(
            query=kernel_array(self.query),
            key=kernel_array(self.key),
            value=kernel_array(self.value),
            dout=kernel_array(self.grad_out),
            row_stats=self.row_stats(extra_rows=0 if spec.adds_dq else PANEL, sizes=spec.sizes),
            slopes=None if slopes is None else slopes.astype(jnp.float32) * LOG2E,
            schedule=self._schedule_refs(schedule),
            mask=() if spec.mask is None else spec.mask.arrays,
            dq=dq,
        )

    def _schedule_refs(self, schedule: BackwardSchedule) -> DkDvScheduleRefs:
        if self.lists is None:
            return DkDvScheduleRefs(schedule.table, schedule.num_valid, schedule.order, None)
        lists = QueryListRefs(self.lists.entries, self.lists.num_partial, self.lists.num_full)
        return DkDvScheduleRefs(schedule.table, schedule.num_valid, self.lists.order, lists)

    def dq_inputs(
        self, inputs: DkDvInputs, schedule: BackwardSchedule, spec: PrefillSpec, *, fuses_delta: bool
    ) -> DqInputs:
        """Return the inputs of the dq kernel; `inputs` are those of the dk/dv kernel."""
        assert schedule.dq_schedule is not None

        def kernel_array(x: jax.Array) -> jax.Array:
            return spec.shape.head.split(_pad_rows(x, axis=0))

        lists = None if self.lists is None else self.lists.dq_lists
        attention = PrefillInputs(
            query=kernel_array(self.query),
            kv=KvRefs(kernel_array(self.key), kernel_array(self.value), None),
            slopes=inputs.slopes,
            sinks=None,
            schedule=schedule_refs(schedule.dq_schedule, lists),
            mask=() if spec.mask is None else spec.mask.arrays,
        )
        out = kernel_array(self.out) if fuses_delta else None
        return DqInputs(attention, kernel_array(self.grad_out), inputs.row_stats, out)

    def dq_spec(self, schedule: BackwardSchedule, spec: BackwardSpec) -> PrefillSpec:
        """Return the static description of the dq kernel."""
        (_, q_heads, head_dim), (kv_tokens, kv_heads, _) = self.query.shape, self.key.shape
        sizes = spec.sizes.dq_sizes
        assert sizes is not None
        assert schedule.dq_schedule is not None
        rows, kv_bytes = len(schedule.dq_schedule.table), 4 * kv_tokens * head_dim
        group_heads = heads_per_l2_group(q_heads, kv_heads, kv_bytes=kv_bytes, rows=rows, sizes=sizes)
        shape = PrefillShape(
            q_heads=q_heads, group=spec.group, head=head_chunks(head_dim), cache_tiling=None,
            heads_per_l2_group=group_heads,
        )  # fmt: skip
        mask = None if self.mask is None else self.mask.dq_mask
        return PrefillSpec(
            shape=shape, score=spec.score, sizes=sizes, dtype=spec.dtype, mask=mask,
            has_lists=spec.has_lists, has_alibi=spec.has_alibi, returns_lse=False, interpret=spec.interpret,
        )  # fmt: skip

    def row_stats(self, *, extra_rows: int, sizes: BackwardSizes) -> jax.Array:
        """Return the base-2 LSE and delta of each row, f32 [q_heads, 2, tokens].

        If the dq kernel computes delta, the second row is 0, and grad_lse is a third row if it is not None.

        Args:
            extra_rows: Number of rows to add after the tokens. Static.
            sizes: Tile sizes of the kernels.
        """
        lse = self.lse.astype(jnp.float32)
        # Rows without keys have probabilities of 0.
        lse_log2 = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2E)

        def stacked(*rows: jax.Array) -> jax.Array:
            return _pad_rows(jnp.stack([lse_log2, *rows], axis=1), axis=2, extra=extra_rows)

        if sizes.fuses_delta:
            zeros = jnp.zeros_like(lse_log2)
            return stacked(zeros, *(() if self.grad_lse is None else (self.grad_lse.astype(jnp.float32),)))
        # A separate XLA kernel computes delta: fused with the stacking, each thread would read a whole head.
        products = self.out.astype(jnp.float32) * self.grad_out.astype(jnp.float32)
        delta = jax.lax.optimization_barrier(products.sum(axis=-1)).T
        if self.grad_lse is not None:
            delta = delta - self.grad_lse.astype(jnp.float32)
        return stacked(delta)

    def dq_from_sum(self, dq_sum: jax.Array, spec: BackwardSpec) -> jax.Array:
        """Scale dq, f32 [q_heads, panels, rows, 64], and convert it to the shape and dtype of the queries."""
        tokens, q_heads, head_dim = self.query.shape
        dq = (dq_sum[:, :, :tokens, : spec.head.chunk_dim] * spec.score.scale).astype(self.query.dtype)
        return dq.transpose(2, 0, 1, 3).reshape(tokens, q_heads, head_dim)


def _pad_rows(x: jax.Array, *, axis: int, extra: int = 0) -> jax.Array:
    """Pad an axis to a multiple of 8, which TMA needs, and by `extra` rows."""
    missing = -x.shape[axis] % ALIGN + extra
    if not missing:
        return copy_if_unaligned(x)
    return jnp.pad(x, [(0, missing if n == axis else 0) for n in range(x.ndim)])
