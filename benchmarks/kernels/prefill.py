"""Varlen prefill: kernel time, the schedule's apart, over packed keys and over the paged cache."""

import argparse
import contextlib
import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.decode import QUANTIZATIONS, random_table, stored_as
from benchmarks.runner import Rows, kernel_times
from pallas_kernels.cache_read import cache_read, padded_len
from pallas_kernels.cases import PREFILL, PrefillCase
from pallas_kernels.checks import require
from pallas_kernels.shared import Score
from pallas_kernels.support import DEQUANTIZED_HEAD_DIMS
from pallas_kernels.varlen_prefill import (
    CallBounds,
    PrefillSizes,
    default_sizes,
    make_schedule,
    should_dequantize_in_kernel,
    varlen_prefill,
)

TOLERANCE = 2e-2  # of a token's largest output; the tests hold the kernel to a tighter bound
CHECKED_TOKENS = 24
MODIFIERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {"causal": False},
    "window": {"window": (1023, None)},
    "soft_cap": {"soft_cap": 30.0},
    "alibi": {},
    "sinks": {},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What one row measures: a case, its keys packed or in blocks, and how stored, a modifier, tiles.

    With `widens` the kernel reads keys of 8 bits itself; else they are read into 16 bits before.
    """

    case: PrefillCase
    block_size: int | None
    modifier: str
    sizes: PrefillSizes
    quantization: str = "none"
    widens: bool = False

    @property
    def score(self) -> Score:
        """The layer's."""
        return Score(scale=self.case.head_dim**-0.5, **MODIFIERS[self.modifier])

    def run(self, arrays: dict[str, jax.Array], schedule: Any) -> jax.Array:
        """The kernel; over an 8-bit cache what it needs is read into 16 bits before, or by the kernel."""
        arrays = dict(arrays)
        if self.widens:
            for x in ("key", "value"):
                arrays[f"{x[0]}_scale"] = arrays.pop(f"{x}_scale")
        elif self.quantization != "none":
            table, scales = arrays.pop("block_table"), {x: arrays.pop(f"{x}_scale") for x in ("key", "value")}
            where = table, jnp.zeros_like(arrays["seq_lens"]), arrays["seq_lens"]
            for x, scale in scales.items():
                arrays[x] = cache_read(arrays[x], *where, dtype=arrays["query"].dtype, scale=scale)
            arrays["kv_start_loc"] = self.read_starts(table)
        return varlen_prefill(**arrays, score=self.score, sizes=self.sizes, schedule=schedule)[0]

    def read_starts(self, table: jax.Array) -> jax.Array:
        """Where cache_read puts each request's keys."""
        assert self.block_size is not None
        reqs, max_blocks = table.shape
        return jnp.arange(reqs, dtype=jnp.int32) * padded_len(max_blocks, self.block_size)

    def schedule(self, arrays: dict[str, jax.Array]) -> Any:
        """The schedule, which a step makes once."""
        lens = arrays["query_start_loc"], arrays["seq_lens"], arrays.get("kv_start_loc")
        if self.quantization != "none" and not self.widens:
            lens = *lens[:2], self.read_starts(arrays["block_table"])
        num_tokens, q_heads, _ = arrays["query"].shape
        return make_schedule(
            *lens, num_tokens=num_tokens, score=self.score, sizes=self.sizes, q_heads=q_heads
        )

    def __str__(self) -> str:
        stored = "" if self.quantization == "none" else f" {self.quantization}"
        stored += " widened by the kernel" if self.widens else ""
        return f"{self.case.name} {self.block_size}{stored} {self.modifier} {name_of(self.sizes)}"


