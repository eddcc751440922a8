"""Gradients of packed attention: kernel time, beside cuDNN through jax.nn."""

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
from benchmarks.kernels.backward_cases import (
    CASES,
    CHOICES,
    make_mask,
    make_score,
    make_sinks,
    share_of_pairs,
)
from benchmarks.kernels.backward_checks import GRADIENTS, max_errors
from benchmarks.kernels.cases import PrefillCase
from benchmarks.kernels.score_mods import (
    Comparison,
    modifier_arrays,
    with_baselines,
)
from benchmarks.runner import Rows, kernel_times, wall_times
from jattn.dense.layout import layout_packed
from jattn.implementations.layer_config import layer_config, region_sizes
from jattn.implementations.mosaic_gpu.backward import (
    GradientPlan,
    choose_sizes,
    plan_gradients,
    planned_gradients,
)
from jattn.implementations.mosaic_gpu.kernel_config import PrefillKernelConfig
from jattn.implementations.mosaic_gpu.kernel_plans import PrefillKernelPlan
from jattn.implementations.mosaic_gpu.kernel_selection import choose_kernel
from jattn.implementations.mosaic_gpu.prefill import attend_prefill, plan_prefill
from jattn.implementations.region_inputs import OutputGradients, RegionInputs
from jattn.pytree import replace
from pallas_kernels import varlen_backward as backward
from pallas_kernels import varlen_prefill as prefill
from pallas_kernels.architectures import NUM_SMS
from pallas_kernels.checks import require
from pallas_kernels.shared import Interpret, Score

