"""attention_fn in Flax layers and on its own: it does what Flax does, or reports what is unsupported."""

import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jattn

HIDDEN, LENGTH = 24, 6
SPEC = jattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=8, causal=True)
POSITIONAL = {
    "causal": {},
    "window": {"window": (2, 0)},
    "chunks": {"chunk_size": 3},
    "sparse": {"sparsity": jattn.masks.Sinks(1) | jattn.masks.Window(left=1)},
}


def hidden(tokens, seed=1):
    return jax.random.normal(jax.random.key(seed), (tokens, HIDDEN))


def texts():
    return hidden(2 * LENGTH).reshape(2, LENGTH, HIDDEN)


def flax_layer(**options):
    return nnx.MultiHeadAttention(4, HIDDEN, rngs=nnx.Rngs(0), **({"decode": False} | options))


def with_spec(**fields):
    spec = jattn.AttentionSpec(num_q_heads=4, num_kv_heads=4, head_dim=6, **{"causal": True} | fields)
    return functools.partial(jattn.attention_fn, spec=spec)


def test_spec_that_does_not_state_causality_is_rejected():
    """An encoder with soft-capped scores must not become causal by the spec's default."""
    q, spec = (
        jnp.ones((1, 2, 1, 8)),
        jattn.AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=8, soft_cap=9.0),
    )
    with pytest.raises(ValueError, match=r"Pass AttentionSpec\(..., causal=True\) .* or causal=False"):
        jattn.attention_fn(q, q, q, spec=spec)
    for causal in (True, False):
        stated = dataclasses.replace(spec, causal=causal)
        assert pickle.loads(pickle.dumps(stated)) == stated
        jattn.attention_fn(q, q, q, spec=pickle.loads(pickle.dumps(stated)))


def test_flax_layer_with_attention_fn_equals_flax_attention():
    make = flax_layer
    x = texts()
    for mask in (None, nnx.make_causal_mask(jnp.ones((2, 6)), dtype=bool)):
        np.testing.assert_allclose(
            make(attention_fn=jattn.attention_fn)(x, mask=mask), make()(x, mask=mask), atol=1e-6
        )


def test_spec_has_the_same_meaning_as_in_attend():
    spec = jattn.AttentionSpec(
        num_q_heads=4, num_kv_heads=2, head_dim=8, causal=True, window=(3, 0), soft_cap=2.0, sqrt_alibi=True
    )
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (2, 3, n, h, 8)) for key, n, h in zip(keys, (5, 9, 9), (4, 2, 2), strict=True)
    )
    modifiers = {"sinks": jnp.linspace(-1.0, 1.0, 4), "alibi_slopes": jnp.linspace(0.1, 0.4, 4)}
    dense = jax.jit(functools.partial(jattn.attention_fn, spec=spec))(q, k, v, **modifiers)
    metadata = jattn.build_batch_metadata([5], [9], None)

    @jax.jit
    def attend(q, k, v):
        kv = jattn.PackedKV(k=k, v=v, kv_start_loc=jnp.zeros(1, jnp.int32))
        return jattn.attend(q, kv, metadata, spec, **modifiers)

    for i, j in np.ndindex(2, 3):
        np.testing.assert_allclose(dense[i, j], attend(q[i, j], k[i, j], v[i, j]), atol=2e-6)


def test_bias_is_added_to_the_scores():
    q, k, v = (jnp.ones((1, 2, 1, 8)) for _ in range(3))
    v = v.at[0, 1].set(3.0)
    bias = jnp.asarray([0.0, jnp.log(3.0)]).reshape(1, 1, 1, 2)
    np.testing.assert_allclose(jattn.attention_fn(q, k, v, bias), 2.5, rtol=1e-6)


def test_dropout_is_rejected():
    q = jnp.ones((1, 2, 1, 8))
    with pytest.raises(NotImplementedError, match=r"=0.5: dropout on attention weights is not supported"):
        jattn.attention_fn(q, q, q, dropout_rate=0.5, deterministic=False)
    with pytest.raises(NotImplementedError, match=r"=0.5: dropout on attention weights is not supported"):
        jattn.attention_fn(
            q, q, q, dropout_rng=jax.random.key(0), dropout_rate=0.5
        )  # as Flax's function does


