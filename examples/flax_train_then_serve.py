"""A Flax model trains on texts with `attention_fn`, and generates from a paged cache by the same weights."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from flax import nnx

import jattn

TEXT = b"how much wood would a woodchuck chuck if a woodchuck could chuck wood?"
PROMPT, WIDTH, BLOCK_SIZE = b"how much wood", 64, 16
SPEC = jattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, window=(31, 0))
CACHE_SPEC = jattn.CacheSpec(
    num_blocks=8, block_size=BLOCK_SIZE, num_kv_heads=2, head_dim=16, dtype=jnp.float32
)


class Layer(nnx.Module):
    """Attention and an MLP; how it attends is the caller's business."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        heads = functools.partial(nnx.LinearGeneral, WIDTH, rngs=rngs)
        self.q, self.k, self.v = heads((4, 16)), heads((2, 16)), heads((2, 16))
        self.out = nnx.LinearGeneral((4, 16), WIDTH, axis=(-2, -1), rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 128, rngs=rngs), nnx.Linear(128, WIDTH, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(2)])

    def __call__(self, x: jax.Array, attention: Callable) -> tuple[jax.Array, jattn.PagedCache | None]:
        """`attention` makes of queries, keys and values an output, and a cache if it has one."""
        y = self.norms[0](x)
        y, cache = attention(self.q(y), self.k(y), self.v(y))
        x = x + self.out(y)
        return x + self.down(nnx.gelu(self.up(self.norms[1](x)))), cache


class Model(nnx.Module):
    """Speaks in bytes. Called it trains, `step` serves, by the same weights."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.bytes, self.places = nnx.Embed(256, WIDTH, rngs=rngs), nnx.Embed(128, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(2)])

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Scores of the next byte of texts [batch, tokens]: causal, and with SPEC's window."""
        x = self.bytes(tokens) + self.places(jnp.arange(tokens.shape[1]))[None]
        for layer in self.layers:
            x, _ = layer(x, lambda q, k, v: (jattn.attention_fn(q, k, v, spec=SPEC), None))
        return self.bytes.attend(x)

    def step(self, tokens: jax.Array, caches: list, metadata: jattn.BatchMetadata) -> tuple[jax.Array, list]:
        """The same of each row's last token, over paged caches."""

        def paged(cache: jattn.PagedCache, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple:
            cache = jattn.write_kv(cache, k, v, metadata.slot_mapping)
            return jattn.attend(q, cache, metadata, SPEC), cache

        x = self.bytes(tokens) + self.places(metadata.positions)
        written = []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, cache = layer(x, functools.partial(paged, cache))
            written.append(cache)
        return self.bytes.attend(x[metadata.last_token_indices]), written


def train(model: Model, text: bytes, steps: int) -> float:
    """Trains on one text; the last loss."""
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    tokens = jnp.asarray(np.frombuffer(text, np.uint8).astype(np.int32))[None]

    @nnx.jit
    def update(model: Model, optimizer: nnx.Optimizer) -> jax.Array:
        loss_of = lambda model: optax.softmax_cross_entropy_with_integer_labels(
            model(tokens[:, :-1]), tokens[:, 1:]
        ).mean()
        loss, grads = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, grads)
        return loss

    return float([update(model, optimizer) for _ in range(steps)][-1])


def generate(model: Model, prompt: bytes, count: int) -> bytes:
    """The prompt and `count` bytes more: one prefill step, then decode_loop."""
    graph, params = nnx.split(model)
    step = lambda params, caches, metadata, tokens: nnx.merge(graph, params).step(tokens, caches, metadata)
    likeliest = lambda logits, index: jnp.argmax(logits, axis=-1)
    caches = [jattn.PagedCache.create(CACHE_SPEC) for _ in model.layers]
    blocks = [
        list(range(1, 1 + -(-(len(prompt) + count) // BLOCK_SIZE)))
    ]  # of the one request; 0 is padding's
    metadata = jattn.build_batch_metadata([len(prompt)], [len(prompt)], blocks, block_size=BLOCK_SIZE)
    tokens = jnp.asarray(np.frombuffer(prompt, np.uint8).astype(np.int32))
    logits, caches = jax.jit(step, donate_argnums=1)(params, caches, metadata, tokens)
    first = likeliest(logits, 0)
    out = jattn.decode_loop(
        step, params, caches, jattn.advance(metadata), first, num_steps=count - 1, sample=likeliest
    )
    return prompt + bytes([int(first[0]), *np.asarray(out.tokens[0]).tolist()])


def main() -> None:
    model = Model(nnx.Rngs(0))
    print(f"loss after training: {train(model, TEXT, steps=150):.3f}")
    print(generate(model, PROMPT, len(TEXT) - len(PROMPT)).decode(errors="replace"))


if __name__ == "__main__":
    main()
