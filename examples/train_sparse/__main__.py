"""Train the tiny model with dense, sliding-window, MoBA-, NSA- and DSA-like attention, and decode with each.

python -m examples.train_sparse --out DIR

Writes rows.jsonl (one row per pattern), losses.json, loss.png (over tokens and time), decode.png (held-out
bits by position, for full sequences and for decode with the paged cache) and masks.png (of the middle layer,
during training). Needs optax and jattn[models,plot]; takes minutes on one GPU. For a quick run:
`--steps 4 --tokens 64 --batch 2`.
"""

import argparse
import functools
import json
import pathlib
import sysconfig
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]

from examples.python_sources import line_starts, read_sources
from examples.train_sparse import plots
from examples.train_sparse.model import Params, bits, cached_bits, generate, init, run_layers, training_loss
from examples.train_sparse.patterns import PATTERNS, Pattern
from examples.train_tiny import HF_CONFIG, LEARNING_RATE, learning_rate, make_optimizer
from jattn.models import DecoderConfig

PROMPT = "def main(argv=None):\n    parser ="
NUM_HELD_OUT = 4  # sequences


def train(
    config: DecoderConfig, windows: np.ndarray, pattern: Pattern, options: Any
) -> tuple[Any, Params, dict[str, list[float]], list[np.ndarray]]:
    """Train a pattern; return the graph, parameters, history of all steps, and masks at some steps."""
    graph, params = init(config, options.seed)
    optimizer = make_optimizer()
    state = params, optimizer.init(params)

    def loss_fn(params: Params, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        return training_loss(graph, in_16_bits(params), batch, pattern)

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state: Any, batch: jax.Array, rate: jax.Array) -> tuple[Any, jax.Array]:
        params, moments = state
        (_, loss), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        updates, moments = optimizer.update(grads, moments, params)
        updates = jax.tree.map(lambda update: -rate * update, updates)
        return (optax.apply_updates(params, updates), moments), loss

    history: dict[str, list[float]] = {"tokens": [], "seconds": [], "bits": []}
    compute_mask = jax.jit(functools.partial(middle_layer_mask, graph, pattern=pattern))
    first_tokens = jnp.asarray(windows[0][:1, :-1])
    masks: list[np.ndarray] = []
    seconds = 0.0
    for i in range(options.steps):
        batch = jnp.asarray(windows[i])
        progress = max(i / options.steps, seconds / (options.seconds or np.inf))
        if progress >= len(masks) / (plots.NUM_STAGES - 1) and len(masks) < plots.NUM_STAGES - 1:
            masks.append(np.asarray(compute_mask(state[0], first_tokens)))
        if progress >= 1:
            break
        start = time.perf_counter()
        state, loss = update(state, batch, jnp.float32(learning_rate(progress, LEARNING_RATE)))
        history["bits"].append(float(loss))
        seconds += time.perf_counter() - start if i else 0.0  # the first step compiles
        history["tokens"].append((i + 1) * batch[:, 1:].size)
        history["seconds"].append(seconds)
    masks.append(np.asarray(compute_mask(state[0], first_tokens)))
    return graph, state[0], history, masks


def in_16_bits(params: Params) -> Params:
    """Cast parameters to bf16 on a GPU, whose kernels support only 16-bit dtypes."""
    if jax.default_backend() == "cpu":
        return params
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)


