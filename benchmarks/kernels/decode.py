"""Paged decode: kernel time with schedule and combine kernel, beside the read ceiling of the same run."""

import argparse
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from benchmarks.kernels.cases import DECODE, DecodeCase
from benchmarks.runner import Rows, kernel_times, read_ceiling, wall_times
from jattn.cache.quantization import quantize_static, quantize_token_head
from pallas_kernels.paged_decode import DecodeSizes, default_sizes, paged_decode
from pallas_kernels.paged_decode import reference as references
from pallas_kernels.shared import Score

CHECKED_REQUESTS = 4
TOLERANCE = 1e-2  # relative to the largest output; the tests use a tighter bound
STATIC_RANGE = 6.0  # the largest absolute value that a static scale represents
# Format -> (dtype, granularity of the scales) of keys and of values.
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
    """Add the options of `python -m benchmarks decode`."""
    parser.add_argument("cases", nargs="*", help=f"Cases to run, of {', '.join(DECODE)}. Default: all.")
    formats = ("bfloat16", "float16")
    add = functools.partial(parser.add_argument, nargs="+")
    add("--block-size", type=int, default=[16], help="Tokens per cache block. Default: 16.")
    add("--layout", default=["NHD"], choices=("NHD", "HND"), help="Cache layouts. Default: NHD.")
    add("--quantization", default=["none"], choices=QUANTIZATIONS, help="Cache formats. Default: none.")
    add("--dtype", default=["bfloat16"], choices=formats, help="Dtypes of queries and of 16-bit caches.")
    add("--tile-kv", type=int, default=[None], help="Keys per tile. Default: the kernel's choice.")
    add("--stages", type=int, default=[None], help="Tiles in flight. Default: the kernel's choice.")
    add("--ctas-per-sm", type=int, default=[None], help="CTAs per SM. Default: the kernel's choice.")
    add("--split-kv", type=int, default=[None], help="Keys per split. Default: balanced over the CTAs.")
    add("--by", default=[None], choices=("warp", "warpgroup"), help="Matrix products per warp or warpgroup.")
    parser.add_argument(
        "--wall", action="store_true", help="Also measure wall times in a chain of calls: kernel and attend."
    )
    parser.add_argument("--out", help="Directory for the result rows.")


def main(arguments: argparse.Namespace) -> None:
    """Measure every case with every combination of the options."""
    rows = Rows("decode", arguments.out)
    ceiling = read_ceiling()
    rows.add(name="read_ceiling", gb_per_s=ceiling)
    options = arguments
    size_options = (
        options.tile_kv, options.stages, options.ctas_per_sm, options.split_kv, options.by
    )  # fmt: skip
    for name, *cache_format in itertools.product(
        options.cases or DECODE, options.block_size, options.layout, options.dtype, options.quantization
    ):
        case = DECODE[name]
        arrays = inputs(case, *cache_format)
        expected = reference_outputs(case, arrays, cache_format[1])
        for sizes in itertools.product(*size_options):
            try:
                measure(
                    rows, case, ceiling, *cache_format, arrays, expected, sizes, has_wall_time=options.wall
                )
            except Exception as error:  # continue with the other rows
                print(f"{name} {cache_format} {sizes}: {type(error).__name__}: {error}"[:500], flush=True)


