"""Measure density, attention mass, bits per byte and speed of a sparsity pattern on the tiny model."""

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
CALLS = 10  # enqueued together, so that the GPU's time per call excludes the dispatch


@dataclasses.dataclass(frozen=True)
class Speed:
    """Time of a layer's attention under a pattern.

    Attributes:
        implementation: Name of the implementation that computed it.
        milliseconds: Time of one layer's attention.
        density: Fraction of the causal (query, key) pairs that are visible, over all heads.
    """

    implementation: str
    milliseconds: float
    density: float


@dataclasses.dataclass(frozen=True)
class Result:
    """Measurements of one pattern.

    Attributes:
        density: Fraction of the causal (query, key) pairs that are visible, [layers, q_heads].
        mass: Fraction of the dense attention probability on visible pairs, [layers, q_heads].
        bits: Bits per byte on the held-out windows.
        speed: Time of the middle layer's attention.
        mask: The middle layer's mask for the last window.
        num_kv_heads: Number of key/value heads per layer.
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
    """Run the model over the windows with the pattern in every layer, and time a prompt of `timed_tokens`."""
    run = jax.jit(functools.partial(run_window, model, pattern))
    densities, masses, bits = [], [], []
    for window in windows:
        window_bits, density, mass, middle_layer = run(jnp.asarray(window))
        bits.append(float(window_bits))
        densities.append(np.asarray(density))
        masses.append(np.asarray(mass))
    query, key, value, mask = middle_layer
    return Result(
        density=np.mean(densities, axis=0),
        mass=np.mean(masses, axis=0),
        bits=statistics.mean(bits),
        speed=time_attention(model.layers[0].self_attn.spec, pattern, query, key, value, timed_tokens),
        mask=masks.Causal() & mask,
        num_kv_heads=model.layers[0].self_attn.spec.num_kv_heads,
    )


def run_window(
    model: Decoder, pattern: Pattern, window: Int[Array, " tokens+1"]
) -> tuple[Array, Array, Array, Any]:
    """Return bits per byte, density and mass [layers, q_heads], and the middle layer's (q, k, v, mask)."""
    tokens = window.shape[0] - 1
    x = jnp.take(model.embed_tokens.embedding[...], window[:-1], axis=0)
    causal = jnp.tri(tokens, dtype=bool)[None]
    densities, masses, middle = [], [], None
    for i, layer in enumerate(model.layers):
        attention, spec = layer.self_attn, layer.self_attn.spec
        query, key, value = project_qkv(attention, layer.input_layernorm(x))
        mask = pattern(query, key, spec)
        num_q, num_kv = spec.num_q_heads, spec.num_kv_heads
        visible = causal & masks.dense(mask, tokens, tokens, num_q_heads=num_q, num_kv_heads=num_kv)
        k, v = (jnp.repeat(y, spec.q_heads_per_kv_head, axis=1) for y in (key, value))
        p = jnp.where(visible, probabilities(query, k, spec.softmax_scale), 0.0)
        mass = p.sum(axis=-1)
        out = jnp.einsum("hqk,khd->qhd", p / jnp.maximum(mass, 1e-30)[..., None], v.astype(jnp.float32))
        densities.append(visible.sum(axis=(1, 2)) / causal.sum())
        masses.append(mass.mean(axis=1))
        if i == len(model.layers) // 2:
            middle = query, key, value, mask
        x = x + attention.o_proj(out.reshape(tokens, -1).astype(x.dtype))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    scores = jax.nn.log_softmax(model.logits(model.norm(x)))
    bits = -jnp.take_along_axis(scores, window[1:, None], axis=1).mean() / np.log(2)
    return bits, jnp.stack(densities), jnp.stack(masses), middle


def project_qkv(attention: Any, x: Float[Array, "tokens hidden"]) -> tuple[Array, Array, Array]:
    """Return a layer's queries and keys after RoPE and its values, [tokens, heads, head_dim]."""
    positions = jnp.arange(x.shape[0], dtype=jnp.int32)
    query, key, value = attention.project(x)
    return attention.rope(query, positions), attention.rope(key, positions), value


def time_attention(
    spec: jattn.AttentionSpec, pattern: Pattern, query: Array, key: Array, value: Array, tokens: int
) -> Speed:
    """Time a layer's attention over a paged cache, with the prompt repeated up to `tokens` tokens."""
    query, key, value = (jnp.resize(x, (tokens, *x.shape[1:])) for x in (query, key, value))
    mask = jax.jit(lambda query, key: pattern(query, key, spec))(query, key)
    size = 32
    blocks = -(-tokens // size)
    metadata = jattn.build_batch_metadata([tokens], [tokens], [range(1, blocks + 1)], block_size=size)
    cache_spec = jattn.CacheSpec(
        num_blocks=blocks + 1, block_size=size, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim
    )
    cache = jattn.write_kv(jattn.PagedCache.create(cache_spec), key, value, metadata.slot_mapping)
    prefill_plan = (
        jattn.plan(metadata, spec, cache_spec, mask=mask, query_dtype=query.dtype).layers[0].prefill
    )
    assert prefill_plan is not None
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
    return Speed(prefill_plan.implementation, 1e3 * statistics.median(times), density)
