"""write_qkv in a layer equals norms, rope and write one after the other, and layers that cannot use it do
not.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import mosaic_gpu as plgpu

import jattn
from jattn.cache import fused_qkv
from jattn.models.layers import AllHeadsNorm, RMSNorm
from jattn.models.rope import Rope
from jattn.models.specs import NormSpec
from pallas_kernels.qkv_write import qkv_write

DIM, HIDDEN = 64, 96
SPEC = jattn.AttentionSpec(num_q_heads=6, num_kv_heads=2, head_dim=DIM)
ROPE = Rope(head_dim=DIM)
LONG = Rope(
    head_dim=DIM,
    rope_type="longrope",
    short_factor=(1.0,) * 32,
    long_factor=(4.0,) * 32,
    long_attention_factor=1.2,
    original_max_position_embeddings=16,
)


def norm(**options):
    norm_layer = RMSNorm(
        DIM, eps=1e-6, is_offset=options.pop("is_offset", False), dtype=jnp.bfloat16, **options
    )
    norm_layer.weight.set_value(1 + 0.1 * jax.random.normal(jax.random.key(3), (DIM,), jnp.bfloat16))
    return norm_layer


SERVED = {
    "rope": {"rope": ROPE},
    "norms": {"q_norm": norm(), "k_norm": norm()},
    "both": {"rope": ROPE, "q_norm": norm(), "k_norm": norm()},
    "offset": {"rope": ROPE, "q_norm": norm(is_offset=True), "k_norm": norm(is_offset=True)},
    "by length": {"rope": LONG, "k_norm": norm()},
    "clipped": {"rope": ROPE, "clip_qkv": 0.5},
    "by name": {"rope": ROPE, "implementation": ["mosaic_gpu", "xla"]},
}
NOT_SERVED = {
    "a rope of one's own": {"rope": lambda x, positions: -x},
    "a part of each head": {"rope": Rope(head_dim=DIM, partial_rotary_factor=0.5)},
    "neighbours": {"rope": Rope(head_dim=DIM, interleaved=True)},
    "another rounding": {"q_norm": norm(rounds_once=True), "k_norm": norm(rounds_once=True)},
    "two kinds": {"q_norm": norm(), "k_norm": norm(is_offset=True)},
    "another norm": {"q_norm": lambda x: 2 * x},
    "one norm of all heads": {
        f"{part}_norm": AllHeadsNorm(heads, DIM, NormSpec("rms", 1e-5), dtype=jnp.bfloat16)
        for part, heads in (("q", SPEC.num_q_heads), ("k", SPEC.num_kv_heads))
    },
    "scaled queries": {"rope": ROPE, "query_scale": lambda positions: 1 + positions.astype(jnp.float32)},
    "xla by name": {"rope": ROPE, "implementation": "xla"},
}


def step(layer_options, layout="NHD", quantization=None):
    """Return a layer's queries and cache after a step of a decode row and a prompt with context."""
    layer = jattn.PagedAttention(
        HIDDEN, SPEC, rngs=nnx.Rngs(0), fuses_qkv=True, param_dtype=jnp.bfloat16, **layer_options
    )
    spec = jattn.CacheSpec(
        num_blocks=9, num_kv_heads=2, head_dim=DIM, layout=layout, quantization=quantization
    )
    metadata = jattn.build_batch_metadata([1, 5], [9, 21], np.arange(1, 5).reshape(2, 2), block_size=16)
    x = jax.random.normal(jax.random.key(1), (metadata.bucket.max_tokens, HIDDEN), jnp.bfloat16)
    return layer, x, jattn.PagedCache.create(spec), metadata


def as_on_a_gpu(monkeypatch):
    """Run the kernel in interpret mode as on a GPU."""
    interpreted = functools.partial(qkv_write, interpret=plgpu.InterpretGPUParams())
    monkeypatch.setattr("pallas_kernels.support.why_not_on", lambda *_: None)
    monkeypatch.setattr(fused_qkv, "qkv_write", interpreted)


@pytest.mark.kernels
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("layer_options", SERVED.values(), ids=SERVED)
def test_the_fused_kernel_equals_the_separate_operations(layer_options, layout, monkeypatch):
    layer, x, cache, metadata = step(layer_options, layout)
    want_query, expected = layer._query_and_kv(x, cache, metadata, metadata.positions)
    as_on_a_gpu(monkeypatch)
    layer, x, cache, metadata = step(layer_options, layout)
    assert layer._qk_norm_rope(cache, x.dtype, metadata, metadata.positions) is not None
    query, actual = jax.jit(layer._query_and_kv)(x, cache, metadata, metadata.positions)
    unit = float(jnp.finfo(jnp.bfloat16).eps)
    for actual_array, expected_array in ((query, want_query), (actual.k, expected.k), (actual.v, expected.v)):
        actual_array, expected_array = (
            np.asarray(array, np.float32) for array in (actual_array, expected_array)
        )
        np.testing.assert_allclose(actual_array, expected_array, rtol=2 * unit, atol=8 * unit)


@pytest.mark.parametrize("layer_options", NOT_SERVED.values(), ids=NOT_SERVED)
def test_unsupported_layers_use_separate_operations(layer_options, monkeypatch):
    layer, x, cache, metadata = step(layer_options)
    as_on_a_gpu(monkeypatch)
    assert layer._qk_norm_rope(cache, x.dtype, metadata, metadata.positions) is None


def test_8_bit_caches_use_separate_operations(monkeypatch):
    layer, x, cache, _ = step(SERVED["both"], quantization="fp8_per_token_head")
    as_on_a_gpu(monkeypatch)
    norms = layer.q_norm, layer.k_norm
    reason = fused_qkv.why_not_write_qkv(cache, x.dtype, layer.rope, norms)
    assert reason.startswith("caches of float8_e4m3fn, float8_e4m3fn are not supported with bfloat16 inputs")


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_fused_kernel_equals_the_separate_operations_on_a_gpu(layout):
    results = []
    for implementation in ("mosaic_gpu", "xla"):
        layer, x, cache, metadata = step(SERVED["both"] | {"implementation": implementation}, layout)
        graphdef, state = nnx.split(layer)
        run = jax.jit(lambda state, *step, g=graphdef: nnx.merge(g, state)(*step))
        results.append(run(state, x, cache, metadata, metadata.positions))
    (actual_array, first_cache), (expected_array, second_cache) = results
    close = functools.partial(np.testing.assert_allclose, rtol=0.02, atol=0.05)
    as_float32 = lambda array: np.asarray(array, np.float32)
    close(as_float32(actual_array), as_float32(expected_array))
    close(as_float32(first_cache.k), as_float32(second_cache.k))
    np.testing.assert_array_equal(as_float32(first_cache.v), as_float32(second_cache.v))
