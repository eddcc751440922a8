"""Sparse attention: prefill over lists of tiles and decode over lists of blocks, made in the same call."""

import argparse
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from benchmarks.kernels import sparse_decode
from benchmarks.runner import Rows, kernel_times
from jattn import masks
from jattn.implementations import xla
from jattn.masks import Mask, Pairs
from jattn.sparsity import select_prefill_blocks

Q_HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 64
TOLERANCE = 2e-2  # of a query's largest output; the tests hold the kernel to a tighter bound
CHECKED = 48  # queries, of every head
TOKENS = {"16k": 16384, "64k": 65536, "128k": 131072}
DENSITIES = (1.0, 0.5, 0.25, 0.1)
SHARES = (0.25, 0.1)  # of the mass, by pooled queries and keys
# MInference's largest pattern, 1000 columns and 6096 slashes; neighbours in a run of them are ours.
COLUMNS, COLUMN_RUN = 1000, 100
SLASHES, SLASH_RUN, NEAREST = 6096, 200, 1024
SPEC = jattn.AttentionSpec(num_q_heads=Q_HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `python -m benchmarks sparse` takes."""
    names = "prefill, pooled, local_strided, vertical_slash, decode, quest"
    parser.add_argument("cases", nargs="*", help=f"of {names}; default all")
    parser.add_argument("--tokens", nargs="+", default=list(TOKENS), choices=TOKENS)
    parser.add_argument("--block", type=int, nargs="+", default=[128, 64])
    parser.add_argument("--density", type=float, nargs="+", default=list(DENSITIES), help="of prefill")
    parser.add_argument("--page", type=int, nargs="+", default=[16, 32], help="of quest's caches")
    parser.add_argument("--list-block", type=int, nargs="+", default=[16, 64], help="of decode's lists")
    parser.add_argument(
        "--quantization", nargs="+", default=["none", "fp8_e4m3"], choices=("none", "fp8_e4m3")
    )
    parser.add_argument("--out", help="folder of the rows")


def main(arguments: argparse.Namespace) -> None:
    """The cases asked for."""
    rows, a = Rows("sparse", arguments.out), arguments
    cases = {
        "prefill": lambda: prefill(rows, a.tokens, a.block, a.density),
        "pooled": lambda: pooled(rows, a.tokens),
        "local_strided": lambda: local_strided(rows),
        "vertical_slash": lambda: vertical_slash(rows, [name for name in a.tokens if name != "128k"]),
        "decode": lambda: sparse_decode.lists(rows, a.quantization, a.list_block),
        "quest": lambda: sparse_decode.quest(rows, a.quantization, a.page),
    }
    for name in a.cases or cases:
        cases[name]()


def prefill(rows: Rows, tokens: list[str], blocks: list[int], densities: list[float]) -> None:
    """Causal attention under random block masks of each head's own."""
    for name in tokens:
        step = Step(TOKENS[name])
        dense_us = step.add_dense(rows, f"dense_{name}")
        for block in blocks:
            for density in densities:
                mask = random_blocks(step.tokens, block, density)
                step.add(rows, f"blocks_{block}_{name}", mask, dense_us, wanted=density)


def pooled(rows: Rows, tokens: list[str]) -> None:
    """Blocks chosen in the same call; of random queries and keys a share of the mass is one of the blocks."""
    for name in tokens:
        step = Step(TOKENS[name])
        dense_us = step.add_dense(rows, f"dense_{name}")
        for mass in SHARES:
            step.add_chosen(rows, f"pooled_128_{name}", mass, dense_us)


def local_strided(rows: Rows) -> None:
    """Phi-3-small's pattern."""
    step = Step(32768)
    dense_us = step.add_dense(rows, "dense_32k")
    mask = masks.LocalStrided(block_size=64, local_blocks=16, vert_stride=8)
    step.add(rows, "local_strided_32k", mask, dense_us)


def vertical_slash(rows: Rows, tokens: list[str]) -> None:
    """MInference's pattern with as many columns and slashes as it takes; XLA beside at 16k."""
    for name in tokens:
        step = Step(TOKENS[name])
        dense_us = step.add_dense(rows, f"dense_{name}")
        for case, column_run in (("vertical_slash", COLUMN_RUN), ("scattered_vertical_slash", 1)):
            mask = slashed(step.tokens, column_run)
            step.add(rows, f"{case}_{name}", mask, dense_us)
            most = int(mask.columns.sum(axis=-1).max())  # runs may be one run more than COLUMNS
            gathered = dataclasses.replace(mask, num_gathered=most)
            step.add(rows, f"{case}_{name}_gathered", gathered, dense_us)
            if step.tokens == 16384 and column_run > 1:
                _, times = kernel_times(
                    step.by_xla, step.query, step.cache, step.metadata, mask, iterations=2
                )
                rows.add(name=f"xla_{case}_{name}", tokens=step.tokens, us=times["us"])


def slashed(tokens: int, column_run: int) -> masks.VerticalSlash:
    """COLUMNS columns and SLASHES slashes of each head: the nearest keys and the first, the rest in runs.

    Args:
        tokens: Keys; all runs lie among them.
        column_run: Neighbours that a run of columns has; the first keys are one run.
    """
    draw = np.random.default_rng(0)
    columns, slashes = np.zeros((2, Q_HEADS, tokens), bool)
    for marks, count, run in ((columns, COLUMNS, column_run), (slashes, SLASHES, SLASH_RUN)):
        marks[:, : COLUMN_RUN if marks is columns else NEAREST] = True
        for mine in marks:
            while mine.sum() < count:
                first = draw.integers(0, tokens - run)
                mine[first : first + run] = True
    return masks.VerticalSlash(columns=jnp.asarray(columns), slashes=jnp.asarray(slashes))


def random_blocks(tokens: int, block: int, density: float) -> masks.BlockMask:
    """Each head's own blocks; the diagonal is always there."""

    @functools.partial(jax.jit, static_argnums=0)
    def drawn(count: int, density: jax.Array) -> jax.Array:
        # One key for each head: a draw of all heads at once would be a large one.
        keys = jax.random.split(jax.random.key(0), Q_HEADS)
        draw = lambda key: jax.random.uniform(key, (count, count)) < density
        return jax.lax.map(draw, keys) | jnp.eye(count, dtype=bool)[None]

    return masks.BlockMask(
        blocks=drawn(-(-tokens // block), jnp.float32(density)), block_q=block, block_kv=block
    )


class Step:
    """One request of so many tokens, all of them queries, over a paged cache."""

    def __init__(self, tokens: int):
        self.tokens = tokens
        draw = jax.jit(
            lambda seed, shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16), static_argnums=1
        )
        blocks = tokens // PAGE
        table = np.random.default_rng(0).permutation(blocks) + 1
        self.metadata = jattn.build_batch_metadata(
            [tokens], [tokens], [table], block_size=PAGE
        ).prefill_region
        shape = (blocks + 1, PAGE, KV_HEADS, HEAD_DIM)
        self.query = draw(0, (tokens, Q_HEADS, HEAD_DIM))
        self.cache = jattn.PagedCache(k=draw(1, shape), v=draw(2, shape))
        attend = functools.partial(jattn.attend, spec=SPEC, implementation="mosaic_gpu")
        self.run = jax.jit(
            lambda query, kv, metadata, mask, plan: attend(query, kv, metadata, plan=plan, mask=mask)
        )
        self.by_xla = jax.jit(
            lambda query, kv, metadata, mask: xla.attend(
                query, kv, metadata, SPEC, tiles=None, mask=mask, sinks=None, alibi_slopes=None
            )[0]
        )

        def choose_and_attend(mass: float, *step: Any) -> tuple[jax.Array, Mask]:
            mask = select_prefill_blocks(*step, SPEC, mass=mass, block_size=128)
            return attend(*step, mask=mask), mask

        self.run_chosen = jax.jit(choose_and_attend, static_argnums=0)

    def add_dense(self, rows: Rows, name: str) -> float:
        """The row without a mask; its time."""
        us = self.measured(None)["us"]
        rows.add(name=name, tokens=self.tokens, us=us)
        return us

    def measured(self, mask: Mask | None, *, is_planned: bool = False) -> dict[str, Any]:
        """Times of attention under a mask, whose result is checked."""
        plan = jattn.plan(self.metadata, SPEC, self.cache, mask=mask) if is_planned else None
        out, times = self.timed(self.run, None if is_planned else mask, plan)
        return self.checked(out, mask, times)

    def timed(self, run: Any, *rest: Any) -> tuple[Any, dict[str, Any]]:
        """What `run` makes of the step, and its times."""
        iterations = 15 if self.tokens <= 32768 else 5
        return kernel_times(run, self.query, self.cache, self.metadata, *rest, iterations=iterations)

    def checked(self, out: jax.Array, mask: Mask | None, times: dict[str, Any]) -> dict[str, Any]:
        """Times, the kernel's own apart, of a result that is right."""
        error = self.worst_error(out, mask)
        assert error < TOLERANCE, f"{error=}"
        kernel = sum(us for name, us in times["kernels_us"].items() if "varlen_prefill" in name)
        return times | {"kernel_us": kernel, "max_error": error}

    def add(self, rows: Rows, name: str, mask: Mask, dense_us: float, *, wanted: float | None = None) -> None:
        """Two rows: `of_ideal` is the dense time's share that the visible pairs are, over the time taken.

        Planned, the lists are made once for all layers of a step, and their time is not counted.
        """
        for case, is_planned in ((name, False), (f"planned_{name}", True)):
            try:
                times = self.measured(mask, is_planned=is_planned)
            except Exception as error:  # the other rows still count
                print(f"{case} {wanted}: {type(error).__name__}: {error}"[:500], flush=True)
                continue
            self.compare(rows, case, mask, dense_us, times, wanted)

    def add_chosen(self, rows: Rows, name: str, mass: float, dense_us: float) -> None:
        """One row whose mask is chosen in the same call."""
        (out, mask), times = self.timed(functools.partial(self.run_chosen, mass))
        self.compare(rows, name, mask, dense_us, self.checked(out, mask, times), mass)

    def compare(
        self,
        rows: Rows,
        name: str,
        mask: Mask,
        dense_us: float,
        times: dict[str, Any],
        wanted: float | None,
    ) -> None:
        """Adds a row with its ratios to the dense kernel's time."""
        density = masks.density(mask, self.tokens, self.tokens, num_q_heads=Q_HEADS, num_kv_heads=KV_HEADS)
        ideal = dense_us * density
        rows.add(
            name=name,
            tokens=self.tokens,
            wanted=wanted,
            density=density,
            **times,
            lists_us=times["us"] - times["kernel_us"],
            dense_us=dense_us,
            of_ideal=ideal / times["us"],
            kernel_of_ideal=ideal / times["kernel_us"],
        )

    def visible(self, mask: Mask | None, queries: jax.Array) -> jax.Array:
        """[q_heads, queries, tokens]: causal, and the mask."""
        keys = jnp.arange(self.tokens, dtype=jnp.int32)[None, None, :]
        heads = jnp.arange(Q_HEADS, dtype=jnp.int32)[:, None, None]
        causal = jnp.broadcast_to(keys <= queries[None, :, None], (Q_HEADS, queries.size, self.tokens))
        if mask is None:
            return causal
        pairs = Pairs(
            heads, jnp.zeros((1, 1, 1), jnp.int32), queries[None, :, None], keys, (Q_HEADS, KV_HEADS)
        )
        return causal & mask.visible(pairs)

    def worst_error(self, out: jax.Array, mask: Mask | None) -> float:
        """Of a few queries, against plain attention in f32; relative to a query's largest output."""
        picked = np.random.default_rng(1).integers(0, self.tokens, CHECKED)
        picked[:4] = 0, 63, 64, self.tokens - 1

        arrays = self.query, self.cache.k, self.cache.v
        return float(self.errors(out, mask, jnp.asarray(picked, jnp.int32), *arrays).max())

    @functools.partial(jax.jit, static_argnums=0)
    def errors(self, out: jax.Array, mask: Mask | None, queries: jax.Array, *arrays: Any) -> jax.Array:
        """Each query's largest error."""
        query, *kv = arrays
        ids = self.metadata.block_table[0]
        k, v = (x[ids].reshape(self.tokens, KV_HEADS, HEAD_DIM) for x in kv)
        q = query[queries].reshape(-1, KV_HEADS, Q_HEADS // KV_HEADS, HEAD_DIM)

        def one_query(inputs: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            q, place, got = inputs
            s = jnp.einsum("hgd,khd->hgk", q, k, preferred_element_type=jnp.float32) * SPEC.softmax_scale
            visible = self.visible(mask, place[None])[:, 0].reshape(s.shape)
            p = jax.nn.softmax(jnp.where(visible, s, -jnp.inf), axis=-1)
            want = jnp.einsum("hgk,khd->hgd", p, v.astype(jnp.float32), precision="highest")
            errors = jnp.abs(got.reshape(want.shape).astype(jnp.float32) - want).max(axis=-1)
            return (errors / jnp.abs(want).max(axis=-1)).max()

        return jax.lax.map(one_query, (q, queries, out[queries]))