def test_heads_that_differ_from_the_spec_are_rejected():
    q = jnp.ones((1, 2, 1, 8))
    with pytest.raises(ValueError, match=r"head_dim\) \(1, 1, 8\), but spec has \(4, 2, 8\)"):
        jattn.attention_fn(q, q, q, spec=SPEC)


class TestFlaxArguments:
    @pytest.mark.kernels
    @pytest.mark.parametrize("length", [LENGTH, 4])
    def test_is_causal_masks_what_flax_masks(self, length):
        """Also for fewer queries than keys: Flax aligns the first query with the first key."""
        x, keys = texts()[:, :length], texts()
        jattn_layer, flax = flax_layer(attention_fn=jattn.attention_fn), flax_layer()
        expected = flax(x, keys, is_causal=True)
        np.testing.assert_allclose(jattn_layer(x, keys, is_causal=True), expected, atol=1e-6)
        assert jnp.abs(flax(x, keys) - expected).max() > 1e-2

    def test_is_causal_and_a_causal_spec_are_equivalent(self):
        x, layer = texts(), flax_layer(attention_fn=with_spec(window=(2, 0)))
        np.testing.assert_array_equal(layer(x, is_causal=True), layer(x))

    def test_is_causal_with_a_contradicting_spec_is_rejected(self):
        with pytest.raises(ValueError, match=r"is_causal=True contradicts spec.causal=False"):
            flax_layer(attention_fn=with_spec(causal=False))(texts(), is_causal=True)
        layer = flax_layer(attention_fn=with_spec())
        message = r"is_causal=True is ambiguous with a spec, 4 queries and 6 keys"
        with pytest.raises(ValueError, match=message):
            layer(texts()[:, :4], texts(), is_causal=True)

    @pytest.mark.parametrize("dtype", [bool, jnp.float32, jnp.int32])
    def test_masks_of_every_flax_dtype_are_supported(self, dtype):
        mask = nnx.make_causal_mask(jnp.ones((2, LENGTH)), dtype=dtype)
        jattn_layer, flax = flax_layer(attention_fn=jattn.attention_fn), flax_layer()
        np.testing.assert_allclose(jattn_layer(texts(), mask=mask), flax(texts(), mask=mask), atol=1e-6)

    @pytest.mark.kernels
    @pytest.mark.parametrize("num_queries", [1, 3])
    def test_nan_in_masked_keys_does_not_reach_the_output(self, num_queries):
        """The masked keys are like unwritten cache slots; one query, or a bias, uses the dense code path."""
        draw = lambda seed, *shape: jax.random.normal(jax.random.key(seed), (1, *shape, 8))
        inputs, bias = (draw(0, num_queries, 4), draw(1, 6, 2), draw(2, 6, 2)), jnp.zeros((1, 1, 6))
        mask = jnp.arange(6) < 4
        attend = lambda q, k, v: jattn.attention_fn(q, k, v, bias, mask).sum()
        spoiled = (inputs[0], *(x.at[:, 4:].set(jnp.nan) for x in inputs[1:]))
        loss_and_gradients = jax.value_and_grad(attend, argnums=(0, 1, 2))
        jax.tree.map(np.testing.assert_array_equal, loss_and_gradients(*spoiled), loss_and_gradients(*inputs))

    @pytest.mark.parametrize("hidden", [-jnp.inf, -1e9])
    def test_bias_passed_as_mask_is_rejected(self, hidden):
        """Flax interprets -inf as visible and 0 as masked; here the call is an error."""
        mask = jnp.where(nnx.make_causal_mask(jnp.ones((2, LENGTH)), dtype=bool), 0.0, hidden)
        layer = flax_layer(attention_fn=jattn.attention_fn)
        with pytest.raises(ValueError, match=r"mask has negative numbers, .* Pass it as bias="):
            layer(texts(), mask=mask)
        assert jnp.isnan(jax.jit(layer.__call__)(texts(), mask=mask)[:, :-1]).all()

    @pytest.mark.kernels
    @pytest.mark.parametrize(
        ("name", "says_position"), [*((name, False) for name in POSITIONAL), ("window", True)]
    )
    def test_decode_position_is_the_cache_index(self, name, says_position):
        x, fn = texts(), with_spec(**POSITIONAL[name])
        whole = flax_layer(attention_fn=fn)(x)
        layer = flax_layer(attention_fn=fn, decode=True)
        layer.init_cache((2, LENGTH + 3, HIDDEN))
        step = nnx.jit(lambda layer, x, **options: layer(x, **options))
        for i in range(LENGTH):
            options = {"input_positions": jnp.full((2, 1), i)} if says_position else {}
            np.testing.assert_allclose(
                step(layer, x[:, i : i + 1], **options), whole[:, i : i + 1], atol=1e-5
            )

    def test_alibi_in_decode_uses_the_cache_index(self):
        fn = functools.partial(jattn.attention_fn, alibi_slopes=jnp.linspace(0.1, 0.4, 4))
        causal = nnx.make_causal_mask(jnp.ones((2, LENGTH)), dtype=bool)
        whole = flax_layer(attention_fn=fn)(texts(), mask=causal)
        layer = flax_layer(attention_fn=fn, decode=True)
        layer.init_cache((2, LENGTH + 3, HIDDEN))
        for i in range(LENGTH):
            np.testing.assert_allclose(layer(texts()[:, i : i + 1])[:, 0], whole[:, i], atol=1e-5)

    def test_several_queries_over_a_masked_cache_require_positions(self):
        q, kv = jnp.ones((2, 2, 4, 6)), jnp.ones((2, 9, 4, 6))
        mask = jnp.arange(9) < 5
        message = r"The positions of 2 queries among 9 keys with a mask are ambiguous"
        with pytest.raises(ValueError, match=message):
            with_spec()(q, kv, kv, mask=mask)
        with_spec(causal=False)(q, kv, kv, mask=mask)  # does not depend on positions

    @pytest.mark.kernels
    @pytest.mark.parametrize("name", POSITIONAL)
    def test_more_queries_than_keys_require_positions(self, name):
        q, kv = texts().reshape(2, LENGTH, 4, 6), texts()[:, :4].reshape(2, 4, 4, 6)
        message = r"The positions of 6 queries among 4 keys are ambiguous"
        with pytest.raises(ValueError, match=message):
            with_spec(**POSITIONAL[name])(q, kv, kv)
        positions = jnp.broadcast_to(jnp.arange(LENGTH), (2, LENGTH))
        at_keys = with_spec()(q, kv, kv, input_positions=positions)
        np.testing.assert_allclose(at_keys, jattn.attention(q, kv, kv, causal=True), atol=1e-6)

    def test_positions_place_queries_in_a_longer_cache(self):
        q, k, v = (
            jax.random.normal(jax.random.key(i), (2, n, 4, 6)) for i, n in enumerate((3, LENGTH, LENGTH))
        )
        fn = jax.jit(with_spec(window=(2, 0)))
        garbage = jnp.full((2, 4, 4, 6), 7.0)
        longer = (jnp.concatenate([x, garbage], axis=1) for x in (k, v))
        positions = jnp.broadcast_to(jnp.arange(3, 6), (2, 3))
        mask = jnp.arange(LENGTH + 4) < LENGTH
        out = fn(q, *longer, mask=mask, input_positions=positions)
        np.testing.assert_allclose(out, fn(q, k, v), atol=1e-6)

    def test_shifting_query_and_key_positions_together_changes_nothing(self):
        x, fn = texts(), with_spec(window=(2, 0))
        layer = flax_layer(attention_fn=fn)
        shifted = jnp.broadcast_to(jnp.arange(LENGTH) + 100, (2, LENGTH))
        np.testing.assert_allclose(layer(x, input_positions=shifted), layer(x), atol=1e-6)

    @pytest.mark.parametrize("wrong", [jnp.zeros((2, LENGTH)), jnp.zeros((LENGTH,), jnp.int32)])
    def test_invalid_positions_are_rejected(self, wrong):
        with pytest.raises(
            ValueError, match=r"input_positions must (have an integer dtype|have shape \(2, 6\)).*, got"
        ):
            flax_layer(attention_fn=with_spec())(texts(), input_positions=wrong)

    def test_deterministic_dropout_changes_nothing(self):
        layer = flax_layer(attention_fn=jattn.attention_fn, dropout_rate=0.5, deterministic=True)
        np.testing.assert_array_equal(layer(texts()), flax_layer(attention_fn=jattn.attention_fn)(texts()))

    def test_sowing_attention_weights_is_rejected(self):
        with pytest.raises(
            NotImplementedError, match=r"module=MultiHeadAttention: attention_fn .*sow_weights"
        ):
            flax_layer(attention_fn=jattn.attention_fn)(texts(), sow_weights=True)

    def test_dtype_argument_is_the_output_dtype(self):
        q = jnp.ones((1, 2, 1, 8))
        assert jattn.attention_fn(q, q, q, dtype=jnp.bfloat16).dtype == jnp.bfloat16
        assert flax_layer(attention_fn=jattn.attention_fn, dtype=jnp.bfloat16)(texts()).dtype == jnp.bfloat16

    def test_linen_layer_accepts_attention_fn(self):
        make = lambda **options: linen.MultiHeadDotProductAttention(num_heads=4, **options)
        params = make().init(jax.random.key(0), texts())
        jattn_layer, flax = make(attention_fn=jattn.attention_fn), make()
        mask = linen.make_causal_mask(jnp.ones((2, LENGTH)))
        np.testing.assert_allclose(
            jattn_layer.apply(params, texts(), mask=mask), flax.apply(params, texts(), mask=mask), atol=1e-6
        )

    def test_unknown_keyword_raises_type_error(self):
        q = jnp.ones((1, 2, 1, 8))
        with pytest.raises(TypeError, match="unexpected keyword argument 'is_casual'"):
            jattn.attention_fn(q, q, q, is_casual=True)


