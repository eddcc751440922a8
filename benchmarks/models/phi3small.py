"""Phi-3-small at its own widths: a decode step and a prompt at 32k, beside the same weights made dense."""

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
from benchmarks.models.graphs import Call, kind, walls
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
CHECKED_LAYERS, CHECKED_TOKENS = 2, 3000  # one sparse, one dense; far beyond the 1,024 local tokens
ATTENTION = ("paged_decode", "varlen_prefill")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `python -m benchmarks phi3small` takes."""
    parser.add_argument("cases", nargs="*", help="of decode, prefill, alone; default the first two")
    parser.add_argument("--layers", type=int, default=PHI3_SMALL["num_hidden_layers"])
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--batch", type=int, default=BATCH, help="of decode; a prompt is one request")
    parser.add_argument("--out", help="folder of the rows")


def main(arguments: argparse.Namespace) -> None:
    """The check, then a row for each model and case, and one that compares the two models."""
    rows = Rows("phi3small", arguments.out)
    steps = {
        "decode": Step([1] * arguments.batch, [arguments.context] * arguments.batch),
        "prefill": Step([arguments.context], [arguments.context]),
    }
    if "alone" in arguments.cases:
        alone(rows, steps["prefill"])
    chosen = {name: steps[name] for name in arguments.cases or steps if name in steps}
    if not chosen:
        return
    rows.add(name="check", layers=CHECKED_LAYERS, tokens=CHECKED_TOKENS, **agreement(CHECKED_TOKENS))
    sparse = random_decoder(PHI3_SMALL | {"num_hidden_layers": arguments.layers})
    models = {"dense": made_dense(sparse), "sparse": sparse}
    caches = sparse.create_caches(1 + max(one.num_blocks for one in chosen.values()), block_size=BLOCK_SIZE)
    runs = compiled(models, chosen, caches)
    for name, step in chosen.items():
        measured = {}
        for which in models:
            call = Call(runs[which, name], caches)
            measured[which] = row = times(call, rounds=8 if name == "decode" else 3)
            caches = call.caches
            rows.add(name=f"{name}_{which}", **step.sizes, layers=arguments.layers, **row)
        rows.add(name=f"{name}_compared", **step.sizes, **compared(measured, step))


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
        """What its rows say of it."""
        return {"batch": len(self.seq_lens), "context": self.seq_lens[0], "tokens": sum(self.query_lens)}

    @property
    def num_blocks(self) -> int:
        """Of all requests."""
        return sum(-(-length // BLOCK_SIZE) for length in self.seq_lens)

    def metadata(self) -> jattn.BatchMetadata:
        """The step's, over shuffled blocks."""
        table = np.random.default_rng(0).permutation(self.num_blocks).reshape(len(self.seq_lens), -1) + 1
        return jattn.build_batch_metadata(self.query_lens, self.seq_lens, table, block_size=BLOCK_SIZE)


def made_dense(model: Decoder) -> Decoder:
    """The same weights with all layers dense."""
    config = DecoderConfig.from_hf(model.config.to_hf() | DENSE)
    graph = nnx.graphdef(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=model.dtype)))
    return nnx.merge(graph, nnx.state(model))


def alone(rows: Rows, step: Step) -> None:
    """A prompt's attention without the model: one call after the other, and each behind so many products.

    Those take what the model's MLPs take: the device's clock sinks while they run, and has not risen again
    when the attention behind them begins.
    """
    config = DecoderConfig.from_hf(PHI3_SMALL)
    metadata = step.metadata()
    width, inner = config.hidden_size, 2 * PHI3_SMALL["ff_intermediate_size"]
    draw = lambda key, *shape: jax.random.normal(jax.random.key(key), shape, jnp.bfloat16)
    x, up, down = (
        draw(0, step.query_lens[0], width),
        0.01 * draw(1, width, inner),
        0.01 * draw(2, inner, width),
    )
    query = draw(3, step.query_lens[0], config.num_attention_heads, config.head_dim)
    shape = (1 + step.num_blocks, BLOCK_SIZE, config.num_key_value_heads, config.head_dim)
    cache = jattn.PagedCache(k=draw(4, *shape), v=draw(5, *shape))
    medians: dict[tuple[str, int], float] = {}
    for (which, layer), products in itertools.product((("sparse", 0), ("dense", 1)), (0, 1, 4)):
        spec = config.attention_spec(layer)
        plan = jattn.plan(metadata, spec, cache)

        @jax.jit
        def run(x: Any, query: Any, cache: Any, plan: Any, spec: Any = spec, products: int = products) -> Any:
            for _ in range(products):
                x = (x @ up) @ down
            query, x = jax.lax.optimization_barrier((query, x))
            return jattn.attend(query, cache, metadata, spec, plan=plan, implementation="mosaic_gpu"), x

        _, taken = kernel_times(run, x, query, cache, plan, iterations=9)
        us = sum(us for name, us in taken["kernels_us"].items() if name.startswith(ATTENTION))
        medians[which, products] = us
        row = {"attention_us": us, "all_us": taken["us"], "products": 2 * products}
        rows.add(name=f"alone_{which}", **step.sizes, **row)
    density, _ = densities(step)
    for products in (0, 1, 4):
        cost = medians["sparse", products] / medians["dense", products]
        rows.add(name="alone_compared", products=2 * products, density=density, cost=cost, of=cost / density)


