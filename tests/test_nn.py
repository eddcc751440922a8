"""The Flax layer under the transformations of Flax and JAX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn

HIDDEN = 24
SPEC = jattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=8)
CACHE_SPEC = jattn.CacheSpec(num_blocks=9, block_size=4, num_kv_heads=2, head_dim=8, dtype=jnp.float32)


def layer(spec=SPEC, seed=0, **options):
    return jattn.PagedAttention(HIDDEN, spec, rngs=nnx.Rngs(seed), **options)


def hidden(tokens, seed=1):
    return jax.random.normal(jax.random.key(seed), (tokens, HIDDEN))


def step(query_lens, seq_lens, table=((1, 2), (5, 3))):
    return jattn.build_batch_metadata(query_lens, seq_lens, [list(row) for row in table], block_size=4)


def rope(x, positions):
    """Rotate adjacent pairs, which is enough to detect wrong positions."""
    angle = positions.astype(jnp.float32)[:, None, None] * jnp.asarray([1.0, 0.3, 0.1, 0.03])[None, None, :]
    even, odd = x[..., 0::2], x[..., 1::2]
    rotated = (even * jnp.cos(angle) - odd * jnp.sin(angle), even * jnp.sin(angle) + odd * jnp.cos(angle))
    return jnp.stack(rotated, axis=-1).reshape(x.shape)


OPTIONS = {
    "plain": {},
    "biases": {"use_bias": True, "use_out_bias": True},
    "rope": {"rope": rope},
    "window": {"spec": jattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=8, window=(2, 0))},
    "cap": {"spec": jattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=8, soft_cap=1.0)},
    "sinks": {"has_sinks": True},
    "clipped": {"clip_qkv": 0.5},
    "scaled": {"query_scale": lambda positions: 1.0 + 0.3 * positions.astype(jnp.float32)},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 1.0]},
}


@pytest.mark.kernels
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("rope", "window") else pytest.mark.kernels) for name in OPTIONS],
)
def test_chunked_prefill_and_decode_equal_the_full_prompt_without_a_cache(name):
    """Two requests of 7 and 5 tokens, at once without a cache and in three paged steps."""
    attention = layer(**OPTIONS[name])
    x = hidden(12)
    whole = step([7, 5], [7, 5])
    expected, no_cache = attention(x, None, whole, whole.positions)
    assert no_cache is None
    cache = jattn.PagedCache.create(CACHE_SPEC)
    run = nnx.jit(lambda m, x, c, meta: m(x, c, meta, meta.positions))
    pieces = [
        (step([3, 4], [3, 4]), [0, 1, 2, 7, 8, 9, 10]),
        (step([1, 3], [5, 6], ((5, 3), (1, 2))), [11, 3, 4, 5]),
        (step([1], [7], ((1, 2),)), [6]),
    ]
    for metadata, tokens in pieces:
        out, cache = run(attention, x[jnp.asarray(tokens)], cache, metadata)
        np.testing.assert_allclose(out, expected[jnp.asarray(tokens)], atol=2e-6)


@pytest.mark.kernels
def test_context_without_a_cache_is_rejected():
    """Without a cache, the missing keys would be read from another request or from padding."""
    attention, bucket = layer(), jattn.Bucket(max_prefills=1, max_prefill_tokens=16, max_blocks=2)
    padded = jattn.build_batch_metadata([4], [6], [[1, 2]], block_size=4, bucket=bucket)
    for metadata, tokens in ((step([4, 4], [6, 4]), 8), (padded, 16)):
        with pytest.raises(ValueError, match=r"seq_lens\[0\]=6 differs from the row's 4 new tokens"):
            attention(hidden(tokens), None, metadata, metadata.positions)
    whole = jattn.build_cross_attention_metadata([4, 4], [4, 4], None)
    actual, expected = (
        jax.jit(
            lambda x, step_metadata=step_metadata: attention(x, None, step_metadata, step_metadata.positions)[
                0
            ]
        )(hidden(8))
        for step_metadata in (whole, step([4, 4], [4, 4]))
    )
    np.testing.assert_array_equal(actual, expected)


def test_norms_are_applied_per_head_before_rope():
    seen = []

    def norm(x):
        seen.append(x.shape)
        return x * 2

    def check(x, positions):
        seen.append((x.shape, positions.shape))
        return x

    attention = layer(q_norm=norm, k_norm=norm, rope=check)
    metadata = step([7, 5], [7, 5])
    attention(hidden(12), None, metadata, metadata.positions)
    assert seen == [(12, 4, 8), ((12, 4, 8), (12,)), (12, 2, 8), ((12, 2, 8), (12,))]


def test_norm_modules_are_parameters_of_the_layer():
    attention = layer(q_norm=nnx.RMSNorm(8, rngs=nnx.Rngs(0)))
    paths = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(attention))}
    assert {"q_norm/scale", "q_proj/kernel", "k_proj/kernel", "v_proj/kernel", "o_proj/kernel"} == paths


class TestFusedProjections:
    @pytest.mark.parametrize("use_bias", [False, True])
    def test_fused_projection_equals_separate_projections(self, use_bias):
        separate, fused = (layer(use_bias=use_bias, fuses_qkv=fuses) for fuses in (False, True))
        assert {name for name in ("q_proj", "k_proj", "v_proj") if hasattr(fused, name)} == set()
        for leaf in ("kernel", "bias") if use_bias else ("kernel",):
            parts = []
            for projection in (separate.q_proj, separate.k_proj, separate.v_proj):
                values = jax.random.normal(jax.random.key(len(parts)), getattr(projection, leaf).shape)
                getattr(projection, leaf)[...] = values
                parts.append(values.reshape(*values.shape[:-1], 2, -1, 8))  # kv heads, heads of each
            getattr(fused.qkv_proj, leaf)[...] = jnp.concatenate(parts, axis=-2)
        fused.o_proj = separate.o_proj
        metadata = step([7, 5], [7, 5])
        expected, _ = separate(hidden(12), None, metadata, metadata.positions)
        out, _ = fused(hidden(12), None, metadata, metadata.positions)
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)

    def test_fused_projection_with_shared_kv_is_rejected(self):
        with pytest.raises(ValueError, match=r"fuses_qkv must be False with shares_kv, got True\."):
            layer(fuses_qkv=True, shares_kv=True)


class TestSharedKeysAndValues:
    def test_layer_with_shared_kv_reads_and_does_not_write_the_cache(self):
        writer, reader = layer(), layer(seed=0, shares_kv=True)
        reader.q_proj, reader.o_proj = writer.q_proj, writer.o_proj
        metadata = step([7, 5], [7, 5])
        cache = jattn.PagedCache.create(CACHE_SPEC)
        expected, cache = writer(hidden(12), cache, metadata, metadata.positions)
        before = np.asarray(cache.k)
        out, after = reader(hidden(12), cache, metadata, metadata.positions)
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(after.k, before)
        assert not hasattr(reader, "k_proj")

    def test_shared_kv_without_a_cache_is_rejected(self):
        metadata = step([7, 5], [7, 5])
        with pytest.raises(ValueError, match="cache is None, but a layer with shares_kv=True"):
            layer(shares_kv=True)(hidden(12), None, metadata, metadata.positions)


class TestTransformations:
    def inputs(self):
        metadata = step([1, 3], [5, 3])
        return hidden(4), jattn.PagedCache.create(CACHE_SPEC), metadata

    def test_nnx_jit_and_jax_jit_agree_and_the_cache_is_donated(self):
        attention = layer(rope=rope)
        x, cache, metadata = self.inputs()
        expected, _ = nnx.jit(lambda m, x, c, meta: m(x, c, meta, meta.positions))(
            attention, x, cache, metadata
        )
        graphdef, state = nnx.split(attention)

        @functools.partial(jax.jit, donate_argnums=2)
        def run(state, x, cache, metadata):
            return nnx.merge(graphdef, state)(x, cache, metadata, metadata.positions)

        x, cache, metadata = self.inputs()
        compiled = run.lower(state, x, cache, metadata).compile()
        assert compiled.memory_analysis().alias_size_in_bytes >= CACHE_SPEC.num_bytes
        out, _ = run(state, x, cache, metadata)
        np.testing.assert_allclose(out, expected, atol=1e-6)
        assert cache.k.is_deleted()

    def test_eval_shape_creates_no_arrays(self):
        abstract = nnx.eval_shape(lambda: layer(has_sinks=True))
        x, cache, metadata = self.inputs()
        out, new_cache = nnx.eval_shape(
            lambda m, x, c, meta: m(x, c, meta, meta.positions), abstract, x, cache, metadata
        )
        assert out.shape == (4, HIDDEN)
        assert new_cache.k.shape == cache.k.shape

    @pytest.mark.kernels
    def test_layer_runs_under_a_mesh(self):
        x, cache, metadata = self.inputs()
        attention = layer()
        expected, _ = attention(x, cache, metadata, metadata.positions)
        x, cache, metadata = self.inputs()
        mesh = jax.make_mesh((1,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
        with jax.set_mesh(mesh):
            out, _ = nnx.jit(lambda m, x, c, meta: m(x, c, meta, meta.positions))(
                attention, x, cache, metadata
            )
        np.testing.assert_allclose(out, expected, atol=1e-6)

    @pytest.mark.kernels
    @pytest.mark.parametrize("implementation", ["reference", "xla"])
    def test_gradients_without_a_cache_equal_finite_differences(self, implementation):
        attention = layer(implementation=implementation, has_sinks=True, rope=rope)
        metadata = step([7, 5], [7, 5])
        loss = lambda m, x: (m(x, None, metadata, metadata.positions)[0] ** 2).sum()
        x = hidden(12)
        direction = hidden(12, seed=9)
        slope = jnp.vdot(jax.jit(jax.grad(lambda x: loss(attention, x)))(x), direction)
        step_size = 1e-2
        ends = [loss(attention, x + sign * step_size * direction) for sign in (1, -1)]
        np.testing.assert_allclose(slope, (ends[0] - ends[1]) / (2 * step_size), rtol=2e-2)
        grads = nnx.grad(loss)(attention, x)
        assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(grads))


def test_invalid_clip_qkv_and_alibi_slopes_are_rejected():
    with pytest.raises(ValueError, match=r"clip_qkv must be positive, got 0\.0"):
        layer(clip_qkv=0.0)
    with pytest.raises(ValueError, match=r"alibi_slopes must have shape \(4,\) .*got \(3,\)"):
        layer(alibi_slopes=[1.0, 2.0, 3.0])


@pytest.mark.usefixtures("types_unchecked")
def test_scalar_alibi_slopes_are_rejected():
    with pytest.raises(ValueError, match=r"alibi_slopes must have shape \(4,\) .*got \(\)"):
        layer(alibi_slopes=0.5)


def test_projections_are_clipped_and_queries_scaled_by_position():
    x, metadata = hidden(3), step([3], [3], ((1,),))
    clipped = layer(clip_qkv=0.5, seed=2)
    heads = clipped.project(x)
    assert all(np.abs(part).max() == 0.5 for part in heads)
    plain, scaled = layer(), layer(query_scale=lambda positions: jnp.where(positions == 2, 0.0, 1.0))
    out, _ = plain(x, None, metadata, metadata.positions)
    actual, _ = scaled(x, None, metadata, metadata.positions)
    np.testing.assert_array_equal(actual[:2], out[:2])
    value = jnp.repeat(plain.project(x)[2].mean(axis=0), 2, axis=0)  # scores of 0: an average of all values
    np.testing.assert_allclose(actual[2], plain.o_proj(value.reshape(-1)), atol=1e-6)
