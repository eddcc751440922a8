"""Train the byte-level Llama of examples/tiny_model on the sources of the Python standard library.

python -m examples.train_tiny --out DIR --steps 4000

Needs optax and jattn[models]. Runs on one GPU, or slowly on a CPU. --data, --steps and --seed determine the
batches.
"""

import argparse
import functools
import json
import pathlib
import sysconfig
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from flax import nnx
from jaxtyping import Array, Float, Int

import jattn
from examples import python_sources as sources
from jattn.models import Decoder, DecoderConfig, load, save

Attention = Literal["cudnn", "xla"]  # jax.nn's implementations
BATCH_TOKENS = 65536
LEARNING_RATE = 3e-3  # peak
WEIGHT_DECAY = 0.5  # matrices only; held-out bits per byte after 165 s: 0.864, with 0.1: 0.931
LONG_CONTEXT_FRACTION = 0.3  # last fraction of the steps, with the full context; half of it before
CHUNK = 25  # steps per call of the compiled loop
HF_CONFIG = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 192,
    "intermediate_size": 432,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": sources.CONTEXT,
    "tie_word_embeddings": True,
    "rope_theta": 10000.0,
    "bos_token_id": None,
    "eos_token_id": sources.END_OF_TEXT,
    "dtype": "bfloat16",
}


def bits(model: Decoder, windows: Int[Array, "batch tokens+1"]) -> Float[Array, "batch tokens"]:
    """Return the cross-entropy in bits of every token of the windows but the first."""
    tokens = windows.shape[1] - 1
    metadata = jattn.build_batch_metadata([tokens], [tokens], None)

    def window_bits(window: Array) -> Array:
        hidden, _ = model(window[:-1], None, metadata)
        scores = jax.nn.log_softmax(model.logits(hidden))
        return -jnp.take_along_axis(scores, window[1:, None], axis=1)[:, 0] / np.log(2)

    return jax.vmap(window_bits)(windows)


def training_bits(
    model: Decoder, windows: Int[Array, "batch tokens+1"], attention: Attention
) -> Float[Array, "batch tokens"]:
    """Compute `bits` for training, with differentiable flash attention and gradients without scatters."""
    tokens = windows[:, :-1]
    table = model.embed_tokens.embedding[...]
    one_hot = functools.partial(jax.nn.one_hot, num_classes=table.shape[0])
    x = one_hot(tokens.reshape(-1), dtype=table.dtype) @ table
    for layer in model.layers:
        x = x + attend_windows(layer.self_attn, layer.input_layernorm(x), len(windows), attention)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    scores = model.logits(model.norm(x))
    target_scores = jnp.where(one_hot(windows[:, 1:].reshape(-1), dtype=bool), scores, 0.0).sum(axis=-1)
    return ((jax.nn.logsumexp(scores, axis=-1) - target_scores) / np.log(2)).reshape(tokens.shape)


