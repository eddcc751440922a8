"""Gradients of packed attention: kernel time beside jax.nn's cuDNN, if sampled gradients are right."""

import argparse
import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device_time import Rows, kernel_times
from pallas_kernels.cases import LLAMA_8B, PREFILL, PrefillCase, log_uniform
from pallas_kernels.checks import require
from pallas_kernels.shared import Score
from pallas_kernels.varlen_backward import KernelSizes, default_sizes, make_schedule, varlen_backward
from pallas_kernels.varlen_prefill import varlen_prefill

TOLERANCE = 2e-2  # of the largest gradient looked at; the tests hold the kernel to a tighter bound
SAMPLES = 12  # queries, and keys, that are looked at
MODIFIERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {"causal": False},
    "window": {"window": (1023, 0)},
    "soft_cap": {"soft_cap": 30.0},
    "alibi": {},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "longest_first": {"l2_bytes": 0},
    "smaller_sets": {"l2_bytes": 16 * 10**6},
    "persistent": {"l2_bytes": 0, "ctas": 132},
}


def _documents(name: str, tokens: int, seed: int) -> PrefillCase:
    """As many documents of 128 to 8k as fill so many tokens; the last one is cut."""
    lens = np.asarray(log_uniform(tokens // 128, 128, 8192, seed))
    lens = lens[: int((np.cumsum(lens) < tokens).sum())]
    return _case(name, (*map(int, lens), tokens - int(lens.sum())))


def _case(name: str, lens: tuple[int, ...], heads: tuple[int, int, int] = LLAMA_8B) -> PrefillCase:
    q_heads, kv_heads, head_dim = heads
    return PrefillCase(
        name=name, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, query_lens=lens,
        context_lens=(0,) * len(lens),
    )  # fmt: skip


CASES = {
    case.name: case
    for case in (
        _case("t_1x8k", (8192,)),
        _case("t_1x16k", (16384,)),
        _case("t_1x32k", (32768,)),
        _case("t_8x2k", (2048,) * 8),
        _case("t_32x512", (512,) * 32),
        _case("t_d64_8x2k", (2048,) * 8, (64, 8, 64)),
        _case("t_mha_8x2k", (2048,) * 8, (16, 16, 128)),
        dataclasses.replace(PREFILL["p_ragged"], name="t_ragged"),
        _documents("t_documents_16k", 16384, 2),
        _documents("t_documents_32k", 32768, 3),
    )
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What one row measures."""

    case: PrefillCase
    modifier: str
    variant: str = "default"

    @property
    def sizes(self) -> KernelSizes:
        """The kernel's."""
        return dataclasses.replace(default_sizes(self.case.head_dim), **VARIANTS[self.variant])

    @property
    def score(self) -> Score:
        """The layer's."""
        return Score(scale=self.case.head_dim**-0.5, **MODIFIERS[self.modifier])

    @property
    def num_flops(self) -> float:
        """Operations of the five products, of pairs that see each other."""
        return 2.5 * self.case.num_flops(self.score.causal, self.score.window[0])

    def schedule(self, arrays: dict[str, jax.Array]) -> Any:
        """The schedule, which a step makes once."""
        lens = (arrays[name] for name in ("query_start_loc", "seq_lens", "kv_start_loc"))
        kv_tokens, kv_heads, head_dim = arrays["key"].shape
        static = {"kv_heads": kv_heads, "head_dim": head_dim, "score": self.score, "sizes": self.sizes}
        return make_schedule(*lens, kv_tokens=kv_tokens, **static)

    def run(self, arrays: dict[str, jax.Array], schedule: Any) -> tuple[jax.Array, ...]:
        """The gradients."""
        return varlen_backward(**arrays, score=self.score, schedule=schedule, sizes=self.sizes)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `python -m benchmarks backward` takes."""
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; default all")
    parser.add_argument("--modifier", nargs="+", default=["plain"], choices=MODIFIERS)
    parser.add_argument("--variant", nargs="+", default=["default"], choices=VARIANTS, help="of the sizes")
    parser.add_argument("--no-peer", action="store_true", help="leave cuDNN out")
    parser.add_argument("--out", help="folder of the rows")


def main(arguments: argparse.Namespace) -> None:
    """Every case with every modifier."""
    rows = Rows("backward", arguments.out)
    a = arguments
    for name, modifier, variant in itertools.product(a.cases or CASES, a.modifier, a.variant):
        work = Work(case=CASES[name], modifier=modifier, variant=variant)
        try:
            rows.add(**measure(work, has_peer=not a.no_peer and variant == a.variant[0]))
        except Exception as error:  # the other rows still count
            print(f"{name} {modifier} {variant}: {type(error).__name__}: {error}"[:500], flush=True)


def inputs(work: Work) -> dict[str, jax.Array]:
    """Random arrays, and what the forward kernel makes of them."""
    case = work.case
    draw = jax.jit(
        lambda seed, shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16), static_argnums=1
    )
    tokens = -(-sum(case.query_lens) // 8) * 8
    of_queries, of_keys = ((tokens, heads, case.head_dim) for heads in (case.q_heads, case.kv_heads))
    starts = jnp.asarray(np.concatenate([[0], np.cumsum(case.query_lens)]), jnp.int32)
    arrays = {
        "query": draw(0, of_queries),
        "key": draw(1, of_keys),
        "value": draw(2, of_keys),
        "query_start_loc": starts,
        "seq_lens": jnp.asarray(case.query_lens, jnp.int32),
        "kv_start_loc": starts[:-1],
    }
    if work.modifier == "alibi":
        heads = np.arange(1, case.q_heads + 1, dtype=np.float32)
        arrays["alibi_slopes"] = jnp.asarray(2.0 ** (-8 * heads / case.q_heads))
    forward = jax.jit(functools.partial(varlen_prefill, score=work.score, return_lse=True))
    out, lse = forward(**arrays)
    return arrays | {"out": out, "lse": lse, "grad_out": draw(3, of_queries)}


def measure(work: Work, *, has_peer: bool) -> dict[str, Any]:
    """One row, if the gradients are right."""
    arrays = inputs(work)
    schedule, schedule_time = kernel_times(jax.jit(work.schedule), arrays)
    grads, time = kernel_times(jax.jit(work.run), arrays, schedule)
    errors = worst_errors(grads, arrays, work)
    for name, error in errors.items():
        require(error < TOLERANCE, f"the error of {name}'s gradient", f"be less than {TOLERANCE}", error)
    row = {
        "name": work.case.name,
        "modifier": work.modifier,
        "tiles": f"q{work.sizes.tile_q}",
        "variant": work.variant,
        **time,
        "tflop_per_s": work.num_flops / time["us"] / 1e6,
        "schedule_us": schedule_time["us"],
        "errors": {name: round(error, 5) for name, error in errors.items()},
    }
    del grads
    return row | (cudnn(work, arrays) if has_peer else {})


def cudnn(work: Work, arrays: dict[str, jax.Array]) -> dict[str, Any]:
    """What jax.nn's cuDNN takes for the same, where it can: equal lengths, a window at most."""
    lens = work.case.query_lens
    if len(set(lens)) > 1 or work.modifier not in ("plain", "full", "window"):
        return {}
    batched = lambda x: x.reshape(len(lens), lens[0], *x.shape[1:])
    left = work.score.window[0]
    attend = functools.partial(
        jax.nn.dot_product_attention,
        scale=work.score.scale,
        is_causal=work.score.causal,
        local_window_size=None if left is None else (left, 0),
        implementation="cudnn",
    )
    q, k, v, grad_out = (batched(arrays[name]) for name in ("query", "key", "value", "grad_out"))
    try:
        _, pull = jax.jit(lambda q, k, v: jax.vjp(attend, q, k, v))(q, k, v)
        _, time = kernel_times(jax.jit(lambda pull, grad: pull(grad)), pull, grad_out)
    except Exception as error:
        return {"cudnn": f"{type(error).__name__}: {error}"[:200]}
    return {"cudnn_us": time["us"], "cudnn_tflop_per_s": work.num_flops / time["us"] / 1e6}


def worst_errors(grads: tuple[jax.Array, ...], arrays: dict[str, jax.Array], work: Work) -> dict[str, float]:
    """Of a few queries' and keys' gradients against float32, each array's by its largest one looked at."""
    starts = np.concatenate([[0], np.cumsum(work.case.query_lens)])
    drawn = np.random.default_rng(1).integers(0, starts[-1], SAMPLES)
    rows = sorted({0, int(starts[-1]) - 1, *map(int, drawn)})
    wanted: dict[str, Callable[..., Any]] = {"query": of_query, "key": of_key, "value": of_value}
    errors = {}
    for (name, want_of), got in zip(wanted.items(), grads, strict=True):
        off, top = 0.0, 0.0
        for row in rows:
            r = int(np.searchsorted(starts, row, side="right")) - 1
            mine = slice(int(starts[r]), int(starts[r + 1]))
            want = np.asarray(want_of(arrays, work, row, mine))
            here = np.asarray(got[row], np.float32)
            off = max(off, float(np.where(np.isnan(here), np.inf, np.abs(here - want)).max()))
            top = max(top, float(np.abs(want).max()))
        errors[name] = off / top
    return errors


def pairs(arrays: dict[str, jax.Array], work: Work, queries: slice, keys: slice, first: int) -> Any:
    """P and dS of some queries and keys of a request that begins at row `first`: [q_heads, queries, keys]."""
    score, group = work.score, work.case.q_heads // work.case.kv_heads
    f32 = lambda name, at: arrays[name][at].astype(jnp.float32)
    spread = lambda name: jnp.repeat(f32(name, keys), group, axis=1)
    dot = functools.partial(jnp.einsum, precision="highest")
    s = dot("qhd,khd->hqk", f32("query", queries), spread("key")) * score.scale
    slope = jnp.full_like(s, score.scale)
    if score.soft_cap is not None:
        bent = jnp.tanh(s / score.soft_cap)
        s, slope = bent * score.soft_cap, slope * (1 - bent**2)
    positions, at = (np.arange(rows.start, rows.stop) - first for rows in (queries, keys))
    away = positions[:, None] - at
    if "alibi_slopes" in arrays:
        s = s - arrays["alibi_slopes"][:, None, None] * away
    sees = (away >= 0) if score.causal else np.full_like(away, True, bool)
    sees = sees & (away <= (score.window[0] if score.window[0] is not None else away))
    p = jnp.where(sees, jnp.exp(s - arrays["lse"][:, queries, None]), 0.0)
    grad_p = dot("qhd,khd->hqk", f32("grad_out", queries), spread("value"))
    expected = dot("qhd,qhd->hq", f32("grad_out", queries), f32("out", queries))
    return p, p * (grad_p - expected[:, :, None]) * slope


def of_query(arrays: dict[str, jax.Array], work: Work, row: int, mine: slice) -> jax.Array:
    """The gradient of a query."""
    _, ds = pairs(arrays, work, slice(row, row + 1), mine, mine.start)
    k = jnp.repeat(arrays["key"][mine].astype(jnp.float32), ds.shape[0] // work.case.kv_heads, axis=1)
    return jnp.einsum("hk,khd->hd", ds[:, 0], k, precision="highest")


def of_key(arrays: dict[str, jax.Array], work: Work, row: int, mine: slice) -> jax.Array:
    """The gradient of a key."""
    _, ds = pairs(arrays, work, mine, slice(row, row + 1), mine.start)
    return _of_group(ds[:, :, 0], arrays["query"][mine], work)


def of_value(arrays: dict[str, jax.Array], work: Work, row: int, mine: slice) -> jax.Array:
    """The gradient of a value."""
    p, _ = pairs(arrays, work, mine, slice(row, row + 1), mine.start)
    return _of_group(p[:, :, 0], arrays["grad_out"][mine], work)


def _of_group(weights: jax.Array, rows: jax.Array, work: Work) -> jax.Array:
    """Rows weighed by [q_heads, queries], summed over the queries and the heads of each group."""
    of_heads = jnp.einsum("hq,qhd->hd", weights, rows.astype(jnp.float32), precision="highest")
    return of_heads.reshape(work.case.kv_heads, -1, of_heads.shape[-1]).sum(axis=1)
