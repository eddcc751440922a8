"""Forward and backward pass of an attention layer in one jit, beside the same layer with jax.nn's cuDNN."""

import argparse
import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jattn
from benchmarks.kernels.backward_cases import MASKS, document_lens, vertical_slash
from benchmarks.kernels.cases import LLAMA_8B
from benchmarks.runner import Rows, kernel_times
from jattn import masks
from pallas_kernels.checks import require

# Limit of an error relative to that of XLA in 16 bits, both against float32: the rule of FlashAttention's
# tests.
TOLERANCE = 2.0
ROUNDS = 5  # alternating measurements of the implementations
type Attend = Callable[..., jax.Array]  # (q, k, v, mask=) [..., tokens, heads, head_dim]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Sequences, and the attention of a layer over them.

    Attributes:
        name: Name of the row.
        lens: Tokens of each sequence. Sequences of equal length form a batch; others are packed.
        heads: Query heads, kv heads, head_dim.
        spec: Fields of AttentionSpec.
        per_head: "sinks" or "alibi_slopes", which are not trained; None for neither.
        pattern: Name of the mask in PATTERNS; None for no mask.
        plain_case: Name of the same case without the modifier, to which the row is compared.
    """

    name: str
    lens: tuple[int, ...]
    heads: tuple[int, int, int] = LLAMA_8B
    spec: dict[str, Any] = dataclasses.field(default_factory=dict)
    per_head: str | None = None
    pattern: str | None = None
    plain_case: str | None = None

    @property
    def is_batch(self) -> bool:
        """Return whether all sequences are equally long."""
        return len(set(self.lens)) == 1

    def mask(self) -> masks.Mask | None:
        """Return the mask of the pattern, or None. May be traced."""
        return None if self.pattern is None else PATTERNS[self.pattern](self.heads[0], self.lens[0])


PATTERNS = MASKS | {"gathered_slash": functools.partial(vertical_slash, gather=True)}
SHORT, LONG = (2048,) * 8, (16384,)
CASES = {
    case.name: case
    for case in (
        Case(name="l_8x2k", lens=SHORT),
        Case(name="l_1x16k", lens=LONG),
        Case(name="l_documents_16k", lens=document_lens(16384, 2)),
        Case(name="l_1x16k_window", lens=LONG, spec={"window": (1023, 0)}, plain_case="l_1x16k"),
        *(
            Case(name=f"l_1x16k_{pattern}", lens=LONG, pattern=pattern, plain_case="l_1x16k")
            for pattern in ("blocks_0.5", "blocks_0.25", "blocks_0.1", "vertical_slash", "gathered_slash")
        ),
        Case(name="l_8x2k_soft_cap", lens=SHORT, spec={"soft_cap": 30.0}, plain_case="l_8x2k"),
        Case(name="l_8x2k_alibi", lens=SHORT, per_head="alibi_slopes", plain_case="l_8x2k"),
        Case(name="l_8x2k_sinks", lens=SHORT, per_head="sinks", plain_case="l_8x2k"),
        Case(name="l_d64_8x2k", lens=SHORT, heads=(64, 8, 64)),
    )
}


class Layer(nnx.Module):
    """An attention layer with its four projections."""

    def __init__(self, heads: tuple[int, int, int], *, rngs: nnx.Rngs):
        q_heads, kv_heads, head_dim = heads
        hidden = q_heads * head_dim
        linear = functools.partial(nnx.LinearGeneral, use_bias=False, rngs=rngs, param_dtype=jnp.bfloat16)
        self.q_proj = linear(hidden, (q_heads, head_dim))
        self.k_proj = linear(hidden, (kv_heads, head_dim))
        self.v_proj = linear(hidden, (kv_heads, head_dim))
        self.o_proj = linear((q_heads, head_dim), hidden, axis=(-2, -1))

    def __call__(self, x: jax.Array, attend: Callable[..., jax.Array]) -> jax.Array:
        """Apply the layer to x [..., tokens, hidden]."""
        return self.o_proj(attend(self.q_proj(x), self.k_proj(x), self.v_proj(x)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks training`."""
    parser.add_argument("cases", nargs="*", help=f"Cases to run, of {', '.join(CASES)}. Default: all.")
    parser.add_argument("--out", help="Directory for the result rows.")


def main(arguments: argparse.Namespace) -> None:
    """Record a row for each case."""
    rows = Rows("training", arguments.out)
    for row in measure_all([CASES[name] for name in arguments.cases or CASES]):
        rows.add(**row)