def attend_windows(
    layer: jattn.PagedAttention, x: Float[Array, "tokens hidden"], num_windows: int, attention: Attention
) -> Float[Array, "tokens hidden"]:
    """Apply a layer's attention within each of the `num_windows` equally long windows of x."""

    def split_windows(y: Array) -> Array:
        return y.reshape(num_windows, -1, *y.shape[1:])

    positions = jnp.tile(jnp.arange(len(x) // num_windows), num_windows)
    rope = layer.rope
    query, key, value = layer.project(x)
    assert rope is not None  # Llama has RoPE
    assert key is not None
    assert value is not None
    out = jax.nn.dot_product_attention(
        split_windows(rope(query, positions)),
        split_windows(rope(key, positions)),
        split_windows(value),
        scale=layer.spec.softmax_scale,
        is_causal=True,
        implementation=attention,
    )
    return layer.o_proj(out.reshape(len(x), -1))


def make_loop(graph: Any, optimizer: optax.GradientTransformation, context: int, args: Any) -> Callable:
    """Return a jitted function of CHUNK steps, which donates its state.

    It maps `(state, data, first step, learning rate)` to `(state, losses)`.
    """
    attention: Attention = "cudnn" if jax.default_backend() == "gpu" else "xla"

    def loss_fn(params: nnx.State, windows: Array) -> Array:
        """Return the mean bits per byte, computed in bf16 from f32 parameters."""
        bf16_params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        return training_bits(nnx.merge(graph, bf16_params), windows, attention).mean()

    def sample_windows(data: tuple[Array, Array], step: Array) -> Int[Array, "batch tokens+1"]:
        """Return the batch of a step: windows of the stream that start at random line starts."""
        stream, lines = data
        key = jax.random.fold_in(jax.random.key(args.seed), step)
        starts = jax.random.choice(key, lines, (args.batch_tokens // context,))
        return stream[starts[:, None] + jnp.arange(context + 1)[None, :]]

    @functools.partial(jax.jit, donate_argnums=0)
    def loop(state: Any, data: tuple[Array, Array], first: Array, rate: Array) -> tuple[Any, Array]:
        def step(state: Any, windows: Array) -> tuple[Any, Array]:
            params, moments = state
            loss, grads = jax.value_and_grad(loss_fn)(params, windows)
            updates, moments = optimizer.update(grads, moments, params)
            updates = jax.tree.map(lambda update: -rate * update, updates)
            return (optax.apply_updates(params, updates), moments), loss

        steps = first + jnp.arange(CHUNK)
        return jax.lax.scan(step, state, jax.vmap(functools.partial(sample_windows, data))(steps))

    return loop


def make_optimizer() -> optax.GradientTransformation:
    """Return AdamW without a learning rate; only matrices have weight decay."""

    def is_matrix(params: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

    decay = optax.add_decayed_weights(WEIGHT_DECAY, mask=is_matrix)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.98), decay)


def learning_rate(progress: float, peak: float) -> float:
    """Return the learning rate: warm-up over the first 2% of the steps, then cosine decay to 2% of `peak`."""
    if progress < 0.02:
        return peak * (progress + 0.002) / 0.022
    return peak * (0.02 + 0.98 * (1 + np.cos(np.pi * progress)) / 2)


def train(stream: Int[np.ndarray, " bytes"], args: argparse.Namespace) -> Decoder:
    """Train a model on the stream and return it in bf16."""
    config = DecoderConfig.from_hf(HF_CONFIG)
    graph, _ = nnx.split(Decoder(config, rngs=nnx.Rngs(args.seed), dtype=jnp.bfloat16))
    _, params = nnx.split(Decoder(config, rngs=nnx.Rngs(args.seed), dtype=jnp.float32))
    optimizer = make_optimizer()
    half_context_loop, full_context_loop = (
        make_loop(graph, optimizer, sources.CONTEXT // n, args) for n in (2, 1)
    )
    state = params, optimizer.init(params)
    data = jnp.asarray(stream), jnp.asarray(sources.line_starts(stream))
    for num_steps_done in range(0, args.steps, CHUNK):
        progress = num_steps_done / args.steps
        loop = full_context_loop if progress >= 1 - LONG_CONTEXT_FRACTION else half_context_loop
        rate = learning_rate(progress, LEARNING_RATE)
        state, losses = loop(state, data, jnp.int32(num_steps_done), jnp.float32(rate))
        if num_steps_done // CHUNK % 4 == 0:
            print(f"step {num_steps_done} of {args.steps}: {float(losses.mean()):.3f} bits/byte", flush=True)
    model = nnx.merge(graph, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state[0]))
    model.tokenizer = sources.byte_tokenizer()
    return model


def bits_per_byte(directory: pathlib.Path, stream: np.ndarray, batch: int = 16) -> float:
    """Return the bits per byte of a saved model on a stream, in windows of CONTEXT tokens.

    The bits of END_OF_TEXT are included, but it does not count as a byte.
    """
    model = load(directory, implementation="reference", progress=False)
    graph, params = nnx.split(model)
    score = jax.jit(lambda params, windows: bits(nnx.merge(graph, params), windows))
    count = -(-(stream.size - 1) // sources.CONTEXT)
    padded = np.pad(
        stream, (0, count * sources.CONTEXT + 1 - stream.size), constant_values=sources.END_OF_TEXT
    )
    windows = np.stack([padded[i * sources.CONTEXT : (i + 1) * sources.CONTEXT + 1] for i in range(count)])
    is_valid = (np.arange(count * sources.CONTEXT) < stream.size - 1).reshape(count, sources.CONTEXT)
    total = 0.0
    for i in range(0, count, batch):
        rows = np.resize(windows[i : i + batch], (batch, sources.CONTEXT + 1))
        window_bits = np.asarray(score(params, jnp.asarray(rows)))[: count - i]
        total += float((window_bits * is_valid[i : i + batch]).sum())
    return total / int((stream[1:] != sources.END_OF_TEXT).sum())


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="output directory of the model")
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    parser.add_argument(
        "--data", type=pathlib.Path, default=library, help="directory of .py files [standard library]"
    )
    parser.add_argument(
        "--steps", type=int, default=17100, help=f"training steps, a multiple of {CHUNK} [%(default)s]"
    )
    parser.add_argument(
        "--batch-tokens", type=int, default=BATCH_TOKENS, help="tokens per step [%(default)s]"
    )
    parser.add_argument("--seed", type=int, default=0, help="random seed [%(default)s]")
    args = parser.parse_args(argv)
    if args.steps <= 0 or args.steps % CHUNK:
        parser.error(f"--steps must be a positive multiple of {CHUNK}, got {args.steps}")
    stream, held_out = sources.read_sources(args.data)
    save(train(stream, args), args.out)
    generation = {"eos_token_id": sources.END_OF_TEXT, "max_length": sources.CONTEXT, "do_sample": False}
    (args.out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    print(f"held-out bits per byte: {bits_per_byte(args.out, held_out):.3f}")


if __name__ == "__main__":
    main()
