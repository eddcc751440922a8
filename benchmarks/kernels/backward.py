"""Gradients of packed attention: kernel time beside jax.nn's cuDNN, if sampled gradients are right."""

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from benchmarks.kernels.backward_cases import CASES, CHOICES, mask_of, per_head, score_of, share_of
from benchmarks.kernels.backward_checks import GRADIENTS, worst_errors
from benchmarks.runner import Rows, kernel_times
from jattn.implementations.mosaic_gpu import tile_lists
from jattn.implementations.mosaic_gpu.backward_tile_lists import (
    PackedLens,
    backward_lists,
    backward_mask,
    backward_sizes,
)
from pallas_kernels import varlen_backward as backward
from pallas_kernels import varlen_prefill as prefill
from pallas_kernels.cases import PrefillCase
from pallas_kernels.checks import require
from pallas_kernels.shared import Score

TOLERANCE = 2e-2  # of the largest number looked at; the tests hold the kernel to a tighter bound
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "longest_first": {"l2_bytes": 0},
    "larger_sets": {"l2_bytes": 32 * 10**6},
    "one_kernel": {"mean_keys": None},
    "two_kernels": {"deterministic": True},
    "dq_tile_64": {"deterministic": True, "dq_sizes": prefill.PrefillSizes(tile_kv=64, stages=3)},
}
Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What one row measures."""

    case: PrefillCase
    modifier: str
    variant: str = "default"

    @property
    def sizes(self) -> backward.BackwardSizes:
        """The kernel's."""
        changes = dict(VARIANTS[self.variant])
        static = {name: changes.pop(name) for name in ("mean_keys", "deterministic") if name in changes}
        if static:
            return dataclasses.replace(backward.default_sizes(self.case.head_dim, **static), **changes)
        mask = jax.eval_shape(lambda: mask_of(self.case, self.modifier))
        mean_len = sum(self.case.query_lens) // len(self.case.query_lens)
        sizes = backward_sizes(mask, self.spec, mean_len=mean_len)
        return dataclasses.replace(sizes, **changes)

    @property
    def score(self) -> Score:
        """The layer's."""
        return score_of(self.case, self.modifier)

    @property
    def spec(self) -> jattn.AttentionSpec:
        """The layer."""
        heads, score = {"num_q_heads": self.case.q_heads, "num_kv_heads": self.case.kv_heads}, self.score
        window = None if score.window == (None, None) else score.window
        numbers = {"causal": score.causal, "window": window, "soft_cap": score.soft_cap}
        return jattn.AttentionSpec(**heads, head_dim=self.case.head_dim, **numbers)

    @property
    def max_seq_len(self) -> int:
        """Of the longest request."""
        return max(self.case.query_lens)

    def arrays(self) -> Arrays:
        """Random ones; traced."""
        case = self.case
        draw = lambda seed, shape: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
        tokens = -(-sum(case.query_lens) // 8) * 8
        of_queries, of_keys = ((tokens, heads, case.head_dim) for heads in (case.q_heads, case.kv_heads))
        starts = jnp.asarray(np.concatenate([[0], np.cumsum(case.query_lens)]), jnp.int32)
        mask = mask_of(case, self.modifier)
        return {
            "query": draw(0, of_queries),
            "key": draw(1, of_keys),
            "value": draw(2, of_keys),
            "grad_out": draw(3, of_queries),
            "query_start_loc": starts,
            "seq_lens": jnp.asarray(case.query_lens, jnp.int32),
            "kv_start_loc": starts[:-1],
            **{name: jnp.asarray(x) for name, x in per_head(case, self.modifier).items()},
            **({} if mask is None else {"mask": mask}),
        }

    def forward_schedule(self, arrays: Arrays) -> Any:
        """Of the forward kernel, and lists where there is a mask."""
        make = functools.partial(prefill.make_schedule, *_lens(arrays), num_tokens=len(arrays["query"]))
        has_lists = "mask" in arrays
        sizes = prefill.default_sizes(self.case.head_dim, has_lists=has_lists)
        schedule = make(score=self.score, sizes=sizes, has_lists=has_lists)
        if not has_lists:
            return schedule, None
        call = tile_lists.TileListConfig(self.max_seq_len, is_packed=True)
        return schedule, tile_lists.tile_lists(arrays["mask"], self.spec, schedule, sizes, call)

    def forward(self, arrays: Arrays, made: Any, *, return_lse: bool) -> tuple[jax.Array, Any]:
        """Output, and LSE if it is wanted."""
        (schedule, lists), mask = made, None
        sizes = prefill.default_sizes(self.case.head_dim, has_lists=lists is not None)
        if lists is not None:
            call = tile_lists.TileListConfig(self.max_seq_len, is_packed=True)
            mask = tile_lists.pair_mask(arrays["mask"], self.spec, sizes, call)
        given = {name: x for name, x in arrays.items() if name not in ("mask", "grad_out")}
        of_layer = {"score": self.score, "sizes": sizes, "schedule": schedule}
        return prefill.varlen_prefill(**given, **of_layer, lists=lists, mask=mask, return_lse=return_lse)

    def schedule(self, arrays: Arrays) -> Any:
        """The schedule, and lists where there is a mask: a step makes them once."""
        lens, (kv_tokens, kv_heads, head_dim) = _lens(arrays), arrays["key"].shape
        static = {"kv_heads": kv_heads, "head_dim": head_dim, "score": self.score, "sizes": self.sizes}
        num_tokens = arrays["query"].shape[0]
        schedule = backward.make_schedule(*lens, kv_tokens=kv_tokens, num_tokens=num_tokens, **static)
        if "mask" not in arrays:
            return schedule, None
        bounds = {"num_tokens": num_tokens, "max_seq_len": self.max_seq_len, "sizes": self.sizes}
        return schedule, backward_lists(arrays["mask"], self.spec, lens, schedule, **bounds)

    def run(self, arrays: Arrays, made: Any) -> tuple[jax.Array, ...]:
        """The gradients. Sinks are in the LSE; their own gradients need no kernel."""
        (schedule, lists), mask = made, None
        if lists is not None:
            mask = backward_mask(arrays["mask"], self.spec, self.sizes, max_seq_len=self.max_seq_len)
        given = {name: x for name, x in arrays.items() if name not in ("mask", "sinks")}
        of_layer = {"score": self.score, "sizes": self.sizes, "schedule": schedule}
        return backward.varlen_backward(**given, **of_layer, lists=lists, mask=mask)


def _lens(arrays: Arrays) -> PackedLens:
    return PackedLens(*(arrays[name] for name in PackedLens._fields))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `python -m benchmarks backward` takes."""
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; default all")
    parser.add_argument("--modifier", nargs="+", default=["plain"], choices=CHOICES)
    parser.add_argument("--variant", nargs="+", default=["default"], choices=VARIANTS, help="of the sizes")
    parser.add_argument("--no-peer", action="store_true", help="leave cuDNN out")
    parser.add_argument("--out", help="folder of the rows")


def main(arguments: argparse.Namespace) -> None:
    """Every case with every modifier."""
    rows, a = Rows("backward", arguments.out), arguments
    works = [
        [Work(case=CASES[name], modifier=modifier, variant=variant) for variant in a.variant]
        for name, modifier in itertools.product(a.cases or CASES, a.modifier)
    ]
    for row in measured(works, has_peer=not a.no_peer):
        rows.add(**row)


def measured(works: list[list[Work]], *, has_peer: bool) -> Iterator[dict[str, Any]]:
    """Rows of each case's variants. All is compiled side by side before anything is timed."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = [_compiled(pool, variants) for variants in works]
    for variants, made in zip(works, compiled, strict=True):
        try:
            runs = {name: future.result() for name, future in made.items()}
            yield from measure(variants, runs, has_peer=has_peer)
        except Exception as error:  # the other rows still count
            what = f"{variants[0].case.name} {variants[0].modifier}"
            print(f"{what}: {type(error).__name__}: {error}"[:500], flush=True)


def _compiled(
    pool: concurrent.futures.Executor, works: list[Work]
) -> dict[str, concurrent.futures.Future[Any]]:
    """What `lowered` makes, being compiled, or its error."""
    try:
        compile_ = lambda program: pool.submit(lambda: program.compile())
        return {name: compile_(program) for name, program in lowered(works).items()}
    except Exception as error:  # the other rows still count
        failed: concurrent.futures.Future[Any] = concurrent.futures.Future()
        failed.set_exception(error)
        return {"lowered": failed}


def lowered(works: list[Work]) -> dict[str, Any]:
    """A case's programs: its arrays, the forward pass with LSE and without, each variant's backward pass."""
    first, found = works[0], {}

    def add(name: str, run: Any, *arguments: Any) -> Any:
        found[name] = jax.jit(run).lower(*arguments)
        return found[name].out_info

    arrays = add("arrays", first.arrays)
    made = add("forward_schedule", first.forward_schedule, arrays)
    add("forward", functools.partial(first.forward, return_lse=False), arrays, made)
    out, lse = add("forward_lse", functools.partial(first.forward, return_lse=True), arrays, made)
    arrays = arrays | {"out": out, "lse": lse}
    for work in works:
        made = add(f"schedule {work.variant}", work.schedule, arrays)
        add(f"run {work.variant}", work.run, arrays, made)
    return found


def measure(works: list[Work], runs: dict[str, Any], *, has_peer: bool) -> Iterator[dict[str, Any]]:
    """A row for each variant of a case, if its gradients are right: the others' are the first one's.

    The first row has the forward pass, too, schedule and lists apart: output alone, and output and LSE.
    """
    first, arrays = works[0], runs["arrays"]()
    made = runs["forward_schedule"](arrays)
    forward_us: dict[str, list[float]] = {"forward": [], "forward_lse": []}
    outputs = {}
    for name in ("forward", "forward_lse", "forward_lse", "forward"):  # by turns: a GPU grows hot
        outputs[name], time = kernel_times(runs[name], arrays, made)
        forward_us[name].append(time["us"])
    (alone, _), (out, lse) = outputs["forward"], outputs["forward_lse"]
    error = distance(alone, out)
    require(error < TOLERANCE, "the output without an LSE", f"be less than {TOLERANCE} off", error)
    arrays |= {"out": out, "lse": lse}
    share = share_of(first.case, first.modifier, arrays.get("mask"))
    flops = 2.5 * first.case.num_flops() * share
    of_first: dict[str, Any] = {f"{name}_us": float(np.mean(us)) for name, us in forward_us.items()}
    of_first |= cudnn(first, arrays, flops) if has_peer else {}
    checked = None
    for work in works:
        schedule, schedule_time = kernel_times(runs[f"schedule {work.variant}"], arrays)
        grads, time = kernel_times(runs[f"run {work.variant}"], arrays, schedule)
        named = dict(zip(GRADIENTS, grads, strict=True))
        if checked is None:
            found = {"out": out, "lse": lse.T, **named}
            errors, checked = worst_errors(found, arrays, work.case, work.score), named
        else:
            errors = {name: distance(x, checked[name]) for name, x in named.items()}
        for name, error in errors.items():
            require(error < TOLERANCE, f"the error of {_called(name)}", f"be less than {TOLERANCE}", error)
        yield {
            "name": work.case.name,
            "modifier": work.modifier,
            "variant": work.variant,
            "tiles": f"q{work.sizes.tile_q}",
            "share": round(share, 5),
            **time,
            "tflop_per_s": flops / time["us"] / 1e6,
            "schedule_us": schedule_time["us"],
            "errors": {name: round(error, 5) for name, error in errors.items()},
            **(of_first if work is first else {}),
        }


def _called(name: str) -> str:
    return f"{name}'s gradient" if name in GRADIENTS else name


@jax.jit
def _distance(a: jax.Array, b: jax.Array) -> jax.Array:
    apart = jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32))
    return jnp.where(jnp.isnan(apart), jnp.inf, apart).max() / jnp.abs(b.astype(jnp.float32)).max()


def distance(a: jax.Array, b: jax.Array) -> float:
    """How far arrays are apart, by the largest number of the second."""
    return float(_distance(a, b))


def cudnn(work: Work, arrays: Arrays, flops: float) -> dict[str, Any]:
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
    return {"cudnn_us": time["us"], "cudnn_tflop_per_s": flops / time["us"] / 1e6}