def step_of(graph: Any) -> Callable[..., Any]:
    """A step as a function of parameters, caches, tokens and metadata; the caches are donated."""

    def run(params: Any, caches: Any, tokens: jax.Array, metadata: jattn.BatchMetadata) -> Any:
        model = nnx.merge(graph, params)
        hidden, caches = model(tokens, caches, metadata, plan=model.plan(metadata, caches))
        return model.logits(hidden[metadata.last_token_indices]), caches

    return jax.jit(run, donate_argnums=1)


def tokens_of(metadata: jattn.BatchMetadata) -> jax.Array:
    """Random ones."""
    return jax.random.randint(jax.random.key(1), (metadata.bucket.max_tokens,), 0, 100000)


def compiled(models: dict[str, Decoder], steps: dict[str, Step], caches: Any) -> dict[Any, Any]:
    """Each model's step of each case as a function of the caches, compiled side by side."""

    def make(which: str, name: str) -> Callable[[Any], Any]:
        graph, params = nnx.split(models[which])
        metadata = steps[name].metadata()
        rest = tokens_of(metadata), metadata
        run = step_of(graph).lower(params, caches, *rest).compile()
        return lambda caches: run(params, caches, *rest)

    names = [(which, name) for which in models for name in steps]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(lambda pair: make(*pair), names), strict=True))


def times(call: Call, rounds: int) -> dict[str, Any]:
    """Of a step: in flight, the sum of its kernels, and the attention of each layer in microseconds."""
    flights = walls(call, rounds=rounds)
    _, runs = profiler.measure(call, aggregate=False, iterations=3)()
    totals = [1e3 * sum(ms for _, ms in run) for run in runs]
    attention: list[list[float]] = []
    for run in runs:
        layers: list[float] = []
        for kernel, ms in run:  # in the order of the layers; a combine kernel belongs to the decode before it
            if kernel.startswith(ATTENTION):
                if "combine" in kernel:
                    layers[-1] += 1e3 * ms
                else:
                    layers.append(1e3 * ms)
        attention.append(layers)
    return {
        "in_flight_us": flights["in_flight_us"],
        "kernel_sum_us": statistics.median(totals),
        "attention_us": [round(statistics.median(of), 1) for of in zip(*attention, strict=True)],
        "kernels": sorted({kind(kernel) for kernel, _ in runs[0]}),
    }


def compared(measured: dict[str, dict[str, Any]], step: Step) -> dict[str, Any]:
    """A block-sparse layer's attention over a dense one's, beside the share of keys that it reads."""
    dense = statistics.median(measured["dense"]["attention_us"])
    sparse = statistics.median(measured["sparse"]["attention_us"][::2])  # each second layer is dense
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
    """Visible pairs over the causal ones; the same of pairs that some query head of a kv head sees.

    The latter is what decode reads: a kv head's keys are read once for all its query heads. In a prompt
    each query head has a list of its own, and the two are one.
    """
    config = DecoderConfig.from_hf(PHI3_SMALL)
    mask = config.attention_spec(0).sparsity
    heads = config.num_attention_heads, config.num_key_value_heads
    assert mask is not None
    length = step.seq_lens[0]
    if step.query_lens[0] > 1:
        density = masks.density(mask, length, length, num_q_heads=heads[0], num_kv_heads=heads[1])
        return density, density
    at = lambda *shape: jnp.zeros(shape, jnp.int32)
    keys, head = jnp.arange(length)[None, :], jnp.arange(heads[0])[:, None]
    visible = mask.visible(Pairs(head, at(1, 1), at(1, 1) + length - 1, keys, heads, False))
    visible = np.broadcast_to(visible, (heads[0], length))
    return float(visible.mean()), float(visible.reshape(heads[1], -1, length).any(axis=1).mean())


def agreement(tokens: int) -> dict[str, float]:
    """Errors of the logits of a prompt and of the token behind it, by kernels and by XLA, against f32.

    Raises:
        SystemExit: The kernels' is more than twice XLA's.
    """
    model = random_decoder(PHI3_SMALL | {"num_hidden_layers": CHECKED_LAYERS})
    wide = nnx.clone(model)
    nnx.update(wide, jax.tree.map(lambda x: x.astype(jnp.float32), nnx.state(wide)))
    prompt = Step([tokens], [tokens])
    behind = Step([1], [tokens])  # its last token once more, as decode computes it
    errors = {}

    def logits(model: Decoder, implementation: str) -> np.ndarray:
        graph, params = nnx.split(with_implementation(model, (implementation,)))
        caches = model.create_caches(1 + prompt.num_blocks, block_size=BLOCK_SIZE)
        run, ids, out = step_of(graph), tokens_of(prompt.metadata()), []
        for step in (prompt, behind):
            metadata = step.metadata()
            own = ids if step is prompt else jnp.full((metadata.bucket.max_tokens,), ids[tokens - 1])
            found, caches = run(params, caches, own, metadata)
            out.append(np.asarray(found[0]))
        return np.stack(out)

    exact = logits(wide, "xla")
    for implementation in ("mosaic_gpu", "xla"):
        off = np.abs(logits(model, implementation) - exact).max(axis=1)
        errors[implementation] = off / np.abs(exact).max(axis=1)
    if not (errors["mosaic_gpu"] <= 2 * errors["xla"]).all():
        raise SystemExit(f"the kernels' logits are {errors} off f32's: no rows")
    return {
        f"{case}_error_{name}": float(errors[name][i])
        for i, case in enumerate(("prefill", "decode"))
        for name in errors
    }
