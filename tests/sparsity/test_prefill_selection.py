"""Selection of blocks from pooled queries and keys: a mass of 1 selects everything, a smaller one the
planted blocks.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import jattn
from jattn import masks
from jattn.batch.transitions import pad_tokens
from jattn.sparsity.prefill_selection import _query_means, select_prefill_blocks, top_mass
from pallas_kernels.block_scores import MAX_TOP_P_LEN

pytestmark = pytest.mark.kernels
SPEC = jattn.AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=8, scale=1.0)


def problem(seed=0, block_size=4):
    """Return two prompts, the second with 9 tokens of context, and one decode row."""
    metadata = jattn.build_batch_metadata(
        [1, 20, 14], [6, 20, 23], [[1, 2], [3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13]], block_size=block_size
    )
    draw = lambda n, *shape: jax.random.normal(jax.random.key(seed + n), shape)
    cache = jattn.PagedCache(k=draw(0, 14, block_size, 1, 8), v=draw(1, 14, block_size, 1, 8))
    return draw(2, 35, 2, 8), cache, metadata


def test_mass_1_selects_every_causal_block():
    query, cache, metadata = problem()
    mask = select_prefill_blocks(query, cache, metadata, SPEC, mass=1.0, block_size=4)
    actual = jattn.attend(query, cache, metadata, SPEC, mask=mask)
    np.testing.assert_allclose(actual[1:], jattn.attend(query, cache, metadata, SPEC)[1:], atol=1e-5)


def test_calls_outside_jit_are_compiled_once(caplog):
    query, cache, metadata = problem()
    choose = lambda query: select_prefill_blocks(query, cache, metadata, SPEC, mass=0.6, block_size=4).blocks
    choose(query)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        choose(query + 1)
    assert not [r for r in caplog.records if "Compiling" in r.getMessage() and "add" not in r.getMessage()]


@pytest.mark.parametrize("mass", [0.2, 1.0])
def test_blocks_that_score_nan_are_selected(mass):
    query, cache, metadata = problem()
    spoiled = jattn.PagedCache(k=cache.k.at[9].set(jnp.nan), v=cache.v)  # the last row's second block
    mask = select_prefill_blocks(query, spoiled, metadata, SPEC, mass=mass, block_size=4, num_first=0)
    first = int(mask.first_q_block[2])
    assert np.asarray(mask.blocks)[2, :, 2 - first :, 1].all()
    assert jnp.isnan(jattn.attend(query, spoiled, metadata, SPEC, mask=mask)[21:]).all()


def test_less_mass_selects_fewer_blocks_but_at_least_one():
    query, cache, metadata = problem()
    counts = [
        int(select_prefill_blocks(query, cache, metadata, SPEC, mass=m, block_size=4).blocks.sum())
        for m in (1.0, 0.6, 0.2)
    ]
    assert counts[0] > counts[1] > counts[2] > 0


@pytest.mark.kernels
@pytest.mark.parametrize("block_size", [4, 6])
def test_kernel_selects_the_same_blocks_as_a_sort(block_size):
    query, cache, metadata = problem()
    choose = lambda mass, **options: select_prefill_blocks(
        query, cache, metadata, SPEC, mass=mass, block_size=block_size, **options
    )
    by_kernel = choose(0.6, implementation="mosaic_gpu", interpret=plgpu.InterpretGPUParams())
    np.testing.assert_array_equal(by_kernel.blocks, choose(0.6, implementation="xla").blocks)
    assert by_kernel.blocks.sum() < choose(1.0).blocks.sum()


def test_more_blocks_than_the_kernel_supports_are_rejected():
    query, cache, metadata = problem()
    long_table = dataclasses.replace(metadata, block_table=jnp.zeros((3, MAX_TOP_P_LEN + 1), jnp.int32))
    options = {"mass": 0.5, "block_size": 4, "interpret": plgpu.InterpretGPUParams()}
    with pytest.raises(NotImplementedError, match=f"choose among {MAX_TOP_P_LEN + 1} blocks"):
        select_prefill_blocks(query, cache, long_table, SPEC, implementation="mosaic_gpu", **options)


def test_query_means_are_per_block():
    query, _, metadata = problem()
    means = np.asarray(_query_means(query, metadata, metadata.num_computed_tokens // 6, 7, 6))
    expected = np.zeros_like(means)
    for row, first_token, context, tokens in ((1, 1, 0, 20), (2, 21, 9, 14)):
        positions = np.arange(context, context + tokens)
        for block in np.unique(positions // 6):
            queries = np.asarray(query)[first_token : first_token + tokens][positions // 6 == block]
            expected[row, block - context // 6] = queries.mean(axis=0)
    np.testing.assert_allclose(means, expected, atol=1e-6)


def test_block_with_all_the_attention_is_selected():
    query, cache, metadata = problem()
    direction = jnp.ones(8)
    query, keys = jnp.broadcast_to(direction, query.shape), cache.k.at[:].set(0.0).at[9].set(direction * 3)
    cache = jattn.PagedCache(k=keys, v=cache.v)
    mask = select_prefill_blocks(query, cache, metadata, SPEC, mass=0.9, block_size=4, num_first=0)
    # Row 2's second block of keys is cache block 9; its queries begin in block 9 // 4 = 2.
    seen = np.asarray(masks.dense(mask, 14, 23, num_q_heads=2, num_kv_heads=1, row=2))
    for i, position in enumerate(range(9, 23)):
        blocks = sorted({int(j) // 4 for j in np.flatnonzero(seen[0, i])})
        assert blocks == [1, position // 4]


def poisoned(query, cache, metadata):
    """Return the problem with NaN past requests' ends, in free blocks, and in the padding of a larger
    bucket.
    """
    bucket = jattn.Bucket(max_decodes=2, max_prefills=3, max_prefill_tokens=40, max_blocks=8)
    padded = jattn.pad_to_bucket(metadata, bucket)
    slots = np.concatenate([
        (np.asarray(metadata.block_table)[row][:, None] * 4 + np.arange(4)).reshape(-1)[:length]
        for row, length in enumerate(np.asarray(metadata.seq_lens))
    ])  # fmt: skip
    is_owned = np.zeros(14 * 4, bool)
    is_owned[slots] = True
    spoiled = lambda x: jnp.where(is_owned.reshape(14, 4, 1, 1), x, jnp.nan)
    cache = jattn.PagedCache(k=spoiled(cache.k), v=spoiled(cache.v))
    tokens = pad_tokens(query, metadata.bucket, bucket)
    tokens = jnp.where(padded.is_valid_token[:, None, None], tokens, jnp.nan)
    return tokens, cache, padded


@pytest.mark.parametrize("method", ["xla", "kernel"])
def test_unowned_tokens_may_be_nan(method):
    query, cache, metadata = problem()
    options = {"implementation": "xla"}
    if method == "kernel":
        options = {"implementation": "mosaic_gpu", "interpret": plgpu.InterpretGPUParams()}
    choose = lambda *step: select_prefill_blocks(*step, SPEC, mass=0.6, block_size=4, **options)
    clean, spoiled = choose(query, cache, metadata), choose(*poisoned(query, cache, metadata))
    for row, padded_row, blocks in ((1, 2, 5), (2, 3, 6)):
        lengths = slice(0, blocks - int(clean.first_q_block[row])), slice(0, blocks)
        expected = np.asarray(clean.blocks)[row][:, *lengths]
        np.testing.assert_array_equal(np.asarray(spoiled.blocks)[padded_row][:, *lengths], expected)


@pytest.mark.kernels
def test_attention_reads_only_selected_blocks():
    query, cache, metadata = problem()
    tokens, spoiled, padded = poisoned(query, cache, metadata)
    mask = select_prefill_blocks(query, cache, metadata, SPEC, mass=0.4, block_size=4)
    mask_of_padded = mask.to_batch_rows(padded)
    for implementation in ("xla", "reference"):
        run = functools.partial(jattn.attend, spec=SPEC, implementation=implementation)
        expected = run(query, cache, metadata, mask=mask)
        actual = run(tokens, spoiled, padded, mask=mask_of_padded)
        live = np.asarray(padded.is_valid_token)
        np.testing.assert_allclose(np.asarray(actual)[live], expected, atol=1e-5)
        assert not np.asarray(actual)[~live].any()


def test_decode_queries_keep_their_blocks_across_a_block_boundary():
    bucket = jattn.Bucket(max_decodes=2, decode_query_len=4, max_blocks=2)
    metadata = jattn.build_batch_metadata([4, 4], [6, 8], [[1, 2], [3, 4]], block_size=4, bucket=bucket)
    draw = lambda n, *shape: jax.random.normal(jax.random.key(n), shape)
    query, cache = draw(0, 8, 2, 8), jattn.PagedCache(k=draw(1, 5, 4, 1, 8), v=draw(2, 5, 4, 1, 8))
    mask = select_prefill_blocks(query, cache, metadata, SPEC, mass=0.5, block_size=4)
    actual = jattn.attend(query, cache, metadata, SPEC, mask=mask)
    np.testing.assert_allclose(actual, jattn.attend(query, cache, metadata, SPEC), atol=1e-6)


def test_empty_batch_selects_nothing():
    query, cache, _ = problem()
    empty = jattn.build_batch_metadata([], [], np.zeros((0, 3), int), block_size=4)
    for kv in (
        cache,
        jattn.PackedKV(k=cache.k[:0, 0], v=cache.v[:0, 0], kv_start_loc=jnp.zeros(0, jnp.int32)),
    ):
        mask = select_prefill_blocks(query[:0], kv, empty, SPEC, mass=0.5, block_size=4)
        assert mask.blocks.shape[:2] == (0, 2)
    nobody = jattn.build_batch_metadata([0], [0], None)
    packed = jattn.PackedKV(k=cache.k[:0, 0], v=cache.v[:0, 0], kv_start_loc=jnp.zeros(1, jnp.int32))
    assert not select_prefill_blocks(query[:0], packed, nobody, SPEC, mass=0.5, block_size=4).blocks.any()
    with pytest.raises(ValueError, match=r"metadata.block_table has no columns"):
        select_prefill_blocks(query[:0], cache, nobody, SPEC, mass=0.5, block_size=4)


def test_changing_the_selection_does_not_recompile(traced_once):
    run = lambda query, cache, metadata: (
        select_prefill_blocks(query, cache, metadata, SPEC, mass=0.5, block_size=4).blocks
    )
    first, second = traced_once(run, problem(0), problem(7))
    assert (first != second).any()


def test_largest_takes_the_minimum_number_of_blocks():
    weights = jnp.asarray([[0.1, 0.6, 0.0, 0.3], [0.25, 0.25, 0.25, 0.25]])
    np.testing.assert_array_equal(top_mass(weights, 0.5)[0], [False, True, False, False])
    np.testing.assert_array_equal(top_mass(weights, 0.85)[0], [False, True, False, True])
    np.testing.assert_array_equal(top_mass(weights, 1.0)[0], [True, True, False, True])
    assert top_mass(weights, 0.3)[1].all()  # equals are kept together


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mass": 0.0}, r"mass must lie in \(0, 1\], got 0.0"),
        ({"block_size": 0}, "block_size must be positive"),
        ({"block_size": 4.0}, "block_size must be an int, got 4.0"),
        ({"num_first": -1}, "num_first must be at least 0, got -1"),
        ({"num_recent": -1}, "num_recent must be at least 0, got -1"),
        ({"num_recent": 1.5}, "num_recent must be an int, got 1.5"),
    ],
)
@pytest.mark.usefixtures("types_unchecked")
def test_invalid_arguments_are_rejected(change, message):
    with pytest.raises(ValueError, match=message):
        select_prefill_blocks(*problem(), SPEC, **{"mass": 0.5} | change)
