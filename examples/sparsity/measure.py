"""What a pattern does to the tiny model: density, attention mass kept, bits per byte, time of a layer."""

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


@dataclasses.dataclass(frozen=True)
class Result:
    """One pattern's figures.

    Attributes:
        density: Pairs seen over causal pairs, [layers, q_heads].
        mass: Share of the dense attention that falls on pairs seen, [layers, q_heads].
        bits: Bits per byte of the held-out windows.
        milliseconds: Time of one layer's attention over one window, on this machine.
        implementation: What computed it.
        mask: What the middle layer sees of the last window.
    """

    density: np.ndarray
    mass: np.ndarray
    bits: float
    milliseconds: float
    implementation: str
    mask: Mask


def measure(model: Decoder, windows: Int[np.ndarray, "windows tokens+1"], pattern: Pattern) -> Result:
    """Runs the model over the windows, every layer under its own mask."""
    run = jax.jit(functools.partial(run_window, model, pattern))
    densities, kept, bits = [], [], []
    for window in windows:
        one_bits, density, mass, layer = run(jnp.asarray(window))
        bits.append(float(one_bits))
        densities.append(np.asarray(density))
        kept.append(np.asarray(mass))
    name, milliseconds = timed(model.layers[0].self_attn.spec, *layer)
    return Result(
        density=np.mean(densities, axis=0),
        mass=np.mean(kept, axis=0),
        bits=statistics.mean(bits),
        milliseconds=milliseconds,
        implementation=name,
        mask=masks.Causal() & layer[-1],
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
    heads = lambda y: y.reshape(x.shape[0], -1, attention.spec.head_dim)
    turned = lambda project: attention.rope(heads(project(x)), positions)
    return turned(attention.q_proj), turned(attention.k_proj), heads(attention.v_proj(x))


def timed(spec: jattn.AttentionSpec, query: Array, key: Array, value: Array, mask: Mask) -> tuple[str, float]:
    """The implementation that attend takes over a paged cache, and the median of its milliseconds."""
    tokens, size = query.shape[0], 32
    blocks = tokens // size
    table = [list(range(1, blocks + 1))]
    metadata = jattn.build_batch_metadata([tokens], [tokens], table, block_size=size)
    room = jattn.CacheSpec(
        num_blocks=blocks + 1, block_size=size, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim
    )
    cache = jattn.write_kv(jattn.PagedCache.create(room), key, value, metadata.slot_mapping)
    step = jax.jit(lambda q, cache, metadata, mask: jattn.attend(q, cache, metadata, spec, mask=mask))
    step(query, cache, metadata, mask).block_until_ready()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        step(query, cache, metadata, mask).block_until_ready()
        times.append(time.perf_counter() - start)
    name = "mosaic_gpu" if jax.default_backend() == "gpu" else "xla"
    return name, 1e3 * statistics.median(times)
