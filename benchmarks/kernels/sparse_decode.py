"""Sparse decode: paged_decode over block lists that the same call builds, beside dense decode."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from benchmarks.kernels.cases import DecodeCase
from benchmarks.kernels.decode import inputs
from benchmarks.runner import Rows, kernel_times, read_ceiling
from jattn import masks
from jattn.masks import Mask, Pairs
from jattn.sparsity import KeyBounds, select_blocks

Q_HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
HEADS = Q_HEADS, KV_HEADS
TOLERANCE = 2e-2  # relative to a query's largest output; the tests use a tighter bound
CHECKED_REQUESTS = 4
DENSITIES = (0.25, 0.1)
KERNELS = ("paged_decode", "varlen_prefill")
SELECTED_SHARE = 0.1  # share of the blocks that Quest selects
NUM_LISTED = 2048  # tokens of each request that an indexer selects
LISTED_STEPS = {"32x32k": (32, 32768), "64x32k": (64, 32768), "32x64k": (32, 65536), "64x64k": (64, 65536)}
SPEC = jattn.AttentionSpec(num_q_heads=Q_HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)


def block_lists(rows: Rows, quantizations: list[str], blocks: list[int], *, page: int = 16) -> None:
    """Measure 64 requests of 32k tokens with LocalStrided, and with random blocks per request and kv head.

    Args:
        rows: Result file.
        quantizations: Formats of the cache.
        blocks: Block sizes of the random masks, in tokens.
        page: Tokens per cache block.
    """
    for quantization in quantizations:
        step = DecodeStep(64, 32768, page, quantization)
        columns = {"page": page, "cache": quantization}
        dense_us = step.add_dense(rows, "dense_64x32k", **columns)
        local_strided = functools.partial(masks.LocalStrided, block_size=64, local_blocks=16, vert_stride=8)
        cases = [("local_strided", local_strided(homo_head_group=True), {})]
        for block in blocks:
            for density in DENSITIES:
                cases.append((f"blocks_{block}", step.random_blocks(block, density), {"wanted": density}))
        for name, mask, wanted in cases:
            for case, is_planned in ((name, False), (f"planned_{name}", True)):
                step.add(rows, f"{case}_64x32k", mask, dense_us, is_planned=is_planned, **columns, **wanted)
        step.add(rows, "local_strided_by_head_64x32k", local_strided(), dense_us, **columns)


def quest(rows: Rows, quantizations: list[str], pages: list[int]) -> None:
    """Measure 8 requests of 128k tokens over the blocks that Quest selects, including the selection."""
    for page in pages:
        for quantization in quantizations:
            step = DecodeStep(8, 131072, page, quantization)
            columns = {"page": page, "cache": quantization}
            dense_us = step.add_dense(rows, "dense_8x128k", **columns)
            step.add_selected(rows, "quest_8x128k", dense_us, **columns)


def listed_tokens(
    rows: Rows,
    quantizations: list[str],
    blocks: list[int],
    steps: dict[str, tuple[int, int]] = LISTED_STEPS,
    *,
    num_listed: int = NUM_LISTED,
    page: int = 64,
) -> None:
    """Measure random tokens or blocks of each request, listed once for all heads, beside the read ceiling.

    Args:
        rows: Result file.
        quantizations: Formats of the cache.
        blocks: Block sizes of the lists, in tokens.
        steps: Name of a step -> numbers of requests and of tokens per request.
        num_listed: Number of tokens in each list.
        page: Tokens per cache block.
    """
    ceiling = read_ceiling()
    rows.add(name="read_ceiling", gb_per_s=ceiling)
    for quantization in quantizations:
        for name, (reqs, context) in steps.items():
            step = DecodeStep(reqs, context, page, quantization)
            kv_bytes = sum(x.dtype.itemsize for x in (step.cache.k, step.cache.v)) * HEAD_DIM
            num_bytes = reqs * (num_listed * KV_HEADS * kv_bytes + 4 * Q_HEADS * HEAD_DIM)
            for block in blocks:
                columns = {"page": page, "cache": quantization, "listed": num_listed, "block": block}
                mask = random_lists(reqs, context, num_listed, block)
                arrays = step.query, step.cache, step.metadata
                try:
                    plan = jattn.plan(
                        step.metadata, SPEC, step.cache, mask=mask, query_dtype=step.query.dtype
                    )
                    times = step.measure(step.run, *arrays, None, plan, mask=mask)
                except Exception as error:  # continue with the other rows
                    print(f"listed_{name} {columns}: {type(error).__name__}: {error}"[:500], flush=True)
                    continue
                gb_per_s = num_bytes / times["us"] / 1e3
                of_ceiling = gb_per_s / ceiling
                rows.add(name=f"listed_{name}", **columns, **times, gb_per_s=gb_per_s, of_ceiling=of_ceiling)
            for x in jax.tree.leaves(step.cache):
                x.delete()  # the steps together exceed the GPU's memory


def random_lists(reqs: int, context: int, num_listed: int, block: int) -> masks.ListedBlocks:
    """Return a mask of random blocks per request, the same for all heads.

    Args:
        reqs: Number of requests.
        context: Tokens of each request.
        num_listed: Tokens in each list.
        block: Tokens per block.
    """
    rng, num_blocks, count = np.random.default_rng(4), context // block, num_listed // block
    ids = np.stack([np.sort(rng.choice(num_blocks, count, replace=False)) for _ in range(reqs)])
    blocks = np.zeros((reqs, num_blocks), bool)
    np.put_along_axis(blocks, ids, True, axis=1)
    return masks.ListedBlocks(
        blocks=jnp.asarray(blocks[:, None, None]),
        block_q=None,
        block_kv=block,
        ids=jnp.asarray(ids[:, None], jnp.int32),
        counts=jnp.full((reqs, 1), count, jnp.int32),
    )


class DecodeStep:
    """A decode step of equally long requests over a paged cache."""

    def __init__(self, reqs: int, context: int, page: int, quantization: str):
        """Create random inputs.

        Args:
            reqs: Number of requests.
            context: Keys per request.
            page: Tokens per cache block.
            quantization: Format of the cache.
        """
        case = DecodeCase(
            name="sparse",
            q_heads=Q_HEADS,
            kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            kv_lens=(context,) * reqs,
        )
        (self.query, k, v, table, lens), scales = inputs(case, page, "NHD", "bfloat16", quantization)
        self.cache = jattn.PagedCache(k=k, v=v, **scales)
        ones = [1] * reqs
        metadata = jattn.build_batch_metadata(ones, np.asarray(lens), np.asarray(table), block_size=page)
        self.metadata, self.context, self.page = metadata.decode_region, context, page
        self.run, self.run_select = jax.jit(self.attend), jax.jit(self.select)
        self.run_select_and_attend = jax.jit(self.select_and_attend)

    def select_and_attend(self, query: Any, cache: Any, metadata: Any, bounds: Any) -> jax.Array:
        """Select blocks and attend to them, as a layer does."""
        return self.attend(query, cache, metadata, self.select(query, bounds, metadata))

    def attend(self, query: Any, cache: Any, metadata: Any, mask: Mask | None, plan: Any = None) -> jax.Array:
        """Compute attention with the kernels."""
        return jattn.attend(query, cache, metadata, SPEC, plan=plan, mask=mask, implementation="mosaic_gpu")

    def select(self, query: Any, bounds: KeyBounds, metadata: Any) -> masks.BlockMask:
        """Return a mask of the blocks with the largest bounds of their scores."""
        block_table, seq_lens = metadata.block_table, metadata.seq_lens
        count = round(SELECTED_SHARE * block_table.shape[1])
        return select_blocks(query, bounds, block_table, seq_lens, num_selected=count, block_size=self.page)

    def random_blocks(self, block: int, density: float) -> masks.BlockMask:
        """Return a mask with random blocks per request and kv head. The last block is always visible."""
        count = self.context // block
        shape = self.query.shape[0], KV_HEADS, 1, count
        blocks = jax.random.uniform(jax.random.key(3), shape) < density
        return masks.BlockMask(blocks=blocks.at[..., -1].set(True), block_q=None, block_kv=block)

    def add_dense(self, rows: Rows, name: str, **columns: Any) -> float:
        """Record the row without a mask and return its time in microseconds."""
        times = self.measure(self.run, self.query, self.cache, self.metadata, None, mask=None)
        rows.add(name=name, **columns, **times)
        return times["us"]

    def add(
        self, rows: Rows, name: str, mask: Mask, dense_us: float, *, is_planned: bool = False, **columns: Any
    ) -> None:
        """Record a row.

        Args:
            rows: Result file.
            name: Name of the row.
            mask: Mask to measure.
            dense_us: Microseconds of dense decode.
            is_planned: Whether the lists come from a plan, whose time does not count.
            **columns: Further columns of the row.
        """
        step: tuple[Any, ...] = (self.query, self.cache, self.metadata, mask)
        if is_planned:
            plan = jattn.plan(self.metadata, SPEC, self.cache, mask=mask, query_dtype=self.query.dtype)
            step = (*step[:3], None, plan)
        times = self.measure(self.run, *step, mask=mask)
        self.compare(rows, name, mask, dense_us, times, **columns)

    def add_selected(self, rows: Rows, name: str, dense_us: float, **columns: Any) -> None:
        """Record a row whose mask is selected in the same call."""
        low, high = jax.jit(lambda k: (k.min(axis=1), k.max(axis=1)))(self.cache.k)
        scale = 1.0 if self.cache.k_scale is None else self.cache.k_scale[:, None]
        low, high = ((x.astype(jnp.float32) * scale).astype(jnp.bfloat16) for x in (low, high))
        bounds = KeyBounds(min_key=low, max_key=high)
        mask = self.run_select(self.query, bounds, self.metadata)
        self.check_selection(mask, bounds)
        run = self.run_select_and_attend
        times = self.measure(run, self.query, self.cache, self.metadata, bounds, mask=mask)
        self.compare(rows, name, mask, dense_us, times, **columns)

    def compare(
        self, rows: Rows, name: str, mask: Mask, dense_us: float, times: dict[str, Any], **columns: Any
    ) -> None:
        """Record a row; `of_ideal` is the dense time times the share of keys read, over the measured time."""
        density, read = map(float, self.densities(mask))
        ratios = {"speedup": dense_us / times["us"], "of_ideal": dense_us * read / times["us"]}
        rows.add(name=name, **columns, density=density, read=read, **times, dense_us=dense_us, **ratios)

    def measure(self, run: Any, *arguments: Any, mask: Mask | None) -> dict[str, Any]:
        """Measure a function, check its result and return the times, also of the attention kernels alone.

        Args:
            run: Function to measure.
            *arguments: Its arguments.
            mask: Mask that the result must follow.

        Raises:
            AssertionError: The error exceeds TOLERANCE.
        """
        out, times = kernel_times(run, *arguments)
        error = self.max_error(out, mask)
        assert error < TOLERANCE, f"{error=}"
        kernel = sum(us for name, us in times["kernels_us"].items() if name.startswith(KERNELS))
        return times | {"kernel_us": kernel, "max_error": error}

    def max_error(self, out: jax.Array, mask: Mask | None) -> float:
        """Return the largest error of some requests against float32, relative to a query's largest output."""
        request_rows = range(0, out.shape[0], max(out.shape[0] // CHECKED_REQUESTS, 1))
        arrays = self.query, self.cache, self.metadata.block_table, out
        return max(float(self.error(mask, jnp.int32(row), *arrays)) for row in request_rows)

    @functools.partial(jax.jit, static_argnums=0)
    def error(self, mask: Mask | None, row: Any, query: Any, cache: Any, table: Any, out: Any) -> jax.Array:
        """Return the largest error of a request."""
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
        expected = jnp.einsum("hgk,khd->hgd", jax.nn.softmax(s, axis=-1), v, precision="highest")
        expected = expected.reshape(Q_HEADS, HEAD_DIM)
        errors = jnp.abs(out[row].astype(jnp.float32) - expected).max(axis=-1)
        return (errors / jnp.abs(expected).max(axis=-1)).max()

    @functools.partial(jax.jit, static_argnums=0)
    def densities(self, mask: Mask) -> tuple[jax.Array, jax.Array]:
        """Return a mask's density, and the share of keys that are read: those that a kv head's group sees."""
        visible = self.visible(mask, slice(None))
        groups = visible.reshape(-1, KV_HEADS, Q_HEADS // KV_HEADS, self.context)
        return visible.mean(), groups.any(axis=2).mean()

    def visible(self, mask: Mask, rows: Any) -> jax.Array:
        """Return which keys the newest query of some requests sees: [rows, q_heads, keys]."""
        keys = jnp.arange(self.context, dtype=jnp.int32)[None, None, :]
        heads = jnp.arange(Q_HEADS, dtype=jnp.int32)[None, :, None]
        row = jnp.arange(self.query.shape[0], dtype=jnp.int32)[rows].reshape(-1, 1, 1)
        query = jnp.full((1, 1, 1), self.context - 1, jnp.int32)
        visible = mask.visible(Pairs(heads, row, query, keys, HEADS, False))
        return jnp.broadcast_to(visible, (row.shape[0], Q_HEADS, self.context))

    def check_selection(self, mask: masks.BlockMask, bounds: KeyBounds) -> None:
        """Check that no unselected block of the last request has a larger bound than a selected one.

        Raises:
            AssertionError: A block has, by more than rounding.
        """
        row = self.query.shape[0] - 1
        low, high = (
            np.asarray(x[self.metadata.block_table[row]], np.float32)
            for x in (bounds.min_key, bounds.max_key)
        )
        q = np.asarray(self.query[row], np.float32).reshape(KV_HEADS, -1, 1, HEAD_DIM)
        low, high = (np.swapaxes(x, 0, 1)[:, None] for x in (low, high))  # [kv_heads, 1, blocks, head_dim]
        scores = np.maximum(q * low, q * high).sum(axis=-1).max(axis=1)[:, :-1]
        selected = np.asarray(mask.blocks)[row, :, 0, :-1]  # the last block is always selected
        min_selected = np.where(selected, scores, np.inf).min(axis=-1)
        max_unselected = np.where(selected, -np.inf, scores).max(axis=-1)
        counts = selected.sum(axis=-1)
        assert (counts == round(SELECTED_SHARE * mask.blocks.shape[-1]) - 1).all(), counts
        tolerance = 1e-2 * np.abs(scores).max()
        assert (max_unselected - min_selected < tolerance).all(), (max_unselected, min_selected)