TOLERANCE = 2e-2  # relative to the largest sampled value; the tests use a tighter bound
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "longest_first": {"l2_bytes": 0},
    "larger_sets": {"l2_bytes": 32 * 10**6},
    "one_kernel": {"mean_keys": None},
    "two_kernels": {"deterministic": True},
    # The kernels of GPUs without wgmma, with sizes for 163 KB and for 99 KB of shared memory.
    "per_warp_8.0": {"gpu": "8.0"},
    "per_warp_8.9": {"gpu": "8.9"},
    "dq_tile_64": {"deterministic": True, "dq_sizes": prefill.PrefillSizes(tile_kv=64, stages=3)},
}
Arrays = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """A case, a modifier and a variant of the kernel, which one row measures.

    Attributes:
        case: Lengths and heads.
        modifier: What changes the scores, of CHOICES.
        variant: Sizes of the backward kernel, of VARIANTS.
        interpret: plgpu.InterpretGPUParams to run on a CPU, for tests.
    """

    case: PrefillCase
    modifier: str
    variant: str = "default"
    interpret: Interpret = None

    @property
    def sizes(self) -> backward.BackwardSizes:
        """Return the sizes of the backward kernel."""
        changes = dict(VARIANTS[self.variant])
        options = "mean_keys", "deterministic", "gpu"
        size_options = {name: changes.pop(name) for name in options if name in changes}
        if size_options:
            sizes = backward.default_sizes(self.case.head_dim, **size_options)
            if sizes.dq_sizes is not None:  # as many thread blocks as this GPU has SMs
                sizes = dataclasses.replace(sizes, dq_sizes=dataclasses.replace(sizes.dq_sizes, ctas=NUM_SMS))
            return dataclasses.replace(sizes, **changes)
        chosen: list[backward.BackwardSizes] = []
        jax.eval_shape(lambda: chosen.append(choose_sizes(self.inputs(self.arrays()))))
        return dataclasses.replace(*chosen, **changes)

    @property
    def score(self) -> Score:
        """Return what the layer does to scores."""
        return make_score(self.case, self.modifier)

    @property
    def spec(self) -> jattn.AttentionSpec:
        """Return the spec of the layer."""
        case, score = self.case, self.score
        return jattn.AttentionSpec(
            num_q_heads=case.q_heads,
            num_kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            causal=score.causal,
            window=None if score.window == (None, None) else score.window,
            soft_cap=score.soft_cap,
        )

    def arrays(self) -> Arrays:
        """Return random inputs. May be traced."""
        case = self.case

        def draw(seed: int, heads: int) -> jax.Array:
            return jax.random.normal(jax.random.key(seed), (tokens, heads, case.head_dim), jnp.bfloat16)

        tokens = -(-sum(case.query_lens) // 8) * 8
        starts = jnp.asarray(np.concatenate([[0], np.cumsum(case.query_lens)]), jnp.int32)
        mask = make_mask(case, self.modifier)
        return {
            "query": draw(0, case.q_heads),
            "key": draw(1, case.kv_heads),
            "value": draw(2, case.kv_heads),
            "grad_out": draw(3, case.q_heads),
            "query_start_loc": starts,
            **modifier_arrays(self.modifier, case.q_heads),
            **{name: jnp.asarray(x) for name, x in make_sinks(case, self.modifier).items()},
            **({} if mask is None else {"mask": mask}),
        }

    def inputs(self, arrays: Arrays) -> RegionInputs:
        """Return the inputs of the forward pass as `jattn.attention` has them."""
        layout = layout_packed(
            arrays["query"], arrays["key"], arrays["value"], arrays["query_start_loc"], arrays.get("mask")
        )
        # A batch of sequences of equal length is aligned, packed documents are not known to be.
        lens = self.case.query_lens
        kv = replace(layout.kv, is_aligned=len(set(lens)) == 1 and lens[0] % 8 == 0)
        modifiers = {name: arrays.get(name) for name in ("sinks", "alibi_slopes", "score_mod")}
        return RegionInputs(
            query=layout.query, kv=kv, metadata=layout.metadata, mask=layout.mask, spec=self.spec,
            **modifiers,
        )  # fmt: skip

    def forward_kernel(self, inputs: RegionInputs) -> PrefillKernelConfig:
        """Return the forward kernel and the sizes that jattn chooses."""
        layer = layer_config(self.spec, inputs.kv, inputs.query.dtype, inputs.score_mod)
        (region,) = region_sizes(inputs.metadata)
        kernel = choose_kernel(layer, region, inputs.mask)
        assert isinstance(kernel, PrefillKernelConfig), kernel
        return kernel

    def forward_plan(self, arrays: Arrays) -> PrefillKernelPlan:
        """Compute the schedule of the forward kernel, and its tile lists if there is a mask."""
        inputs = self.inputs(arrays)
        return plan_prefill(inputs, self.forward_kernel(inputs))

    def forward(self, arrays: Arrays, plan: PrefillKernelPlan, *, return_lse: bool) -> tuple[jax.Array, Any]:
        """Run the forward kernel and return the output, and the log-sum-exps if requested.

        Args:
            arrays: Inputs from `arrays`.
            plan: Result of `forward_plan`.
            return_lse: Whether to return the log-sum-exps.
        """
        inputs = self.inputs(arrays)
        kernel = self.forward_kernel(inputs)
        return attend_prefill(inputs, kernel, plan, return_lse=return_lse, interpret=self.interpret)

    def plan(self, arrays: Arrays) -> GradientPlan:
        """Compute the schedule of the backward kernel, and its tile lists if there is a mask.

        A model computes them once per step for all layers.
        """
        return plan_gradients(self.inputs(arrays), self.sizes)

    def run(self, arrays: Arrays, plan: GradientPlan) -> tuple[jax.Array, ...]:
        """Run the backward kernel and return the gradients of queries, keys and values.

        The log-sum-exps contain the sinks, whose gradients need no kernel. If heads become rows of queries,
        the time includes that.

        Args:
            arrays: Inputs, the output and the log-sum-exps.
            plan: Result of `plan`.
        """
        outputs = OutputGradients(arrays["out"], arrays["lse"], arrays["grad_out"], None)
        return planned_gradients(self.inputs(arrays), outputs, self.sizes, plan, interpret=self.interpret)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks backward`."""
    parser.add_argument("cases", nargs="*", help=f"Cases to run, of {', '.join(CASES)}. Default: all.")
    add = functools.partial(parser.add_argument, nargs="+")
    add("--modifier", default=["plain"], choices=CHOICES, help="Modifiers and masks. Default: plain.")
    add("--variant", default=["default"], choices=VARIANTS, help="Variants of the kernel's sizes.")
    parser.add_argument(
        "--wall",
        action="store_true",
        help="Also measure wall times in a chain of calls, forward and backward: the kernels and attention.",
    )
    parser.add_argument("--no-peer", action="store_true", help="Do not measure cuDNN.")
    parser.add_argument("--out", help="Directory for the result rows.")


def main(arguments: argparse.Namespace) -> None:
    """Measure every case with every modifier."""
    rows, a = Rows("backward", arguments.out), arguments
    works = [
        [Work(case=CASES[name], modifier=modifier, variant=variant) for variant in a.variant]
        for name, modifier in itertools.product(a.cases or CASES, with_baselines(a.modifier))
    ]
    comparisons = {name: Comparison() for name in ("us", "forward_us", "forward_lse_us")}
    for row in measure_all(works, has_peer=not a.no_peer, has_wall_time=a.wall):
        for name, comparison in comparisons.items():
            if name in row:
                key = row["name"], row["variant"]
                ratio = comparison.columns(key, row["modifier"], row[name]).get("of_baseline")
                prefix = name.removesuffix("us")
                row |= {} if ratio is None else {f"{prefix}of_baseline": ratio}
        rows.add(**row)


def measure_all(
    works: list[list[Work]], *, has_peer: bool, has_wall_time: bool = False
) -> Iterator[dict[str, Any]]:
    """Compile all programs in parallel, then yield the rows.

    Args:
        works: For each case and modifier, its variants.
        has_peer: Whether to measure cuDNN, too.
        has_wall_time: Whether to measure the wall times of `wall_columns`, too.
    """
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiling = [_start_compiling(pool, variants) for variants in works]
    for variants, futures in zip(works, compiling, strict=True):
        try:
            runs = {name: future.result() for name, future in futures.items()}
            yield from measure(variants, runs, has_peer=has_peer, has_wall_time=has_wall_time)
        except Exception as error:  # continue with the other rows
            case = f"{variants[0].case.name} {variants[0].modifier}"
            print(f"{case}: {type(error).__name__}: {error}"[:500], flush=True)


def _start_compiling(
    pool: concurrent.futures.Executor, works: list[Work]
) -> dict[str, concurrent.futures.Future[Any]]:
    """Start to compile the programs of `lower`; if it fails, return a future with its error."""
    try:
        return {name: pool.submit(program.compile) for name, program in lower(works).items()}
    except Exception as error:  # continue with the other rows
        failed: concurrent.futures.Future[Any] = concurrent.futures.Future()
        failed.set_exception(error)
        return {"lower": failed}


def lower(works: list[Work]) -> dict[str, Any]:
    """Lower the programs of a case: inputs, forward pass with and without LSE, each variant's backward pass.

    Args:
        works: Variants of the same case and modifier.

    Returns:
        Name -> lowered program.
    """
    first, programs = works[0], {}

    def add(name: str, run: Any, *arguments: Any) -> Any:
        programs[name] = jax.jit(run).lower(*arguments)
        return programs[name].out_info

    arrays = add("arrays", first.arrays)
    plan = add("forward_plan", first.forward_plan, arrays)
    add("forward", functools.partial(first.forward, return_lse=False), arrays, plan)
    out, lse = add("forward_lse", functools.partial(first.forward, return_lse=True), arrays, plan)
    arrays = arrays | {"out": out, "lse": lse}
    for work in works:
        plan = add(f"plan {work.variant}", work.plan, arrays)
        add(f"run {work.variant}", work.run, arrays, plan)
    return programs


def measure(
    works: list[Work], runs: dict[str, Any], *, has_peer: bool, has_wall_time: bool = False
) -> Iterator[dict[str, Any]]:
    """Measure and check the variants of a case, and yield a row for each.

    The gradients of the first variant are compared with float32, those of the others with the first one's.
    The row of the first variant also has the times of the forward pass without and with log-sum-exps.

    Args:
        works: Variants of the same case and modifier.
        runs: Compiled programs of `lower`.
        has_peer: Whether to measure cuDNN, too.
        has_wall_time: Whether to measure the wall times of `wall_columns` of the first variant, too.

    Raises:
        ValueError: An error exceeds TOLERANCE.
    """
    first, arrays = works[0], runs["arrays"]()
    plan = runs["forward_plan"](arrays)
    forward_us: dict[str, list[float]] = {"forward": [], "forward_lse": []}
    outputs = {}
    for name in ("forward", "forward_lse", "forward_lse", "forward"):  # alternating, as a GPU slows when hot
        outputs[name], time = kernel_times(runs[name], arrays, plan)
        forward_us[name].append(time["us"])
    (out_without_lse, _), (out, lse) = outputs["forward"], outputs["forward_lse"]
    error = max_relative_difference(out_without_lse, out)
    require(error < TOLERANCE, "the output without an LSE", f"be less than {TOLERANCE} off", error)
    arrays |= {"out": out, "lse": lse}
    share = share_of_pairs(first.case, first.modifier, arrays.get("mask"))
    flops = 2.5 * first.case.num_flops() * share
    first_columns: dict[str, Any] = {f"{name}_us": float(np.mean(us)) for name, us in forward_us.items()}
    first_columns |= measure_cudnn(first, arrays, flops) if has_peer else {}
    first_grads = None
    for work in works:
        schedule, schedule_time = kernel_times(runs[f"plan {work.variant}"], arrays)
        grads, time = kernel_times(runs[f"run {work.variant}"], arrays, schedule)
        grads = dict(zip(GRADIENTS, grads, strict=True))
        if first_grads is None:
            results = {"out": out, "lse": lse.T, **grads}
            errors, first_grads = max_errors(results, arrays, work.case, work.score), grads
            if has_wall_time:
                first_columns |= wall_columns(work, arrays, plan, schedule, grads)
        else:
            errors = {name: max_relative_difference(x, first_grads[name]) for name, x in grads.items()}
        for name, error in errors.items():
            array_name = f"{name}'s gradient" if name in GRADIENTS else name
            require(error < TOLERANCE, f"the error of {array_name}", f"be less than {TOLERANCE}", error)
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
            **(first_columns if work is first else {}),
        }


def attend_gradients(work: Work, arrays: Arrays) -> tuple[jax.Array, ...]:
    """Compute the gradients of queries, keys and values by `jattn.attention`, without padding tokens."""
    num_tokens = sum(work.case.query_lens)
    q, k, v, grad_out = (arrays[name][:num_tokens] for name in ("query", "key", "value", "grad_out"))
    attention = functools.partial(
        jattn.attention,
        cu_seqlens=arrays["query_start_loc"],
        causal=work.spec.causal,
        window=work.spec.window,
        soft_cap=work.spec.soft_cap,
        mask=arrays.get("mask"),
        sinks=arrays.get("sinks"),
        alibi_slopes=arrays.get("alibi_slopes"),
        score_mod=arrays.get("score_mod"),
    )
    _, pull = jax.vjp(attention, q, k, v)
    gradients: tuple[jax.Array, ...] = pull(grad_out)
    return gradients


def wall_columns(
    work: Work, arrays: Arrays, plan: Any, schedule: Any, expected: dict[str, jax.Array]
) -> dict[str, float]:
    """Return the wall times of forward and backward pass: the kernels with their schedules, and attention.

    Args:
        work: What to measure.
        arrays: Inputs.
        plan: Result of `Work.forward_plan`.
        schedule: Result of `Work.plan`.
        expected: Gradients of the kernels.

    Raises:
        ValueError: A gradient of `jattn.attention` differs from `expected` by more than TOLERANCE.
    """
    num_tokens = sum(work.case.query_lens)
    names = ("query", "key", "value")
    rest = {name: x for name, x in arrays.items() if name not in (*names, "out", "lse")}
    inputs = tuple(arrays[name] for name in names)

    def run(inputs: Any, rest: Arrays, plan: Any, schedule: Any) -> tuple[jax.Array, ...]:
        arrays = rest | dict(zip(names, inputs, strict=True))
        out, lse = work.forward(arrays, plan, return_lse=True)
        return work.run(arrays | {"out": out, "lse": lse}, schedule)

    def attend(inputs: Any, rest: Arrays) -> tuple[jax.Array, ...]:
        return attend_gradients(work, rest | dict(zip(names, inputs, strict=True)))

    cut_inputs = tuple(x[:num_tokens] for x in inputs)
    for name, gradient in zip(GRADIENTS, jax.jit(attend)(cut_inputs, rest), strict=True):
        error = max_relative_difference(gradient, expected[name][:num_tokens])
        require(error < TOLERANCE, f"the difference of {name}'s gradient", f"be less than {TOLERANCE}", error)
    calls = {"wall_us": (run, inputs, rest, plan, schedule), "attend_us": (attend, cut_inputs, rest)}
    return wall_times(calls, layers=4, rounds=4)


@jax.jit
def _max_relative_difference(a: jax.Array, b: jax.Array) -> jax.Array:
    difference = jnp.abs(a.astype(jnp.float32) - b.astype(jnp.float32))
    return jnp.where(jnp.isnan(difference), jnp.inf, difference).max() / jnp.abs(b.astype(jnp.float32)).max()


def max_relative_difference(a: jax.Array, b: jax.Array) -> float:
    """Return the largest difference of two arrays, relative to the largest value of the second."""
    return float(_max_relative_difference(a, b))


def measure_cudnn(work: Work, arrays: Arrays, flops: float) -> dict[str, Any]:
    """Measure jax.nn's cuDNN attention, which supports equal lengths and at most a window.

    Args:
        work: What to measure.
        arrays: Inputs.
        flops: Floating-point operations of the backward pass.

    Returns:
        Columns of the row; none if cuDNN does not support the case.
    """
    lens = work.case.query_lens
    if len(set(lens)) > 1 or work.modifier not in ("plain", "full", "window"):
        return {}
    left = work.score.window[0]
    attend = functools.partial(
        jax.nn.dot_product_attention,
        scale=work.score.scale,
        is_causal=work.score.causal,
        local_window_size=None if left is None else (left, 0),
        implementation="cudnn",
    )
    q, k, v, grad_out = (
        arrays[name].reshape(len(lens), lens[0], *arrays[name].shape[1:])
        for name in ("query", "key", "value", "grad_out")
    )
    try:
        _, pull = jax.jit(lambda q, k, v: jax.vjp(attend, q, k, v))(q, k, v)
        _, time = kernel_times(jax.jit(lambda pull, grad: pull(grad)), pull, grad_out)
    except Exception as error:
        return {"cudnn": f"{type(error).__name__}: {error}"[:200]}
    return {"cudnn_us": time["us"], "cudnn_tflop_per_s": flops / time["us"] / 1e6}
