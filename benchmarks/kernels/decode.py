"""Paged decode: kernel time with schedule and combine kernel, beside the read ceiling of the same run."""

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from benchmarks.kernels.cases import DECODE, DecodeCase
from benchmarks.kernels.score_mods import (
    BASELINES,
    SOFT_CAP,
    Comparison,
    apply_score_mod,
    kernel_arrays,
    modifier_arrays,
    with_baselines,
)
from benchmarks.runner import Rows, kernel_times, read_ceiling, wall_times
from jattn.cache.quantization import quantize_static, quantize_token_head
from pallas_kernels.architectures import ARCHITECTURES, NUM_SMS, kernel_architecture, target
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
# Modifier -> fields of Score. Slopes and score functions come from `modifier_arrays`.
MODIFIERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "soft_cap": {"soft_cap": SOFT_CAP},
    "alibi": {},
    **{name: {} for name in BASELINES},
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
    add("--modifier", default=["plain"], choices=MODIFIERS, help="Modifiers of the scores. Default: plain.")
    add(
        "--target",
        default=[],
        choices=ARCHITECTURES,
        help="Also measure the kernels of these compute capabilities. Default: the device's own alone.",
    )
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
    comparison = Comparison()
    for name, *cache_format, modifier in itertools.product(
        options.cases or DECODE,
        options.block_size,
        options.layout,
        options.dtype,
        options.quantization,
        with_baselines(options.modifier),
    ):
        case = DECODE[name]
        arrays = inputs(case, *cache_format)
        expected = reference_outputs(case, arrays, cache_format[1], modifier)
        for *sizes, gpu in itertools.product(*size_options, [None, *options.target]):
            try:
                with target(gpu):
                    row = measure(
                        case, *cache_format, arrays, expected, sizes, modifier, has_wall_time=options.wall
                    )
                key = name, *cache_format, *sizes
                compared = comparison.columns(key, modifier, row["us"], gpu)
                rows.add(**row, of_ceiling=row["gb_per_s"] / ceiling, **compared)
            except Exception as error:  # continue with the other rows
                settings = f"{name} {cache_format} {modifier} {sizes} {gpu or ''}"
                print(f"{settings}: {type(error).__name__}: {error}"[:500], flush=True)


def kernel_sizes(
    case: DecodeCase, kv_dtypes: Any, tile_kv: Any, stages: Any, ctas_per_sm: Any, split_kv: Any, by: Any
) -> DecodeSizes:
    """Return the default sizes for the device or `target`, with the changes that the options request.

    None keeps a default. The number of thread blocks per SM is that of the target, whose number of SMs may
    differ from that of the device.
    """
    gpu = kernel_architecture()
    sizes = default_sizes(case.head_dim, rows=case.q_heads // case.kv_heads, kv_dtypes=kv_dtypes, gpu=gpu)
    ctas_per_sm = ctas_per_sm or sizes.ctas // ARCHITECTURES[gpu].num_sms
    return dataclasses.replace(
        sizes,
        tile_kv=tile_kv or sizes.tile_kv,
        stages=stages or sizes.stages,
        ctas=ctas_per_sm * core_count(),
        split_kv=split_kv,
        per_warp_mma=sizes.per_warp_mma if by is None else by == "warp",
    )


def core_count() -> int:
    """Return the number of SMs of the device; NUM_SMS on a CPU."""
    return getattr(jax.devices()[0], "core_count", None) or NUM_SMS


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
    case: DecodeCase,
    block_size: int,
    layout: str,
    dtype: str,
    quantization: str,
    inputs: tuple[tuple[jax.Array, ...], dict[str, Any]],
    expected: dict[int, jax.Array],
    size_options: Sequence[Any],
    modifier: str = "plain",
    *,
    has_wall_time: bool,
) -> dict[str, Any]:
    """Measure the kernel, check its output and return a row.

    Args:
        case: Case to measure.
        block_size: Tokens per cache block.
        layout: Layout of the cache.
        dtype: Dtype of the queries.
        quantization: Format of the cache.
        inputs: Result of `inputs`.
        expected: Outputs of some requests, for the numerical check.
        size_options: Arguments of `kernel_sizes` after the dtypes.
        modifier: Name of a modifier in MODIFIERS.
        has_wall_time: Whether to measure the wall times of the kernel and of `jattn.attend`, too.

    Raises:
        AssertionError: The error of the kernel exceeds TOLERANCE.
    """
    args, scales = inputs
    kv = args[1:3]
    sizes = kernel_sizes(case, tuple(x.dtype for x in kv), *size_options)
    score = Score(scale=case.head_dim**-0.5, **MODIFIERS[modifier])
    rest = scales | modifier_arrays(modifier, case.q_heads)

    def run(query: Any, k: Any, v: Any, table: Any, lens: Any, rest: Any) -> jax.Array:
        rest = kernel_arrays(rest)
        return paged_decode(query, k, v, table, lens, **rest, score=score, layout=layout, sizes=sizes)[0]

    out, time = kernel_times(run, *args, rest)
    error = max_error(out, expected)
    assert error < TOLERANCE, f"{error=}"
    wall_columns = {}
    if has_wall_time:
        attend = attend_call(inputs, expected, block_size, layout, modifier)
        wall_columns = wall_times({"wall_us": (run, *args, rest), "attend_us": attend})
    num_token_scales = sum(x is not None and x.ndim == 3 for x in scales.values())
    bytes_per_token = case.head_dim * sum(x.dtype.itemsize for x in kv) + 4 * num_token_scales
    gb_per_s = case.num_bytes(bytes_per_token) / time["us"] / 1e3
    return {
        "name": case.name,
        "block_size": block_size,
        "layout": layout,
        "dtype": dtype,
        "quantization": quantization,
        **({} if modifier == "plain" else {"modifier": modifier}),
        "tiles": format_sizes(sizes),
        **time,
        **wall_columns,
        "gb_per_s": gb_per_s,
        "max_error": error,
    }