def measure_all(cases: list[Case]) -> Iterator[dict[str, Any]]:
    """Compile all cases in parallel, then yield their rows, with the times of their plain cases."""
    rows: dict[str, dict[str, Any]] = {}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        futures = [
            {name: pool.submit(program.compile) for name, program in _try_lower(case).items()}
            for case in cases
        ]
    for case, runs in zip(cases, futures, strict=True):
        try:
            rows[case.name] = row = measure(case, runs)
        except Exception as error:  # continue with the other rows
            print(f"{case.name}: {type(error).__name__}: {error}"[:500], flush=True)
            continue
        plain_row = rows.get(case.plain_case or "", {})
        yield row | {f"plain_{key}": plain_row[key] for key in ("us", "attention_us") if plain_row}


def _try_lower(case: Case) -> dict[str, Any]:
    """Return the programs of `lower`, or in their place programs that raise its error."""
    try:
        return lower(case)
    except Exception as error:  # continue with the other rows
        return dict.fromkeys(("ours", "xla", "exact"), FailedProgram(error))


def lower(case: Case) -> dict[str, Any]:
    """Lower the layer's two passes with each implementation of attention.

    Returns:
        Implementation -> lowered program `(state, x, weights, mask) -> (output, gradients)`. "exact" is XLA
        in float32.
    """
    arrays = jax.eval_shape(functools.partial(inputs, case))
    graph = nnx.graphdef(nnx.eval_shape(lambda: Layer(case.heads, rngs=nnx.Rngs(0))))
    implementations = {"ours": ours(case), "xla": ours(case, "xla"), "cudnn": cudnn(case)}
    if jax.default_backend() != "gpu":
        del implementations["cudnn"]
    programs: dict[str, Any] = {}
    for name, attend in implementations.items():
        if attend is None:
            continue
        try:
            programs[name] = jax.jit(functools.partial(run_passes, graph, attend)).lower(*arrays)
        except Exception as error:  # cuDNN may not support the case
            if name != "cudnn":
                raise
            programs[name] = FailedProgram(error)

    def exact(*arrays: Any) -> Any:
        return run_passes(graph, ours(case, "xla"), *jax.tree.map(_to_float32, arrays))

    with jax.default_matmul_precision("highest"):
        return programs | {"exact": jax.jit(exact).lower(*arrays)}


@dataclasses.dataclass(frozen=True)
class FailedProgram:
    """A program that could not be lowered, with the error."""

    error: Exception

    def compile(self) -> None:
        """Raise the error."""
        raise self.error


def _to_float32(array: jax.Array) -> jax.Array:
    return array.astype(jnp.float32) if jnp.issubdtype(array.dtype, jnp.floating) else array


def inputs(case: Case) -> tuple[Any, jax.Array, jax.Array, masks.Mask | None]:
    """Return the layer's parameters, its input, the gradient of its output, and its mask."""
    q_heads, _, head_dim = case.heads
    token_shape = (len(case.lens), case.lens[0]) if case.is_batch else (sum(case.lens),)
    shape = (*token_shape, q_heads * head_dim)
    x, weights = (jax.random.normal(jax.random.key(n), shape, jnp.bfloat16) for n in (1, 2))
    return nnx.state(Layer(case.heads, rngs=nnx.Rngs(0))), x, weights, case.mask()


def run_passes(
    graph: Any, attend: Attend, state: Any, x: jax.Array, weights: jax.Array, mask: masks.Mask | None
) -> tuple[jax.Array, tuple[Any, jax.Array]]:
    """Run the forward and the backward pass.

    Args:
        graph: Graph definition of the layer.
        attend: Attention function.
        state: Parameters of the layer.
        x: Input of the layer.
        weights: Gradient of the output.
        mask: Mask of the attention, or None.

    Returns:
        The output of the layer, and the gradients of its parameters and of its input.
    """

    def forward(state: Any, x: jax.Array) -> jax.Array:
        return nnx.merge(graph, state)(x, functools.partial(attend, mask=mask))

    out, vjp = jax.vjp(forward, state, x)
    return out, vjp(weights)


def ours(case: Case, implementation: str | None = None) -> Attend:
    """Return jattn.attention with the options of a case."""
    options: dict[str, Any] = {"causal": True, "implementation": implementation, **case.spec}
    heads = np.arange(1, case.heads[0] + 1, dtype=np.float32)
    if case.per_head == "alibi_slopes":
        options["alibi_slopes"] = jnp.asarray(2.0 ** (-8 * heads / case.heads[0]))
    if case.per_head == "sinks":
        options["sinks"] = jnp.asarray(np.cos(heads))
    if not case.is_batch:
        options["cu_seqlens"] = jnp.asarray(np.cumsum([0, *case.lens]), jnp.int32)
    return functools.partial(jattn.attention, **options)


