"""Varlen prefill: kernel time without the schedule, over packed keys and over the paged cache."""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from benchmarks.kernels.cases import PREFILL, PrefillCase
from benchmarks.kernels.decode import QUANTIZATIONS, core_count, paged_cache, quantize_cache, random_table
from benchmarks.kernels.score_mods import (
    BASELINES,
    SOFT_CAP,
    Comparison,
    apply_score_mod,
    kernel_arrays,
    modifier_arrays,
    prefill_sizes,
    with_baselines,
)
from benchmarks.runner import Rows, kernel_times, wall_times
from pallas_kernels.architectures import ARCHITECTURES, kernel_architecture, target
from pallas_kernels.cache_read import cache_read, padded_len
from pallas_kernels.checks import require
from pallas_kernels.shared import Score
from pallas_kernels.support import KERNELS
from pallas_kernels.varlen_prefill import (
    CallBounds,
    PrefillSizes,
    default_sizes,
    make_schedule,
    should_dequantize_in_kernel,
    varlen_prefill,
)

TOLERANCE = 2e-2  # relative to a token's largest output; the tests use a tighter bound
CHECKED_TOKENS = 24
MODIFIERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {"causal": False},
    "window": {"window": (1023, None)},
    "soft_cap": {"soft_cap": SOFT_CAP},
    "alibi": {},
    "sinks": {},
    **{name: {} for name in BASELINES},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """A case and the options with which one row measures it.

    Attributes:
        case: Numbers of heads and tokens.
        block_size: Tokens per cache block; None for packed keys without a cache.
        modifier: Name of a modifier in MODIFIERS.
        sizes: Sizes of the kernel.
        quantization: Format of the cache.
        dequantizes_in_kernel: Whether the kernel reads an 8-bit cache itself. If not, `cache_read`
            dequantizes it before the kernel.
    """

    case: PrefillCase
    block_size: int | None
    modifier: str
    sizes: PrefillSizes
    quantization: str = "none"
    dequantizes_in_kernel: bool = False

    @property
    def score(self) -> Score:
        """Return what the layer does to scores."""
        return Score(scale=self.case.head_dim**-0.5, **MODIFIERS[self.modifier])

    def run(self, arrays: dict[str, Any], schedule: Any) -> jax.Array:
        """Run the kernel and return its output.

        Args:
            arrays: Arrays from `inputs`.
            schedule: Schedule from `schedule`.
        """
        arrays = kernel_arrays(dict(arrays))
        if self.dequantizes_in_kernel:
            for name in ("key", "value"):
                arrays[f"{name[0]}_scale"] = arrays.pop(f"{name}_scale")
        elif self.quantization != "none":
            table, seq_lens = arrays.pop("block_table"), arrays["seq_lens"]
            starts, dtype = jnp.zeros_like(seq_lens), arrays["query"].dtype
            for name in ("key", "value"):
                scale = arrays.pop(f"{name}_scale")
                arrays[name] = cache_read(arrays[name], table, starts, seq_lens, dtype=dtype, scale=scale)
            arrays["kv_start_loc"] = self.cache_read_starts(table)
        return varlen_prefill(**arrays, score=self.score, sizes=self.sizes, schedule=schedule)[0]

    def cache_read_starts(self, table: jax.Array) -> jax.Array:
        """Return the row of each request's first key in the output of cache_read."""
        assert self.block_size is not None
        reqs, max_blocks = table.shape
        return jnp.arange(reqs, dtype=jnp.int32) * padded_len(max_blocks, self.block_size)

    def schedule(self, arrays: dict[str, Any]) -> Any:
        """Compute the schedule. A model computes it once per step for all layers."""
        lens = arrays["query_start_loc"], arrays["seq_lens"], arrays.get("kv_start_loc")
        if self.quantization != "none" and not self.dequantizes_in_kernel:
            lens = *lens[:2], self.cache_read_starts(arrays["block_table"])
        num_tokens, q_heads, _ = arrays["query"].shape
        return make_schedule(
            *lens, num_tokens=num_tokens, score=self.score, sizes=self.sizes, q_heads=q_heads
        )

    def __str__(self) -> str:
        cache = "" if self.quantization == "none" else f" {self.quantization}"
        cache += " dequantized in the kernel" if self.dequantizes_in_kernel else ""
        return f"{self.case.name} {self.block_size}{cache} {self.modifier} {format_sizes(self.sizes)}"


