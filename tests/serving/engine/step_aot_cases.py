"""Steps of an engine to compile ahead of time: speculative decoding, a draft model, and cascade attention."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
from flax import nnx

from jattn.batch.bucket import Bucket
from jattn.batch.metadata import abstract_metadata
from jattn.models.decoder import Decoder
from jattn.serving.engine.draft_model import FIRST_TOKENS, make_draft_step
from jattn.serving.engine.sampler import build_sampling_metadata
from jattn.serving.engine.sampling_params import SamplingParams
from jattn.serving.engine.step import ModelInputs, ModelStep
from tests.models.decoder_aot_cases import BLOCK_SIZE, config

ROWS, NUM_DRAFTS = 8, 4
ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)


def case(make, query_len, inputs):
    """Return a step of decode rows with `query_len` tokens each, for an absent GPU."""
    bucket = Bucket(max_decodes=ROWS, decode_query_len=query_len, max_blocks=64)
    model = nnx.eval_shape(lambda: Decoder(config(1, "llama"), rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model)
    caches = jax.eval_shape(lambda: model.create_caches(10_000, block_size=BLOCK_SIZE))

    def run(*arguments):
        with mock.patch("pallas_kernels.support.why_not_on", return_value=None):
            return make(graphdef)(*arguments)

    return run, (params, caches, abstract_metadata(bucket, BLOCK_SIZE), *inputs), (1,)


def padded_step_tokens(query_len):
    count = ROWS * query_len
    return ModelInputs(ints(count), ints(count), last_tokens=ints(ROWS), logits_indices=ints(count))


@functools.cache
def aot_cases():
    warm = SamplingParams(temperature=1.0, seed=0)
    sampling = jax.eval_shape(lambda: build_sampling_metadata([warm], num_rows=ROWS))
    draft = functools.partial(make_draft_step, num_tokens=NUM_DRAFTS)
    return {
        "drafts": case(ModelStep, 1 + NUM_DRAFTS, [padded_step_tokens(1 + NUM_DRAFTS)]),
        "cascade": case(ModelStep, 1, [padded_step_tokens(1)._replace(common_prefix_len=ints())]),
        "draft model": case(draft, FIRST_TOKENS, [ints(ROWS * FIRST_TOKENS), sampling, ints(ROWS)]),
    }
