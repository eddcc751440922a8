"""Paged decode: kernel time, schedule and merge included, against the read ceiling of the same run."""

import argparse
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.runner import Rows, kernel_times, read_ceiling, wall_time
from jattn.cache.quantization import quantize_static, quantize_token_head
from pallas_kernels.cases import DECODE, DecodeCase
from pallas_kernels.paged_decode import DecodeSizes, default_sizes, paged_decode
from pallas_kernels.paged_decode import reference as references
from pallas_kernels.shared import Score

CHECKED_REQUESTS = 4
TOLERANCE = 1e-2  # of the largest output; the tests hold the kernel to a tighter bound
STATIC_SCALE = 6.0  # the largest key or value that a static scale keeps
# How keys and values are stored: a dtype, and what has a scale of its own.
QUANTIZATIONS: dict[str, tuple[tuple[Any, str | None], tuple[Any, str | None]]] = {
    "none": ((jnp.bfloat16, None), (jnp.bfloat16, None)),
    "fp8_e4m3": ((jnp.float8_e4m3fn, "head"), (jnp.float8_e4m3fn, "head")),
    "fp8_e5m2": ((jnp.float8_e5m2, "head"), (jnp.float8_e5m2, "head")),
    "fp8_e4m3_token_head": ((jnp.float8_e4m3fn, "token"), (jnp.float8_e4m3fn, "token")),
    "int8_token_head": ((jnp.int8, "token"), (jnp.int8, "token")),
    "int8_static_v": ((jnp.int8, "token"), (jnp.int8, "channel")),
    "int8_k_only": ((jnp.int8, "token"), (jnp.bfloat16, None)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `python -m benchmarks decode` takes."""
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(DECODE)}; default all")
    parser.add_argument("--block-size", type=int, nargs="+", default=[16])
    parser.add_argument("--layout", nargs="+", default=["NHD"])
    parser.add_argument("--quantization", nargs="+", default=["none"], choices=QUANTIZATIONS)
    parser.add_argument("--dtype", nargs="+", default=["bfloat16"], choices=("bfloat16", "float16"))
    parser.add_argument("--tile-kv", type=int, nargs="+", default=[None])
    parser.add_argument("--stages", type=int, nargs="+", default=[None])
    parser.add_argument("--ctas-per-sm", type=int, nargs="+", default=[None])
    parser.add_argument("--split-kv", type=int, nargs="+", default=[None])
    parser.add_argument(
        "--by", nargs="+", default=[None], choices=("warp", "warpgroup"), help="who multiplies"
    )
    parser.add_argument("--wall", action="store_true", help="also wall time of a call in a chain of calls")
    parser.add_argument("--out", help="folder of the rows")


def main(arguments: argparse.Namespace) -> None:
    """Every case with every combination of the options."""
    rows = Rows("decode", arguments.out)
    ceiling = read_ceiling()
    rows.add(name="read_ceiling", gb_per_s=ceiling)
    a = arguments
    sizes = (a.tile_kv, a.stages, a.ctas_per_sm, a.split_kv, a.by)
    for name, *cache in itertools.product(a.cases or DECODE, a.block_size, a.layout, a.dtype, a.quantization):
        problem = inputs(DECODE[name], *cache)
        wanted = some_results(DECODE[name], problem, cache[1])
        for size in itertools.product(*sizes):
            try:
                measure(rows, DECODE[name], ceiling, *cache, problem, wanted, size, has_wall_time=a.wall)
            except Exception as error:  # the other rows still count
                print(f"{name} {cache} {size}: {type(error).__name__}: {error}"[:500], flush=True)


def sizes_of(
    case: DecodeCase, kv_dtypes: Any, tile_kv: Any, stages: Any, ctas_per_sm: Any, split_kv: Any, by: Any
) -> DecodeSizes:
    """The default sizes, changed where an option says so."""
    sizes = default_sizes(case.head_dim, rows=case.q_heads // case.kv_heads, kv_dtypes=kv_dtypes)
    return DecodeSizes(
        tile_kv=tile_kv or sizes.tile_kv,
        stages=stages or sizes.stages,
        ctas=ctas_per_sm * 132 if ctas_per_sm else sizes.ctas,
        max_rows=sizes.max_rows,
        split_kv=split_kv,
        per_warp_mma=sizes.per_warp_mma if by is None else by == "warp",
    )


def inputs(
    case: DecodeCase, block_size: int, layout: str, dtype: str, quantization: str
) -> tuple[tuple[jax.Array, ...], dict[str, Any]]:
    """Random queries, keys and values, and scales; blocks in random order."""
    table, num_blocks = random_table(case.kv_lens, block_size)
    cache = num_blocks, block_size, case.kv_heads, case.head_dim

    def draw(seed: int, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), shape, dtype)

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def stored(seed: int, kind: Any, scale: str | None) -> tuple[jax.Array, jax.Array | None]:
        values, scales = stored_as(draw(seed, cache), kind, scale)
        return (values if layout == "NHD" else jnp.swapaxes(values, 1, 2)), scales

    (kind_k, scale_k), (kind_v, scale_v) = QUANTIZATIONS[quantization]
    k, k_scale = stored(1, kind_k if scale_k else dtype, scale_k)
    v, v_scale = stored(2, kind_v if scale_v else dtype, scale_v)
    query = jax.jit(draw, static_argnums=1)(0, (len(case.kv_lens), case.q_heads, case.head_dim))
    arrays = query, k, v, jnp.asarray(table), jnp.asarray(case.kv_lens, jnp.int32)
    return arrays, {"k_scale": k_scale, "v_scale": v_scale}


def random_table(lens: Sequence[int], block_size: int) -> tuple[np.ndarray, int]:
    """Block table of requests of these lengths, from block 1 on in random order, and the number of blocks."""
    needed = [-(-n // block_size) for n in lens]
    order = np.random.default_rng(0).permutation(sum(needed)) + 1
    table = np.zeros((len(needed), max(needed)), np.int32)
    for row, blocks in zip(table, np.split(order, np.cumsum(needed)[:-1]), strict=True):
        row[: len(blocks)] = blocks
    return table, sum(needed) + 1


def stored_as(values: jax.Array, kind: Any, scale: str | None) -> tuple[jax.Array, jax.Array | None]:
    """Values [blocks, block_size, kv_heads, head_dim] as QUANTIZATIONS says, and their scales."""
    shape, scales = values.shape, None
    values = values.reshape(-1, *shape[2:])
    if scale == "token":
        values, scales = quantize_token_head(values, kind)
        scales = jnp.swapaxes(scales.reshape(shape[:3]), 1, 2)
    elif scale is not None:
        top = 127.0 if kind == jnp.int8 else float(jnp.finfo(kind).max)
        scales = jnp.full(shape[2:] if scale == "channel" else shape[2:3], STATIC_SCALE / top)
        values = quantize_static(values, scales[:, 0] if scale == "channel" else scales, kind)
    return values.reshape(shape), scales


def measure(
    rows: Rows,
    case: DecodeCase,
    ceiling: float,
    block_size: int,
    layout: str,
    dtype: str,
    quantization: str,
    problem: tuple[tuple[jax.Array, ...], dict[str, Any]],
    wanted: dict[int, jax.Array],
    options: tuple[Any, ...],
    *,
    has_wall_time: bool,
) -> None:
    """One row."""
    args, scales = problem
    stored = args[1:3]
    sizes = sizes_of(case, tuple(x.dtype for x in stored), *options)
    score = Score(scale=case.head_dim**-0.5)

    def run(query: Any, k: Any, v: Any, table: Any, lens: Any, scales: Any) -> jax.Array:
        return paged_decode(query, k, v, table, lens, **scales, score=score, layout=layout, sizes=sizes)[0]

    out, time = kernel_times(run, *args, scales)
    error = worst_error(out, wanted)
    assert error < TOLERANCE, f"{error=}"
    per_token = sum(x is not None and x.ndim == 3 for x in scales.values())
    per_key = case.head_dim * sum(x.dtype.itemsize for x in stored) + 4 * per_token
    speed = case.num_bytes(per_key) / time["us"] / 1e3
    rows.add(
        name=case.name,
        block_size=block_size,
        layout=layout,
        dtype=dtype,
        quantization=quantization,
        tiles=f"kv{sizes.tile_kv} stages{sizes.stages} ctas{sizes.ctas} split{sizes.split_kv}"
        + " by warp" * sizes.per_warp_mma,
        **time,
        **({"wall_us": wall_time(run, *args, scales)} if has_wall_time else {}),
        gb_per_s=speed,
        of_ceiling=speed / ceiling,
        max_error=error,
    )


def some_results(case: DecodeCase, problem: Any, layout: str) -> dict[int, jax.Array]:
    """The reference's output for a few requests, the longest among them."""
    picked = np.argsort(case.kv_lens, kind="stable")[:: -max(len(case.kv_lens) // CHECKED_REQUESTS, 1)]

    @jax.jit
    def one(row: jax.Array, arrays: Any, scales: Any) -> jax.Array:
        query, k, v, table, lens = arrays
        only = lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1)
        rest = {"scale": case.head_dim**-0.5, "layout": layout, **scales}
        return references.paged_decode(only(query), k, v, only(table), only(lens), **rest)[0]

    return {int(row): one(jnp.int32(row), *problem) for row in picked}


def worst_error(out: jax.Array, wanted: dict[int, jax.Array]) -> float:
    """Relative to each request's largest output."""
    errors = []
    for row, want in wanted.items():
        want = want[0].astype(jnp.float32)
        errors.append(jnp.abs(out[row].astype(jnp.float32) - want).max() / jnp.abs(want).max())
    return float(max(errors))