def format_sizes(sizes: PrefillSizes) -> str:
    """Return the name of sizes in rows."""
    splits = "" if sizes.max_splits == 1 else f" splits{sizes.max_splits}"
    splits = splits if sizes.pack_gqa == 1 else f" heads{sizes.pack_gqa}{splits}"
    return f"q{sizes.tile_q} kv{sizes.tile_kv} stages{sizes.stages} buffers{sizes.query_buffers}{splits}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks prefill`."""
    parser.add_argument("cases", nargs="*", help=f"Cases to run, of {', '.join(PREFILL)}. Default: all.")
    add = functools.partial(parser.add_argument, nargs="+")
    add(
        "--block-size",
        type=int,
        default=[0, 16],
        help="Tokens per cache block; 0: packed keys without a cache.",
    )
    add("--modifier", default=["plain"], choices=MODIFIERS, help="Modifiers of the scores. Default: plain.")
    add("--quantization", default=["none"], choices=QUANTIZATIONS, help="Cache formats. Default: none.")
    add(
        "--target",
        default=[],
        choices=ARCHITECTURES,
        help="Also measure the kernels of these compute capabilities. Default: the device's own alone.",
    )
    parser.add_argument(
        "--whole", action="store_true", help="Also measure cases with few queries without splits of the keys."
    )
    parser.add_argument(
        "--wall", action="store_true", help="Also measure wall times in a chain of calls: kernel and attend."
    )
    parser.add_argument("--out", help="Directory for the result rows.")


def main(arguments: argparse.Namespace) -> None:
    """Measure every case with every combination of the options and varlen_prefill's default sizes."""
    a, rows = arguments, Rows("prefill", arguments.out)
    comparison = Comparison()
    options = itertools.product(
        a.cases or PREFILL, a.block_size, with_baselines(a.modifier), a.quantization, [None, *a.target]
    )
    for name, block_size, modifier, quantization, gpu in options:
        if quantization != "none" and (not block_size or modifier in BASELINES):
            continue  # packed keys are never quantized
        with target(gpu):
            works = [default_work(PREFILL[name], block_size or None, modifier, quantization)]
        if gpu is not None:  # as many thread blocks per SM as on that GPU
            sizes = works[0].sizes
            ctas_per_sm = sizes.ctas // ARCHITECTURES[gpu].num_sms
            works = [
                dataclasses.replace(
                    works[0], sizes=dataclasses.replace(sizes, ctas=ctas_per_sm * core_count())
                )
            ]
        default = works[0]
        if gpu is None and a.whole and default.sizes.max_splits > 1 and not default.dequantizes_in_kernel:
            works.append(dataclasses.replace(default, sizes=default_sizes(default.case.head_dim)))
        if gpu is None and default.dequantizes_in_kernel:
            sizes = default_sizes(default.case.head_dim, bounds=call_bounds(default.case, default.score))
            works.append(dataclasses.replace(default, sizes=sizes, dequantizes_in_kernel=False))
        for work in works:
            try:
                with target(gpu):
                    row = measure(work, has_wall_time=a.wall and work is default)
                key = name, block_size, quantization
                compared = comparison.columns(key, modifier, row["us"], gpu) if work is default else {}
                rows.add(**row, **compared)
            except Exception as error:  # continue with the other rows
                print(f"{work} {gpu or ''}: {type(error).__name__}: {error}"[:500], flush=True)


def default_work(
    case: PrefillCase, block_size: int | None, modifier: str, quantization: str = "none"
) -> Work:
    """Return a row's work with varlen_prefill's default sizes for the device or `target`.

    Args:
        case: Case to measure.
        block_size: Tokens per cache block; None for packed keys.
        modifier: Name of a modifier in MODIFIERS.
        quantization: Format of the cache.

    Raises:
        ValueError: `quantization` is given without `block_size`.
    """
    require(block_size is not None or quantization == "none", "block_size", "be given for an 8-bit cache", 0)
    bounds = call_bounds(case, Score(scale=1.0, **MODIFIERS[modifier]))
    kv_dtypes, granularities = zip(*QUANTIZATIONS[quantization], strict=True)
    is_supported = case.head_dim in KERNELS["varlen_prefill"].eight_bit_head_dims and all(
        jnp.dtype(dtype).itemsize == 1 for dtype in kv_dtypes
    )
    dequantizes_in_kernel = is_supported and should_dequantize_in_kernel(
        case.head_dim, bounds, kv_dtypes=kv_dtypes, has_token_scales="token" in granularities
    )
    sizes = default_sizes(
        case.head_dim,
        bounds=None if block_size is None else bounds,
        is_quantized=dequantizes_in_kernel,
        gpu=kernel_architecture(),
    )
    if modifier in BASELINES:
        sizes = prefill_sizes(case, modifier, block_size, kernel_architecture())
    return Work(
        case=case,
        block_size=block_size,
        modifier=modifier,
        sizes=sizes,
        quantization=quantization,
        dequantizes_in_kernel=dequantizes_in_kernel,
    )


