"""Mixture of experts of one layer: kernel time, router included, beside the bytes of the selected experts."""

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
    why_not_expert_kernel,
)
from jattn.models.experts import Experts
from jattn.models.routing import Routing

TOKENS = (1, 4, 16, 64, 256, 512, 1024, 2048, 8192)
NUM_CHECKED = 16  # tokens whose output is compared with float32
# Methods of computing the experts, and the largest number of tokens for which each is measured.
METHODS = ((run_rows, 64), (run_all_experts, 2048), (run_tiles_mosaic, 2**30), (run_tiles_xla, 2**30))


@dataclasses.dataclass(frozen=True)
class Shape:
    """Arguments of `Experts` for one model."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    experts_per_token: int
    routing: Routing
    activation: str | ClampedSwiGLU = "silu"
    use_bias: bool = False

    def create_layer(self) -> Experts:
        """Create a layer with random parameters."""
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
    """Add the options of `python -m benchmarks experts`."""
    parser.add_argument("case", nargs="*", choices=[*SHAPES, []], help="Models. Default: all.")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help="Numbers of tokens.")
    parser.add_argument(
        "--beside-transformers",
        action="store_true",
        help="Compare models of two layers with transformers instead.",
    )
    parser.add_argument("--out", help="Directory for the result rows.")


def main(arguments: argparse.Namespace) -> None:
    """Measure every shape, number of tokens and method, with random tokens and with equal tokens."""
    if arguments.beside_transformers:
        experts_peers.main(arguments.case or [*SHAPES], arguments.out)
        return
    rows = Rows("experts", arguments.out)
    ceiling = read_ceiling()
    rows.add(name="read_ceiling", gb_per_s=ceiling)
    for name in arguments.case or SHAPES:
        layer = SHAPES[name].create_layer()
        for tokens, choice in itertools.product(arguments.tokens, ("random", "alike")):
            for method in [method for method, max_tokens in METHODS if tokens <= max_tokens]:
                try:
                    row = measure(layer, SHAPES[name], tokens, choice, method)
                except Exception as error:  # continue with the other rows
                    print(f"{name} {tokens} {choice}: {type(error).__name__}: {error}"[:500], flush=True)
                    continue
                rows.add(name=name, tokens=tokens, choice=choice, **row, of_ceiling=row["gb_per_s"] / ceiling)


def measure(layer: Experts, shape: Shape, tokens: int, choice: str, method: Any) -> dict[str, Any]:
    """Return a row: time, router included, and the rate at which the selected experts' weights are read.

    Args:
        layer: Layer to measure.
        shape: Shape of the layer.
        tokens: Number of tokens.
        choice: "random" for random tokens, "alike" for equal tokens, which select the same experts.
        method: Function that computes the experts.
    """
    x = jax.random.normal(jax.random.key(tokens), (tokens, shape.hidden_size), jnp.bfloat16)
    x = x if choice == "random" else jnp.broadcast_to(x[:1], x.shape)
    graph, state = nnx.split(layer)

    @jax.jit
    def run(state: Any, x: jax.Array) -> jax.Array:
        layer = nnx.merge(graph, state)
        statics = ExpertStatics(layer.activation, layer.precision)
        return method(x, layer.route(x), layer.weights(), statics).astype(x.dtype)

    memory = run.lower(state, x).compile().memory_analysis()
    out, time = kernel_times(run, state, x)
    check(layer, x, out)
    _, selected = jax.lax.top_k(layer.router_logits(x), shape.experts_per_token)
    num_selected = len(np.unique(np.asarray(selected)))
    expert_bytes = sum(array.nbytes for array in jax.tree.leaves(state)) // shape.num_experts
    flops = 6 * tokens * shape.experts_per_token * shape.hidden_size * shape.intermediate_size
    default_method = select_method(
        num_tokens=tokens,
        num_selected=shape.experts_per_token,
        num_experts=shape.num_experts,
        has_kernel=why_not_expert_kernel(x, layer.weights()) is None,
    )
    return {
        "way": method.__name__,
        "is_taken": default_method is method,
        **time,
        "num_touched": num_selected,
        "gb_per_s": num_selected * expert_bytes / time["us"] / 1e3,
        "tflop_per_s": flops / time["us"] / 1e6,
        "temp_mb": memory.temp_size_in_bytes / 1e6,
    }


def check(layer: Experts, x: jax.Array, out: jax.Array) -> None:
    """Check that the outputs of some tokens agree with float32 within the rounding of 16 bits.

    Raises:
        AssertionError: They do not agree.
    """
    rows = np.linspace(0, len(x) - 1, min(NUM_CHECKED, len(x))).astype(int)
    float32_state = jax.tree.map(lambda array: array.astype(jnp.float32), nnx.state(layer))
    reference = nnx.merge(nnx.graphdef(layer), float32_state)
    reference.precision = "highest"
    # Chunks that select fewer experts than the layer has are computed row by row.
    chunk = max(1, (layer.down_proj.weight.shape[0] - 1) // layer.experts_per_token)
    outputs = [reference(x[rows[i : i + chunk]].astype(jnp.float32)) for i in range(0, len(rows), chunk)]
    expected = np.concatenate([np.asarray(output) for output in outputs])
    actual = np.asarray(out.astype(jnp.float32))[rows]
    assert np.abs(actual - expected).max() <= 2**-6 * np.abs(expected).max()