def name_of(sizes: PrefillSizes) -> str:
    """How rows name tiles."""
    splits = "" if sizes.max_splits == 1 else f" splits{sizes.max_splits}"
    splits = splits if sizes.pack_gqa == 1 else f" heads{sizes.pack_gqa}{splits}"
    return f"q{sizes.tile_q} kv{sizes.tile_kv} stages{sizes.stages} buffers{sizes.query_buffers}{splits}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `python -m benchmarks prefill` takes."""
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(PREFILL)}; default all")
    parser.add_argument("--block-size", type=int, nargs="+", default=[0, 16], help="0: packed keys, no cache")
    parser.add_argument("--modifier", nargs="+", default=["plain"], choices=MODIFIERS)
    parser.add_argument("--whole", action="store_true", help="besides, as if queries were many")
    parser.add_argument(
        "--quantization", nargs="+", default=["none"], choices=QUANTIZATIONS, help="of keys in blocks"
    )
    parser.add_argument("--out", help="folder of the rows")


def main(arguments: argparse.Namespace) -> None:
    """Every case with every combination of the options, by the tiles that varlen_prefill picks for itself."""
    a, rows = arguments, Rows("prefill", arguments.out)
    options = itertools.product(a.cases or PREFILL, a.block_size, a.modifier, a.quantization)
    for name, block_size, modifier, quantization in options:
        if quantization != "none" and not block_size:
            continue  # packed keys are what an 8-bit cache is read into
        works = [default_work(PREFILL[name], block_size or None, modifier, quantization)]
        if a.whole and works[0].sizes.max_splits > 1 and not works[0].widens:
            works.append(dataclasses.replace(works[0], sizes=default_sizes(PREFILL[name].head_dim)))
        if works[0].widens:
            read_first = bounds_of(works[0].case, works[0].score)
            sizes = default_sizes(works[0].case.head_dim, bounds=read_first)
            works.append(dataclasses.replace(works[0], sizes=sizes, widens=False))
        for work in works:
            try:
                rows.add(**measure(work))
            except Exception as error:  # the other rows still count
                print(f"{work}: {type(error).__name__}: {error}"[:500], flush=True)


def default_work(
    case: PrefillCase, block_size: int | None, modifier: str, quantization: str = "none"
) -> Work:
    """A row with the tiles that varlen_prefill picks for itself."""
    require(block_size is not None or quantization == "none", "block_size", "be given for an 8-bit cache", 0)
    bounds = bounds_of(case, Score(scale=1.0, **MODIFIERS[modifier]))
    kinds, scales = zip(*QUANTIZATIONS[quantization], strict=True)
    is_narrow = case.head_dim in DEQUANTIZED_HEAD_DIMS and all(
        jnp.dtype(kind).itemsize == 1 for kind in kinds
    )
    costs: Any = {"kv_dtypes": kinds, "has_token_scales": "token" in scales}
    widens = is_narrow and should_dequantize_in_kernel(case.head_dim, bounds, **costs)
    sizes = default_sizes(case.head_dim, bounds=None if block_size is None else bounds, is_quantized=widens)
    return Work(
        case=case, block_size=block_size, modifier=modifier, sizes=sizes, quantization=quantization,
        widens=widens,
    )  # fmt: skip


def bounds_of(case: PrefillCase, score: Score) -> CallBounds:
    """What is static of a case over a cache."""
    bounds = CallBounds(
        num_tokens=sum(case.query_lens),
        reqs=len(case.query_lens),
        q_heads=case.q_heads,
        kv_heads=case.kv_heads,
        max_kv=max(case.seq_lens),
    )
    return bounds.limited_by(score)