class TestShapes:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                {"value": (1, 3, 1, 8)},
                r"value must have shape \(1, 2, 1, 8\) \(the shape of key\), got \(1, 3, 1, 8\)",
            ),
            ({"query": (3, 2, 1, 8)}, r"key must have shape \(3, 2, 1, 8\) .*, got \(1, 2, 1, 8\)"),
            ({"key": (1, 2, 1, 4), "value": (1, 2, 1, 4)}, r"key must have shape .*, got \(1, 2, 1, 4\)"),
            ({"query": (2, 8)}, r"query must have shape \[\*batch, tokens, heads, head_dim\], got \(2, 8\)"),
            ({"mask": (1, 1, 2, 3)}, r"mask must broadcast to \(1, 1, 2, 2\) .*, got \(1, 1, 2, 3\)"),
            ({"bias": (5,)}, r"bias must broadcast to \(1, 1, 2, 2\) .*, got \(5,\)"),
            ({"sinks": (3,)}, r"sinks must have shape \(1,\) \(q_heads\), got \(3,\)"),
            ({"alibi_slopes": (3,)}, r"alibi_slopes must have shape \(1,\) \(q_heads\), got \(3,\)"),
        ],
    )
    def test_inconsistent_shapes_are_rejected(self, change, message):
        arrays = {name: jnp.ones(change.get(name, (1, 2, 1, 8))) for name in ("query", "key", "value")}
        with pytest.raises(ValueError, match=message):
            jattn.attention_fn(**arrays | {name: jnp.ones(shape) for name, shape in change.items()})

    def test_sqrt_alibi_requires_slopes(self):
        q = jnp.ones((1, 2, 4, 6))
        with pytest.raises(
            ValueError, match=r"spec.sqrt_alibi=True requires ALiBi slopes. Pass alibi_slopes"
        ):
            with_spec(sqrt_alibi=True)(q, q, q)

    @pytest.mark.kernels
    @pytest.mark.parametrize("lens", [(3, 0), (0, 3), (0, 0)])
    def test_without_keys_or_tokens_outputs_are_zero(self, lens):
        q, k = (jnp.ones((2, 3, n, 1, 8)) for n in lens)
        for options in ({}, {"mask": jnp.ones((2, 3, 1, *lens), bool)}, {"bias": jnp.zeros(lens)}):
            out = jattn.attention_fn(q, k, k, **options)
            np.testing.assert_array_equal(out, jnp.zeros_like(q))

    @pytest.mark.usefixtures("types_unchecked")
    def test_sinks_and_slopes_may_be_lists(self):
        x, numbers = jax.random.normal(jax.random.key(0), (1, 5, 4, 6)), [0.0, 1.0, 2.0, 3.0]
        inputs = {"sinks": numbers, "alibi_slopes": numbers}
        expected = jattn.attention(x, x, x, **{name: jnp.asarray(numbers) for name in inputs})
        for attend in (jattn.attention_fn, jattn.attention):
            np.testing.assert_allclose(attend(x, x, x, **inputs), expected, atol=1e-6)


