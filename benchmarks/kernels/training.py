"""A layer's forward and backward pass in one jit, beside jax.nn's cuDNN in its place, if XLA agrees."""

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
from benchmarks.runner import Rows, kernel_times
from jattn import masks
from pallas_kernels.cases import LLAMA_8B
from pallas_kernels.checks import require

# What a way to attend may lose, by what XLA loses in 16 bits: FlashAttention's rule. Both against float32.
TOLERANCE = 2.0
ROUNDS = 5  # in which each way is timed
type Attend = Callable[..., jax.Array]  # (q, k, v, mask=) [..., tokens, heads, head_dim]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Texts and what a layer attends to in them.

    Attributes:
        name: Of its row.
        lens: Tokens of each text. Equal ones are a batch, others are packed.
        heads: Query heads, kv heads, head_dim.
        spec: AttentionSpec's fields.
        per_head: "sinks" or "alibi_slopes", not trained.
        pattern: The mask's name, of PATTERNS.
        beside: The case without the modifier.
    """

    name: str
    lens: tuple[int, ...]
    heads: tuple[int, int, int] = LLAMA_8B
    spec: dict[str, Any] = dataclasses.field(default_factory=dict)
    per_head: str | None = None
    pattern: str | None = None
    beside: str | None = None

    @property
    def is_batch(self) -> bool:
        """Whether texts are equally long."""
        return len(set(self.lens)) == 1

    def mask(self) -> masks.Mask | None:
        """The pattern's. Traced or not."""
        return None if self.pattern is None else PATTERNS[self.pattern](self.heads[0], self.lens[0])


PATTERNS = MASKS | {"gathered_slash": functools.partial(vertical_slash, gather=True)}
SHORT, LONG = (2048,) * 8, (16384,)
CASES = {
    case.name: case
    for case in (
        Case(name="l_8x2k", lens=SHORT),
        Case(name="l_1x16k", lens=LONG),
        Case(name="l_documents_16k", lens=document_lens(16384, 2)),
        Case(name="l_1x16k_window", lens=LONG, spec={"window": (1023, 0)}, beside="l_1x16k"),
        *(
            Case(name=f"l_1x16k_{pattern}", lens=LONG, pattern=pattern, beside="l_1x16k")
            for pattern in ("blocks_0.5", "blocks_0.25", "blocks_0.1", "vertical_slash", "gathered_slash")
        ),
        Case(name="l_8x2k_soft_cap", lens=SHORT, spec={"soft_cap": 30.0}, beside="l_8x2k"),
        Case(name="l_8x2k_alibi", lens=SHORT, per_head="alibi_slopes", beside="l_8x2k"),
        Case(name="l_8x2k_sinks", lens=SHORT, per_head="sinks", beside="l_8x2k"),
        Case(name="l_d64_8x2k", lens=SHORT, heads=(64, 8, 64)),
    )
}


