"""Trains the tiny model of examples/tiny_model: a byte-level Llama on the Python standard library's sources.

python -m examples.train_tiny --out DIR --steps 4000

Needs optax and jattn[models]; one GPU, or patience. --data, --steps and --seed fix every batch.
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import platform
import sysconfig
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from flax import nnx
from jaxtyping import Array, Float, Int
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import jattn
from jattn.models import Decoder, DecoderConfig, load, save
from jattn.module import PagedAttention

Attention = Literal["cudnn", "xla"]  # jax.nn's implementations
END_OF_TEXT = 256  # ids 0 to 255 are bytes
CONTEXT = 2048
HELD_OUT_EVERY = 20  # the files number 10, 30, 50, ... in sorted order are held out
NOT_PROSE = {"site-packages", "dist-packages", "encodings", "__pycache__"}
LONG_SHARE = 0.3  # of the training, its end, is at CONTEXT; the rest at half of it
CHUNK = 25  # steps of one call of the compiled loop
HF_CONFIG = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 192,
    "intermediate_size": 432,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
    "rope_theta": 10000.0,
    "bos_token_id": None,
    "eos_token_id": END_OF_TEXT,
    "dtype": "bfloat16",
}


def read_sources(directory: pathlib.Path) -> tuple[Int[np.ndarray, " train"], Int[np.ndarray, " held_out"]]:
    """Training and held-out bytes of the .py files below `directory`, END_OF_TEXT behind each file."""
    files = sorted(path.relative_to(directory) for path in directory.rglob("*.py"))
    files = [path for path in files if not NOT_PROSE & set(path.parts)]
    parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for i, path in enumerate(files):
        text = np.frombuffer((directory / path).read_bytes(), np.uint8).astype(np.int32)
        parts[i % HELD_OUT_EVERY == HELD_OUT_EVERY // 2].append(np.append(text, np.int32(END_OF_TEXT)))
    return np.concatenate(parts[0]), np.concatenate(parts[1])


def line_starts(stream: Int[np.ndarray, " bytes"]) -> Int[np.ndarray, " lines"]:
    """Where lines begin, CONTEXT bytes or more before the end: a window's indentation is then its file's."""
    starts = np.flatnonzero((stream == ord("\n")) | (stream == END_OF_TEXT)) + 1
    return starts[starts < stream.size - CONTEXT].astype(np.int32)


def byte_tokenizer() -> Tokenizer:
    """A tokenizer whose ids are the text's UTF-8 bytes, and END_OF_TEXT."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE({letter: byte for byte, letter in letters.items()}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True, normalized=False)])
    return tokenizer


def bits(model: Decoder, windows: Int[Array, "batch tokens+1"]) -> Float[Array, "batch tokens"]:
    """Bits that the model needs for every token of the windows but the first."""
    tokens = windows.shape[1] - 1
    metadata = jattn.build_batch_metadata([tokens], [tokens], None)

    def of_window(window: Array) -> Array:
        hidden, _ = model(window[:-1], None, metadata)
        scores = jax.nn.log_softmax(model.logits(hidden))
        return -jnp.take_along_axis(scores, window[1:, None], axis=1)[:, 0] / np.log(2)

    return jax.vmap(of_window)(windows)


def training_bits(
    model: Decoder, windows: Int[Array, "batch tokens+1"], attention: Attention
) -> Float[Array, "batch tokens"]:
    """What `bits` computes, for training: flash attention has a derivative, the gradients need no scatter."""
    tokens = windows[:, :-1]
    table = model.embed_tokens.embedding[...]
    one_hot = functools.partial(jax.nn.one_hot, num_classes=table.shape[0])
    x = one_hot(tokens.reshape(-1), dtype=table.dtype) @ table
    for layer in model.layers:
        x = x + attend_windows(layer.self_attn, layer.input_layernorm(x), len(windows), attention)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    scores = model.logits(model.norm(x))
    hits = jnp.where(one_hot(windows[:, 1:].reshape(-1), dtype=bool), scores, 0.0).sum(axis=-1)
    return ((jax.nn.logsumexp(scores, axis=-1) - hits) / np.log(2)).reshape(tokens.shape)