def call_bounds(case: PrefillCase, score: Score) -> CallBounds:
    """Return the static bounds of a call over the paged cache."""
    bounds = CallBounds(
        num_tokens=sum(case.query_lens),
        reqs=len(case.query_lens),
        q_heads=case.q_heads,
        kv_heads=case.kv_heads,
        max_kv=max(case.seq_lens),
    )
    return bounds.limited_by(score)


def inputs(work: Work) -> dict[str, Any]:
    """Return random inputs of the kernel, with cache blocks in random order."""
    case, block_size, modifier = work.case, work.block_size, work.modifier
    draw = jax.jit(
        lambda seed, shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16), static_argnums=1
    )
    num_tokens = -(-sum(case.query_lens) // 8) * 8
    arrays: dict[str, Any] = {
        "query": draw(0, (num_tokens, case.q_heads, case.head_dim)),
        "query_start_loc": jnp.asarray(_start_locs(case.query_lens)),
        "seq_lens": jnp.asarray(case.seq_lens, jnp.int32),
    }
    if block_size is None:
        kv_shape: tuple[int, ...] = (-(-sum(case.seq_lens) // 8) * 8, case.kv_heads, case.head_dim)
        arrays["kv_start_loc"] = jnp.asarray(_start_locs(case.seq_lens)[:-1])
    else:
        table, num_blocks = random_table(case.seq_lens, block_size)
        kv_shape = (num_blocks, block_size, case.kv_heads, case.head_dim)
        arrays["block_table"] = jnp.asarray(table)
    arrays |= modifier_arrays(modifier, case.q_heads)
    if modifier == "sinks":
        arrays["sinks"] = jnp.arange(1, case.q_heads + 1, dtype=jnp.float32) / 16
    arrays |= {"key": draw(1, kv_shape), "value": draw(2, kv_shape)}
    if work.quantization != "none":
        quantize = jax.jit(quantize_cache, static_argnums=(1, 2))
        formats = QUANTIZATIONS[work.quantization]
        for name, (dtype, granularity) in zip(("key", "value"), formats, strict=True):
            arrays[name], arrays[f"{name}_scale"] = quantize(arrays[name], dtype, granularity)
    return arrays


def _start_locs(lens: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)


def measure(
    work: Work,
    device_lock: contextlib.AbstractContextManager[Any] | None = None,
    *,
    has_wall_time: bool = False,
) -> dict[str, Any]:
    """Compile and measure the kernel, check its output and return a row.

    Args:
        work: What to measure.
        device_lock: Lock to hold while the GPU is used.
        has_wall_time: Whether to measure the wall times of the kernel and of `jattn.attend`, too.

    Raises:
        AssertionError: The error of the output exceeds TOLERANCE.
    """
    shapes = jax.eval_shape(lambda: inputs(work))
    make_schedule = jax.jit(work.schedule)
    run = jax.jit(work.run).lower(shapes, jax.eval_shape(make_schedule, shapes)).compile()
    make_schedule = make_schedule.lower(shapes).compile()
    with device_lock or contextlib.nullcontext():
        arrays = inputs(work)
        schedule, schedule_time = kernel_times(make_schedule, arrays)
        out, time = kernel_times(run, arrays, schedule)
    error = max_error(out, arrays, work)
    assert error < TOLERANCE, f"{error=}"
    wall_columns = {}
    if has_wall_time:

        def run_from(query: jax.Array, arrays: Any, schedule: Any) -> jax.Array:
            return work.run(arrays | {"query": query}, schedule)

        kernel = run_from, arrays["query"], arrays, schedule
        wall_columns = wall_times({"wall_us": kernel, "attend_us": attend_call(work, arrays)})
    flops = work.case.num_flops(work.score.causal, work.score.window[0])
    cache_format = {"quantization": work.quantization, "widens": work.dequantizes_in_kernel}
    return {
        "name": work.case.name,
        "block_size": work.block_size,
        "modifier": work.modifier,
        **({} if work.quantization == "none" else cache_format),
        "tiles": format_sizes(work.sizes),
        **time,
        **wall_columns,
        "tflop_per_s": flops / time["us"] / 1e6,
        "schedule_us": schedule_time["us"],
        "max_error": error,
    }


def attend_call(work: Work, arrays: dict[str, Any]) -> tuple[Any, ...]:
    """Return `jattn.attend` of the case's tokens, which plans the step, and its arguments.

    Args:
        work: What to measure.
        arrays: Arrays from `inputs`, whose number of tokens is padded to a multiple of 8.

    Raises:
        AssertionError: The error of its output exceeds TOLERANCE.
    """
    case, score = work.case, work.score
    cache: Any
    table, block_size = arrays.get("block_table"), work.block_size or 16
    if work.block_size is None:
        k, v = (arrays[name][: sum(case.seq_lens)] for name in ("key", "value"))
        cache = jattn.PackedKV(k=k, v=v, kv_start_loc=arrays["kv_start_loc"], is_in_order=True)
        table, _ = random_table(case.seq_lens, block_size)
    else:
        scales = {f"{name[0]}_scale": arrays.get(f"{name}_scale") for name in ("key", "value")}
        cache = paged_cache(arrays["key"], arrays["value"], **scales)
    metadata = jattn.build_batch_metadata(case.query_lens, case.seq_lens, table, block_size=block_size)
    spec = jattn.AttentionSpec(
        num_q_heads=case.q_heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        causal=score.causal,
        window=None if score.window == (None, None) else score.window,
        soft_cap=score.soft_cap,
    )
    per_head = {name: arrays.get(name) for name in ("sinks", "alibi_slopes", "score_mod")}

    def attend(query: jax.Array, cache: Any, metadata: Any, per_head: Any) -> jax.Array:
        return jattn.attend(query, cache, metadata, spec, **per_head)

    arguments = arrays["query"][: sum(case.query_lens)], cache, metadata, per_head
    error = max_error(jax.jit(attend)(*arguments), arrays, work)
    assert error < TOLERANCE, f"attend: {error=}"
    return attend, *arguments


def max_error(out: jax.Array, arrays: dict[str, Any], work: Work) -> float:
    """Return the largest error of some tokens against float32 on the host.

    The first and the last token are always compared. An error is relative to the token's largest output,
    because outputs over many keys are small.

    Args:
        out: Output of the kernel.
        arrays: Inputs of the kernel.
        work: What was measured.
    """
    case, score = work.case, work.score
    starts = np.concatenate([[0], np.cumsum(case.query_lens)])
    tokens = np.random.default_rng(1).integers(0, starts[-1], CHECKED_TOKENS)
    host = functools.cache(lambda name: np.asarray(arrays[name]))
    result, errors = np.asarray(out), []

    @functools.cache
    def dequantized(name: str) -> np.ndarray:
        """Return the key or value cache in float32, in the NHD layout."""
        values, scale = host(name).astype(np.float32), arrays.get(f"{name}_scale")
        if scale is None:
            return values
        if scale.ndim == 3:
            return values * np.swapaxes(np.asarray(scale), 1, 2)[..., None]
        return values * (np.asarray(scale) if scale.ndim == 2 else np.asarray(scale)[:, None])

    for token in {0, *map(int, tokens), int(starts[-1]) - 1}:
        r = int(np.searchsorted(starts, token, side="right")) - 1
        seq_len, position = case.seq_lens[r], token - starts[r] + case.context_lens[r]
        high = position + 1 if score.causal else seq_len
        low = 0 if score.window[0] is None else max(position - score.window[0], 0)
        kv_positions = np.arange(low, high)
        if work.block_size is None:
            k, v = (host(name)[int(host("kv_start_loc")[r]) + kv_positions] for name in ("key", "value"))
        else:
            blocks, offsets = np.divmod(kv_positions, work.block_size)
            blocks = host("block_table")[r][blocks]
            k, v = (dequantized(name)[blocks, offsets] for name in ("key", "value"))
        q = host("query")[token].astype(np.float32).reshape(case.kv_heads, -1, case.head_dim)
        k, v = (x.astype(np.float32).transpose(1, 0, 2) for x in (k, v))
        s = q @ k.transpose(0, 2, 1) * score.scale
        if score.soft_cap is not None:
            s = np.tanh(s / score.soft_cap) * score.soft_cap
        if "alibi_slopes" in arrays:
            s += host("alibi_slopes").reshape(case.kv_heads, -1, 1) * (kv_positions - position)
        if "score_mod" in arrays:
            padded = np.pad(s, ((0, 0), (0, 0), (low, seq_len - high)))  # one shape for all tokens
            pair = r, np.arange(case.q_heads).reshape(case.kv_heads, -1, 1), position, np.arange(seq_len)
            modified = apply_score_mod(arrays["score_mod"], padded, *map(jnp.int32, pair))
            s = np.asarray(modified)[..., low:high]
        row_max = s.max(axis=-1, keepdims=True)
        p = np.exp(s - row_max)
        row_sum = p.sum(axis=-1, keepdims=True)
        if "sinks" in arrays:
            row_sum += np.exp(host("sinks").reshape(case.kv_heads, -1, 1) - row_max)
        expected = p / row_sum @ v
        actual = result[token].astype(np.float32).reshape(expected.shape)
        error = np.abs(actual - expected).max() / np.abs(expected).max()
        errors.append(math.inf if np.isnan(error) else float(error))
    return max(errors)