class Layer(nnx.Module):
    """Projections around an attention."""

    def __init__(self, heads: tuple[int, int, int], *, rngs: nnx.Rngs):
        q_heads, kv_heads, head_dim = heads
        hidden = q_heads * head_dim
        make = functools.partial(nnx.LinearGeneral, use_bias=False, rngs=rngs, param_dtype=jnp.bfloat16)
        self.q_proj = make(hidden, (q_heads, head_dim))
        self.k_proj = make(hidden, (kv_heads, head_dim))
        self.v_proj = make(hidden, (kv_heads, head_dim))
        self.o_proj = make((q_heads, head_dim), hidden, axis=(-2, -1))

    def __call__(self, x: jax.Array, attend: Callable[..., jax.Array]) -> jax.Array:
        """Of [..., tokens, hidden]."""
        return self.o_proj(attend(self.q_proj(x), self.k_proj(x), self.v_proj(x)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `python -m benchmarks training` takes."""
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; default all")
    parser.add_argument("--out", help="folder of the rows")


def main(arguments: argparse.Namespace) -> None:
    """A row for each case."""
    rows = Rows("training", arguments.out)
    for row in measured([CASES[name] for name in arguments.cases or CASES]):
        rows.add(**row)


def measured(cases: list[Case]) -> Iterator[dict[str, Any]]:
    """Rows of cases, with the times of the plain case that they name. All is compiled before one is timed."""
    plain: dict[str, dict[str, Any]] = {}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compile_ = lambda run: pool.submit(lambda: run.compile())
        made = [{name: compile_(run) for name, run in _lowered(case).items()} for case in cases]
    for case, runs in zip(cases, made, strict=True):
        try:
            plain[case.name] = row = measure(case, runs)
        except Exception as error:  # the other rows still count
            print(f"{case.name}: {type(error).__name__}: {error}"[:500], flush=True)
            continue
        of_plain = plain.get(case.beside or "", {})
        yield row | {f"plain_{key}": of_plain[key] for key in ("us", "attention_us") if of_plain}


def _lowered(case: Case) -> dict[str, Any]:
    """What `lowered` makes, or its error in the place of each that a row needs."""
    try:
        return lowered(case)
    except Exception as error:  # the other rows still count
        return dict.fromkeys(("ours", "xla", "exact"), Refusal(error))


def lowered(case: Case) -> dict[str, Any]:
    """Ways to attend, as `(state, x, weights, mask) -> (output, gradients)`; "exact" is XLA's in float32."""
    arrays = jax.eval_shape(functools.partial(inputs, case))
    graph = nnx.graphdef(nnx.eval_shape(lambda: Layer(case.heads, rngs=nnx.Rngs(0))))
    ways = {"ours": ours(case), "xla": ours(case, "xla"), "cudnn": cudnn(case)}
    if jax.default_backend() != "gpu":
        del ways["cudnn"]
    run = lambda attend: jax.jit(functools.partial(passes, graph, attend))
    made: dict[str, Any] = {}
    for name, attend in ways.items():
        try:
            made |= {name: run(attend).lower(*arrays)} if attend is not None else {}
        except Exception as error:  # a peer may refuse
            if name != "cudnn":
                raise
            made[name] = Refusal(error)
    exact = lambda *arrays: run(ours(case, "xla"))(*jax.tree.map(_wide, arrays))
    with jax.default_matmul_precision("highest"):
        return made | {"exact": jax.jit(exact).lower(*arrays)}


@dataclasses.dataclass(frozen=True)
class Refusal:
    """In a way's place: why it cannot be compiled."""

    error: Exception

    def compile(self) -> None:
        """Raises it."""
        raise self.error


def _wide(array: jax.Array) -> jax.Array:
    return array.astype(jnp.float32) if jnp.issubdtype(array.dtype, jnp.floating) else array


def inputs(case: Case) -> tuple[Any, jax.Array, jax.Array, masks.Mask | None]:
    """The layer's parameters, what it reads, the gradient of what it writes, and its mask."""
    q_heads, _, head_dim = case.heads
    lead = (len(case.lens), case.lens[0]) if case.is_batch else (sum(case.lens),)
    shape = (*lead, q_heads * head_dim)
    x, weights = (jax.random.normal(jax.random.key(n), shape, jnp.bfloat16) for n in (1, 2))
    return nnx.state(Layer(case.heads, rngs=nnx.Rngs(0))), x, weights, case.mask()


def passes(
    graph: Any, attend: Attend, state: Any, x: jax.Array, weights: jax.Array, mask: masks.Mask | None
) -> tuple[jax.Array, tuple[Any, jax.Array]]:
    """Forward and backward: the layer's output, and the gradients of its weights and of what it reads."""
    run = lambda state, x: nnx.merge(graph, state)(x, functools.partial(attend, mask=mask))
    out, pull = jax.vjp(run, state, x)
    return out, pull(weights)


def ours(case: Case, implementation: str | None = None) -> Attend:
    """jattn.attention, as the case has it."""
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
    """jax.nn's, where it can: documents are padded to the longest of them."""
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
    lens, longest = np.asarray(case.lens), -(-max(case.lens) // 128) * 128  # odd lengths are refused
    starts = np.cumsum(lens) - lens

    def padded(q: jax.Array, k: jax.Array, v: jax.Array, mask: None) -> jax.Array:
        behind = lambda x: jnp.pad(x, ((0, longest - len(x)), (0, 0), (0, 0)))
        pad = lambda x: jnp.stack([behind(x[s : s + n]) for s, n in zip(starts, lens, strict=True)])
        sizes = jnp.asarray(lens, jnp.int32)
        out = attend(pad(q), pad(k), pad(v), query_seq_lengths=sizes, key_value_seq_lengths=sizes)
        return jnp.concatenate([text[:n] for text, n in zip(out, lens, strict=True)])

    return padded


def measure(case: Case, runs: dict[str, concurrent.futures.Future[Any]]) -> dict[str, Any]:
    """Device time of the layer's two passes, each way in turn: a GPU that grows hot is slower for all."""
    arrays = jax.jit(functools.partial(inputs, case))()
    want = runs["exact"].result()(*arrays)
    lost = largest_error(runs["xla"].result()(*arrays), want)
    found: dict[str, Any] = {"name": case.name, "xla_error": f"{lost:.5f}"}
    ways: dict[str, Any] = {}
    for name in (name for name in ("ours", "cudnn") if name in runs):
        try:
            ways[name] = run = runs[name].result()
            error = largest_error(run(*arrays), want)
            rule = f"be at most {TOLERANCE} times {lost:.2g}, as XLA's"
            require(error <= TOLERANCE * lost, f"the largest error of {name}", rule, error)
        except Exception as error:  # a peer may fail
            if name == "ours":
                raise
            ways.pop(name, None)
            found[name] = f"{type(error).__name__}: {error}"[:200]
            continue
        found[_key(name, "error")] = f"{error:.5f}"
    timed = lambda: {name: kernel_times(run, *arrays, iterations=4)[1] for name, run in ways.items()}
    rounds = [timed() for _ in range(ROUNDS)]
    for name in ways:
        found |= {_key(name, key): x for key, x in middle([times[name] for times in rounds]).items()}
    return found


def _key(name: str, key: str) -> str:
    return key if name == "ours" else f"{name}_{key}"


def middle(times: list[dict[str, Any]]) -> dict[str, Any]:
    """The round of the median time, and the fastest and the slowest of all rounds."""
    one = sorted(times, key=lambda time: time["us"])[len(times) // 2]
    spread = [min(time["spread_us"][0] for time in times), max(time["spread_us"][1] for time in times)]
    kernels = one["kernels_us"]
    return {
        "us": one["us"],
        "spread_us": spread,
        "attention_us": attention_us(kernels),
        "kernels_us": kernels,
    }


def attention_us(kernels: dict[str, float]) -> float:
    """What is not the projections' products; cuDNN's kernels may name pieces of cutlass."""
    is_of_products = lambda name: any(part in name for part in ("nvjet", "gemm", "cutlass", "cublas"))
    is_product = lambda name: is_of_products(name) and "cudnn" not in name
    return sum(us for name, us in kernels.items() if not is_product(name))


@jax.jit
def _errors(got: Any, want: Any) -> list[jax.Array]:
    def apart(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        return jnp.where(jnp.isnan(a), jnp.inf, jnp.abs(a - b)).max() / jnp.abs(b).max()

    return jax.tree.leaves(jax.tree.map(apart, got, want))


def largest_error(got: Any, want: Any) -> float:
    """Of output and gradients, each by its largest number."""
    return max(map(float, _errors(got, want)))
