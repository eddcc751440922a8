"""Varlen prefill: kernel time, the schedule's apart, over packed keys and over the paged cache."""

import argparse
import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device_time import Rows, kernel_times
from pallas_kernels.cases import PREFILL, PrefillCase
from pallas_kernels.shared.score import Score
from pallas_kernels.varlen_prefill import Tiles, default_tiles, make_schedule, varlen_prefill
from pallas_kernels.varlen_prefill.reference import attend_request

TOLERANCE = 2e-2  # bf16 outputs of about 0.1 to 4; the tests hold the kernel to a tighter bound
MODIFIERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {"causal": False},
    "window": {"window": (1023, None)},
    "soft_cap": {"soft_cap": 30.0},
    "alibi": {},
    "sinks": {},
}
CHECKED = ("plain", "full", "window")  # the tests check the others


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `python -m benchmarks prefill` takes."""
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(PREFILL)}; default all")
    parser.add_argument("--block-size", type=int, nargs="+", default=[0, 16], help="0: packed keys, no cache")
    parser.add_argument("--modifier", nargs="+", default=["plain"], choices=MODIFIERS)
    parser.add_argument("--tile-kv", type=int, nargs="+", default=[None])
    parser.add_argument("--stages", type=int, nargs="+", default=[None])
    parser.add_argument("--warpgroups", type=int, nargs="+", default=[None])
    parser.add_argument("--query-buffers", type=int, nargs="+", default=[None])
    parser.add_argument("--out", help="folder of the rows")


def main(arguments: argparse.Namespace) -> None:
    """Every case with every combination of the options."""
    a, rows = arguments, Rows("prefill", arguments.out)
    for name in a.cases or PREFILL:
        options = (a.block_size, a.modifier, a.tile_kv, a.stages, a.warpgroups, a.query_buffers)
        for block_size, modifier, *sizes in itertools.product(*options):
            try:
                measure(rows, PREFILL[name], block_size or None, modifier, tiles_of(PREFILL[name], *sizes))
            except Exception as error:  # the other rows still count
                print(
                    f"{name} {block_size} {modifier} {sizes}: {type(error).__name__}: {error}"[:500],
                    flush=True,
                )


def tiles_of(case: PrefillCase, tile_kv: Any, stages: Any, warpgroups: Any, query_buffers: Any) -> Tiles:
    """The default tiles, changed where an option says so."""
    changes = {
        "tile_kv": tile_kv,
        "stages": stages,
        "warpgroups": warpgroups,
        "query_buffers": query_buffers,
    }
    changes = {name: value for name, value in changes.items() if value is not None}
    return dataclasses.replace(default_tiles(case.head_dim), **changes)


def inputs(case: PrefillCase, block_size: int | None) -> dict[str, jax.Array]:
    """Random queries, keys and values; blocks in random order."""
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
        needed = [-(-n // block_size) for n in case.seq_lens]
        order = np.random.default_rng(0).permutation(sum(needed)) + 1
        table = np.zeros((len(needed), max(needed)), np.int32)
        for row, blocks in zip(table, np.split(order, np.cumsum(needed)[:-1]), strict=True):
            row[: len(blocks)] = blocks
        kv = (sum(needed) + 1, block_size, case.kv_heads, case.head_dim)
        arrays["block_table"] = jnp.asarray(table)
    return arrays | {"key": draw(1, kv), "value": draw(2, kv)}


def measure(rows: Rows, case: PrefillCase, block_size: int | None, modifier: str, tiles: Tiles) -> None:
    """One row."""
    arrays = inputs(case, block_size)
    heads = jnp.arange(1, case.q_heads + 1, dtype=jnp.float32)
    per_head = {"alibi": {"alibi_slopes": 2.0 ** (-8 * heads / case.q_heads)}, "sinks": {"sinks": heads / 16}}
    arrays |= per_head.get(modifier, {})
    score = Score(scale=case.head_dim**-0.5, **MODIFIERS[modifier])
    schedule = make_schedule(
        arrays["query_start_loc"],
        arrays["seq_lens"],
        arrays.get("kv_start_loc"),
        num_tokens=arrays["query"].shape[0],
        score=score,
        tiles=tiles,
    )
    run = lambda arrays, schedule: varlen_prefill(**arrays, score=score, tiles=tiles, schedule=schedule)[0]
    out, time = kernel_times(run, arrays, schedule)
    error = worst_error(out, arrays, case, score) if modifier in CHECKED else None
    assert error is None or error < TOLERANCE, f"{error=}"
    flops = None if modifier == "window" else case.num_flops(score.causal)  # a window's pairs are not counted
    rows.add(
        name=case.name,
        block_size=block_size,
        modifier=modifier,
        tiles=f"q{tiles.tile_q} kv{tiles.tile_kv} stages{tiles.stages} buffers{tiles.query_buffers}",
        **time,
        tflop_per_s=flops and flops / time["us"] / 1e6,
        max_error=error,
    )


def worst_error(out: jax.Array, arrays: dict[str, jax.Array], case: PrefillCase, score: Score) -> float:
    """Against the reference, for the first, the longest and the last request, and the outermost heads."""
    lens, errors = case.seq_lens, []
    starts = np.concatenate([[0], np.cumsum(case.query_lens)])
    for r in {0, int(np.argmax(lens)), len(lens) - 1}:
        tokens = slice(int(starts[r]), int(starts[r + 1]))
        kv = []
        for x in (arrays["key"], arrays["value"]):
            if "block_table" in arrays:
                rows = x[arrays["block_table"][r]].reshape(-1, *x.shape[2:])[: lens[r]]
            else:
                rows = x[int(arrays["kv_start_loc"][r]) :][: lens[r]]
            kv.append(rows[:, np.array([0, case.kv_heads - 1])])
        q_heads = np.array([0, case.q_heads - 1])
        reference = jax.jit(
            lambda q, k, v: attend_request(
                q, k, v, scale=score.scale, causal=score.causal, window=score.window
            )
        )
        want = reference(arrays["query"][tokens][:, q_heads], *kv)
        errors.append(jnp.abs(out[tokens][:, q_heads].astype(jnp.float32) - want).max())
    return float(max(errors))
