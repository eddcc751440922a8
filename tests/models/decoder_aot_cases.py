"""Steps of decoders with few and many layers, to compile ahead of time."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.batch.bucket import Bucket
from jattn.batch.metadata import abstract_metadata
from jattn.models.config import DecoderConfig
from jattn.models.decoder import Decoder
from jattn.serving.engine.step import ModelInputs, ModelStep

BUCKET = Bucket(max_decodes=8, max_prefills=4, max_prefill_tokens=256, max_blocks=64)
NUM_LAYERS = (2, 4)
BLOCK_SIZE = 16


def config(num_layers, family):
    """Return a small decoder config with the kernels' head_dim; Gemma2 has two kinds of layers."""
    sizes = {
        "model_type": family,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "vocab_size": 1024,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "bfloat16",
        "rope_theta": 1e6,
    }
    gemma = {"query_pre_attn_scalar": 128, "sliding_window": 256, "attn_logit_softcapping": 50.0}
    return DecoderConfig.from_hf(sizes | (gemma if family == "gemma2" else {}))


def case(num_layers, family):
    model = nnx.eval_shape(lambda: Decoder(config(num_layers, family), rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model)
    caches = jax.eval_shape(lambda: model.create_caches(1000, block_size=BLOCK_SIZE))
    metadata = abstract_metadata(BUCKET, BLOCK_SIZE)
    sizes = BUCKET.max_tokens, BUCKET.max_tokens, 16, BUCKET.max_reqs
    inputs = ModelInputs(*(jax.ShapeDtypeStruct((size,), jnp.int32) for size in sizes))

    def run(params, caches, metadata, inputs):
        with mock.patch("pallas_kernels.support.why_not_on", return_value=None):  # there is no GPU here
            return ModelStep(graphdef)(params, caches, metadata, inputs)

    return run, (params, caches, metadata, inputs)


@functools.cache
def aot_cases():
    """Return the function and abstract arguments by the name of the case."""
    return {
        f"{family}-{num_layers}": case(num_layers, family)
        for family in ("qwen3", "gemma2")
        for num_layers in NUM_LAYERS
    }