def cudnn(case: Case) -> Attend | None:
    """Return jax.nn's cuDNN attention, or None if it does not support the case.

    Sequences of different lengths are padded to the longest one.
    """
    if case.pattern is not None or case.per_head is not None or "soft_cap" in case.spec:
        return None
    attend = functools.partial(
        jax.nn.dot_product_attention,
        is_causal=True,
        local_window_size=case.spec.get("window"),
        implementation="cudnn",
    )
    if case.is_batch:
        return lambda q, k, v, mask: attend(q, k, v)
    lens, padded_len = np.asarray(case.lens), -(-max(case.lens) // 128) * 128  # odd lengths are refused
    starts = np.cumsum(lens) - lens

    def pad(x: jax.Array) -> jax.Array:
        sequences = [x[start : start + n] for start, n in zip(starts, lens, strict=True)]
        return jnp.stack([jnp.pad(s, ((0, padded_len - len(s)), (0, 0), (0, 0))) for s in sequences])

    def attend_padded(q: jax.Array, k: jax.Array, v: jax.Array, mask: None) -> jax.Array:
        seq_lens = jnp.asarray(lens, jnp.int32)
        out = attend(pad(q), pad(k), pad(v), query_seq_lengths=seq_lens, key_value_seq_lengths=seq_lens)
        return jnp.concatenate([sequence[:n] for sequence, n in zip(out, lens, strict=True)])

    return attend_padded


def measure(case: Case, runs: dict[str, concurrent.futures.Future[Any]]) -> dict[str, Any]:
    """Measure the device time of the layer's two passes and return a row.

    The implementations alternate, because a GPU slows down when it gets hot.

    Args:
        case: Case to measure.
        runs: Compiled programs of `lower`.

    Raises:
        ValueError: The error of jattn is more than TOLERANCE times that of XLA.
    """
    arrays = jax.jit(functools.partial(inputs, case))()
    exact = runs["exact"].result()(*arrays)
    xla_error = max_error(runs["xla"].result()(*arrays), exact)
    row: dict[str, Any] = {"name": case.name, "xla_error": f"{xla_error:.5f}"}
    programs: dict[str, Any] = {}
    for name in (name for name in ("ours", "cudnn") if name in runs):
        try:
            programs[name] = run = runs[name].result()
            error = max_error(run(*arrays), exact)
            rule = f"be at most {TOLERANCE} times {xla_error:.2g}, as XLA's"
            require(error <= TOLERANCE * xla_error, f"the largest error of {name}", rule, error)
        except Exception as error:  # cuDNN may not support the case
            if name == "ours":
                raise
            programs.pop(name, None)
            row[name] = f"{type(error).__name__}: {error}"[:200]
            continue
        row[_column(name, "error")] = f"{error:.5f}"
    rounds = [
        {name: kernel_times(run, *arrays, iterations=4)[1] for name, run in programs.items()}
        for _ in range(ROUNDS)
    ]
    for name in programs:
        times = median_round([times[name] for times in rounds])
        row |= {_column(name, key): value for key, value in times.items()}
    return row


def _column(name: str, key: str) -> str:
    return key if name == "ours" else f"{name}_{key}"


def median_round(times: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the times of the round with the median time, and the spread over all rounds."""
    median = sorted(times, key=lambda time: time["us"])[len(times) // 2]
    spread = [min(time["spread_us"][0] for time in times), max(time["spread_us"][1] for time in times)]
    kernels = median["kernels_us"]
    return {
        "us": median["us"],
        "spread_us": spread,
        "attention_us": attention_us(kernels),
        "kernels_us": kernels,
    }


def attention_us(kernels: dict[str, float]) -> float:
    """Return the time of all kernels except the matrix products of the projections.

    Names of cuDNN's attention kernels may contain "cutlass", too.
    """
    return sum(
        us
        for name, us in kernels.items()
        if "cudnn" in name or not any(part in name for part in ("nvjet", "gemm", "cutlass", "cublas"))
    )


@jax.jit
def _errors(results: Any, expected: Any) -> list[jax.Array]:
    def relative_error(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.where(jnp.isnan(a), jnp.inf, jnp.abs(a - b)).max() / jnp.abs(b).max()

    return jax.tree.leaves(jax.tree.map(relative_error, results, expected))


def max_error(results: Any, expected: Any) -> float:
    """Return the largest error of the output and the gradients, each relative to its largest value."""
    return max(map(float, _errors(results, expected)))