def kernel_sizes(
    case: DecodeCase, kv_dtypes: Any, tile_kv: Any, stages: Any, ctas_per_sm: Any, split_kv: Any, by: Any
) -> DecodeSizes:
    """Return the default sizes with the changes that the options request; None keeps a default."""
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
    """Return random inputs with cache blocks in random order.

    Args:
        case: Case to measure.
        block_size: Tokens per cache block.
        layout: Layout of the cache.
        dtype: Dtype of the queries, and of keys and values that are not quantized.
        quantization: Format of the cache, of QUANTIZATIONS.

    Returns:
        Queries, keys, values, block table and lengths; and the scales of keys and values.
    """
    table, num_blocks = random_table(case.kv_lens, block_size)
    cache_shape = num_blocks, block_size, case.kv_heads, case.head_dim

    def draw(seed: int, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), shape, dtype)

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def draw_cache(seed: int, kv_dtype: Any, granularity: str | None) -> tuple[jax.Array, jax.Array | None]:
        values, scales = quantize_cache(draw(seed, cache_shape), kv_dtype, granularity)
        return (values if layout == "NHD" else jnp.swapaxes(values, 1, 2)), scales

    (k_dtype, k_granularity), (v_dtype, v_granularity) = QUANTIZATIONS[quantization]
    k, k_scale = draw_cache(1, k_dtype if k_granularity else dtype, k_granularity)
    v, v_scale = draw_cache(2, v_dtype if v_granularity else dtype, v_granularity)
    query = jax.jit(draw, static_argnums=1)(0, (len(case.kv_lens), case.q_heads, case.head_dim))
    arrays = query, k, v, jnp.asarray(table), jnp.asarray(case.kv_lens, jnp.int32)
    return arrays, {"k_scale": k_scale, "v_scale": v_scale}


