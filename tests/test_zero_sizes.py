"""Zero requests or tokens give an empty result or a ValueError by name, never an error from inside JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from jattn.implementations import reference, xla
from jattn.implementations.region_inputs import RegionInputs
from jattn.vllm.cuda_graphs import pad_batch_for_graph
from pallas_kernels.shared import Score
from pallas_kernels.varlen_prefill import varlen_prefill
from tests.cache.test_cache import LAYOUTS, create, random_kv
from tests.cache.test_cache import spec as cache_spec
from tests.conftest import GOLDEN

SPEC = jattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16)
BUCKET = jattn.Bucket(max_decodes=2, max_prefills=1, max_prefill_tokens=4, max_blocks=2)
BATCHES = {
    "no requests": ([], [], [], None),
    "no requests in a bucket": ([], [], [], BUCKET),
    "no requests, an array": ([], [], np.zeros((0, 3), np.int32), None),
    "requests without tokens": ([0, 0], [0, 0], [[], []], None),
    "a request without new tokens": ([0], [3], [[1]], None),
}
NO_KEYS = jnp.zeros((0, 2, 16))


def build(name):
    *lists, bucket = BATCHES[name]
    return jattn.build_batch_metadata(*lists, block_size=4, bucket=bucket)


@pytest.mark.parametrize("name", BATCHES)
class TestBatches:
    @pytest.mark.kernels
    @pytest.mark.parametrize("implementation", ["reference", "xla", None])
    def test_attention_without_tokens_returns_empty_arrays(self, name, implementation):
        metadata = build(name)
        tokens = metadata.bucket.max_tokens
        packed = jattn.PackedKV(
            k=NO_KEYS, v=NO_KEYS, kv_start_loc=jnp.zeros(metadata.bucket.max_reqs, jnp.int32)
        )
        no_blocks = jattn.PagedCache(k=jnp.zeros((0, 4, 2, 16)), v=jnp.zeros((0, 4, 2, 16)))
        for kv in (create(), packed, no_blocks):
            out, lse = jattn.attend(
                jnp.ones((tokens, 4, 16)), kv, metadata, SPEC, implementation=implementation, return_lse=True
            )
            assert out.shape == (tokens, 4, 16)
            assert lse.shape == (4, tokens)
            assert (np.asarray(out) == 0).all()
            assert np.isneginf(lse).all()

    def test_steps_after_an_empty_batch_are_empty(self, name):
        metadata = build(name)
        larger = jattn.pad_to_bucket(
            metadata, jattn.Bucket(max_decodes=3, max_prefills=3, max_prefill_tokens=8, max_blocks=4)
        )
        assert (np.asarray(larger.slot_mapping) == -1).all()
        assert jattn.advance(metadata).seq_lens.shape == metadata.seq_lens.shape
        moved = jattn.update_block_table(metadata, metadata.block_table)
        np.testing.assert_array_equal(moved.slot_mapping, metadata.slot_mapping)
        jattn.check_batch(metadata, cache_spec())

    @pytest.mark.kernels
    def test_cascades_without_tokens_return_empty_arrays(self, name):
        metadata = build(name)
        query = jnp.ones((metadata.bucket.max_tokens, 4, 16))
        out = jattn.cascade_attend(query, create(), jattn.build_cascade_metadata(metadata, 4), SPEC)
        assert (np.asarray(out) == 0).all()
        assert out.shape == query.shape


@pytest.mark.parametrize("attend", [xla.attend, reference.attend])
def test_attention_without_keys_returns_zeros(attend):
    metadata = jattn.build_batch_metadata([1], [1], None, block_size=4)
    packed = jattn.PackedKV(k=NO_KEYS, v=NO_KEYS, kv_start_loc=jnp.zeros(1, jnp.int32))
    for kv in (packed, create()):
        out, lse = attend(RegionInputs(query=jnp.ones((1, 4, 16)), kv=kv, metadata=metadata, spec=SPEC))
        assert (np.asarray(out) == 0).all()
        assert np.isneginf(lse).all()


def test_tiles_are_chosen_without_requests():
    """The table has room for many keys, and the choice depends on the average tokens per request."""
    cache, query = jnp.zeros((3, 16, 1, 64), jnp.bfloat16), jnp.zeros((8, 2, 64), jnp.bfloat16)
    lens, table = (jnp.zeros(1, jnp.int32), jnp.zeros(0, jnp.int32)), jnp.zeros((0, 256), jnp.int32)
    out, _ = varlen_prefill(query, cache, cache, *lens, block_table=table, score=Score(scale=1.0))
    assert (np.asarray(out) == 0).all()


@pytest.mark.parametrize("quantization", [None, "int8_token_head", "fp8_e4m3"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_writing_no_tokens_leaves_the_cache_unchanged(layout, quantization):
    key, value = random_kv(20)
    filled = jattn.write_kv(
        create(layout=layout, quantization=quantization), key, value, jnp.arange(20, dtype=jnp.int32)
    )
    expected = jax.device_get(filled)
    actual = jattn.write_kv(filled, key[:0], value[:0], jnp.zeros(0, jnp.int32))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(actual), expected)


@pytest.mark.parametrize("mapping", [np.zeros((0, 2), int), jnp.zeros((0, 2), jnp.int32), []])
@pytest.mark.usefixtures("types_unchecked")
def test_copying_no_pairs_leaves_the_cache_unchanged(mapping):
    expected = jax.device_get(create())
    jax.tree.map(np.testing.assert_array_equal, jattn.copy_blocks(create(), mapping), expected)
    jax.tree.map(np.testing.assert_array_equal, jattn.swap_blocks(create(), create(), mapping), expected)
    assert jattn.copy_blocks([], mapping) == []


def test_decode_loop_without_rows_returns_no_tokens():
    step = lambda params, caches, metadata, tokens: (jnp.zeros((tokens.shape[0], 7)), caches)
    sample = lambda logits, index: jnp.argmax(logits, axis=-1)
    metadata, tokens = build("no requests"), jnp.zeros(0, jnp.int32)
    out = jattn.decode_loop(step, None, create(), metadata, tokens, num_steps=2, sample=sample)
    assert out.tokens.shape == (0, 2)
    assert int(out.num_steps) == 0


def test_states_of_no_tokens_can_be_combined():
    out, lse = jattn.merge_attn_states(*(jnp.zeros((0, 4, 16)), jnp.zeros((4, 0))) * 2)
    assert out.shape == (0, 4, 16)
    assert lse.shape == (4, 0)


NO_TABLE = np.zeros((0, 2), np.int32)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: jattn.vllm.compute_slot_mapping([], [], [], 4), []),
        (lambda: jattn.vllm.compute_slot_mapping(NO_TABLE, [0], [1], 4), [-1]),
        (lambda: jattn.vllm.compute_slot_mapping(np.zeros((1, 0), int), [0], [1], 4), [-1]),
        (lambda: jattn.vllm.compute_slot_mapping(jnp.zeros((1, 0), jnp.int32), [0], [1], 4), [-1]),
        (lambda: jattn.vllm.compute_slot_mapping(jnp.zeros((0, 1), jnp.int32), [0], [1], 4), [-1]),
        (lambda: jattn.vllm.compute_slot_mapping([[3, 2], [4]], [0, 1, 1], [5, 3, 4], 4), [9, 19, -1]),
        (lambda: jattn.vllm.compute_dcp_slot_mapping([], [0], [1], 4, dcp_size=2, dcp_rank=0), [-1]),
        (lambda: jattn.vllm.get_dcp_local_seq_lens([], 2), []),
        (lambda: jattn.vllm.physical_to_logical_mapping([], [], 4, 5), []),
        (lambda: jattn.vllm.fill_slot_mapping_tail([], 0), []),
        (lambda: jattn.vllm.mask_empty_context_lse(np.zeros((1, 2)), [0], [0]), [[0, 0]]),
        (lambda: jattn.vllm.make_local_attention_virtual_batches(4, [0], [], [], 2).q_lens, []),
        (
            lambda: (
                jattn.vllm.make_padded_local_attention_virtual_batches(
                    4, [0], [], NO_TABLE, 2, max_virtual_batches=3
                ).k_lens
            ),
            [0, 0, 0],
        ),
        (
            lambda: pad_batch_for_graph([0], [], NO_TABLE, [], max_num_reqs=1, max_num_tokens=2).block_table,
            [[-1, -1]],
        ),
        (lambda: jattn.vllm.split_prefill_chunks([], 4), []),
        (lambda: jattn.vllm.reorder_batch_to_split_decodes_and_prefills([], [], []).order, []),
    ],
)
def test_vllm_helpers_accept_empty_batches(call, expected):
    assert np.asarray(call()).tolist() == expected


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: jattn.vllm.round_capture_sizes([], 2),
            r"capture_sizes must have at least one size, got \[\]",
        ),
        (
            lambda: jattn.vllm.make_local_attention_virtual_batches(4, [0, 1], [1], np.zeros((1, 0), int), 2),
            r"block_table must have at least one column, got shape \(1, 0\)",
        ),
        (
            lambda: jattn.vllm.make_local_attention_virtual_batches(0, [0, 1], [1], [[1]], 2),
            "attn_chunk_size must be positive, got 0",
        ),
        (
            lambda: jattn.vllm.use_cascade_attention(512, [1] * 8, 4, 0, False, False, False, 132),
            "num_kv_heads must be positive, got 0",
        ),
        (
            lambda: jattn.vllm.use_cascade_attention(512, [1] * 8, 4, 2, False, False, False, 0),
            "num_sms must be positive, got 0",
        ),
        (
            lambda: jattn.vllm.cp_lse_combine(jnp.zeros((0, 3, 4, 16)), jnp.zeros((0, 3, 4))),
            r"partial_lse must have at least one rank, got \(0, 3, 4\)",
        ),
        (lambda: cache_spec().num_blocks_in(10**6, 0), "num_layers must be positive, got 0"),
    ],
)
def test_meaningless_zero_sizes_are_rejected_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: jattn.vllm.compute_slot_mapping(np.ones((1, 2)), [0], [1], 4),
            "block_table must hold ints, got float64",
        ),
        (
            lambda: jattn.vllm.compute_slot_mapping([[1, 2.5]], [0], [1], 4),
            r"block_table\[0\] must be a list of ints",
        ),
        (
            lambda: jattn.vllm.compute_slot_mapping(np.ones(2, int), [0], [1], 4),
            r"block_table must have 2 axes, got",
        ),
        (
            lambda: jattn.vllm.compute_slot_mapping([[2**40]], [0], [1], 4),
            "block_table must hold int32s, got",
        ),
        (lambda: jattn.vllm.compute_slot_mapping([[1]], [0.5], [1], 4), "rows must hold ints, got float64"),
        (
            lambda: jattn.vllm.compute_slot_mapping(jnp.ones((1, 2)), [0], [1], 4),
            "block_table must hold ints, got float32",
        ),
        (lambda: jattn.vllm.get_dcp_local_seq_lens([True], 2), "seq_lens must hold ints, got bool"),
        (
            lambda: jattn.vllm.reorder_batch_to_split_decodes_and_prefills([1.5], [1]),
            "num_scheduled_tokens must hold ints, got float64",
        ),
        (
            lambda: jattn.vllm.reorder_batch_to_split_decodes_and_prefills([1], [1.5]),
            "num_computed_tokens must hold ints, got float64",
        ),
        (
            lambda: jattn.vllm.split_prefill_and_decode([1.5], [2], [0]),
            "query_lens must hold ints, got float64",
        ),
        (lambda: jattn.vllm.split_prefill_chunks([1.5], 4), "seq_lens_cpu must hold ints, got float64"),
        (
            lambda: jattn.vllm.use_cascade_attention(512, [1.0] * 8, 4, 2, False, False, False, 132),
            "query_lens must hold ints, got float64",
        ),
        (lambda: jattn.vllm.split_at_token([3], [2.5], 1), "query_lens must hold ints, got float64"),
        (lambda: jattn.batch.bucket.exact_bucket([1.5]), "query_lens must hold ints, got float64"),
        (
            lambda: jattn.batch.bucket.pack_tokens([[1], [2.5]], BUCKET),
            r"tokens\[1\] must hold ints, got float64",
        ),
        (
            lambda: jattn.batch.bucket.pack_tokens([[1], [2**32 + 5]], BUCKET),
            r"tokens\[1\] must hold int32s, got 4294967301",
        ),
        (
            lambda: jattn.batch.bucket.pack_tokens([[1]], BUCKET, pad=2**40),
            r"pad must hold int32s, got 1099511627776",
        ),
        (
            lambda: jattn.batch.bucket.pack_tokens([[[1, 2]]], BUCKET),
            r"tokens\[0\] must be a list of token ids, got shape \(1, 2\)",
        ),
        (
            lambda: jattn.vllm.get_dcp_local_seq_lens([1, [2]], 2),
            r"seq_lens must hold ints in rows of one length, got",
        ),
    ],
)
def test_non_int_sizes_are_rejected_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        (np.asarray([[1, 5]]), r"block_mapping must stay below 5 in column 1, got \[\[1, 5\]\]"),
        (np.asarray([[5, 1]]), r"block_mapping must stay below 5 in column 0, got \[\[5, 1\]\]"),
        (np.asarray([[1, 3], [2, 3]]), r"block_mapping must have distinct targets, got \[3\]"),
        (np.asarray([1, 2, 3]), r"block_mapping must have shape \[pairs, 2\], got shape \(3,\)"),
        (np.asarray([[1.5, 2]]), "block_mapping must hold ints, got float64"),
        (jnp.asarray([[1.5, 2]]), "block_mapping must hold ints, got float32"),
    ],
)
def test_invalid_block_pairs_are_rejected_before_donation(mapping, message):
    cache = create()
    with pytest.raises(ValueError, match=message):
        jattn.copy_blocks([cache], mapping)
    with pytest.raises(ValueError, match=message):
        jattn.swap_blocks(create(), cache, mapping)
    assert not cache.k.is_deleted()


@pytest.mark.usefixtures("types_unchecked")
def test_copy_blocks_requires_caches():
    with pytest.raises(ValueError, match="caches must be a tree of PagedCache, got ArrayImpl"):
        jattn.copy_blocks([jnp.zeros(3)], np.asarray([[1, 2]]))


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_steps": 2.0}, "num_steps must be an int, got 2.0"),
        ({"tokens": jnp.ones(1)}, "tokens must hold ints, got float32"),
        ({"stop_ids": [1.5]}, "stop_ids must hold ints, got float64"),
        ({"max_lens": [2.5]}, "max_lens must hold ints, got float64"),
    ],
)
def test_non_int_options_of_decode_loop_are_rejected_by_name(change, message):
    arguments = {"tokens": jnp.zeros(1, jnp.int32), "num_steps": 2} | change
    metadata = jattn.build_batch_metadata([1], [1], [[1]], block_size=4)
    with pytest.raises(ValueError, match=message):
        jattn.decode_loop(print, None, create(), metadata, sample=print, **arguments)


@pytest.mark.parametrize("has_cache", [True, False])
def test_model_step_without_tokens_returns_no_logits(has_cache):
    """For a family with a norm over all heads, and experts."""
    model = jattn.models.load(GOLDEN / "hf" / "olmoe", progress=False)
    table = np.zeros((0, 2), np.int32) if has_cache else None
    metadata = jattn.build_batch_metadata([], [], table)
    caches = model.create_caches(3, block_size=16) if has_cache else None
    hidden, written = model(jnp.zeros(0, jnp.int32), caches, metadata)
    assert model.logits(hidden).shape == (0, model.config.vocab_size)
    assert (written is None) is (not has_cache)


def test_layer_with_separate_projections_accepts_no_tokens():
    spec = jattn.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16)
    layer = jattn.PagedAttention(32, spec, rngs=nnx.Rngs(0))
    metadata = jattn.build_batch_metadata([], [], None)
    out, _ = layer(jnp.zeros((0, 32)), None, metadata, metadata.positions)
    assert out.shape == (0, 32)
