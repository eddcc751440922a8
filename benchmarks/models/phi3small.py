"""Phi-3-small: a decode step and a prompt of 32k tokens, beside the same weights with dense attention."""

import argparse
import concurrent.futures
import itertools
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.mosaic.gpu import profiler

import jattn
from benchmarks.models.graphs import Call, call_times, kernel_kind
from benchmarks.models.random_decoder import random_decoder
from benchmarks.runner import Rows, kernel_times
from jattn import masks
from jattn.masks import Pairs
from jattn.models.config import DecoderConfig
from jattn.models.decoder import Decoder
from jattn.serving.engine.step import with_implementation

PHI3_SMALL = {
    "architectures": ["Phi3SmallForCausalLM"],
    "model_type": "phi3small",
    "vocab_size": 100352,
    "hidden_size": 4096,
    "ff_intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "mup_width_multiplier": 8.0,
    "torch_dtype": "bfloat16",
}
DENSE = {"dense_attention_every_n_layers": 1}
BLOCK_SIZE, BATCH, CONTEXT = 64, 8, 32768
CHECKED_LAYERS, CHECKED_TOKENS = 2, 3000  # a sparse and a dense layer; more tokens than the 1,024 local ones
ATTENTION = ("paged_decode", "varlen_prefill")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks phi3small`."""
    parser.add_argument(
        "cases", nargs="*", help="Cases to run, of decode, prefill, alone. Default: decode prefill."
    )
    parser.add_argument(
        "--layers", type=int, default=PHI3_SMALL["num_hidden_layers"], help="Number of layers."
    )
    parser.add_argument("--context", type=int, default=CONTEXT, help="Tokens per request.")
    parser.add_argument("--batch", type=int, default=BATCH, help="Requests of the case decode.")
    parser.add_argument("--out", help="Directory for the result rows.")


def main(arguments: argparse.Namespace) -> None:
    """Check the logits, then record a row for each model and case, and a comparison of the two models."""
    rows = Rows("phi3small", arguments.out)
    steps = {
        "decode": Step([1] * arguments.batch, [arguments.context] * arguments.batch),
        "prefill": Step([arguments.context], [arguments.context]),
    }
    if "alone" in arguments.cases:
        measure_attention_alone(rows, steps["prefill"])
    steps = {name: steps[name] for name in arguments.cases or steps if name in steps}
    if not steps:
        return
    rows.add(name="check", layers=CHECKED_LAYERS, tokens=CHECKED_TOKENS, **agreement(CHECKED_TOKENS))
    sparse = random_decoder(PHI3_SMALL | {"num_hidden_layers": arguments.layers})
    models = {"dense": with_dense_attention(sparse), "sparse": sparse}
    num_blocks = 1 + max(step.num_blocks for step in steps.values())
    caches = sparse.create_caches(num_blocks, block_size=BLOCK_SIZE)
    runs = compile_steps(models, steps, caches)
    for name, step in steps.items():
        measured = {}
        for model_name in models:
            call = Call(runs[model_name, name], caches)
            measured[model_name] = row = step_times(call, rounds=8 if name == "decode" else 3)
            caches = call.caches
            rows.add(name=f"{name}_{model_name}", **step.sizes, layers=arguments.layers, **row)
        rows.add(name=f"{name}_compared", **step.sizes, **compare_models(measured, step))


class Step(NamedTuple):
    """One step of the model.

    Attributes:
        query_lens: New tokens of each request.
        seq_lens: Tokens of each request, the new ones included.
    """

    query_lens: list[int]
    seq_lens: list[int]

    @property
    def sizes(self) -> dict[str, int]:
        """Return the columns that describe the step."""
        return {"batch": len(self.seq_lens), "context": self.seq_lens[0], "tokens": sum(self.query_lens)}

    @property
    def num_blocks(self) -> int:
        """Return the number of cache blocks of all requests."""
        return sum(-(-length // BLOCK_SIZE) for length in self.seq_lens)

    def metadata(self) -> jattn.BatchMetadata:
        """Return the step's metadata, with blocks in random order."""
        table = np.random.default_rng(0).permutation(self.num_blocks).reshape(len(self.seq_lens), -1) + 1
        return jattn.build_batch_metadata(self.query_lens, self.seq_lens, table, block_size=BLOCK_SIZE)


def with_dense_attention(model: Decoder) -> Decoder:
    """Return a model with the same weights and dense attention in all layers."""
    config = DecoderConfig.from_hf(model.config.to_hf() | DENSE)
    graph = nnx.graphdef(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=model.dtype)))
    return nnx.merge(graph, nnx.state(model))


def measure_attention_alone(rows: Rows, step: Step) -> None:
    """Record the attention time of a prompt outside the model, directly and after matrix products.

    The products take as long as the model's MLPs. They lower the clock of the device, and the attention that
    follows them starts before the clock has risen again.
    """
    config = DecoderConfig.from_hf(PHI3_SMALL)
    metadata = step.metadata()
    width, inner = config.hidden_size, 2 * PHI3_SMALL["ff_intermediate_size"]

    def draw(seed: int, *shape: int) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)

    x = draw(0, step.query_lens[0], width)
    up, down = 0.01 * draw(1, width, inner), 0.01 * draw(2, inner, width)
    query = draw(3, step.query_lens[0], config.num_attention_heads, config.head_dim)
    shape = (1 + step.num_blocks, BLOCK_SIZE, config.num_key_value_heads, config.head_dim)
    cache = jattn.PagedCache(k=draw(4, *shape), v=draw(5, *shape))
    medians: dict[tuple[str, int], float] = {}
    for (layer_name, layer), products in itertools.product((("sparse", 0), ("dense", 1)), (0, 1, 4)):
        spec = config.attention_spec(layer)
        plan = jattn.plan(metadata, spec, cache)

        @jax.jit
        def run(x: Any, query: Any, cache: Any, plan: Any, spec: Any = spec, products: int = products) -> Any:
            for _ in range(products):
                x = (x @ up) @ down
            query, x = jax.lax.optimization_barrier((query, x))
            return jattn.attend(query, cache, metadata, spec, plan=plan, implementation="mosaic_gpu"), x

        _, times = kernel_times(run, x, query, cache, plan, iterations=9)
        us = sum(us for name, us in times["kernels_us"].items() if name.startswith(ATTENTION))
        medians[layer_name, products] = us
        row = {"attention_us": us, "all_us": times["us"], "products": 2 * products}
        rows.add(name=f"alone_{layer_name}", **step.sizes, **row)
    density, _ = densities(step)
    for products in (0, 1, 4):
        cost = medians["sparse", products] / medians["dense", products]
        rows.add(name="alone_compared", products=2 * products, density=density, cost=cost, of=cost / density)


def jit_step(graph: Any) -> Callable[..., Any]:
    """Return a jitted step as a function of parameters, donated caches, tokens and metadata."""

    def run(params: Any, caches: Any, tokens: jax.Array, metadata: jattn.BatchMetadata) -> Any:
        model = nnx.merge(graph, params)
        hidden, caches = model(tokens, caches, metadata, plan=model.plan(metadata, caches))
        return model.logits(hidden[metadata.last_token_indices]), caches

    return jax.jit(run, donate_argnums=1)


def random_tokens(metadata: jattn.BatchMetadata) -> jax.Array:
    """Return random token ids for a step."""
    return jax.random.randint(jax.random.key(1), (metadata.bucket.max_tokens,), 0, 100000)


def compile_steps(models: dict[str, Decoder], steps: dict[str, Step], caches: Any) -> dict[Any, Any]:
    """Compile the steps of all models and cases in parallel.

    Returns:
        (model name, case) -> step as a function of the caches.
    """

    def compile_step(model_name: str, case: str) -> Callable[[Any], Any]:
        graph, params = nnx.split(models[model_name])
        metadata = steps[case].metadata()
        tokens = random_tokens(metadata)
        run = jit_step(graph).lower(params, caches, tokens, metadata).compile()
        return lambda caches: run(params, caches, tokens, metadata)

    names = [(model_name, case) for model_name in models for case in steps]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(lambda pair: compile_step(*pair), names), strict=True))


def step_times(call: Call, rounds: int) -> dict[str, Any]:
    """Return microseconds of a step: in flight, the sum of its kernels, and the attention of each layer."""
    in_flight_us = call_times(call, rounds=rounds)["in_flight_us"]
    _, runs = profiler.measure(call, aggregate=False, iterations=3)()
    totals = [1e3 * sum(ms for _, ms in run) for run in runs]
    attention: list[list[float]] = []
    for run in runs:
        layers: list[float] = []
        for kernel, ms in run:  # in layer order; a combine kernel belongs to the decode kernel before it
            if kernel.startswith(ATTENTION):
                if "combine" in kernel:
                    layers[-1] += 1e3 * ms
                else:
                    layers.append(1e3 * ms)
        attention.append(layers)
    return {
        "in_flight_us": in_flight_us,
        "kernel_sum_us": statistics.median(totals),
        "attention_us": [round(statistics.median(us), 1) for us in zip(*attention, strict=True)],
        "kernels": sorted({kernel_kind(kernel) for kernel, _ in runs[0]}),
    }


def compare_models(measured: dict[str, dict[str, Any]], step: Step) -> dict[str, Any]:
    """Return a block-sparse layer's attention time relative to a dense layer's, and its share of keys."""
    dense = statistics.median(measured["dense"]["attention_us"])
    sparse = statistics.median(measured["sparse"]["attention_us"][::2])  # every second layer is dense
    density, read = densities(step)
    return {
        "dense_layer_us": dense,
        "sparse_layer_us": sparse,
        "density": density,
        "read": read,
        "cost": sparse / dense,
        "cost_of_density": sparse / dense / density,
        "cost_of_read": sparse / dense / read,
        "step_speedup": measured["dense"]["in_flight_us"] / measured["sparse"]["in_flight_us"],
    }


def densities(step: Step) -> tuple[float, float]:
    """Return the density of the mask, and the share of keys that attention reads.

    Decode reads a kv head's key once if any of its query heads sees it. In prefill every query head has its
    own list of blocks, so the share that is read equals the density.
    """
    config = DecoderConfig.from_hf(PHI3_SMALL)
    mask = config.attention_spec(0).sparsity
    heads = config.num_attention_heads, config.num_key_value_heads
    assert mask is not None
    length = step.seq_lens[0]
    if step.query_lens[0] > 1:
        density = masks.density(mask, length, length, num_q_heads=heads[0], num_kv_heads=heads[1])
        return density, density
    keys, head = jnp.arange(length)[None, :], jnp.arange(heads[0])[:, None]
    request = jnp.zeros((1, 1), jnp.int32)
    visible = mask.visible(Pairs(head, request, request + length - 1, keys, heads, False))
    visible = np.broadcast_to(visible, (heads[0], length))
    return float(visible.mean()), float(visible.reshape(heads[1], -1, length).any(axis=1).mean())


def agreement(tokens: int) -> dict[str, float]:
    """Return the errors of a prompt's and a decode step's logits, by the kernels and by XLA, against float32.

    Args:
        tokens: Number of prompt tokens.

    Raises:
        SystemExit: An error of the kernels is more than twice that of XLA.
    """
    model = random_decoder(PHI3_SMALL | {"num_hidden_layers": CHECKED_LAYERS})
    float32_model = nnx.clone(model)
    nnx.update(float32_model, jax.tree.map(lambda x: x.astype(jnp.float32), nnx.state(float32_model)))
    prefill = Step([tokens], [tokens])
    decode = Step([1], [tokens])  # computes the last prompt token again
    errors = {}

    def logits(model: Decoder, implementation: str) -> np.ndarray:
        graph, params = nnx.split(with_implementation(model, (implementation,)))
        caches = model.create_caches(1 + prefill.num_blocks, block_size=BLOCK_SIZE)
        run, prompt_ids, step_logits = jit_step(graph), random_tokens(prefill.metadata()), []
        for step in (prefill, decode):
            metadata = step.metadata()
            last_id = jnp.full((metadata.bucket.max_tokens,), prompt_ids[tokens - 1])
            output, caches = run(params, caches, prompt_ids if step is prefill else last_id, metadata)
            step_logits.append(np.asarray(output[0]))
        return np.stack(step_logits)

    exact = logits(float32_model, "xla")
    for implementation in ("mosaic_gpu", "xla"):
        difference = np.abs(logits(model, implementation) - exact).max(axis=1)
        errors[implementation] = difference / np.abs(exact).max(axis=1)
    if not (errors["mosaic_gpu"] <= 2 * errors["xla"]).all():
        raise SystemExit(
            f"the kernels' logits differ from those in float32 by {errors}. No rows are recorded."
        )
    return {
        f"{case}_error_{name}": float(errors[name][i])
        for i, case in enumerate(("prefill", "decode"))
        for name in errors
    }
