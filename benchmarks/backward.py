"""Gradients of packed attention: kernel time beside jax.nn's cuDNN, if sampled gradients are right."""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from benchmarks.device_time import Rows, kernel_times
from jattn import masks
from jattn.implementations.mosaic_gpu import tile_lists
from jattn.implementations.mosaic_gpu.backward_lists import PackedLens, backward_lists, backward_mask
from pallas_kernels import varlen_prefill as prefill
from pallas_kernels.cases import LLAMA_8B, PREFILL, PrefillCase, log_uniform
from pallas_kernels.checks import require
from pallas_kernels.shared import Score
from pallas_kernels.varlen_backward import KernelSizes, default_sizes, make_schedule, varlen_backward

TOLERANCE = 2e-2  # of the largest gradient looked at; the tests hold the kernel to a tighter bound
SAMPLES = 12  # queries, and keys, that are looked at
MODIFIERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {"causal": False},
    "window": {"window": (1023, 0)},
    "soft_cap": {"soft_cap": 30.0},
    "alibi": {},
    **{f"blocks_{density}": {} for density in (0.5, 0.25, 0.1)},
}
BLOCK = 128  # queries, and keys, of a block of a mask
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "longest_first": {"l2_bytes": 0},
    "larger_sets": {"l2_bytes": 32 * 10**6},
    "one_kernel": {"mean_len": None},
    "two_kernels": {"deterministic": True},
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
        _case("t_1x64k", (65536,)),
        _case("t_8x2k", (2048,) * 8),
        _case("t_32x512", (512,) * 32),
        _case("t_d64_8x2k", (2048,) * 8, (64, 8, 64)),
        _case("t_d256_1x8k", (8192,), (16, 8, 256)),
        _case("t_d256_8x2k", (2048,) * 8, (16, 8, 256)),
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
        changes = dict(VARIANTS[self.variant])
        static = {"mean_len": sum(self.case.query_lens) // len(self.case.query_lens)}
        static |= {name: changes.pop(name) for name in ("mean_len", "deterministic") if name in changes}
        if self.density is not None:
            static["mean_len"] = None
        return dataclasses.replace(default_sizes(self.case.head_dim, **static), **changes)

    @property
    def score(self) -> Score:
        """The layer's."""
        return Score(scale=self.case.head_dim**-0.5, **MODIFIERS[self.modifier])

    @property
    def density(self) -> float | None:
        """Of random blocks of each head's own, of a single request; None: all are seen."""
        kind, _, density = self.modifier.partition("_")
        return float(density) if kind == "blocks" else None

    @property
    def spec(self) -> jattn.AttentionSpec:
        """The layer, as masks are asked about it."""
        heads = {"num_q_heads": self.case.q_heads, "num_kv_heads": self.case.kv_heads}
        return jattn.AttentionSpec(**heads, head_dim=self.case.head_dim)

    def num_flops(self, arrays: dict[str, jax.Array]) -> float:
        """Operations of the five products, of pairs that see each other."""
        if self.density is None:
            return 2.5 * self.case.num_flops(self.score.causal, self.score.window[0])
        seen = np.tril(np.asarray(arrays["blocks"]))
        num_diagonal = np.trace(seen, axis1=1, axis2=2).sum()
        pairs = seen.sum() * BLOCK**2 - num_diagonal * BLOCK * (BLOCK - 1) / 2
        return 2.5 * 4.0 * self.case.head_dim * float(pairs)

    def schedule(self, arrays: dict[str, jax.Array]) -> Any:
        """The schedule, and lists where there is a mask: a step makes them once."""
        lens = PackedLens(*(arrays[name] for name in PackedLens._fields))
        kv_tokens, kv_heads, head_dim = arrays["key"].shape
        static = {"kv_heads": kv_heads, "head_dim": head_dim, "score": self.score, "sizes": self.sizes}
        num_tokens = arrays["query"].shape[0]
        schedule = make_schedule(*lens, kv_tokens=kv_tokens, num_tokens=num_tokens, **static)
        if self.density is None:
            return schedule, None
        bounds = {"num_tokens": kv_tokens, "max_seq_len": kv_tokens, "sizes": self.sizes}
        return schedule, backward_lists(mask_of(arrays), self.spec, lens, schedule, **bounds)

    def run(self, arrays: dict[str, jax.Array], made: Any) -> tuple[jax.Array, ...]:
        """The gradients."""
        (schedule, lists), mask = made, None
        if lists is not None:
            mask = backward_mask(mask_of(arrays), self.spec, max_seq_len=arrays["key"].shape[0])
        given = {name: x for name, x in arrays.items() if name != "blocks"}
        of_layer = {"score": self.score, "sizes": self.sizes, "schedule": schedule}
        return varlen_backward(**given, **of_layer, lists=lists, mask=mask)

    def forward(self, arrays: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        """Output and LSE, by the forward kernel."""
        given = {name: x for name, x in arrays.items() if name != "blocks"}
        attend = functools.partial(prefill.varlen_prefill, **given, score=self.score, return_lse=True)
        if self.density is None:
            return attend()
        sizes = prefill.default_sizes(self.case.head_dim, has_lists=True)
        tokens = arrays["query"].shape[0]
        lens = (arrays[name] for name in PackedLens._fields)
        static = {"num_tokens": tokens, "score": self.score, "sizes": sizes, "has_lists": True}
        schedule = prefill.make_schedule(*lens, **static)
        of_mask = mask_of(arrays), self.spec
        call = tile_lists.ListsCall(tokens, is_packed=True)
        lists = tile_lists.tile_lists(*of_mask, schedule, sizes, call)
        mask = tile_lists.mask_of_pairs(*of_mask, sizes, call)
        return attend(sizes=sizes, schedule=schedule, lists=lists, mask=mask)


def mask_of(arrays: dict[str, jax.Array]) -> masks.BlockMask:
    """The mask of blocks."""
    return masks.BlockMask(blocks=arrays["blocks"], block_q=BLOCK, block_kv=BLOCK)


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
    for name, modifier in itertools.product(a.cases or CASES, a.modifier):
        works = [Work(case=CASES[name], modifier=modifier, variant=variant) for variant in a.variant]
        try:
            for row in measure(works, has_peer=not a.no_peer):
                rows.add(**row)
        except Exception as error:  # the other rows still count
            print(f"{name} {modifier}: {type(error).__name__}: {error}"[:500], flush=True)


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
    if work.density is not None:
        count = tokens // BLOCK
        drawn = jax.random.uniform(jax.random.key(4), (case.q_heads, count, count)) < work.density
        arrays["blocks"] = drawn | jnp.eye(count, dtype=bool)[None]
    out, lse = jax.jit(work.forward)(arrays)
    return arrays | {"out": out, "lse": lse, "grad_out": draw(3, of_queries)}


def measure(works: list[Work], *, has_peer: bool) -> Iterator[dict[str, Any]]:
    """A row for each variant of a case, if its gradients are right: the others' are the first one's."""
    arrays = inputs(works[0])
    makes = [jax.jit(work.schedule).lower(arrays) for work in works]
    runs = [jax.jit(work.run).lower(arrays, jax.eval_shape(work.schedule, arrays)) for work in works]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = list(pool.map(lambda lowered: lowered.compile(), [*makes, *runs]))
    checked, peer = None, cudnn(works[0], arrays) if has_peer else {}
    for work, make, run in zip(works, compiled, compiled[len(works) :], strict=False):
        schedule, schedule_time = kernel_times(make, arrays)
        grads, time = kernel_times(run, arrays, schedule)
        if checked is None:
            errors, checked = worst_errors(grads, arrays, work), grads
        else:
            errors = {name: distance(a, b) for name, a, b in zip(GRADIENTS, grads, checked, strict=True)}
        for name, error in errors.items():
            require(error < TOLERANCE, f"the error of {name}'s gradient", f"be less than {TOLERANCE}", error)
        yield {
            "name": work.case.name,
            "modifier": work.modifier,
            "variant": work.variant,
            "tiles": f"q{work.sizes.tile_q}",
            **time,
            "tflop_per_s": work.num_flops(arrays) / time["us"] / 1e6,
            "schedule_us": schedule_time["us"],
            "errors": {name: round(error, 5) for name, error in errors.items()},
            **(peer if work is works[0] else {}),
        }


@jax.jit
def _distance(a: jax.Array, b: jax.Array) -> jax.Array:
    apart = jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32))
    return jnp.where(jnp.isnan(apart), jnp.inf, apart).max() / jnp.abs(b.astype(jnp.float32)).max()


