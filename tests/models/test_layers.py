"""Parts of layers that few families have, against what they say in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from jattn.models import Decoder, DecoderConfig
from jattn.models.activations import ACTIVATIONS
from jattn.models.kv_cache_groups import PerKVCacheGroup
from jattn.models.layers import make_norm, make_qk_norm, take_rows
from jattn.models.loading.tensor_layouts import HFTensors, Join, to_hf
from jattn.models.specs import NORM_PLACEMENTS, AttentionTemperature, NormSpec, QKNorm

X = np.random.default_rng(0).normal(size=(5, 4, 6)).astype(np.float32)
WEIGHT = np.random.default_rng(1).normal(size=(4, 6)).astype(np.float32)
SIZES = dict(vocab_size=24, hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)
PLAIN = {"gelu_fast": "gelu_new", "gelu_python": "gelu", "swish": "silu"}


def normalised(x, axes, centred):
    x = x - x.mean(axes, keepdims=True) if centred else x
    return x / np.sqrt((x * x).mean(axes, keepdims=True) + 1e-5)


@pytest.mark.parametrize(
    ("kind", "over", "axes"), [("rms_f32", "all_heads", (1, 2)), ("layer_no_bias", "own_head", 2)]
)
def test_heads_with_weights_of_their_own(kind, over, axes):
    norm = make_qk_norm(QKNorm(norm=NormSpec(kind, 1e-5), over=over), 4, 6, dtype=jnp.float32)
    (param,) = nnx.to_flat_state(nnx.state(norm))
    param[1].set_value(jnp.asarray(WEIGHT.reshape(param[1].get_value().shape)))
    nnx.update(norm, nnx.from_flat_state([param]))
    want = normalised(X, axes, centred=kind.startswith("layer")) * WEIGHT
    np.testing.assert_allclose(norm(jnp.asarray(X)), want, atol=1e-5)


def test_weights_by_head_are_a_layer_norm_s():
    with pytest.raises(ValueError, match=r"the norm for over='own_head' must be one of 'layer'.*got 'rms'"):
        QKNorm(norm=NormSpec("rms", 1e-5), over="own_head")
    with pytest.raises(ValueError, match=r"the norm for over='all_heads' must be one of 'rms'.*got 'layer'"):
        QKNorm(norm=NormSpec("layer", 1e-5), over="all_heads")
    with pytest.raises(ValueError, match=r"over must be one of 'head'.*got 'heads'"):
        QKNorm(norm=NormSpec("rms", 1e-5), over="heads")


def test_a_norm_behind_the_rope_is_of_each_head():
    behind = QKNorm(norm=NormSpec("rms", 1e-5), comes_after_rope=True)
    assert make_qk_norm(behind, 4, 6, dtype=jnp.float32).follows_rope
    with pytest.raises(ValueError, match=r"over of a norm after the rope must be .* got 'all_heads'"):
        QKNorm(norm=NormSpec("rms", 1e-5), comes_after_rope=True, over="all_heads")
    with pytest.raises(ValueError, match=r"has_weight must be True before the rope, got False"):
        QKNorm(norm=NormSpec("rms", 1e-5), has_weight=False)


def test_layer_norms_with_an_offset_and_without_weights():
    x = jnp.asarray(X[0])
    offset = make_norm(NormSpec("layer_offset", 1e-5), 6, dtype=jnp.float32)
    offset.weight.set_value(jnp.full(6, 0.5))
    np.testing.assert_allclose(offset(x), 1.5 * normalised(X[0], -1, True), atol=1e-5)
    bare = make_norm(NormSpec("layer_no_weight", 1e-5), 6, dtype=jnp.float32)
    assert (bare.weight, bare.bias) == (None, None)
    np.testing.assert_allclose(bare(x), normalised(X[0], -1, True), atol=1e-5)


def test_every_activation_has_a_name_and_does_what_it_says():
    x = jnp.linspace(-4.0, 8.0, 25)
    for name, same in PLAIN.items():
        np.testing.assert_array_equal(ACTIVATIONS[name](x), ACTIVATIONS[same](x))
    np.testing.assert_allclose(ACTIVATIONS["quick_gelu"](x), x / (1 + np.exp(-1.702 * x)), atol=1e-5)
    np.testing.assert_allclose(ACTIVATIONS["relu2"](x), np.maximum(x, 0) ** 2, rtol=1e-6)
    np.testing.assert_allclose(ACTIVATIONS["relu6"](x), np.clip(x, 0, 6), rtol=1e-6)


def test_a_temperature_may_count_from_position_0():
    positions = jnp.arange(9, dtype=jnp.int32)
    tuned = AttentionTemperature(floor_scale=4.0, attn_scale=0.5, first=0)
    want = 1 + 0.5 * np.log1p(np.arange(9) // 4)
    np.testing.assert_allclose(tuned(positions), want, rtol=1e-6)


def test_a_projection_may_be_stored_the_other_way_round():
    tensors = {"up_proj": HFTensors(("c_fc",), is_transposed=True)}
    kernel = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    (stored,) = to_hf(tensors, ("up_proj", "kernel"), kernel).values()
    np.testing.assert_array_equal(stored, kernel)
    join = Join("whole", "kernel", (2, 3), is_transposed=True)
    np.testing.assert_array_equal(join([jnp.asarray(stored)]), kernel)


@pytest.mark.parametrize("model_type", ["stablelm", "gpt_neox", "olmo2", "glm4"])
def test_layers_have_the_norms_of_their_placement_and_no_others(model_type):
    config = DecoderConfig.from_hf(SIZES | {"model_type": model_type, "num_key_value_heads": 2})
    layer = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))).layers[0]
    has = {name for names in NORM_PLACEMENTS.values() for name in names if getattr(layer, name) is not None}
    assert has == set(NORM_PLACEMENTS[config.norm_placement])


def test_what_is_added_is_scaled_before_it_is_rounded():
    hf = SIZES | {"model_type": "granite", "mlp_bias": True, "residual_multiplier": 0.22}
    model = Decoder(DecoderConfig.from_hf(hf), rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    layer, x = model.layers[0], jnp.zeros((2, 16), jnp.bfloat16)
    gives = jnp.linspace(1.0, 3.0, 16).astype(jnp.bfloat16)
    layer.mlp.down_proj.kernel.set_value(jnp.zeros((8, 16), jnp.bfloat16))
    layer.mlp.down_proj.bias.set_value(gives)
    metadata = jattn.build_batch_metadata([2], [2], None)
    _, delta, _ = layer(x, x, None, metadata, metadata.positions)
    want = (np.asarray(gives, np.float32) * np.float32(0.22)).astype(jnp.bfloat16)  # bf16's 0.22 is 0.2197
    np.testing.assert_array_equal(delta, np.stack([want, want]))


def test_tokens_are_placed_where_they_stand():
    model = Decoder(DecoderConfig.from_hf(SIZES | {"model_type": "gpt2"}), rngs=nnx.Rngs(0))
    table, positions = model.embed_positions.embedding[...], jnp.asarray([7, 0], jnp.int32)
    tokens = jnp.asarray([3, 3], jnp.int32)
    placed = model.embed(tokens, positions) - model.embed_tokens.embedding[...][tokens]
    np.testing.assert_allclose(placed, table[positions], atol=1e-6)
    metadata = jattn.build_batch_metadata([2], [2], None)
    shifted = model(tokens, None, metadata, positions=positions)[0] - model(tokens, None, metadata)[0]
    assert np.abs(shifted).max() > 1e-4


def test_without_caches_no_row_has_context():
    model = Decoder(DecoderConfig.from_hf(SIZES | {"model_type": "gpt2"}), rngs=nnx.Rngs(0))
    metadata = jattn.build_batch_metadata([1, 1], [1, 3], [[1], [2]])
    for given in (metadata, PerKVCacheGroup(metadata, metadata)):
        with pytest.raises(ValueError, match=r"seq_lens\[1\] must be its 1 new tokens without .*, got 3\."):
            model(jnp.zeros(2, jnp.int32), None, given)


def test_a_row_that_many_tokens_share_has_the_gradient_of_float64():
    ids = np.array([3] * 2000 + [0, 5, 9, -1])  # 9 and -1 are beyond the table: its last row, its first
    weights = jax.random.uniform(jax.random.key(0), (len(ids), 8), minval=0.5, maxval=1.0).astype(
        jnp.bfloat16
    )
    _, pull = jax.vjp(lambda table: take_rows(table, jnp.asarray(ids)), jnp.ones((6, 8), jnp.bfloat16))
    (gradient,) = pull(weights)
    expected = np.zeros((6, 8))
    np.add.at(expected, np.clip(ids, 0, 5), np.asarray(weights, np.float64))
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(gradient, np.float64), expected, rtol=2**-8)  # rounded once


def test_rows_are_those_of_take():
    table = jax.random.normal(jax.random.key(1), (6, 8), jnp.bfloat16)
    ids = jnp.array([3, 0, 5, 9, -1])
    np.testing.assert_array_equal(take_rows(table, ids), table[jnp.array([3, 0, 5, 5, 0])])