def middle_layer_mask(graph: Any, params: Params, tokens: jax.Array, pattern: Pattern) -> jax.Array:
    """Return the mask of the middle layer's first head, [queries, keys]."""
    _, _, layers = run_layers(graph, in_16_bits(params), tokens, pattern)
    q, k, selection = layers[len(layers) // 2]
    return plots.first_head_mask(pattern.mask(q, k, selection), q.shape[1], q.shape[2], k.shape[2])


def held_out_bits(graph: Any, params: Params, texts: jax.Array, pattern: Pattern) -> dict[str, np.ndarray]:
    """Return the bits of each held-out token [batch, tokens], for full sequences and for cached decode."""
    results = {}
    for name, function in {"whole": bits, "cached": cached_bits}.items():
        compute_bits = jax.jit(functools.partial(function, graph, pattern=pattern))
        results[name] = np.asarray(compute_bits(in_16_bits(params), texts), np.float32)
    return results


def summarize(name: str, history: dict[str, list[float]], held_out: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return the summary of a pattern's training."""
    steps = len(history["bits"])
    ms = 1e3 * history["seconds"][-1] / max(steps - 1, 1)
    cost = {"steps": steps, "tokens": history["tokens"][-1], "ms_per_step": ms}
    means = {f"held_out_bits_{run}": float(x.mean()) for run, x in held_out.items()}
    largest_difference = float(np.abs(held_out["whole"] - held_out["cached"]).max())
    train_bits = float(np.mean(history["bits"][-20:]))
    numbers = {"train_bits": train_bits, **means, "largest_difference": largest_difference, **cost}
    rounded = {key: round(x, 4) if isinstance(x, float) else x for key, x in numbers.items()}
    return {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "pattern": name} | rounded


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_sparse", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, help="output directory")
    parser.add_argument(
        "--data", default=sysconfig.get_path("stdlib"), help="directory of Python source files"
    )
    parser.add_argument("--steps", type=int, default=1000, help="maximum number of steps [%(default)s]")
    parser.add_argument(
        "--seconds", type=float, default=12, help="maximum training time per pattern [%(default)s]"
    )
    parser.add_argument("--batch", type=int, default=32, help="sequences per step [%(default)s]")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens per sequence [%(default)s]")
    parser.add_argument(
        "--layers", type=int, default=HF_CONFIG["num_hidden_layers"], help="number of layers [%(default)s]"
    )
    parser.add_argument(
        "--patterns", nargs="+", default=list(PATTERNS), choices=PATTERNS, help="patterns to train [all]"
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed [%(default)s]")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    config = DecoderConfig.from_hf(HF_CONFIG | {"num_hidden_layers": options.layers})
    stream, held_out_stream = read_sources(pathlib.Path(options.data))
    rng = np.random.default_rng(options.seed)
    starts = rng.choice(line_starts(stream), (options.steps, options.batch, 1))
    windows = stream[starts + np.arange(options.tokens + 1)]  # the same for every pattern
    prompt = jnp.asarray([*PROMPT.encode()], jnp.int32)
    texts = jnp.asarray(np.resize(held_out_stream, (NUM_HELD_OUT, options.tokens + 1)))
    histories, stage_masks, held_out = {}, {}, {}
    for name in options.patterns:
        graph, params, histories[name], stage_masks[name] = train(config, windows, PATTERNS[name], options)
        generated = generate(graph, in_16_bits(params), prompt, 40, PATTERNS[name])
        text = bytes(np.minimum(np.asarray(generated), 255).tolist()).decode(errors="replace")
        seconds, last = histories[name]["seconds"][-1], np.mean(histories[name]["bits"][-20:])
        print(f"--- {name}: {last:.3f} bits per byte after {seconds:.0f} s\n{text}", flush=True)
        held_out[name] = held_out_bits(graph, params, texts, PATTERNS[name])
        row = summarize(name, histories[name], held_out[name])
        print(json.dumps(row), flush=True)
        with (options.out / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        save(options.out, histories, held_out, stage_masks)


def save(
    out: pathlib.Path,
    histories: dict[str, dict[str, list[float]]],
    held_out: dict[str, dict[str, np.ndarray]],
    stage_masks: dict[str, list[np.ndarray]],
) -> None:
    """Save the losses and plots of all patterns so far, so that an interrupted run has results."""
    (out / "losses.json").write_text(json.dumps(histories) + "\n")
    plots.draw_losses(histories).savefig(out / "loss.png", dpi=110)
    plots.draw_held_out(held_out).savefig(out / "decode.png", dpi=110)
    plots.draw_masks(stage_masks).savefig(out / "masks.png", dpi=110)


if __name__ == "__main__":
    main()