class TestMemory:
    """Memory of residuals for the backward pass."""

    @staticmethod
    def temporary_bytes(tokens, run):
        arrays = [jnp.zeros((2, tokens, heads, 32), jnp.bfloat16) for heads in (4, 2, 2)]
        step = jax.jit(jax.grad(lambda arrays: run(*arrays).astype(jnp.float32).sum()))
        return step.lower(arrays).compile().memory_analysis().temp_size_in_bytes

    @pytest.mark.kernels
    def test_memory_is_linear_in_tokens_without_a_bias(self):
        spec = jattn.AttentionSpec(
            num_q_heads=4, num_kv_heads=2, head_dim=32, causal=True, window=(99, 0), soft_cap=9.0
        )
        run = functools.partial(jattn.attention_fn, spec=spec)
        used = [self.temporary_bytes(tokens, run) for tokens in (2048, 4096)]
        assert used[1] < 2.2 * used[0]
        assert used[1] < 4 * 4096**2  # a single head's scores of one text


def test_gradients_of_a_flax_layer_equal_flax_attention():
    x = texts()
    mask = nnx.make_causal_mask(jnp.ones((2, LENGTH)), dtype=jnp.float32)
    loss = lambda layer, x: (layer(x, mask=mask) ** 2).sum()
    gradients = [
        jax.tree.leaves(nnx.jit(nnx.grad(loss))(flax_layer(**options), x))
        for options in ({"attention_fn": jattn.attention_fn}, {})
    ]
    for actual, expected in zip(*gradients, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5)


