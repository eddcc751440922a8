"""The tiny model with a pattern in place of its attention: whole texts at once, or a token at a time."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

import jattn
from examples.train_sparse.patterns import BLOCK, Pattern
from jattn.models import Decoder, DecoderConfig


class Params(NamedTuple):
    """What is trained: a decoder, and in each layer the gates of NSA's three attentions."""

    model: Any
    gates: Float[Array, "layers hidden gates"]


class Kept(NamedTuple):
    """What a layer keeps between steps: its cache, and of each request the query that chooses last."""

    cache: jattn.PagedCache
    chooser: Float[Array, "reqs q_heads head_dim"]


def init(config: DecoderConfig, seed: int) -> tuple[Any, Params]:
    """The graph of the decoder, and parameters in f32; gates begin at one half."""
    graph, model = nnx.split(Decoder(config, rngs=nnx.Rngs(seed), dtype=jnp.float32))
    shape = config.num_hidden_layers, config.hidden_size, 3 * config.num_attention_heads
    return graph, Params(model, jnp.zeros(shape))


def hidden_of_texts(
    graph: Any, params: Params, tokens: Int[Array, "batch tokens"], pattern: Pattern
) -> tuple[Decoder, Float[Array, "n hidden"], list[tuple[Array, Array]]]:
    """The model, its last hidden states, and each layer's queries and keys."""
    model: Decoder = nnx.merge(graph, params.model)
    x, seen = embedded(model, tokens.reshape(-1)), []
    positions = jnp.tile(jnp.arange(tokens.shape[1], dtype=jnp.int32), len(tokens))
    for layer, gates in zip(model.layers, params.gates, strict=True):
        y = layer.input_layernorm(x)
        by_text = lambda a: a.reshape(*tokens.shape, *a.shape[1:])
        q, k, v = map(by_text, projected(layer.self_attn, y, positions))
        seen.append((q, k))
        out = pattern.train(q, k, v, by_text(gates_of(y, gates)))
        x = x + layer.self_attn.o_proj(out.reshape(len(x), -1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model, model.norm(x), seen


def embedded(model: Decoder, tokens: Int[Array, " n"]) -> Float[Array, "n hidden"]:
    """By a product: rows of a small table that are looked up have a gradient by atomics, which queue up."""
    table = model.embed_tokens.embedding[...]
    return jax.nn.one_hot(tokens, len(table), dtype=table.dtype) @ table


def bits(
    graph: Any, params: Params, windows: Int[Array, "batch tokens+1"], pattern: Pattern
) -> Float[Array, "batch tokens"]:
    """Bits that the model needs for every token but the first."""
    model, hidden, _ = hidden_of_texts(graph, params, windows[:, :-1], pattern)
    scores = jax.nn.log_softmax(model.logits(hidden))
    wanted = windows[:, 1:].reshape(-1, 1)
    return -jnp.take_along_axis(scores, wanted, axis=1).reshape(len(windows), -1) / jnp.log(2)


def cached_bits(
    graph: Any, params: Params, windows: Int[Array, "batch tokens+1"], pattern: Pattern
) -> Float[Array, "batch tokens"]:
    """What `bits` computes, a token of each text at a time through paged caches."""
    num_texts, tokens = windows.shape[0], windows.shape[1] - 1
    blocks = -(-tokens // BLOCK)
    model: Decoder = nnx.merge(graph, params.model)
    kept = create_kept(model, num_texts, 1 + num_texts * blocks)
    tables = 1 + np.arange(num_texts * blocks).reshape(num_texts, blocks)
    metadata = jattn.build_batch_metadata([1] * num_texts, [1] * num_texts, tables, block_size=BLOCK)

    def one(carry: Any, given: tuple[Array, Array]) -> tuple[Any, Array]:
        kept, metadata = carry
        token, wanted = given
        scores, kept = step(graph, params, kept, metadata, token, pattern)
        found = jnp.take_along_axis(jax.nn.log_softmax(scores), wanted[:, None], axis=1)
        return (kept, jattn.advance(metadata)), -found[:, 0] / jnp.log(2)

    return jax.lax.scan(one, (kept, metadata), (windows[:, :-1].T, windows[:, 1:].T))[1].T


def step(
    graph: Any,
    params: Params,
    kept: tuple[Kept, ...],
    metadata: jattn.BatchMetadata,
    tokens: Int[Array, " reqs"],
    pattern: Pattern,
) -> tuple[Float[Array, "reqs vocab"], tuple[Kept, ...]]:
    """Scores behind one token of each request, over what layers kept of those before."""
    model: Decoder = nnx.merge(graph, params.model)
    x, written = embedded(model, tokens), []
    is_first = (metadata.positions % BLOCK == 0)[:, None, None]
    for layer, gates, (cache, chooser) in zip(model.layers, params.gates, kept, strict=True):
        y = layer.input_layernorm(x)
        q, k, v = projected(layer.self_attn, y, metadata.positions)
        cache = jattn.write_kv(cache, k, v, metadata.slot_mapping)
        chooser = jnp.where(is_first, q, chooser)
        out = pattern.decode(q, chooser, cache, metadata, layer.self_attn.spec, gates_of(y, gates))
        x = x + layer.self_attn.o_proj(out.reshape(len(x), -1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        written.append(Kept(cache, chooser))
    return model.logits(model.norm(x)), tuple(written)


def create_kept(model: Decoder, num_reqs: int, num_blocks: int) -> tuple[Kept, ...]:
    """What layers keep before the first token."""
    caches, spec = model.create_caches(num_blocks, block_size=BLOCK), model.layers[0].self_attn.spec
    chooser = jnp.zeros((num_reqs, spec.num_q_heads, spec.head_dim), caches[0].k.dtype)
    return tuple(Kept(cache, chooser) for cache in caches)


def projected(layer: jattn.PagedAttention, x: Array, positions: Array) -> tuple[Array, Array, Array]:
    """Queries, keys and values [tokens, heads, head_dim], turned."""
    query, key, value = layer.project(x)
    assert key is not None
    assert value is not None
    assert layer.rope is not None  # a Llama's
    return layer.rope(query, positions), layer.rope(key, positions), value


def gates_of(x: Float[Array, "..."], gates: Float[Array, "hidden gates"]) -> Float[Array, "..."]:
    """[..., q_heads, 3] of a layer's input."""
    made = jax.nn.sigmoid(x @ gates.astype(x.dtype))
    return made.reshape(*made.shape[:-1], -1, 3)


def generate(
    graph: Any, params: Params, prompt: Int[Array, " tokens"], count: int, pattern: Pattern
) -> Array:
    """A prompt and the likeliest tokens behind it, through a paged cache token by token."""
    model: Decoder = nnx.merge(graph, params.model)
    num_blocks = -(-(len(prompt) + count) // BLOCK)
    kept = create_kept(model, 1, 1 + num_blocks)
    table = [list(range(1, 1 + num_blocks))]
    metadata = jattn.build_batch_metadata([1], [1], table, block_size=BLOCK)

    @jax.jit
    def run(params: Params, kept: Any, metadata: Any) -> Array:
        def one(carry: Any, nth: Array) -> tuple[Any, Array]:
            token, kept, metadata = carry
            scores, kept = step(graph, params, kept, metadata, token[None], pattern)
            is_given = nth + 1 < len(prompt)
            follows = jnp.where(is_given, prompt[jnp.minimum(nth + 1, len(prompt) - 1)], scores[0].argmax())
            follows = follows.astype(token.dtype)
            return (follows, kept, jattn.advance(metadata)), follows

        steps = jnp.arange(len(prompt) + count - 1)
        return jax.lax.scan(one, (prompt[0], kept, metadata), steps)[1]

    return jnp.concatenate([prompt[:1], run(params, kept, metadata)])
