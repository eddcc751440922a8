"""Trains the tiny model's recipe dense, windowed, MoBA-like and NSA-like on the same bytes, and decodes each.

python -m examples.train_sparse --out DIR

Writes rows.jsonl (a row for each pattern), losses.json, loss.png (against tokens and time), decode.png
(held-out bits by place: whole texts, and through the paged cache) and masks.png (of the middle layer, over
training). Needs optax and jattn[models,plot]; minutes on one GPU. To try it:
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
from examples.train_sparse import pictures
from examples.train_sparse.model import Params, bits, cached_bits, generate, hidden_of_texts, init
from examples.train_sparse.patterns import PATTERNS, Pattern
from examples.train_tiny import HF_CONFIG, LEARNING_RATE, learning_rate, make_optimizer
from jattn.models import DecoderConfig

PROMPT = "def main(argv=None):\n    parser ="
HELD_OUT = 4  # texts


def train(
    config: DecoderConfig, windows: np.ndarray, pattern: Pattern, options: Any
) -> tuple[Any, Params, dict[str, list[float]], list[np.ndarray]]:
    """The graph, the parameters, tokens and seconds and bits of each step, and the mask at a few of them."""
    graph, params = init(config, options.seed)
    optimizer = make_optimizer()
    state = params, optimizer.init(params)
    loss_of = lambda params, batch: bits(graph, in_16_bits(params), batch, pattern).mean()

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state: Any, batch: jax.Array, rate: jax.Array) -> tuple[Any, jax.Array]:
        params, moments = state
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, moments = optimizer.update(grads, moments, params)
        updates = jax.tree.map(lambda update: -rate * update, updates)
        return (optax.apply_updates(params, updates), moments), loss

    history: dict[str, list[float]] = {"tokens": [], "seconds": [], "bits": []}
    look = jax.jit(lambda params, text: seen_by_the_middle_layer(graph, params, text, pattern))
    masks: list[np.ndarray] = []
    seconds = 0.0
    for nth in range(options.steps):
        batch = jnp.asarray(windows[nth])
        progress = max(nth / options.steps, seconds / (options.seconds or np.inf))
        if progress >= len(masks) / (pictures.STAGES - 1) and len(masks) < pictures.STAGES - 1:
            masks.append(np.asarray(look(state[0], jnp.asarray(windows[0][:1, :-1]))))
        if progress >= 1:
            break
        begin = time.perf_counter()
        state, loss = update(state, batch, jnp.float32(learning_rate(progress, LEARNING_RATE)))
        history["bits"].append(float(loss))
        seconds += time.perf_counter() - begin if nth else 0.0  # the first step compiles
        history["tokens"].append((nth + 1) * batch[:, 1:].size)
        history["seconds"].append(seconds)
    masks.append(np.asarray(look(state[0], jnp.asarray(windows[0][:1, :-1]))))
    return graph, state[0], history, masks


def in_16_bits(params: Params) -> Params:
    """On a GPU, whose kernels are of 16 bits."""
    if jax.default_backend() == "cpu":
        return params
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)


def seen_by_the_middle_layer(graph: Any, params: Params, tokens: jax.Array, pattern: Pattern) -> jax.Array:
    """What its first head sees: [queries, keys]."""
    _, _, layers = hidden_of_texts(graph, in_16_bits(params), tokens, pattern)
    q, k = layers[len(layers) // 2]
    return pictures.drawn(pattern.mask(q, k), q.shape[1], q.shape[2], k.shape[2])


def of_held_out(graph: Any, params: Params, texts: jax.Array, pattern: Pattern) -> dict[str, np.ndarray]:
    """Bits of each token of held-out texts [texts, tokens]: of whole texts, and through paged caches."""
    runs = {"whole": bits, "cached": cached_bits}
    found = {}
    for name, run in runs.items():
        of = jax.jit(functools.partial(run, graph, pattern=pattern))
        found[name] = np.asarray(of(in_16_bits(params), texts), np.float32)
    return found


def row_of(name: str, history: dict[str, list[float]], held: dict[str, np.ndarray]) -> dict[str, Any]:
    """What a pattern's training came to."""
    steps = len(history["bits"])
    ms = 1e3 * history["seconds"][-1] / max(steps - 1, 1)
    taken = {"steps": steps, "tokens": history["tokens"][-1], "ms_per_step": ms}
    means = {f"held_out_bits_{kind}": float(x.mean()) for kind, x in held.items()}
    apart = float(np.abs(held["whole"] - held["cached"]).max())
    train_bits = float(np.mean(history["bits"][-20:]))
    numbers = {"train_bits": train_bits, **means, "largest_difference": apart, **taken}
    rounded = {key: round(x, 4) if isinstance(x, float) else x for key, x in numbers.items()}
    return {"device": jax.devices()[0].device_kind, "jax": jax.__version__, "pattern": name} | rounded


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_sparse", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder of the results")
    parser.add_argument("--data", default=sysconfig.get_path("stdlib"), help="a folder of Python sources")
    parser.add_argument("--steps", type=int, default=1000, help="at most [%(default)s]")
    parser.add_argument(
        "--seconds", type=float, default=12, help="of a pattern's training at most [%(default)s]"
    )
    parser.add_argument("--batch", type=int, default=32, help="texts of a step [%(default)s]")
    parser.add_argument("--tokens", type=int, default=1024, help="of a text [%(default)s]")
    parser.add_argument("--layers", type=int, default=HF_CONFIG["num_hidden_layers"])
    parser.add_argument("--patterns", nargs="+", default=list(PATTERNS), choices=PATTERNS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    config = DecoderConfig.from_hf(HF_CONFIG | {"num_hidden_layers": options.layers})
    stream, held_out = read_sources(pathlib.Path(options.data))
    rng = np.random.default_rng(options.seed)
    starts = rng.choice(line_starts(stream), (options.steps, options.batch, 1))
    windows = stream[starts + np.arange(options.tokens + 1)]  # the same for every pattern
    prompt = jnp.asarray([*PROMPT.encode()], jnp.int32)
    texts = jnp.asarray(np.resize(held_out, (HELD_OUT, options.tokens + 1)))
    histories, seen, held = {}, {}, {}
    for name in options.patterns:
        graph, params, histories[name], seen[name] = train(config, windows, PATTERNS[name], options)
        said = generate(graph, in_16_bits(params), prompt, 40, PATTERNS[name])
        text = bytes(np.minimum(np.asarray(said), 255).tolist()).decode(errors="replace")
        seconds, last = histories[name]["seconds"][-1], np.mean(histories[name]["bits"][-20:])
        print(f"--- {name}: {last:.3f} bits a byte after {seconds:.0f} s\n{text}", flush=True)
        held[name] = of_held_out(graph, params, texts, PATTERNS[name])
        row = row_of(name, histories[name], held[name])
        print(json.dumps(row), flush=True)
        with (options.out / "rows.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        save(options.out, histories, held, seen)


def save(
    out: pathlib.Path,
    histories: dict[str, dict[str, list[float]]],
    held: dict[str, dict[str, np.ndarray]],
    seen: dict[str, list[np.ndarray]],
) -> None:
    """Losses and pictures of the patterns so far: a run that is cut short has those of all but the last."""
    (out / "losses.json").write_text(json.dumps(histories) + "\n")
    pictures.draw_losses(histories).savefig(out / "loss.png", dpi=110)
    pictures.draw_held_out(held).savefig(out / "decode.png", dpi=110)
    pictures.draw_masks(seen).savefig(out / "masks.png", dpi=110)


if __name__ == "__main__":
    main()
