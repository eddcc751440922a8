"""Sparse attention: prefill over tile lists and decode over block lists that the same call builds."""

import argparse
import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from benchmarks.kernels import sparse_decode
from benchmarks.runner import Rows, kernel_times
from jattn import masks
from jattn.implementations import xla
from jattn.implementations.region_inputs import RegionInputs
from jattn.masks import Mask, Pairs
from jattn.sparsity import select_prefill_blocks

Q_HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 64
TOLERANCE = 2e-2  # relative to a query's largest output; the tests use a tighter bound
NUM_CHECKED = 48  # queries whose output is compared with float32, for every head
TOKENS = {"16k": 16384, "64k": 65536, "128k": 131072}
DENSITIES = (1.0, 0.5, 0.25, 0.1)
MASSES = (0.25, 0.1)  # shares of the attention mass that pooled queries and keys select
# MInference's largest pattern has 1,000 columns and 6,096 slashes. Here they come in runs of adjacent ones.
NUM_COLUMNS, COLUMN_RUN = 1000, 100
NUM_SLASHES, SLASH_RUN, NUM_NEAREST = 6096, 200, 1024
SPEC = jattn.AttentionSpec(num_q_heads=Q_HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks sparse`."""
    names = "prefill, pooled, local_strided, vertical_slash, decode, listed, quest"
    parser.add_argument("cases", nargs="*", help=f"Cases to run, of {names}. Default: all.")
    add, formats = functools.partial(parser.add_argument, nargs="+"), ("none", "fp8_e4m3")
    add("--tokens", default=list(TOKENS), choices=TOKENS, help="Prompt lengths.")
    add("--block", type=int, default=[128, 64], help="Block sizes of the masks of `prefill`, in tokens.")
    add(
        "--query-block",
        type=int,
        default=[],
        help="Queries per block of `prefill`. Default: as many as keys.",
    )
    parser.add_argument(
        "--mask-heads",
        type=int,
        default=Q_HEADS,
        help="Heads of the masks of `prefill`, each for as many query heads. Default: one per query head.",
    )
    add("--density", type=float, default=list(DENSITIES), help="Densities of the masks of `prefill`.")
    add("--page", type=int, default=[16, 32], help="Tokens per cache block of `quest`.")
    add("--list-block", type=int, default=[16, 64], help="Block sizes of `decode` and `listed`.")
    add("--quantization", default=formats, choices=formats, help="Cache formats of decode.")
    parser.add_argument("--out", help="Directory for the result rows.")


def main(arguments: argparse.Namespace) -> None:
    """Run the requested cases."""
    rows, a = Rows("sparse", arguments.out), arguments
    cases = {
        "prefill": lambda: prefill(rows, a.tokens, a.block, a.query_block, a.density, a.mask_heads),
        "pooled": lambda: pooled_selection(rows, a.tokens),
        "local_strided": lambda: local_strided(rows),
        "vertical_slash": lambda: vertical_slash(rows, [name for name in a.tokens if name != "128k"]),
        "decode": lambda: sparse_decode.block_lists(rows, a.quantization, a.list_block),
        "listed": lambda: sparse_decode.listed_tokens(rows, a.quantization, [1, *a.list_block]),
        "quest": lambda: sparse_decode.quest(rows, a.quantization, a.page),
    }
    for name in a.cases or cases:
        cases[name]()


def prefill(
    rows: Rows,
    tokens: list[str],
    blocks: list[int],
    query_blocks: list[int],
    densities: list[float],
    mask_heads: int,
) -> None:
    """Measure causal attention with a random block mask per head, or per several heads.

    Args:
        rows: Result file.
        tokens: Prompt lengths, of TOKENS.
        blocks: Numbers of keys per block.
        query_blocks: Numbers of queries per block; empty for square blocks.
        densities: Shares of the blocks that are visible.
        mask_heads: Number of heads of a mask, which divides the number of query heads.
    """
    for name in tokens:
        step = Step(TOKENS[name])
        dense_us = step.add_dense(rows, f"dense_{name}")
        for block, query_block in itertools.product(blocks, query_blocks or [None]):
            case = str(block) if query_block is None else f"{query_block}x{block}"
            case += "" if mask_heads == Q_HEADS else f"_{mask_heads}_heads"
            for density in densities:
                mask = random_blocks(step.tokens, query_block or block, block, density, mask_heads)
                step.add(rows, f"blocks_{case}_{name}", mask, dense_us, wanted=density)


def pooled_selection(rows: Rows, tokens: list[str]) -> None:
    """Measure block selection by pooled queries and keys together with attention over the selected blocks.

    With random queries and keys, a share of the attention mass is about the same share of the blocks.
    """
    for name in tokens:
        step = Step(TOKENS[name])
        dense_us = step.add_dense(rows, f"dense_{name}")
        for mass in MASSES:
            step.add_selected(rows, f"pooled_128_{name}", mass, dense_us)


def local_strided(rows: Rows) -> None:
    """Measure Phi-3-small's pattern."""
    step = Step(32768)
    dense_us = step.add_dense(rows, "dense_32k")
    mask = masks.LocalStrided(block_size=64, local_blocks=16, vert_stride=8)
    step.add(rows, "local_strided_32k", mask, dense_us)


def vertical_slash(rows: Rows, tokens: list[str]) -> None:
    """Measure MInference's largest pattern; at 16k tokens also with XLA."""
    for name in tokens:
        step = Step(TOKENS[name])
        dense_us = step.add_dense(rows, f"dense_{name}")
        for case, column_run in (("vertical_slash", COLUMN_RUN), ("scattered_vertical_slash", 1)):
            mask = random_vertical_slash(step.tokens, column_run)
            step.add(rows, f"{case}_{name}", mask, dense_us)
            num_gathered = int(mask.columns.sum(axis=-1).max())  # the last run may exceed NUM_COLUMNS
            gathered = dataclasses.replace(mask, num_gathered=num_gathered)
            step.add(rows, f"{case}_{name}_gathered", gathered, dense_us)
            if step.tokens == 16384 and column_run > 1:
                _, times = kernel_times(
                    step.run_xla, step.query, step.cache, step.metadata, mask, iterations=2
                )
                rows.add(name=f"xla_{case}_{name}", tokens=step.tokens, us=times["us"])


def random_vertical_slash(tokens: int, column_run: int) -> masks.VerticalSlash:
    """Return a mask with NUM_COLUMNS columns and NUM_SLASHES slashes per head.

    The first keys are columns and the nearest keys are slashes; the others are drawn in runs.

    Args:
        tokens: Number of keys.
        column_run: Length of a run of columns.
    """
    rng = np.random.default_rng(0)
    columns, slashes = np.zeros((2, Q_HEADS, tokens), bool)
    columns[:, :COLUMN_RUN] = True
    slashes[:, :NUM_NEAREST] = True
    for heads, count, run in ((columns, NUM_COLUMNS, column_run), (slashes, NUM_SLASHES, SLASH_RUN)):
        for head in heads:
            while head.sum() < count:
                start = rng.integers(0, tokens - run)
                head[start : start + run] = True
    return masks.VerticalSlash(columns=jnp.asarray(columns), slashes=jnp.asarray(slashes))


def random_blocks(
    tokens: int, block_q: int, block_kv: int, density: float, num_heads: int = Q_HEADS
) -> masks.BlockMask:
    """Return a mask with random blocks per head. The blocks on the diagonal are always visible."""
    shape = -(-tokens // block_q), -(-tokens // block_kv)

    @jax.jit
    def draw_blocks(density: jax.Array) -> jax.Array:
        # Drawing all heads at once would need a large array of random numbers.
        keys = jax.random.split(jax.random.key(0), num_heads)
        blocks = jax.lax.map(lambda key: jax.random.uniform(key, shape) < density, keys)
        first_query, first_key = (
            jax.lax.broadcasted_iota(jnp.int32, shape, axis) * size
            for axis, size in enumerate((block_q, block_kv))
        )
        is_diagonal = (first_query < first_key + block_kv) & (first_key < first_query + block_q)
        return blocks | is_diagonal[None]

    return masks.BlockMask(blocks=draw_blocks(jnp.float32(density)), block_q=block_q, block_kv=block_kv)


class Step:
    """A step with one prompt over a paged cache, whose tokens are all queries."""

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
        self.run_xla = jax.jit(
            lambda query, kv, metadata, mask: xla.attend(
                RegionInputs(query=query, kv=kv, metadata=metadata, spec=SPEC, mask=mask)
            )[0]
        )

        def select_and_attend(mass: float, *step: Any) -> tuple[jax.Array, Mask]:
            mask = select_prefill_blocks(*step, SPEC, mass=mass, block_size=128)
            return attend(*step, mask=mask), mask

        self.run_selected = jax.jit(select_and_attend, static_argnums=0)

    def add_dense(self, rows: Rows, name: str) -> float:
        """Record the row without a mask and return its time in microseconds."""
        us = self.measure(None)["us"]
        rows.add(name=name, tokens=self.tokens, us=us)
        return us

    def measure(self, mask: Mask | None, *, is_planned: bool = False) -> dict[str, Any]:
        """Measure attention with a mask, check its result and return the times.

        Args:
            mask: Mask; None is dense attention.
            is_planned: Whether the lists come from a plan, whose time does not count.
        """
        plan = jattn.plan(self.metadata, SPEC, self.cache, mask=mask) if is_planned else None
        out, times = self.time(self.run, None if is_planned else mask, plan)
        return self.check(out, mask, times)

    def time(self, run: Any, *rest: Any) -> tuple[Any, dict[str, Any]]:
        """Run a function of the step's arrays and of `rest`, and return its result and its times."""
        iterations = 15 if self.tokens <= 32768 else 5
        return kernel_times(run, self.query, self.cache, self.metadata, *rest, iterations=iterations)

    def check(self, out: jax.Array, mask: Mask | None, times: dict[str, Any]) -> dict[str, Any]:
        """Check an output and return its times, with the error and the time of the attention kernel alone.

        Raises:
            AssertionError: The error exceeds TOLERANCE.
        """
        error = self.max_error(out, mask)
        assert error < TOLERANCE, f"{error=}"
        kernel = sum(us for name, us in times["kernels_us"].items() if "varlen_prefill" in name)
        return times | {"kernel_us": kernel, "max_error": error}

    def add(self, rows: Rows, name: str, mask: Mask, dense_us: float, *, wanted: float | None = None) -> None:
        """Record a row with lists built in the call, and a row with lists from a plan.

        Args:
            rows: Result file.
            name: Name of the row.
            mask: Mask to measure.
            dense_us: Microseconds of dense attention.
            wanted: Density that was requested, if any.
        """
        for case, is_planned in ((name, False), (f"planned_{name}", True)):
            try:
                times = self.measure(mask, is_planned=is_planned)
            except Exception as error:  # continue with the other rows
                print(f"{case} {wanted}: {type(error).__name__}: {error}"[:500], flush=True)
                continue
            self.compare(rows, case, mask, dense_us, times, wanted)

    def add_selected(self, rows: Rows, name: str, mass: float, dense_us: float) -> None:
        """Record a row whose mask is selected in the same call."""
        (out, mask), times = self.time(functools.partial(self.run_selected, mass))
        self.compare(rows, name, mask, dense_us, self.check(out, mask, times), mass)

    def compare(
        self,
        rows: Rows,
        name: str,
        mask: Mask,
        dense_us: float,
        times: dict[str, Any],
        wanted: float | None,
    ) -> None:
        """Record a row; `of_ideal` is the dense time times the density, divided by the measured time."""
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
        """Return which keys some queries see, by the mask and causally: [q_heads, queries, tokens]."""
        keys = jnp.arange(self.tokens, dtype=jnp.int32)[None, None, :]
        heads = jnp.arange(Q_HEADS, dtype=jnp.int32)[:, None, None]
        causal = jnp.broadcast_to(keys <= queries[None, :, None], (Q_HEADS, queries.size, self.tokens))
        if mask is None:
            return causal
        pairs = Pairs(
            heads, jnp.zeros((1, 1, 1), jnp.int32), queries[None, :, None], keys, (Q_HEADS, KV_HEADS)
        )
        return causal & mask.visible(pairs)

    def max_error(self, out: jax.Array, mask: Mask | None) -> float:
        """Return the largest error of some queries against float32, relative to a query's largest output."""
        queries = np.random.default_rng(1).integers(0, self.tokens, NUM_CHECKED)
        queries[:4] = 0, 63, 64, self.tokens - 1
        arrays = self.query, self.cache.k, self.cache.v
        return float(self.errors(out, mask, jnp.asarray(queries, jnp.int32), *arrays).max())

    @functools.partial(jax.jit, static_argnums=0)
    def errors(self, out: jax.Array, mask: Mask | None, queries: jax.Array, *arrays: Any) -> jax.Array:
        """Return the largest error of each query."""
        query, *kv = arrays
        ids = self.metadata.block_table[0]
        k, v = (x[ids].reshape(self.tokens, KV_HEADS, HEAD_DIM) for x in kv)
        q = query[queries].reshape(-1, KV_HEADS, Q_HEADS // KV_HEADS, HEAD_DIM)

        def one_query(inputs: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
            q, position, actual = inputs
            s = jnp.einsum("hgd,khd->hgk", q, k, preferred_element_type=jnp.float32) * SPEC.softmax_scale
            visible = self.visible(mask, position[None])[:, 0].reshape(s.shape)
            p = jax.nn.softmax(jnp.where(visible, s, -jnp.inf), axis=-1)
            expected = jnp.einsum("hgk,khd->hgd", p, v.astype(jnp.float32), precision="highest")
            errors = jnp.abs(actual.reshape(expected.shape).astype(jnp.float32) - expected).max(axis=-1)
            return (errors / jnp.abs(expected).max(axis=-1)).max()

        return jax.lax.map(one_query, (q, queries, out[queries]))
