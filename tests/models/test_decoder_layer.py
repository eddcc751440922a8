"""A decoder layer has the norms and scales of its configuration."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from jattn.models import Decoder, DecoderConfig
from jattn.models.specs import NORM_PLACEMENTS

SIZES = dict(vocab_size=24, hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)


@pytest.mark.parametrize("model_type", ["stablelm", "gpt_neox", "olmo2", "glm4"])
def test_layers_have_exactly_the_norms_of_their_placement(model_type):
    config = DecoderConfig.from_hf(SIZES | {"model_type": model_type, "num_key_value_heads": 2})
    layer = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))).layers[0]
    has = {name for names in NORM_PLACEMENTS.values() for name in names if getattr(layer, name) is not None}
    assert has == set(NORM_PLACEMENTS[config.norm_placement])


def test_residuals_are_scaled_before_they_are_rounded():
    hf = SIZES | {"model_type": "granite", "mlp_bias": True, "residual_multiplier": 0.22}
    model = Decoder(DecoderConfig.from_hf(hf), rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    layer, x = model.layers[0], jnp.zeros((2, 16), jnp.bfloat16)
    gives = jnp.linspace(1.0, 3.0, 16).astype(jnp.bfloat16)
    layer.mlp.down_proj.kernel.set_value(jnp.zeros((8, 16), jnp.bfloat16))
    layer.mlp.down_proj.bias.set_value(gives)
    metadata = jattn.build_batch_metadata([2], [2], None)
    _, sublayer_out, _ = layer(x, x, None, metadata, metadata.positions)
    expected = (np.asarray(gives, np.float32) * np.float32(0.22)).astype(
        jnp.bfloat16
    )  # bf16's 0.22 is 0.2197
    np.testing.assert_array_equal(sublayer_out, np.stack([expected, expected]))