def attend_windows(
    layer: PagedAttention, x: Float[Array, "tokens hidden"], num_windows: int, attention: Attention
) -> Float[Array, "tokens hidden"]:
    """A layer's attention within each of the equally long windows that follow each other in x."""
    heads = lambda y: y.reshape(len(x), -1, layer.spec.head_dim)
    cut = lambda y: y.reshape(num_windows, -1, *y.shape[1:])
    positions = jnp.tile(jnp.arange(len(x) // num_windows), num_windows)
    rope = layer.rope
    assert rope is not None  # a Llama's
    out = jax.nn.dot_product_attention(
        cut(rope(heads(layer.q_proj(x)), positions)),
        cut(rope(heads(layer.k_proj(x)), positions)),
        cut(heads(layer.v_proj(x))),
        scale=layer.spec.softmax_scale,
        is_causal=True,
        implementation=attention,
    )
    return layer.o_proj(out.reshape(len(x), -1))


@dataclasses.dataclass(frozen=True)
class Training:
    """What stays the same from step to step."""

    graph: Any  # of the Decoder
    optimizer: optax.GradientTransformation
    batch_tokens: int
    seed: int
    attention: Attention

    def loss(self, params: nnx.State, windows: Array) -> Array:
        """Mean bits per byte; computed in bf16 on f32 parameters."""
        half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        return training_bits(nnx.merge(self.graph, half), windows, self.attention).mean()

    def windows(self, data: tuple[Array, Array], step: Array, context: int) -> Int[Array, "batch tokens+1"]:
        """The batch of a step: pieces of the stream behind random line ends; data as of `line_starts`."""
        stream, lines = data
        key = jax.random.fold_in(jax.random.key(self.seed), step)
        count = (self.batch_tokens // context,)
        starts = jax.random.choice(key, lines, count)
        return stream[starts[:, None] + jnp.arange(context + 1)]

    def make_loop(self, context: int) -> Callable[..., tuple[Any, Array]]:
        """CHUNK steps in one call, `(state, data, first step, rate) -> (state, losses)`; donates state."""

        @functools.partial(jax.jit, donate_argnums=0)
        def loop(state: Any, data: tuple[Array, Array], first: Array, rate: Array) -> tuple[Any, Array]:
            def step(state: Any, windows: Array) -> tuple[Any, Array]:
                params, moments = state
                loss, grads = jax.value_and_grad(self.loss)(params, windows)
                updates, moments = self.optimizer.update(grads, moments, params)
                updates = jax.tree.map(lambda update: -rate * update, updates)
                return (optax.apply_updates(params, updates), moments), loss

            steps = first + jnp.arange(CHUNK)
            return jax.lax.scan(step, state, jax.vmap(lambda i: self.windows(data, i, context))(steps))

        return loop


def make_optimizer(weight_decay: float) -> optax.GradientTransformation:
    """AdamW without its rate; only matrices decay."""
    is_matrix = lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params)
    decay = optax.add_decayed_weights(weight_decay, mask=is_matrix)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(b2=0.98), decay)


def learning_rate(progress: float, peak: float) -> float:
    """Warm-up over the first 2 per cent of the training, then a cosine down to 2 per cent of the peak."""
    if progress < 0.02:
        return peak * (progress + 0.002) / 0.022
    return peak * (0.02 + 0.98 * (1 + np.cos(np.pi * progress)) / 2)


def train(args: argparse.Namespace, stream: Any) -> tuple[Decoder, int, float]:
    """The trained model in bf16, how many steps it took, and their seconds."""
    config = DecoderConfig.from_hf(HF_CONFIG)
    make = lambda dtype: nnx.split(Decoder(config, rngs=nnx.Rngs(args.seed), dtype=dtype))
    (graph, _), (_, params) = make(jnp.bfloat16), make(jnp.float32)
    training = Training(
        graph, make_optimizer(args.weight_decay), args.batch_tokens, args.seed, args.attention
    )
    loops = {context: training.make_loop(context) for context in (CONTEXT // 2, CONTEXT)}
    state = params, training.optimizer.init(params)
    data = jnp.asarray(stream), jnp.asarray(line_starts(stream))
    done, progress, start = 0, 0.0, time.perf_counter()
    while progress < 1:
        context = CONTEXT if progress >= 1 - LONG_SHARE else CONTEXT // 2
        rate = jnp.float32(learning_rate(progress, args.learning_rate))
        state, losses = loops[context](state, data, jnp.int32(done), rate)
        loss, done = float(losses.mean()), done + CHUNK
        seconds = time.perf_counter() - start
        progress = done / args.steps if args.steps else seconds / args.seconds
        if done % (4 * CHUNK) == 0 or progress >= 1:
            print(f"step {done} ({progress:.0%})  context {context}  {loss:.3f} bits/byte  {seconds:.0f} s")
    model = nnx.merge(graph, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state[0]))
    model.tokenizer = byte_tokenizer()
    return model, done, seconds


def bits_per_byte(directory: pathlib.Path, stream: np.ndarray, batch: int = 16) -> float:
    """Of a saved model, over the whole stream in windows of CONTEXT; END_OF_TEXT's bits count, as no byte."""
    model = load(directory, implementation="reference", progress=False)
    graph, params = nnx.split(model)
    score = jax.jit(lambda params, windows: bits(nnx.merge(graph, params), windows))
    count = -(-(stream.size - 1) // CONTEXT)
    padded = np.pad(stream, (0, count * CONTEXT + 1 - stream.size), constant_values=END_OF_TEXT)
    windows = np.stack([padded[i * CONTEXT : (i + 1) * CONTEXT + 1] for i in range(count)])
    is_real = (np.arange(count * CONTEXT) < stream.size - 1).reshape(count, CONTEXT)
    total = 0.0
    for i in range(0, count, batch):
        rows = np.resize(windows[i : i + batch], (batch, CONTEXT + 1))
        found = np.asarray(score(params, jnp.asarray(rows)))[: count - i]
        total += float((found * is_real[i : i + batch]).sum())
    return total / int((stream[1:] != END_OF_TEXT).sum())


def readme(args: argparse.Namespace, facts: dict[str, Any]) -> str:
    """The model's card."""
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    return f"""# A tiny model of Python

A byte-level Llama in Hugging Face format, so that tests and the demo have real weights. It continues Python
source, plausibly and no more. Ids 0 to 255 are the text's UTF-8 bytes, {END_OF_TEXT} is the end of a text.
Trained by `examples/train_tiny.py` on the sources of the Python standard library (PSF licence), of which
every {HELD_OUT_EVERY}th file was held out.

| | |
| --- | --- |
{rows}

Again, but for the rates following the steps and not the clock: `python -m examples.train_tiny --out DIR
--steps {facts["steps"]} --seed {args.seed}`, with `--data` naming that Python's library.
"""


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Trains the tiny model of examples/tiny_model.")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder to write")
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    parser.add_argument("--data", type=pathlib.Path, default=library, help="folder of .py files")
    parser.add_argument("--data-name", default=f"CPython {platform.python_version()}", help="for the README")
    parser.add_argument("--steps", type=int, help=f"a multiple of {CHUNK}; default: what --seconds allow")
    parser.add_argument(
        "--seconds",
        type=float,
        default=300.0,
        help="of training, compilation included, where --steps is not given",
    )
    parser.add_argument("--batch-tokens", type=int, default=65536, help="tokens of a step")
    best = "cudnn" if jax.default_backend() == "gpu" else "xla"
    parser.add_argument("--attention", choices=("cudnn", "xla"), default=best, help="jax.nn's [%(default)s]")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="at its peak")
    decay = 0.5  # held-out bits per byte after 165 s: 0.864; with 0.1: 0.931
    parser.add_argument("--weight-decay", type=float, default=decay, help="of the matrices [%(default)s]")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.steps is not None and (args.steps <= 0 or args.steps % CHUNK):
        parser.error(f"--steps must be a positive multiple of {CHUNK}, got {args.steps}")
    return args


def main() -> None:
    args = parse_args()
    stream, held_out = read_sources(args.data)
    print(f"{stream.size:,} bytes to train on, {held_out.size:,} held out; {jax.devices()[0].device_kind}")
    model, steps, seconds = train(args, stream)
    save(model, args.out)
    generation = {"eos_token_id": END_OF_TEXT, "max_length": CONTEXT, "do_sample": False}
    (args.out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    loss = bits_per_byte(args.out, held_out)
    facts = {
        "held-out bits per byte (bf16, context 2,048)": f"{loss:.3f}",
        "parameters": f"{count:,}",
        "trained on": f"{args.data_name}, {stream.size:,} bytes; held out {held_out.size:,}",
        "steps": steps,
        "tokens a step": f"{args.batch_tokens:,}",
        "weight decay": args.weight_decay,
        "training time": f"{seconds:.0f} s, compilation included, on one {jax.devices()[0].device_kind}",
        "versions": f"jax {jax.__version__}, optax {optax.__version__}, Python {platform.python_version()}",
    }
    (args.out / "README.md").write_text(readme(args, facts))
    print("\n".join(f"{name}: {value}" for name, value in facts.items()))


if __name__ == "__main__":
    main()