def inputs(work: Work) -> dict[str, jax.Array]:
    """Random queries, keys and values; blocks in random order."""
    case, block_size, modifier = work.case, work.block_size, work.modifier
    draw = jax.jit(
        lambda seed, shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16), static_argnums=1
    )
    ends = lambda lens: np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    num_tokens = -(-sum(case.query_lens) // 8) * 8
    arrays = {
        "query": draw(0, (num_tokens, case.q_heads, case.head_dim)),
        "query_start_loc": jnp.asarray(ends(case.query_lens)),
        "seq_lens": jnp.asarray(case.seq_lens, jnp.int32),
    }
    if block_size is None:
        kv: tuple[int, ...] = (-(-sum(case.seq_lens) // 8) * 8, case.kv_heads, case.head_dim)
        arrays["kv_start_loc"] = jnp.asarray(ends(case.seq_lens)[:-1])
    else:
        table, num_blocks = random_table(case.seq_lens, block_size)
        kv = (num_blocks, block_size, case.kv_heads, case.head_dim)
        arrays["block_table"] = jnp.asarray(table)
    heads = np.arange(1, case.q_heads + 1, dtype=np.float32)
    if modifier == "alibi":
        arrays["alibi_slopes"] = jnp.asarray(2.0 ** (-8 * heads / case.q_heads), jnp.float32)
    if modifier == "sinks":
        arrays["sinks"] = jnp.asarray(heads / 16)
    arrays |= {"key": draw(1, kv), "value": draw(2, kv)}
    if work.quantization != "none":
        store = jax.jit(stored_as, static_argnums=(1, 2))
        for name, (kind, scale) in zip(("key", "value"), QUANTIZATIONS[work.quantization], strict=True):
            arrays[name], arrays[f"{name}_scale"] = store(arrays[name], kind, scale)
    return arrays


def measure(work: Work, device: contextlib.AbstractContextManager[Any] | None = None) -> dict[str, Any]:
    """One row, if the output is right; what needs the GPU to itself happens inside `device`."""
    shapes = jax.eval_shape(lambda: inputs(work))
    make = jax.jit(work.schedule)
    run = jax.jit(work.run).lower(shapes, jax.eval_shape(make, shapes)).compile()
    make = make.lower(shapes).compile()
    with device or contextlib.nullcontext():
        arrays = inputs(work)
        schedule, schedule_time = kernel_times(make, arrays)
        out, time = kernel_times(run, arrays, schedule)
    error = worst_error(out, arrays, work)
    assert error < TOLERANCE, f"{error=}"
    flops = work.case.num_flops(work.score.causal, work.score.window[0])
    return {
        "name": work.case.name,
        "block_size": work.block_size,
        "modifier": work.modifier,
        **({} if work.quantization == "none" else {"quantization": work.quantization, "widens": work.widens}),
        "tiles": name_of(work.sizes),
        **time,
        "tflop_per_s": flops / time["us"] / 1e6,
        "schedule_us": schedule_time["us"],
        "max_error": error,
    }


def worst_error(out: jax.Array, arrays: dict[str, jax.Array], work: Work) -> float:
    """Against float32 on the host: a few tokens, the first and the last of all among them, every q head.

    Relative to a token's largest output: behind many keys all of them are small.
    """
    case, score = work.case, work.score
    starts = np.concatenate([[0], np.cumsum(case.query_lens)])
    tokens = np.random.default_rng(1).integers(0, starts[-1], CHECKED_TOKENS)
    host = functools.cache(lambda name: np.asarray(arrays[name]))
    result, errors = np.asarray(out), []

    @functools.cache
    def exact(name: str) -> np.ndarray:
        """A cache in f32, NHD."""
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
        at = np.arange(low, high)
        if work.block_size is None:
            k, v = (host(name)[int(host("kv_start_loc")[r]) + at] for name in ("key", "value"))
        else:
            blocks = host("block_table")[r][at // work.block_size]
            k, v = (exact(name)[blocks, at % work.block_size] for name in ("key", "value"))
        q = host("query")[token].astype(np.float32).reshape(case.kv_heads, -1, case.head_dim)
        k, v = (x.astype(np.float32).transpose(1, 0, 2) for x in (k, v))
        s = q @ k.transpose(0, 2, 1) * score.scale
        if score.soft_cap is not None:
            s = np.tanh(s / score.soft_cap) * score.soft_cap
        if "alibi_slopes" in arrays:
            s += host("alibi_slopes").reshape(case.kv_heads, -1, 1) * (at - position)
        top = s.max(axis=-1, keepdims=True)
        p = np.exp(s - top)
        total = p.sum(axis=-1, keepdims=True)
        if "sinks" in arrays:
            total += np.exp(host("sinks").reshape(case.kv_heads, -1, 1) - top)
        want = p / total @ v
        error = np.abs(result[token].astype(np.float32).reshape(want.shape) - want).max() / np.abs(want).max()
        errors.append(math.inf if np.isnan(error) else float(error))
    return max(errors)