def distance(a: jax.Array, b: jax.Array) -> float:
    """How far arrays are apart, by the largest number of the second."""
    return float(_distance(a, b))


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
    return {"cudnn_us": time["us"], "cudnn_tflop_per_s": work.num_flops(arrays) / time["us"] / 1e6}


def worst_errors(grads: tuple[jax.Array, ...], arrays: dict[str, jax.Array], work: Work) -> dict[str, float]:
    """Of a few queries' and keys' gradients against float32, each array's by its largest one looked at."""
    starts = np.concatenate([[0], np.cumsum(work.case.query_lens)])
    drawn = np.random.default_rng(1).integers(0, starts[-1], SAMPLES)
    rows = sorted({0, int(starts[-1]) - 1, *map(int, drawn)})
    errors = {}
    for (name, want_of), got in zip(GRADIENTS.items(), grads, strict=True):
        off, top = 0.0, 0.0
        for row in rows:
            r = int(np.searchsorted(starts, row, side="right")) - 1
            size = int(starts[r + 1] - starts[r])
            want = np.asarray(_wanted(arrays, row, int(starts[r]), work=work, size=size, of=want_of))
            here = np.asarray(got[row], np.float32)
            off = max(off, float(np.where(np.isnan(here), np.inf, np.abs(here - want)).max()))
            top = max(top, float(np.abs(want).max()))
        errors[name] = off / top
    return errors