def test_unsupported_kernel_is_rejected_by_name():
    q = jnp.ones((1, 2, 1, 8))
    with pytest.raises(NotImplementedError, match=r"mosaic_gpu: the kernels do not support a bias"):
        jattn.attention_fn(q, q, q, jnp.zeros((2, 2)), implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match=r"mosaic_gpu: the kernels need an NVIDIA GPU"):
        jattn.attention_fn(q, q, q, implementation="mosaic_gpu")


@pytest.mark.parametrize("options", [{}, {"bias": jnp.zeros((2, 2))}])
def test_unsupported_spec_options_are_rejected_with_and_without_a_bias(options):
    q = jnp.ones((1, 2, 4, 6))
    message = r"spec.query_quantization must be None with float32 keys, got 'int8'"
    with pytest.raises(ValueError, match=message):
        with_spec(query_quantization="int8")(q, q, q, **options)
    with pytest.raises(NotImplementedError, match="reference: its sums depend on the sizes of the bucket"):
        with_spec(batch_invariant=True)(q, q, q, implementation="reference", **options)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("query", [1.0], "query must be an array, got a list"),
        ("value", None, "value must be an array, got a NoneType"),
        ("query", jnp.ones((1, 2, 1, 8), int), "query must have a floating-point dtype, got int32"),
        ("key", jnp.ones((1, 2, 1, 8), int), "key must have a floating-point dtype, got int32"),
        (
            "query",
            jnp.ones((1, 2, 1, 8), jnp.float8_e5m2),
            "query must have a floating-point dtype of at least 16 bits, got float8_e5m2",
        ),
        ("bias", 1.0, "bias must be an array, got float"),
        (
            "bias",
            jnp.ones((2, 2), bool),
            r"bias must have a real dtype \(pass a bool array as mask=\), got bool",
        ),
        ("bias", jnp.ones((2, 2), jnp.complex64), "bias must have a real dtype .*, got complex64"),
        ("mask", [[True]], "mask must be an array, got list"),
        ("input_positions", [[0, 1]], "input_positions must be an array, got list"),
    ],
)
def test_arguments_of_a_wrong_type_are_rejected(name, wrong, message, types_unchecked):
    q = jnp.ones((1, 2, 1, 8))
    inputs = {"query": q, "key": q, "value": q, "bias": jnp.zeros((2, 2))} | {name: wrong}
    with pytest.raises(ValueError, match=message):
        jattn.attention_fn(**inputs)