def random_table(lens: Sequence[int], block_size: int) -> tuple[np.ndarray, int]:
    """Return a block table with blocks in random order, starting with block 1, and the number of blocks.

    Args:
        lens: Tokens of each request.
        block_size: Tokens per block.
    """
    counts = [-(-n // block_size) for n in lens]
    order = np.random.default_rng(0).permutation(sum(counts)) + 1
    table = np.zeros((len(counts), max(counts)), np.int32)
    for row, blocks in zip(table, np.split(order, np.cumsum(counts)[:-1]), strict=True):
        row[: len(blocks)] = blocks
    return table, sum(counts) + 1


def quantize_cache(
    values: jax.Array, dtype: Any, granularity: str | None
) -> tuple[jax.Array, jax.Array | None]:
    """Quantize keys or values and return them with their scales.

    Args:
        values: Keys or values [blocks, block_size, kv_heads, head_dim].
        dtype: Dtype of the quantized values.
        granularity: What has a scale: "head", "channel" or "token" (per token and head). None does not
            quantize.
    """
    shape, scales = values.shape, None
    values = values.reshape(-1, *shape[2:])
    if granularity == "token":
        values, scales = quantize_token_head(values, dtype)
        scales = jnp.swapaxes(scales.reshape(shape[:3]), 1, 2)
    elif granularity is not None:
        max_value = 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
        is_per_channel = granularity == "channel"
        scales = jnp.full(shape[2:] if is_per_channel else shape[2:3], STATIC_RANGE / max_value)
        values = quantize_static(values, scales[:, 0] if is_per_channel else scales, dtype)
    return values.reshape(shape), scales


def measure(
    rows: Rows,
    case: DecodeCase,
    ceiling: float,
    block_size: int,
    layout: str,
    dtype: str,
    quantization: str,
    inputs: tuple[tuple[jax.Array, ...], dict[str, Any]],
    expected: dict[int, jax.Array],
    size_options: tuple[Any, ...],
    *,
    has_wall_time: bool,
) -> None:
    """Measure the kernel and record a row.

    Args:
        rows: Result file.
        case: Case to measure.
        ceiling: Read ceiling in GB/s.
        block_size: Tokens per cache block.
        layout: Layout of the cache.
        dtype: Dtype of the queries.
        quantization: Format of the cache.
        inputs: Result of `inputs`.
        expected: Outputs of some requests, for the numerical check.
        size_options: Arguments of `kernel_sizes` after the dtypes.
        has_wall_time: Whether to measure the wall times of the kernel and of `jattn.attend`, too.

    Raises:
        AssertionError: The error of the kernel exceeds TOLERANCE.
    """
    args, scales = inputs
    kv = args[1:3]
    sizes = kernel_sizes(case, tuple(x.dtype for x in kv), *size_options)
    score = Score(scale=case.head_dim**-0.5)

    def run(query: Any, k: Any, v: Any, table: Any, lens: Any, scales: Any) -> jax.Array:
        return paged_decode(query, k, v, table, lens, **scales, score=score, layout=layout, sizes=sizes)[0]

    out, time = kernel_times(run, *args, scales)
    error = max_error(out, expected)
    assert error < TOLERANCE, f"{error=}"
    wall_columns = {}
    if has_wall_time:
        attend = attend_call(inputs, expected, block_size, layout)
        wall_columns = wall_times({"wall_us": (run, *args, scales), "attend_us": attend})
    num_token_scales = sum(x is not None and x.ndim == 3 for x in scales.values())
    bytes_per_token = case.head_dim * sum(x.dtype.itemsize for x in kv) + 4 * num_token_scales
    gb_per_s = case.num_bytes(bytes_per_token) / time["us"] / 1e3
    rows.add(
        name=case.name,
        block_size=block_size,
        layout=layout,
        dtype=dtype,
        quantization=quantization,
        tiles=f"kv{sizes.tile_kv} stages{sizes.stages} ctas{sizes.ctas} split{sizes.split_kv}"
        + " by warp" * sizes.per_warp_mma,
        **time,
        **wall_columns,
        gb_per_s=gb_per_s,
        of_ceiling=gb_per_s / ceiling,
        max_error=error,
    )


def paged_cache(
    k: jax.Array, v: jax.Array, *, k_scale: jax.Array | None, v_scale: jax.Array | None, layout: str = "NHD"
) -> jattn.PagedCache:
    """Return a cache of the kernels' arrays, whose scales per token have the heads before the tokens."""
    k_scale, v_scale = (
        jnp.swapaxes(x, 1, 2) if x is not None and x.ndim == 3 else x for x in (k_scale, v_scale)
    )
    return jattn.PagedCache(k=k, v=v, k_scale=k_scale, v_scale=v_scale, layout=layout)


def attend_call(
    inputs: tuple[tuple[jax.Array, ...], dict[str, Any]],
    expected: dict[int, jax.Array],
    block_size: int,
    layout: str,
) -> tuple[Any, ...]:
    """Return `jattn.attend` of the inputs, which plans the step, and its arguments.

    Args:
        inputs: Result of `inputs`.
        expected: Outputs of some requests, for the numerical check.
        block_size: Tokens per cache block.
        layout: Layout of the cache.

    Raises:
        AssertionError: The error of its output exceeds TOLERANCE.
    """
    (query, k, v, table, lens), scales = inputs
    cache = paged_cache(k, v, **scales, layout=layout)
    spec = jattn.AttentionSpec(
        num_q_heads=query.shape[1], num_kv_heads=cache.num_kv_heads, head_dim=query.shape[2]
    )
    metadata = jattn.build_batch_metadata([1] * len(lens), np.asarray(lens), table, block_size=block_size)

    def attend(query: jax.Array, cache: jattn.PagedCache, metadata: jattn.BatchMetadata) -> jax.Array:
        return jattn.attend(query, cache, metadata, spec)

    arguments = query, cache, metadata
    error = max_error(jax.jit(attend)(*arguments), expected)
    assert error < TOLERANCE, f"attend: {error=}"
    return attend, *arguments


def reference_outputs(case: DecodeCase, inputs: Any, layout: str) -> dict[int, jax.Array]:
    """Return row -> reference output for some requests, including the longest."""
    rows = np.argsort(case.kv_lens, kind="stable")[:: -max(len(case.kv_lens) // CHECKED_REQUESTS, 1)]

    @jax.jit
    def attend_row(row: jax.Array, arrays: Any, scales: Any) -> jax.Array:
        query, k, v, table, lens = arrays
        query, table, lens = (jax.lax.dynamic_slice_in_dim(x, row, 1) for x in (query, table, lens))
        scale = case.head_dim**-0.5
        return references.paged_decode(query, k, v, table, lens, scale=scale, layout=layout, **scales)[0]

    return {int(row): attend_row(jnp.int32(row), *inputs) for row in rows}


def max_error(out: jax.Array, expected: dict[int, jax.Array]) -> float:
    """Return the largest error of the expected rows, relative to each row's largest output."""
    errors = []
    for row, output in expected.items():
        reference = output[0].astype(jnp.float32)
        errors.append(jnp.abs(out[row].astype(jnp.float32) - reference).max() / jnp.abs(reference).max())
    return float(max(errors))
