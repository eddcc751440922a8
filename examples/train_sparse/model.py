"""The tiny model with a sparsity pattern as its attention: full sequences, or token by token with a cache."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

import jattn
from examples.train_sparse.patterns import BLOCK, INDEX_DIM, INDEX_HEADS, LayerState, Pattern, Selection
from jattn.models import Decoder, DecoderConfig
from jattn.sparsity import write_index_keys


class Params(NamedTuple):
    """Trainable parameters: a decoder, and in each layer the gates of NSA's branches and DSA's indexer."""

    model: Any
    gates: Float[Array, "layers hidden gates"]
    indexer: Float[Array, "layers hidden index_features"]


def init(config: DecoderConfig, seed: int) -> tuple[Any, Params]:
    """Return the decoder's graph definition and f32 parameters; the initial gates are 0.5."""
    graph, model = nnx.split(Decoder(config, rngs=nnx.Rngs(seed), dtype=jnp.float32))
    shape = config.num_hidden_layers, config.hidden_size
    indexer = jax.random.normal(jax.random.key(seed), (*shape, (INDEX_HEADS + 1) * INDEX_DIM + INDEX_HEADS))
    gates = jnp.zeros((*shape, 3 * config.num_attention_heads))
    return graph, Params(model, gates, indexer * config.hidden_size**-0.5)


def run_layers(
    graph: Any, params: Params, tokens: Int[Array, "batch tokens"], pattern: Pattern
) -> tuple[Decoder, Float[Array, "n hidden"], list[tuple[Array, Array, Selection]]]:
    """Return the model, its last hidden states, and each layer's queries, keys and selection."""
    model: Decoder = nnx.merge(graph, params.model)
    x, layers = embed(model, tokens.reshape(-1)), []
    positions = jnp.tile(jnp.arange(tokens.shape[1], dtype=jnp.int32), len(tokens))

    def split_batch(a: Array) -> Array:
        return a.reshape(*tokens.shape, *a.shape[1:])

    for layer, *weights in zip(model.layers, params.gates, params.indexer, strict=True):
        y = layer.input_layernorm(x)
        q, k, v = map(split_batch, project_qkv(layer.self_attn, y, positions))
        selection = Selection(*map(split_batch, compute_selection(y, *weights)))
        layers.append((q, k, selection))
        out = pattern.train(q, k, v, selection)
        x = x + layer.self_attn.o_proj(out.reshape(len(x), -1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model, model.norm(x), layers


def embed(model: Decoder, tokens: Int[Array, " n"]) -> Float[Array, "n hidden"]:
    """Embed tokens with a one-hot matrix product.

    The gradient of a lookup in a small table is a scatter with contended atomics.
    """
    table = model.embed_tokens.embedding[...]
    return jax.nn.one_hot(tokens, len(table), dtype=table.dtype) @ table


def training_loss(
    graph: Any, params: Params, windows: Int[Array, "batch tokens+1"], pattern: Pattern
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the loss, and the part of it that is the mean cross-entropy in bits."""
    model, hidden, layers = run_layers(graph, params, windows[:, :-1], pattern)
    mean_bits = cross_entropy(model, hidden, windows).mean()
    return mean_bits + sum(pattern.loss(*layer) for layer in layers), mean_bits


def bits(
    graph: Any, params: Params, windows: Int[Array, "batch tokens+1"], pattern: Pattern
) -> Float[Array, "batch tokens"]:
    """Return the cross-entropy in bits of every token but the first."""
    model, hidden, _ = run_layers(graph, params, windows[:, :-1], pattern)
    return cross_entropy(model, hidden, windows)


def cross_entropy(
    model: Decoder, hidden: Float[Array, "n hidden"], windows: Int[Array, "batch tokens+1"]
) -> Float[Array, "batch tokens"]:
    """Return the cross-entropy in bits of every token but the first, from the last hidden states."""
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
    for layer, state, *weights in zip(model.layers, states, params.gates, params.indexer, strict=True):
        y = layer.input_layernorm(x)
        q, k, v = project_qkv(layer.self_attn, y, metadata.positions)
        selection = compute_selection(y, *weights)
        new_state = LayerState(
            cache=jattn.write_kv(state.cache, k, v, metadata.slot_mapping),
            selector=jnp.where(is_block_start, q, state.selector),
            index_keys=write_index_keys(state.index_keys, selection.index_k, metadata.slot_mapping),
        )
        out = pattern.decode(q, new_state, metadata, layer.self_attn.spec, selection)
        x = x + layer.self_attn.o_proj(out.reshape(len(x), -1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        new_states.append(new_state)
    return model.logits(model.norm(x)), tuple(new_states)


def create_layer_states(model: Decoder, num_reqs: int, num_blocks: int) -> tuple[LayerState, ...]:
    """Return the states of all layers before the first token."""
    caches, spec = model.create_caches(num_blocks, block_size=BLOCK), model.layers[0].self_attn.spec
    selector = jnp.zeros((num_reqs, spec.num_q_heads, spec.head_dim), caches[0].k.dtype)
    index_keys = jnp.zeros((num_blocks, BLOCK, INDEX_DIM), caches[0].k.dtype)
    return tuple(LayerState(cache, selector, index_keys) for cache in caches)


def project_qkv(layer: jattn.PagedAttention, x: Array, positions: Array) -> tuple[Array, Array, Array]:
    """Return queries and keys after RoPE, and values, [tokens, heads, head_dim]."""
    query, key, value = layer.project(x)
    assert key is not None
    assert value is not None
    assert layer.rope is not None  # Llama has RoPE
    return layer.rope(query, positions), layer.rope(key, positions), value


def compute_selection(
    x: Float[Array, "n hidden"], gates: Float[Array, "hidden gates"], indexer: Float[Array, "hidden features"]
) -> Selection:
    """Return the gates of NSA's branches, and the arrays of DSA's indexer, for a layer's input.

    The indexer's loss trains only the indexer: its input is a constant, as in DeepSeek-V3.2.
    """
    values = jax.nn.sigmoid(x @ gates.astype(x.dtype))
    features = jax.lax.stop_gradient(x) @ indexer.astype(x.dtype)
    index_q, index_k, index_weights = jnp.split(
        features, [INDEX_HEADS * INDEX_DIM, (INDEX_HEADS + 1) * INDEX_DIM], axis=-1
    )
    index_q = index_q.reshape(len(x), INDEX_HEADS, INDEX_DIM)
    return Selection(values.reshape(len(x), -1, 3), index_q, index_k, index_weights)


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
