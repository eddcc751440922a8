"""The tiny model with a sparsity pattern as its attention: full sequences, or token by token with a cache."""

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
    """Trainable parameters: a decoder, and the gates of NSA's three attention branches in each layer."""

    model: Any
    gates: Float[Array, "layers hidden gates"]


class LayerState(NamedTuple):
    """State of a layer between decode steps.

    Attributes:
        cache: Paged cache of the layer.
        selector: Query of the first token of each request's current block, which selects the key blocks.
    """

    cache: jattn.PagedCache
    selector: Float[Array, "reqs q_heads head_dim"]


def init(config: DecoderConfig, seed: int) -> tuple[Any, Params]:
    """Return the decoder's graph definition and f32 parameters; the initial gates are 0.5."""
    graph, model = nnx.split(Decoder(config, rngs=nnx.Rngs(seed), dtype=jnp.float32))
    shape = config.num_hidden_layers, config.hidden_size, 3 * config.num_attention_heads
    return graph, Params(model, jnp.zeros(shape))


def run_layers(
    graph: Any, params: Params, tokens: Int[Array, "batch tokens"], pattern: Pattern
) -> tuple[Decoder, Float[Array, "n hidden"], list[tuple[Array, Array]]]:
    """Return the model, its last hidden states, and each layer's queries and keys."""
    model: Decoder = nnx.merge(graph, params.model)
    x, queries_and_keys = embed(model, tokens.reshape(-1)), []
    positions = jnp.tile(jnp.arange(tokens.shape[1], dtype=jnp.int32), len(tokens))

    def split_batch(a: Array) -> Array:
        return a.reshape(*tokens.shape, *a.shape[1:])

    for layer, gates in zip(model.layers, params.gates, strict=True):
        y = layer.input_layernorm(x)
        q, k, v = map(split_batch, project_qkv(layer.self_attn, y, positions))
        queries_and_keys.append((q, k))
        out = pattern.train(q, k, v, split_batch(compute_gates(y, gates)))
        x = x + layer.self_attn.o_proj(out.reshape(len(x), -1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model, model.norm(x), queries_and_keys


def embed(model: Decoder, tokens: Int[Array, " n"]) -> Float[Array, "n hidden"]:
    """Embed tokens with a one-hot matrix product.

    The gradient of a lookup in a small table is a scatter with contended atomics.
    """
    table = model.embed_tokens.embedding[...]
    return jax.nn.one_hot(tokens, len(table), dtype=table.dtype) @ table


def bits(
    graph: Any, params: Params, windows: Int[Array, "batch tokens+1"], pattern: Pattern
) -> Float[Array, "batch tokens"]:
    """Return the cross-entropy in bits of every token but the first."""
    model, hidden, _ = run_layers(graph, params, windows[:, :-1], pattern)
    scores = jax.nn.log_softmax(model.logits(hidden))
    targets = windows[:, 1:].reshape(-1, 1)
    return -jnp.take_along_axis(scores, targets, axis=1).reshape(len(windows), -1) / jnp.log(2)


def cached_bits(
    graph: Any, params: Params, windows: Int[Array, "batch tokens+1"], pattern: Pattern
) -> Float[Array, "batch tokens"]:
    """Compute `bits` one token at a time with paged caches."""
    num_texts, tokens = windows.shape[0], windows.shape[1] - 1
    blocks = -(-tokens // BLOCK)
    model: Decoder = nnx.merge(graph, params.model)
    states = create_layer_states(model, num_texts, 1 + num_texts * blocks)
    tables = 1 + np.arange(num_texts * blocks).reshape(num_texts, blocks)
    metadata = jattn.build_batch_metadata([1] * num_texts, [1] * num_texts, tables, block_size=BLOCK)

    def decode_token(carry: Any, token_and_target: tuple[Array, Array]) -> tuple[Any, Array]:
        states, metadata = carry
        token, target = token_and_target
        scores, states = step(graph, params, states, metadata, token, pattern)
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(scores), target[:, None], axis=1)
        return (states, jattn.advance(metadata)), -log_probs[:, 0] / jnp.log(2)

    return jax.lax.scan(decode_token, (states, metadata), (windows[:, :-1].T, windows[:, 1:].T))[1].T


def step(
    graph: Any,
    params: Params,
    states: tuple[LayerState, ...],
    metadata: jattn.BatchMetadata,
    tokens: Int[Array, " reqs"],
    pattern: Pattern,
) -> tuple[Float[Array, "reqs vocab"], tuple[LayerState, ...]]:
    """Return the logits after one token of each request, and the updated states of the layers."""
    model: Decoder = nnx.merge(graph, params.model)
    x, new_states = embed(model, tokens), []
    is_block_start = (metadata.positions % BLOCK == 0)[:, None, None]
    for layer, gates, (cache, selector) in zip(model.layers, params.gates, states, strict=True):
        y = layer.input_layernorm(x)
        q, k, v = project_qkv(layer.self_attn, y, metadata.positions)
        cache = jattn.write_kv(cache, k, v, metadata.slot_mapping)
        selector = jnp.where(is_block_start, q, selector)
        out = pattern.decode(q, selector, cache, metadata, layer.self_attn.spec, compute_gates(y, gates))
        x = x + layer.self_attn.o_proj(out.reshape(len(x), -1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        new_states.append(LayerState(cache, selector))
    return model.logits(model.norm(x)), tuple(new_states)


def create_layer_states(model: Decoder, num_reqs: int, num_blocks: int) -> tuple[LayerState, ...]:
    """Return the states of all layers before the first token."""
    caches, spec = model.create_caches(num_blocks, block_size=BLOCK), model.layers[0].self_attn.spec
    selector = jnp.zeros((num_reqs, spec.num_q_heads, spec.head_dim), caches[0].k.dtype)
    return tuple(LayerState(cache, selector) for cache in caches)


def project_qkv(layer: jattn.PagedAttention, x: Array, positions: Array) -> tuple[Array, Array, Array]:
    """Return queries and keys after RoPE, and values, [tokens, heads, head_dim]."""
    query, key, value = layer.project(x)
    assert key is not None
    assert value is not None
    assert layer.rope is not None  # Llama has RoPE
    return layer.rope(query, positions), layer.rope(key, positions), value


def compute_gates(x: Float[Array, "..."], gates: Float[Array, "hidden gates"]) -> Float[Array, "..."]:
    """Return the gates [..., q_heads, 3] of the NSA branches for a layer's input."""
    values = jax.nn.sigmoid(x @ gates.astype(x.dtype))
    return values.reshape(*values.shape[:-1], -1, 3)


def generate(
    graph: Any, params: Params, prompt: Int[Array, " tokens"], count: int, pattern: Pattern
) -> Array:
    """Return the prompt and `count` greedily sampled tokens, decoded with a paged cache."""
    model: Decoder = nnx.merge(graph, params.model)
    num_blocks = -(-(len(prompt) + count) // BLOCK)
    states = create_layer_states(model, 1, 1 + num_blocks)
    table = [list(range(1, 1 + num_blocks))]
    metadata = jattn.build_batch_metadata([1], [1], table, block_size=BLOCK)

    @jax.jit
    def run(params: Params, states: Any, metadata: Any) -> Array:
        def decode_token(carry: Any, position: Array) -> tuple[Any, Array]:
            token, states, metadata = carry
            scores, states = step(graph, params, states, metadata, token[None], pattern)
            prompt_token = prompt[jnp.minimum(position + 1, len(prompt) - 1)]
            is_prompt = position + 1 < len(prompt)
            next_token = jnp.where(is_prompt, prompt_token, scores[0].argmax()).astype(token.dtype)
            return (next_token, states, jattn.advance(metadata)), next_token

        positions = jnp.arange(len(prompt) + count - 1)
        return jax.lax.scan(decode_token, (prompt[0], states, metadata), positions)[1]

    return jnp.concatenate([prompt[:1], run(params, states, metadata)])