class Neighbours(NamedTuple):
    """Neighbours among the rows of a request.

    Attributes:
        first: The first one; traced.
        size: How many; static.
        start: The request's first row; traced.
    """

    first: Any
    size: int
    start: Any

    def of(self, x: jax.Array, axis: int = 0) -> jax.Array:
        """Theirs, in f32."""
        return jax.lax.dynamic_slice_in_dim(x, self.first, self.size, axis).astype(jnp.float32)

    @property
    def positions(self) -> jax.Array:
        """Theirs, in the request."""
        return jnp.arange(self.size) + (self.first - self.start)


@functools.partial(jax.jit, static_argnames=("work", "size", "of"))
def _wanted(
    arrays: dict[str, jax.Array], row: int, start: int, *, work: Work, size: int, of: Callable[..., Any]
) -> jax.Array:
    return of(arrays, work, Neighbours(row, 1, start), Neighbours(start, size, start))


def pairs(arrays: dict[str, jax.Array], work: Work, queries: Neighbours, keys: Neighbours) -> tuple[Any, Any]:
    """P and dS of some queries and keys of a request: [q_heads, queries, keys]."""
    score, group = work.score, work.case.q_heads // work.case.kv_heads
    spread = lambda name: jnp.repeat(keys.of(arrays[name]), group, axis=1)
    dot = functools.partial(jnp.einsum, precision="highest")
    s = dot("qhd,khd->hqk", queries.of(arrays["query"]), spread("key")) * score.scale
    slope = jnp.full_like(s, score.scale)
    if score.soft_cap is not None:
        bent = jnp.tanh(s / score.soft_cap)
        s, slope = bent * score.soft_cap, slope * (1 - bent**2)
    away = queries.positions[:, None] - keys.positions[None, :]
    if "alibi_slopes" in arrays:
        s = s - arrays["alibi_slopes"][:, None, None] * away[None]
    sees = (away >= 0) if score.causal else jnp.full_like(away, True, bool)
    sees = sees & (away <= (score.window[0] if score.window[0] is not None else away))
    sees = sees[None]
    if "blocks" in arrays:
        sees = sees & arrays["blocks"][:, queries.positions // BLOCK][:, :, keys.positions // BLOCK]
    p = jnp.where(sees, jnp.exp(s - queries.of(arrays["lse"], axis=1)[:, :, None]), 0.0)
    grad_out, out = queries.of(arrays["grad_out"]), queries.of(arrays["out"])
    grad_p = dot("qhd,khd->hqk", grad_out, spread("value"))
    return p, p * (grad_p - dot("qhd,qhd->hq", grad_out, out)[:, :, None]) * slope


def of_query(arrays: dict[str, jax.Array], work: Work, row: Neighbours, mine: Neighbours) -> jax.Array:
    """The gradient of a query."""
    _, ds = pairs(arrays, work, row, mine)
    k = jnp.repeat(mine.of(arrays["key"]), ds.shape[0] // work.case.kv_heads, axis=1)
    return jnp.einsum("hk,khd->hd", ds[:, 0], k, precision="highest")


def of_key(arrays: dict[str, jax.Array], work: Work, row: Neighbours, mine: Neighbours) -> jax.Array:
    """The gradient of a key."""
    _, ds = pairs(arrays, work, mine, row)
    return _of_group(ds[:, :, 0], mine.of(arrays["query"]), work)


def of_value(arrays: dict[str, jax.Array], work: Work, row: Neighbours, mine: Neighbours) -> jax.Array:
    """The gradient of a value."""
    p, _ = pairs(arrays, work, mine, row)
    return _of_group(p[:, :, 0], mine.of(arrays["grad_out"]), work)


def _of_group(weights: jax.Array, rows: jax.Array, work: Work) -> jax.Array:
    """Rows weighed by [q_heads, queries], summed over the queries and the heads of each group."""
    of_heads = jnp.einsum("hq,qhd->hd", weights, rows, precision="highest")
    return of_heads.reshape(work.case.kv_heads, -1, of_heads.shape[-1]).sum(axis=1)


GRADIENTS: dict[str, Callable[..., Any]] = {"query": of_query, "key": of_key, "value": of_value}
