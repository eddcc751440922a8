"""A layer's mixture of experts: kernel time, router included, against the bytes of the touched experts."""

import argparse
import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.kernels import experts_peers
from benchmarks.runner import Rows, kernel_times, read_ceiling
from jattn.models.activations import ClampedSwiGLU
from jattn.models.expert_matmuls import (
    ExpertStatics,
    run_all_experts,
    run_rows,
    run_tiles_mosaic,
    run_tiles_xla,
    select_method,
    why_no_kernel,
)
from jattn.models.experts import Experts
from jattn.models.routing import Routing

TOKENS = (1, 4, 16, 64, 256, 512, 1024, 2048, 8192)
CHECKED = 16  # tokens that are computed again, in f32
# Each way of computing them, up to how many tokens.
WAYS = ((run_rows, 64), (run_all_experts, 2048), (run_tiles_mosaic, 2**30), (run_tiles_xla, 2**30))


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model's experts, by `Experts`' own names."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    experts_per_token: int
    routing: Routing
    activation: str | ClampedSwiGLU = "silu"
    use_bias: bool = False

    def make(self) -> Experts:
        """A layer with random parameters."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return Experts(**fields, rngs=nnx.Rngs(0), dtype=jnp.bfloat16)


SHAPES = {
    "qwen3_30b_a3b": Shape(2048, 768, 128, 8, Routing(renormalize=True)),
    "gpt_oss_20b": Shape(
        2880,
        2880,
        32,
        4,
        Routing(scores="softmax_of_top_k", has_bias=True),
        activation=ClampedSwiGLU(),
        use_bias=True,
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `python -m benchmarks experts` takes."""
    parser.add_argument("case", nargs="*", choices=[*SHAPES, []], help="all of them if none is named")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument(
        "--beside-transformers", action="store_true", help="models of two layers, and no other rows"
    )
    parser.add_argument("--out", help="folder of the rows")


def main(arguments: argparse.Namespace) -> None:
    """Every shape, number of tokens and way: as a random router chooses, and all tokens alike."""
    if arguments.beside_transformers:
        experts_peers.main(arguments.case or [*SHAPES], arguments.out)
        return
    rows = Rows("experts", arguments.out)
    ceiling = read_ceiling()
    rows.add(name="read_ceiling", gb_per_s=ceiling)
    for name in arguments.case or SHAPES:
        layer = SHAPES[name].make()
        for tokens, choice in itertools.product(arguments.tokens, ("random", "alike")):
            for run in [run for run, most in WAYS if tokens <= most]:
                try:
                    row = measure(layer, SHAPES[name], tokens, choice, run)
                except Exception as error:  # the other rows still count
                    print(f"{name} {tokens} {choice}: {type(error).__name__}: {error}"[:500], flush=True)
                    continue
                rows.add(name=name, tokens=tokens, choice=choice, **row, of_ceiling=row["gb_per_s"] / ceiling)


def measure(layer: Experts, shape: Shape, tokens: int, choice: str, way_of: Any) -> dict[str, Any]:
    """A row: time, router included, and the rate at which the touched experts' bytes were read."""
    x = jax.random.normal(jax.random.key(tokens), (tokens, shape.hidden_size), jnp.bfloat16)
    x = x if choice == "random" else jnp.broadcast_to(x[:1], x.shape)
    graph, state = nnx.split(layer)

    @jax.jit
    def run(state: Any, x: jax.Array) -> jax.Array:
        layer = nnx.merge(graph, state)
        how = ExpertStatics(layer.activation, layer.precision)
        return way_of(x, layer.route(x), layer.weights(), how).astype(x.dtype)

    memory = run.lower(state, x).compile().memory_analysis()
    out, time = kernel_times(run, state, x)
    check(layer, x, out)
    _, chosen = jax.lax.top_k(layer.router_logits(x), shape.experts_per_token)
    num_touched = len(np.unique(np.asarray(chosen)))
    expert_bytes = sum(array.nbytes for array in jax.tree.leaves(state)) // shape.num_experts
    flops = 6 * tokens * shape.experts_per_token * shape.hidden_size * shape.intermediate_size
    sizes = {"num_selected": shape.experts_per_token, "num_experts": shape.num_experts}
    has_kernel = why_no_kernel(x, layer.weights()) is None
    return {
        "way": way_of.__name__,
        "is_taken": select_method(num_tokens=tokens, **sizes, has_kernel=has_kernel) is way_of,
        **time,
        "num_touched": num_touched,
        "gb_per_s": num_touched * expert_bytes / time["us"] / 1e3,
        "tflop_per_s": flops / time["us"] / 1e6,
        "temp_mb": memory.temp_size_in_bytes / 1e6,
    }


def check(layer: Experts, x: jax.Array, out: jax.Array) -> None:
    """Some tokens, computed again in f32 and each by its own experts, must agree within 16 bits' rounding."""
    some = np.linspace(0, len(x) - 1, min(CHECKED, len(x))).astype(int)
    wide = jax.tree.map(lambda array: array.astype(jnp.float32), nnx.state(layer))
    # Fewer rows than experts are computed one by one.
    precise = nnx.merge(nnx.graphdef(layer), wide)
    precise.precision = "highest"
    step = max(1, (layer.down_proj.weight.shape[0] - 1) // layer.experts_per_token)
    parts = [precise(x[some[i : i + step]].astype(jnp.float32)) for i in range(0, len(some), step)]
    want, got = (
        np.concatenate([np.asarray(part) for part in parts]),
        np.asarray(out.astype(jnp.float32))[some],
    )
    assert np.abs(got - want).max() <= 2**-6 * np.abs(want).max()
