"""Sparse decode: paged_decode over lists of blocks, made in the same call, beside our dense decode."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from benchmarks.kernels.decode import inputs
from benchmarks.runner import Rows, kernel_times
from jattn import masks
from jattn.masks import Mask, Pairs
from jattn.sparsity import KeyBounds, select_blocks
from pallas_kernels.cases import DecodeCase

Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
HEADS = Q_HEADS, KV_HEADS
TOLERANCE = 2e-2  # of a query's largest output; the tests hold the kernel to a tighter bound
CHECKED_REQUESTS = 4
DENSITIES = (0.25, 0.1)
KERNELS = ("paged_decode", "varlen_prefill")
SELECTED = 0.1  # of the blocks, by Quest
SPEC = jattn.AttentionSpec(num_q_heads=Q_HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)


def lists(rows: Rows, quantizations: list[str], blocks: list[int], *, page: int = 16) -> None:
    """64 requests of 32k under LocalStrided, and under random blocks of each request and kv head."""
    for quantization in quantizations:
        step = DecodeStep(64, 32768, page, quantization)
        names = {"page": page, "cache": quantization}
        dense_us = step.add_dense(rows, "dense_64x32k", **names)
        of_heads = functools.partial(masks.LocalStrided, block_size=64, local_blocks=16, vert_stride=8)
        strided = of_heads(homo_head_group=True)
        named = [("local_strided", strided, {})]
        for block in blocks:
            for density in DENSITIES:
                named.append((f"blocks_{block}", step.random_blocks(block, density), {"wanted": density}))
        for name, mask, wanted in named:
            for case, is_planned in ((name, False), (f"planned_{name}", True)):
                where = names | wanted
                step.add(rows, f"{case}_64x32k", mask, dense_us, is_planned=is_planned, **where)
        step.add(rows, "local_strided_by_head_64x32k", of_heads(), dense_us, **names)


def quest(rows: Rows, quantizations: list[str], pages: list[int]) -> None:
    """8 requests of 128k, of which the blocks with the largest bounds are seen; choosing them is timed."""
    for page in pages:
        for quantization in quantizations:
            step = DecodeStep(8, 131072, page, quantization)
            names = {"page": page, "cache": quantization}
            dense_us = step.add_dense(rows, "dense_8x128k", **names)
            step.add_selected(rows, "quest_8x128k", dense_us, **names)


class DecodeStep:
    """One new token of each of `reqs` requests with `context` keys in a paged cache."""

    def __init__(self, reqs: int, context: int, page: int, quantization: str):
        heads = {"q_heads": Q_HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
        case = DecodeCase(name="sparse", **heads, kv_lens=(context,) * reqs)
        (self.query, k, v, table, lens), scales = inputs(case, page, "NHD", "bfloat16", quantization)
        self.cache = jattn.PagedCache(k=k, v=v, **scales)
        ones = [1] * reqs
        made = jattn.build_batch_metadata(ones, np.asarray(lens), np.asarray(table), block_size=page)
        self.metadata, self.context, self.page = made.decode_region, context, page
        self.run, self.choose = jax.jit(self.attend), jax.jit(self.select)
        self.run_chosen = jax.jit(self.select_and_attend)

    def select_and_attend(self, query: Any, cache: Any, metadata: Any, bounds: Any) -> jax.Array:
        """Both, as a layer does."""
        return self.attend(query, cache, metadata, self.select(query, bounds, metadata))

    def attend(self, query: Any, cache: Any, metadata: Any, mask: Mask | None, plan: Any = None) -> jax.Array:
        """By the kernels."""
        how: dict[str, Any] = {"plan": plan, "mask": mask, "implementation": "mosaic_gpu"}
        return jattn.attend(query, cache, metadata, SPEC, **how)

    def select(self, query: Any, bounds: KeyBounds, metadata: Any) -> masks.BlockMask:
        """The mask of the best blocks."""
        where = metadata.block_table, metadata.seq_lens
        count = round(SELECTED * metadata.block_table.shape[1])
        return select_blocks(query, bounds, *where, num_selected=count, block_size=self.page)

    def random_blocks(self, block: int, density: float) -> masks.BlockMask:
        """Of each request and kv head its own; the last block is always among them."""
        count = self.context // block
        shape = self.query.shape[0], KV_HEADS, 1, count
        drawn = jax.random.uniform(jax.random.key(3), shape) < density
        return masks.BlockMask(blocks=drawn.at[..., -1].set(True), block_q=None, block_kv=block)

    def add_dense(self, rows: Rows, name: str, **names: Any) -> float:
        """The row without a mask; its time."""
        times = self.measured(self.run, self.query, self.cache, self.metadata, None, mask=None)
        rows.add(name=name, **names, **times)
        return times["us"]

    def add(
        self, rows: Rows, name: str, mask: Mask, dense_us: float, *, is_planned: bool = False, **names: Any
    ) -> None:
        """A row: `of_ideal` is the dense time times the share of keys that are read, over the time taken.

        Planned, the lists are made once for all layers of a step, and their time is not counted.
        """
        step: tuple[Any, ...] = (self.query, self.cache, self.metadata, mask)
        if is_planned:
            plan = jattn.plan(self.metadata, SPEC, self.cache, mask=mask, query_dtype=self.query.dtype)
            step = (*step[:3], None, plan)
        times = self.measured(self.run, *step, mask=mask)
        self.compare(rows, name, mask, dense_us, times, **names)

    def add_selected(self, rows: Rows, name: str, dense_us: float, **names: Any) -> None:
        """A row whose mask is chosen in the same call."""
        low, high = jax.jit(lambda k: (k.min(axis=1), k.max(axis=1)))(self.cache.k)
        scale = 1.0 if self.cache.k_scale is None else self.cache.k_scale[:, None]
        low, high = ((x.astype(jnp.float32) * scale).astype(jnp.bfloat16) for x in (low, high))
        bounds = KeyBounds(low=low, high=high)
        mask = self.choose(self.query, bounds, self.metadata)
        self.check_selected(mask, bounds)
        times = self.measured(self.run_chosen, self.query, self.cache, self.metadata, bounds, mask=mask)
        self.compare(rows, name, mask, dense_us, times, **names)

    def compare(
        self, rows: Rows, name: str, mask: Mask, dense_us: float, times: dict[str, Any], **names: Any
    ) -> None:
        """Adds a row with its ratios to the dense kernel's time."""
        density, read = map(float, self.densities(mask))
        ratios = {"speedup": dense_us / times["us"], "of_ideal": dense_us * read / times["us"]}
        rows.add(name=name, **names, density=density, read=read, **times, dense_us=dense_us, **ratios)

    def measured(self, run: Any, *arguments: Any, mask: Mask | None) -> dict[str, Any]:
        """Times, the kernel's own apart; the result is checked."""
        out, times = kernel_times(run, *arguments)
        error = self.worst_error(out, mask)
        assert error < TOLERANCE, f"{error=}"
        kernel = sum(us for name, us in times["kernels_us"].items() if name.startswith(KERNELS))
        return times | {"kernel_us": kernel, "max_error": error}

    def worst_error(self, out: jax.Array, mask: Mask | None) -> float:
        """Of a few requests, against plain attention in f32; relative to a query's largest output."""
        picked = range(0, out.shape[0], max(out.shape[0] // CHECKED_REQUESTS, 1))
        arrays = self.query, self.cache, self.metadata.block_table, out
        return max(float(self.error(mask, jnp.int32(row), *arrays)) for row in picked)

    @functools.partial(jax.jit, static_argnums=0)
    def error(self, mask: Mask | None, row: Any, query: Any, cache: Any, table: Any, out: Any) -> jax.Array:
        """One request's largest error."""
        scales = (cache.k_scale, cache.v_scale)
        k, v = (
            x[table[row]].reshape(-1, KV_HEADS, HEAD_DIM).astype(jnp.float32)
            * (1.0 if scale is None else scale[:, None])
            for x, scale in zip((cache.k, cache.v), scales, strict=True)
        )
        q = query[row].reshape(KV_HEADS, -1, HEAD_DIM).astype(jnp.float32)
        s = jnp.einsum("hgd,khd->hgk", q, k, precision="highest") * SPEC.softmax_scale
        if mask is not None:
            s = jnp.where(self.visible(mask, row)[0].reshape(s.shape), s, -jnp.inf)
        want = jnp.einsum("hgk,khd->hgd", jax.nn.softmax(s, axis=-1), v, precision="highest")
        want = want.reshape(Q_HEADS, HEAD_DIM)
        errors = jnp.abs(out[row].astype(jnp.float32) - want).max(axis=-1)
        return (errors / jnp.abs(want).max(axis=-1)).max()

    @functools.partial(jax.jit, static_argnums=0)
    def densities(self, mask: Mask) -> tuple[jax.Array, jax.Array]:
        """Visible keys over all; the same of keys that some query head of a kv head sees, which are read."""
        visible = self.visible(mask, slice(None))
        return visible.mean(), visible.reshape(-1, KV_HEADS, Q_HEADS // KV_HEADS, self.context).any(
            axis=2
        ).mean()

    def visible(self, mask: Mask, rows: Any) -> jax.Array:
        """[rows, q_heads, keys] of some rows: what the newest query sees."""
        keys = jnp.arange(self.context, dtype=jnp.int32)[None, None, :]
        heads = jnp.arange(Q_HEADS, dtype=jnp.int32)[None, :, None]
        row = jnp.arange(self.query.shape[0], dtype=jnp.int32)[rows].reshape(-1, 1, 1)
        query = jnp.full((1, 1, 1), self.context - 1, jnp.int32)
        visible = mask.visible(Pairs(heads, row, query, keys, HEADS, False))
        return jnp.broadcast_to(visible, (row.shape[0], Q_HEADS, self.context))

    def check_selected(self, mask: masks.BlockMask, bounds: KeyBounds) -> None:
        """No block that was left out has a larger bound than one that was taken, but for rounding."""
        row = self.query.shape[0] - 1
        low, high = (
            np.asarray(x[self.metadata.block_table[row]], np.float32) for x in (bounds.low, bounds.high)
        )
        q = np.asarray(self.query[row], np.float32).reshape(KV_HEADS, -1, 1, HEAD_DIM)
        swap = lambda x: np.swapaxes(x, 0, 1)[:, None]  # [kv_heads, 1, blocks, head_dim]
        scores = np.maximum(q * swap(low), q * swap(high)).sum(axis=-1).max(axis=1)[:, :-1]
        taken = np.asarray(mask.blocks)[row, :, 0, :-1]  # the last is taken as the newest
        worst_taken = np.where(taken, scores, np.inf).min(axis=-1)
        best_left = np.where(taken, -np.inf, scores).max(axis=-1)
        counts = taken.sum(axis=-1)
        assert (counts == round(SELECTED * mask.blocks.shape[-1]) - 1).all(), counts
        assert (best_left - worst_taken < 1e-2 * np.abs(scores).max()).all(), (best_left, worst_taken)