def format_sizes(sizes: DecodeSizes) -> str:
    """Return the name of sizes in rows."""
    text = f"kv{sizes.tile_kv} stages{sizes.stages} ctas{sizes.ctas} split{sizes.split_kv}"
    return text + " by warp" * sizes.per_warp_mma + " cp.async" * (not sizes.uses_tma)


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
    modifier: str = "plain",
) -> tuple[Any, ...]:
    """Return `jattn.attend` of the inputs, which plans the step, and its arguments.

    Args:
        inputs: Result of `inputs`.
        expected: Outputs of some requests, for the numerical check.
        block_size: Tokens per cache block.
        layout: Layout of the cache.
        modifier: Name of a modifier in MODIFIERS.

    Raises:
        AssertionError: The error of its output exceeds TOLERANCE.
    """
    (query, k, v, table, lens), scales = inputs
    cache = paged_cache(k, v, **scales, layout=layout)
    spec = jattn.AttentionSpec(
        num_q_heads=query.shape[1],
        num_kv_heads=cache.num_kv_heads,
        head_dim=query.shape[2],
        soft_cap=MODIFIERS[modifier].get("soft_cap"),
    )
    modifiers = modifier_arrays(modifier, spec.num_q_heads)
    metadata = jattn.build_batch_metadata([1] * len(lens), np.asarray(lens), table, block_size=block_size)

    def attend(query: jax.Array, cache: jattn.PagedCache, metadata: jattn.BatchMetadata) -> jax.Array:
        return jattn.attend(query, cache, metadata, spec, **modifiers)

    arguments = query, cache, metadata
    error = max_error(jax.jit(attend)(*arguments), expected)
    assert error < TOLERANCE, f"attend: {error=}"
    return attend, *arguments


def reference_outputs(
    case: DecodeCase, inputs: Any, layout: str, modifier: str = "plain"
) -> dict[int, jax.Array]:
    """Return row -> reference output for some requests, including the longest.

    Score functions are compared with what a layer has built in, if it has the same.
    """
    rows = np.argsort(case.kv_lens, kind="stable")[:: -max(len(case.kv_lens) // CHECKED_REQUESTS, 1)]
    baseline = BASELINES.get(modifier, modifier)
    modifiers = MODIFIERS[baseline] | modifier_arrays(baseline, case.q_heads)

    @jax.jit
    def attend_row(row: jax.Array, arrays: Any, scales: Any) -> jax.Array:
        query, k, v, table, lens = arrays
        query, table, lens = (jax.lax.dynamic_slice_in_dim(x, row, 1) for x in (query, table, lens))
        if modifier == "relative_table":
            return attend_relative(query[0], (k, v), table[0], lens[0], scales, layout)[None]
        scale = case.head_dim**-0.5
        return references.paged_decode(
            query, k, v, table, lens, scale=scale, layout=layout, **scales, **modifiers
        )[0]

    return {int(row): attend_row(jnp.int32(row), *inputs) for row in rows}


def attend_relative(
    query: jax.Array, kv: Any, blocks: jax.Array, seq_len: jax.Array, scales: Any, layout: str
) -> jax.Array:
    """Return the float32 output of a request's query with the biases of `relative_table`."""
    k, v = (
        references.gather_blocks(x if layout == "NHD" else jnp.swapaxes(x, 1, 2), scale, blocks, jnp.float32)
        for x, scale in zip(kv, (scales["k_scale"], scales["v_scale"]), strict=True)
    )
    q_heads, head_dim = query.shape
    q = query.astype(jnp.float32).reshape(k.shape[1], -1, head_dim)
    s = jnp.einsum("hgd,khd->hgk", q, k, precision="highest") * head_dim**-0.5
    positions, heads = jnp.arange(len(k)), jnp.arange(q_heads).reshape(q.shape[0], -1, 1)
    score_mod = modifier_arrays("relative_table", q_heads)["score_mod"]
    s = apply_score_mod(score_mod, s, jnp.int32(0), heads, seq_len - 1, positions)
    p = jax.nn.softmax(jnp.where(positions[None, None] < seq_len, s, -jnp.inf), axis=-1)
    return jnp.einsum("hgk,khd->hgd", p, v, precision="highest").reshape(query.shape)


def max_error(out: jax.Array, expected: dict[int, jax.Array]) -> float:
    """Return the largest error of the expected rows, relative to each row's largest output."""
    errors = []
    for row, output in expected.items():
        reference = output[0].astype(jnp.float32)
        errors.append(jnp.abs(out[row].astype(jnp.float32) - reference).max() / jnp.abs(reference).max())
    return float(max(errors))
