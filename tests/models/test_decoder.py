"""The decoder under JAX transformations, and its caches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from jattn.models import Decoder, DecoderConfig
from jattn.models.kv_cache_groups import PerKVCacheGroup
from tests.models.tiny_checkpoints import CONFIGS

TINY = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
CONFIG = DecoderConfig.from_hf(CONFIGS["llama3_rope"] | TINY)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 97, (3, 11)), jnp.int32)
METADATA = jattn.build_batch_metadata([11], [11], None)


@nnx.jit
def step(model, tokens, caches, metadata, positions=None, plan=None):
    return model(tokens, caches, metadata, positions=positions, plan=plan)


def make(implementation=None, config=CONFIG, **options):
    return Decoder(config, rngs=nnx.Rngs(0), implementation=implementation, **options)


@pytest.mark.parametrize("eval_shape", [jax.eval_shape, nnx.eval_shape])
def test_a_decoder_can_be_created_abstractly(eval_shape):
    huge = dataclasses.replace(CONFIG, vocab_size=10**9, hidden_size=2**14)
    model = eval_shape(lambda: make(config=huge, dtype=jnp.bfloat16))
    assert model.embed_tokens.embedding.shape == (10**9, 2**14)
    assert (model.dtype, model.max_len, model.tokenizer) == (jnp.bfloat16, 256, None)


@pytest.mark.kernels
def test_jit_split_and_eval_shape_give_the_same_structure():
    model = make()
    run = lambda model, tokens: model.logits(model(tokens, None, METADATA)[0])
    graph, state = nnx.split(model)
    by_split = jax.jit(lambda state, tokens: run(nnx.merge(graph, state), tokens))
    expected = nnx.jit(run)(model, TOKENS[0])
    np.testing.assert_array_equal(by_split(state, TOKENS[0]), expected)
    shape = jax.eval_shape(by_split, state, TOKENS[0])
    assert (shape.shape, shape.dtype) == (expected.shape, jnp.float32)


@pytest.mark.kernels
def test_a_step_compiles_once_per_bucket():
    model, traces = make(), []

    @nnx.jit
    def counted(model, tokens, caches, metadata):
        traces.append(1)
        return model(tokens, caches, metadata)

    caches = model.create_caches(8, block_size=4)
    bucket = jattn.Bucket(max_decodes=2, max_prefills=1, max_prefill_tokens=8, max_blocks=3)
    for lens in ([1, 5], [3]):
        metadata = jattn.build_batch_metadata(
            lens, lens, [[1, 2, 3]] * len(lens), block_size=4, bucket=bucket
        )
        _, caches = counted(model, jnp.zeros(10, jnp.int32), caches, metadata)
    assert len(traces) == 1


@pytest.mark.kernels
@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("name", ["qwen3_biases", "gemma2_default_layers"])
def test_a_decoder_trains_under_vmap(name, implementation):
    graph, params = nnx.split(make(implementation, DecoderConfig.from_hf(CONFIGS[name] | TINY)))

    def loss(params):
        model = nnx.merge(graph, params)
        hidden = jax.vmap(lambda tokens: model(tokens, None, METADATA)[0])(TOKENS)
        scores = jax.nn.log_softmax(model.logits(hidden[:, :-1].reshape(-1, hidden.shape[-1])))
        return -jnp.take_along_axis(scores, TOKENS[:, 1:].reshape(-1, 1), axis=1).mean()

    loss_and_gradient = jax.jit(jax.value_and_grad(loss))
    before, gradient = loss_and_gradient(params)
    after, _ = loss_and_gradient(jax.tree.map(lambda p, g: p - 0.001 * g, params, gradient))
    assert after < before
    assert all(bool(jnp.isfinite(g).all()) and bool(jnp.any(g != 0)) for g in jax.tree.leaves(gradient))


@pytest.mark.kernels
def test_a_decoder_accepts_positions():
    model = make()
    hidden, _ = step(model, TOKENS[0], None, METADATA, METADATA.positions)
    shifted, _ = step(model, TOKENS[0], None, METADATA, METADATA.positions + 50)
    scaled, _ = step(model, TOKENS[0], None, METADATA, METADATA.positions * 3)
    np.testing.assert_allclose(hidden, shifted, atol=1e-5)  # rope knows distances only
    assert np.abs(hidden - scaled).max() > 1e-3


@pytest.mark.kernels
def test_a_plan_does_not_change_the_result():
    model = make()
    metadata = jattn.build_batch_metadata([11], [11], [[1, 2, 3]], block_size=4)
    spec = CONFIG.attention_spec(0)
    run = lambda plan: step(model, TOKENS[0], model.create_caches(4, block_size=4), metadata, None, plan)[0]
    np.testing.assert_array_equal(run(jattn.plan(metadata, spec)), run(None))


def test_a_decoder_requires_one_cache_per_layer():
    model = make(dtype=jnp.bfloat16)
    specs = model.cache_specs(9, block_size=8, layout="HND")
    assert len(specs) == len(model.create_caches(9)) == 2
    assert (specs[0].dtype, specs[0].layout, specs[0].key_shape) == (jnp.bfloat16, "HND", (9, 2, 8, 4))
    assert model.cache_specs(9, dtype=jnp.float32, quantization="int8_token_head")[0].key_dtype == jnp.int8
    with pytest.raises(ValueError, match=r"caches must have one entry per layer \(2\), got 1"):
        model(TOKENS[0], model.create_caches(9)[:1], METADATA)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("options", "tolerance"), [({"layout": "packed"}, 1e-5), ({"quantization": "int8_token_head"}, 0.1)]
)
def test_a_decoder_accepts_every_cache_format(options, tolerance):
    model = make()
    metadata = jattn.build_batch_metadata([11], [11], [[3, 1, 2]], block_size=4)
    expected, _ = step(model, TOKENS[0], None, METADATA)
    actual, _ = step(model, TOKENS[0], model.create_caches(4, block_size=4, **options), metadata)
    np.testing.assert_allclose(actual, expected, atol=tolerance)


def test_layers_get_the_requested_implementation():
    model = make(["reference", "xla"])
    assert {layer.self_attn.implementation for layer in model.layers} == {("reference", "xla")}
    with pytest.raises(ValueError, match=r"implementation must be one of .*got 'cudnn'"):
        make("cudnn")(TOKENS[0], None, METADATA)


SIZES = dict(vocab_size=24, hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)


def test_position_embeddings_use_the_given_positions():
    model = Decoder(DecoderConfig.from_hf(SIZES | {"model_type": "gpt2"}), rngs=nnx.Rngs(0))
    table, positions = model.embed_positions.embedding[...], jnp.asarray([7, 0], jnp.int32)
    tokens = jnp.asarray([3, 3], jnp.int32)
    placed = model.embed(tokens, positions) - model.embed_tokens.embedding[...][tokens]
    np.testing.assert_allclose(placed, table[positions], atol=1e-6)
    metadata = jattn.build_batch_metadata([2], [2], None)
    shifted = model(tokens, None, metadata, positions=positions)[0] - model(tokens, None, metadata)[0]
    assert np.abs(shifted).max() > 1e-4


def test_steps_without_caches_refuse_context():
    model = Decoder(DecoderConfig.from_hf(SIZES | {"model_type": "gpt2"}), rngs=nnx.Rngs(0))
    metadata = jattn.build_batch_metadata([1, 1], [1, 3], [[1], [2]])
    for step_metadata in (metadata, PerKVCacheGroup(metadata, metadata)):
        with pytest.raises(ValueError, match=r"seq_lens\[1\]=3 differs from the row's 1 new tokens"):
            model(jnp.zeros(2, jnp.int32), None, step_metadata)
