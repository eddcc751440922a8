"""Paged decode: kernel time, schedule and merge included, against the read ceiling of the same run."""

import argparse
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device_time import Rows, kernel_times, read_ceiling, wall_time
from pallas_kernels.cases import DECODE, DecodeCase
from pallas_kernels.paged_decode import Tiles, default_tiles, paged_decode
from pallas_kernels.paged_decode import reference as references
from pallas_kernels.shared.score import Score

CHECKED_REQUESTS = 4
TOLERANCE = 2e-2  # bf16 outputs of about 0.1 to 4; the tests hold the kernel to a tighter bound


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `python -m benchmarks decode` takes."""
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(DECODE)}; default all")
    parser.add_argument("--block-size", type=int, nargs="+", default=[16])
    parser.add_argument("--layout", nargs="+", default=["NHD"])
    parser.add_argument("--tile-kv", type=int, nargs="+", default=[None])
    parser.add_argument("--stages", type=int, nargs="+", default=[None])
    parser.add_argument("--ctas-per-sm", type=int, nargs="+", default=[None])
    parser.add_argument("--split-kv", type=int, nargs="+", default=[None])
    parser.add_argument("--wall", action="store_true", help="also wall time of a call in a chain of calls")
    parser.add_argument("--out", help="folder of the rows")


def main(arguments: argparse.Namespace) -> None:
    """Every case with every combination of the options."""
    rows = Rows("decode", arguments.out)
    ceiling = read_ceiling()
    rows.add(name="read_ceiling", gb_per_s=ceiling)
    a = arguments
    options = (a.block_size, a.layout, a.tile_kv, a.stages, a.ctas_per_sm, a.split_kv)
    for name in a.cases or DECODE:
        for block_size, layout, *sizes in itertools.product(*options):
            try:
                measure(rows, DECODE[name], ceiling, block_size, layout, *sizes, has_wall_time=a.wall)
            except Exception as error:  # the other rows still count
                print(
                    f"{name} {block_size} {layout} {sizes}: {type(error).__name__}: {error}"[:500], flush=True
                )


def tiles_of(case: DecodeCase, tile_kv: Any, stages: Any, ctas_per_sm: Any, split_kv: Any) -> Tiles:
    """The default tiles, changed where an option says so."""
    tiles = default_tiles(case.head_dim, rows=case.q_heads // case.kv_heads)
    return Tiles(
        tile_kv=tile_kv or tiles.tile_kv,
        stages=stages or tiles.stages,
        ctas=ctas_per_sm * 132 if ctas_per_sm else tiles.ctas,
        max_rows=tiles.max_rows,
        split_kv=split_kv,
    )


def inputs(case: DecodeCase, block_size: int, layout: str) -> tuple[jax.Array, ...]:
    """Random queries, keys and values; blocks in random order."""
    needed = [-(-n // block_size) for n in case.kv_lens]
    order = np.random.default_rng(0).permutation(sum(needed)) + 1
    table = np.zeros((len(needed), max(needed)), np.int32)
    for row, blocks in zip(table, np.split(order, np.cumsum(needed)[:-1]), strict=True):
        row[: len(blocks)] = blocks
    heads = (block_size, case.kv_heads) if layout == "NHD" else (case.kv_heads, block_size)
    draw = jax.jit(
        lambda seed, shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16), static_argnums=1
    )
    cache = (sum(needed) + 1, *heads, case.head_dim)
    query = draw(0, (len(needed), case.q_heads, case.head_dim))
    return query, draw(1, cache), draw(2, cache), jnp.asarray(table), jnp.asarray(case.kv_lens, jnp.int32)


def measure(
    rows: Rows,
    case: DecodeCase,
    ceiling: float,
    block_size: int,
    layout: str,
    *sizes: Any,
    has_wall_time: bool,
) -> None:
    """One row."""
    tiles = tiles_of(case, *sizes)
    args = inputs(case, block_size, layout)
    scale = case.head_dim**-0.5
    score = Score(scale=scale)
    run = lambda *args: paged_decode(*args, score=score, layout=layout, tiles=tiles)[0]
    out, time = kernel_times(run, *args)
    error = worst_error(out, args, scale, layout)
    assert error < TOLERANCE, f"{error=}"
    speed = case.num_bytes / time["us"] / 1e3
    rows.add(
        name=case.name,
        block_size=block_size,
        layout=layout,
        tiles=f"kv{tiles.tile_kv} stages{tiles.stages} ctas{tiles.ctas} split{tiles.split_kv}",
        **time,
        **({"wall_us": wall_time(run, *args)} if has_wall_time else {}),
        gb_per_s=speed,
        of_ceiling=speed / ceiling,
        max_error=error,
    )


def worst_error(out: jax.Array, args: tuple[jax.Array, ...], scale: float, layout: str) -> float:
    """Against the reference, for a few requests, the longest among them."""
    query, k, v, table, lens = args
    picked = np.argsort(np.asarray(lens), kind="stable")[:: -max(len(lens) // CHECKED_REQUESTS, 1)]
    reference = jax.jit(lambda *a: references.paged_decode(*a, scale=scale, layout=layout)[0])
    errors = []
    for row in picked:
        one = np.s_[row : row + 1]
        want = reference(query[one], k, v, table[one], lens[one])
        errors.append(jnp.abs(out[one].astype(jnp.float32) - want.astype(jnp.float32)).max())
    return float(max(errors))
