"""What a pattern does to the tiny model: density, attention mass kept, bits per byte; and how fast it is."""

import dataclasses
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import jattn
from examples.sparsity.patterns import Pattern, probabilities
from jattn import masks
from jattn.masks import Mask
from jattn.models import Decoder

REPEATS = 5
CALLS = 10  # in flight together, so that on a GPU the time is the kernels'


@dataclasses.dataclass(frozen=True)
class Speed:
    """How long attention under a pattern takes.

    Attributes:
        implementation: What computed it.
        milliseconds: Of a layer, on this machine.
        density: Pairs seen over causal pairs, all heads together.
    """

    implementation: str
    milliseconds: float
    density: float


@dataclasses.dataclass(frozen=True)
class Result:
    """One pattern's figures.

    Attributes:
        density: Pairs seen over causal pairs, [layers, q_heads].
        mass: Share of the dense attention that falls on pairs seen, [layers, q_heads].
        bits: Bits per byte of the held-out windows.
        speed: Of the middle layer's attention.
        mask: What the middle layer sees of the last window.
        num_kv_heads: Of a layer.
    """

    density: np.ndarray
    mass: np.ndarray
    bits: float
    speed: Speed
    mask: Mask
    num_kv_heads: int


def measure(
    model: Decoder, windows: Int[np.ndarray, "windows tokens+1"], pattern: Pattern, timed_tokens: int
) -> Result:
    """Runs the model over the windows, every layer under its own mask, and times a prompt of timed_tokens."""
    run = jax.jit(functools.partial(run_window, model, pattern))
    densities, kept, bits = [], [], []
    for window in windows:
        one_bits, density, mass, layer = run(jnp.asarray(window))
        bits.append(float(one_bits))
        densities.append(np.asarray(density))
        kept.append(np.asarray(mass))
    query, key, value, mask = layer
    return Result(
        density=np.mean(densities, axis=0),
        mass=np.mean(kept, axis=0),
        bits=statistics.mean(bits),
        speed=timed(model.layers[0].self_attn.spec, pattern, query, key, value, timed_tokens),
        mask=masks.Causal() & mask,
        num_kv_heads=model.layers[0].self_attn.spec.num_kv_heads,
    )


def run_window(
    model: Decoder, pattern: Pattern, window: Int[Array, " tokens+1"]
) -> tuple[Array, Array, Array, Any]:
    """Bits per byte, density and mass kept [layers, q_heads], and the middle layer's (q, k, v, mask)."""
    tokens = window.shape[0] - 1
    x = jnp.take(model.embed_tokens.embedding[...], window[:-1], axis=0)
    causal = jnp.tri(tokens, dtype=bool)[None]
    densities, kept, middle = [], [], None
    for i, layer in enumerate(model.layers):
        attention, spec = layer.self_attn, layer.self_attn.spec
        query, key, value = heads_of(attention, layer.input_layernorm(x))
        mask = pattern(query, key, spec)
        num_q, num_kv = spec.num_q_heads, spec.num_kv_heads
        seen = causal & masks.dense(mask, tokens, tokens, num_q_heads=num_q, num_kv_heads=num_kv)
        k, v = (jnp.repeat(y, spec.q_heads_per_kv_head, axis=1) for y in (key, value))
        p = jnp.where(seen, probabilities(query, k, spec.softmax_scale), 0.0)
        mass = p.sum(axis=-1)
        out = jnp.einsum("hqk,khd->qhd", p / jnp.maximum(mass, 1e-30)[..., None], v.astype(jnp.float32))
        densities.append(seen.sum(axis=(1, 2)) / causal.sum())
        kept.append(mass.mean(axis=1))
        if i == len(model.layers) // 2:
            middle = query, key, value, mask
        x = x + attention.o_proj(out.reshape(tokens, -1).astype(x.dtype))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    scores = jax.nn.log_softmax(model.logits(model.norm(x)))
    bits = -jnp.take_along_axis(scores, window[1:, None], axis=1).mean() / np.log(2)
    return bits, jnp.stack(densities), jnp.stack(kept), middle


def heads_of(attention: Any, x: Float[Array, "tokens hidden"]) -> tuple[Array, Array, Array]:
    """Queries, keys (both turned) and values of a layer: [tokens, heads, head_dim]."""
    positions = jnp.arange(x.shape[0], dtype=jnp.int32)
    query, key, value = attention.project(x)
    return attention.rope(query, positions), attention.rope(key, positions), value


def timed(
    spec: jattn.AttentionSpec, pattern: Pattern, query: Array, key: Array, value: Array, tokens: int
) -> Speed:
    """A layer's attention over a paged cache, its prompt repeated until it has so many tokens."""
    query, key, value = (jnp.resize(x, (tokens, *x.shape[1:])) for x in (query, key, value))
    mask = jax.jit(lambda query, key: pattern(query, key, spec))(query, key)
    size = 32
    blocks = -(-tokens // size)
    metadata = jattn.build_batch_metadata([tokens], [tokens], [range(1, blocks + 1)], block_size=size)
    room = jattn.CacheSpec(
        num_blocks=blocks + 1, block_size=size, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim
    )
    cache = jattn.write_kv(jattn.PagedCache.create(room), key, value, metadata.slot_mapping)
    serves = jattn.plan(metadata, spec, room, mask=mask, query_dtype=query.dtype).layers[0].prefill
    assert serves is not None  # there is a prompt
    arrays = query, cache, metadata, mask
    step = jax.jit(lambda query, cache, metadata, mask: jattn.attend(query, cache, metadata, spec, mask=mask))
    step(*arrays).block_until_ready()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        out = [step(*arrays) for _ in range(CALLS)]
        out[-1].block_until_ready()
        times.append((time.perf_counter() - start) / CALLS)
    num_q, num_kv = spec.num_q_heads, spec.num_kv_heads
    density = masks.density(mask, tokens, tokens, num_q_heads=num_q, num_kv_heads=num_kv)
    return Speed(serves.implementation, 1e3 * statistics.median(times), density)
