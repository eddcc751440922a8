"""check_batch accepts valid batches and reports invalid arrays by name."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.pytree import replace
from tests.batch.test_metadata import BLOCK, batches, bucket_for_all_batches, build, roomier

SPEC = jattn.CacheSpec(num_blocks=100, block_size=BLOCK, num_kv_heads=2, head_dim=8)
BUCKET = jattn.Bucket(max_decodes=3, max_prefills=2, max_prefill_tokens=8, max_blocks=3)


def batch(**changes):
    """Return rows 0 and 1 with one new token after 6 and 3 tokens, a padding row, and row 3 with 5 new
    tokens after 4.
    """
    metadata = jattn.build_batch_metadata(
        [1, 1, 5], [7, 4, 9], [[1, 2], [3], [4, 5, 6]], block_size=BLOCK, bucket=BUCKET, to_device=False
    )
    for name, (index, value) in changes.items():
        array = getattr(metadata, name).copy()
        array[index] = value
        metadata = replace(metadata, **{name: array})
    return metadata


check = functools.partial(jattn.check_batch, cache_spec=SPEC)


class TestValidBatches:
    @hypothesis.settings(max_examples=40)
    @hypothesis.given(batches())
    def test_built_batches_are_valid(self, batch_arguments):
        metadata = build(batch_arguments)
        check(metadata)
        check(build(batch_arguments, roomier(metadata.bucket)))
        largest = bucket_for_all_batches(batch_arguments[-1])
        check(jattn.pad_to_bucket(build(batch_arguments, largest), roomier(largest)))

    @hypothesis.settings(max_examples=15)
    @hypothesis.given(batches(decode_query_len=1))
    def test_steps_advanced_on_the_device_are_valid(self, batch_arguments):
        query_lens, seq_lens, table, length = batch_arguments
        hypothesis.assume(all(seq_lens) and all(query_lens))
        table = [[*row, 90 - r] for r, row in enumerate(table)]
        metadata = build((query_lens, seq_lens, table, length), bucket_for_all_batches(length))
        is_running = jnp.arange(metadata.bucket.max_reqs) != 1
        for _ in range(2):
            metadata = jattn.advance(metadata, is_running=is_running)
            check(metadata)

    def test_tokens_without_a_slot_are_valid(self):
        check(batch(slot_mapping=(slice(None), -1)))

    def test_cross_attention_is_valid(self):
        lens = ([1, 6, 3], [7, 2, 0])
        check(jattn.build_cross_attention_metadata(*lens, [[2, 1], [3], []], block_size=BLOCK))

    def test_prefixes_may_be_shared_after_or_while_they_are_written(self):
        shared = jattn.build_batch_metadata([1, 1], [6, 7], [[1, 2], [1, 3]], block_size=BLOCK)
        check(shared)
        written_in_the_same_step = jattn.build_batch_metadata(
            [7, 2], [7, 6], [[1, 2], [1, 3]], block_size=BLOCK
        )
        check(written_in_the_same_step)

    def test_blocks_before_the_window_may_be_the_null_block(self):
        check(jattn.build_batch_metadata([1, 1], [11, 10], [[0, 0, 3], [0, 4, 5]], block_size=BLOCK))

    def test_no_cache_is_needed_without_context(self):
        jattn.check_batch(jattn.build_batch_metadata([1, 3], [1, 3], None, block_size=BLOCK), None)

    def test_packed_keys_are_valid(self):
        keys = jnp.zeros((9, 2, 8))
        kv = jattn.PackedKV(k=keys, v=keys, kv_start_loc=jnp.asarray([0, 7, 9]))
        jattn.check_batch(jattn.build_cross_attention_metadata([1, 6, 3], [7, 2, 0], None), kv)

    def test_an_empty_batch_is_valid(self):
        check(jattn.build_batch_metadata([], [], [], block_size=BLOCK))
        check(jattn.build_batch_metadata([], [], [], block_size=BLOCK, bucket=BUCKET))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_lens": (3, -9)}, r"seq_lens\[3\] must be at least 0, got -9"),
        ({"seq_lens": (1, 13)}, r"seq_lens\[1\] must be at most 12, the 3 blocks of 4 tokens .*, got 13"),
        ({"seq_lens": (3, 3)}, r"seq_lens\[3\] is 3, but row 3 has 5 query tokens"),
        ({"seq_lens": (2, 5)}, r"num_decodes must be at least 3, since decode row 2 has keys, got 2"),
        ({"num_decodes": ((), 4)}, r"num_decodes must be at most the bucket's 3, got 4"),
        ({"num_prefills": ((), 0)}, r"num_prefills must be at least 1, since prefill row 0 has keys, got 0"),
        ({"num_prefills": ((), 3)}, r"num_prefills must be at most the bucket's 2, got 3"),
        ({"query_start_loc": (0, 1)}, r"query_start_loc\[0\] must be 0, got 1"),
        ({"query_start_loc": (4, 2)}, r"query_start_loc must be non-decreasing, got \[0, 1, 2, 3, 2, 8\]"),
        (
            {"query_start_loc": (slice(3, 6), 2)},
            r"query_start_loc\[3\] must be 3, the number of decode tokens .*, got 2",
        ),
        ({"query_start_loc": (5, 12)}, r"query_start_loc\[5\] must be at most .* 11 tokens, got 12"),
        (
            {"block_table": ((3, 1), 100)},
            r"block_table\[3\] contains ids outside \[0, 100\).*: \[4, 100, 6\]",
        ),
        ({"block_table": ((0, 1), -1)}, r"block_table\[0\] contains ids outside .* 7 tokens: \[1, -1, 0\]"),
        ({"slot_mapping": (0, 11)}, r"slot_mapping\[0\] must be 10 \(position 6 of row 0.*got 11"),
        ({"slot_mapping": (2, 0)}, r"slot_mapping\[2\]=0, but token 2 is padding"),
        ({"slot_mapping": (10, 40)}, r"slot_mapping\[10\]=40, but token 10 is padding"),
    ],
)
def test_invalid_array_is_reported_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        check(batch(**changes))


def test_block_table_past_a_requests_end_is_not_checked():
    check(batch(block_table=((1, 2), 10_000)))


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "block_table", "message"),
    [
        ([1, 1], [7, 7], [[2, 1], [3, 1]], r"slot_mapping has slot 6 twice, for rows 0 and 1"),
        ([8], [8], [[1, 1]], "has slot 4 twice, for rows 0 and 0"),
        (
            [1, 1],
            [7, 5],
            [[2, 1], [3, 1]],
            r"Row 0 writes position 6 of block 1, which row 1 also uses.*4 tokens of context",
        ),
        (
            [4, 1],
            [4, 9],
            [[2], [3, 2, 4]],
            r"block_table\[1\] has block 2 in column 1, but row 0 writes it as column 0",
        ),
        (
            [1, 1, 1],
            [9, 12, 10],
            np.asarray([[1, 2, 8], [3, 4, 0], [5, 6, 7]]),
            r"slot_mapping\[1\]=3 is in block 0, the null block, but row 1",
        ),
    ],
    ids=["two requests", "one request", "shared block", "two columns", "null block"],
)
def test_writes_to_shared_slots_and_blocks_are_rejected(query_lens, seq_lens, block_table, message):
    metadata = jattn.build_batch_metadata(query_lens, seq_lens, block_table, block_size=BLOCK)
    with pytest.raises(ValueError, match=message):
        check(metadata)


class TestOtherArguments:
    def test_block_size_of_another_cache_is_rejected(self):
        spec = jattn.CacheSpec(num_blocks=100, block_size=16, num_kv_heads=2, head_dim=8)
        with pytest.raises(
            ValueError, match=r"metadata.block_size must equal the cache's block_size \(16\), got 4"
        ):
            jattn.check_batch(batch(), spec)

    def test_a_batch_built_without_blocks_does_not_read_a_cache(self):
        metadata = jattn.build_batch_metadata([1, 1], [7, 4], None, block_size=BLOCK)
        with pytest.raises(ValueError, match=r"seq_lens\[0\] must be at most 0, the 0 blocks.* got 7"):
            check(metadata)

    def test_a_decode_batch_with_context_requires_a_cache(self):
        metadata = jattn.build_batch_metadata([1, 1], [1, 4], None)
        with pytest.raises(ValueError, match=r"seq_lens\[1\]=4 differs from the row's 1 new tokens"):
            jattn.check_batch(metadata, None)

    def test_packed_keys_must_hold_every_request(self):
        keys = jnp.zeros((5, 2, 8))
        kv = jattn.PackedKV(k=keys, v=keys, kv_start_loc=jnp.asarray([0, 3]))
        with pytest.raises(
            ValueError, match=r"kv_start_loc\[1\]=3 with .*=4 selects keys \[3, 7\), but cache.k has 5"
        ):
            jattn.check_batch(jattn.build_batch_metadata([1, 1], [3, 4], None), kv)
        kv = replace(kv, kv_start_loc=jnp.asarray([-1, 0]))
        with pytest.raises(
            ValueError, match=r"kv_start_loc\[0\]=-1 with .*=3 selects keys \[-1, 2\), but cache.k has 5"
        ):
            jattn.check_batch(jattn.build_batch_metadata([1, 1], [3, 4], None), kv)

    def test_packed_keys_must_not_have_slots(self):
        keys = jnp.zeros((16, 2, 8))
        kv = jattn.PackedKV(k=keys, v=keys, kv_start_loc=jnp.zeros(5, jnp.int32))
        with pytest.raises(ValueError, match=r"slot_mapping\[0\]=10, but there is no cache"):
            jattn.check_batch(batch(), kv)

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("seq_lens", np.zeros(4, np.int32), r"seq_lens must have shape \(5,\) .*Bucket.*, got \(4,\)"),
            (
                "block_table",
                np.zeros((5, 2), np.int32),
                r"block_table must have shape \(5, 3\).*got \(5, 2\)",
            ),
            ("slot_mapping", np.zeros(11), "slot_mapping must be int32, got float64"),
            ("num_decodes", np.zeros(1, np.int32), r"num_decodes must have shape \(\).*got \(1,\)"),
        ],
    )
    def test_arrays_must_have_the_shapes_and_dtypes_of_the_bucket(self, name, value, message):
        with pytest.raises(ValueError, match=message):
            check(replace(batch(), **{name: value}))

    @pytest.mark.usefixtures("types_unchecked")
    def test_arguments_of_other_types_are_rejected(self):
        with pytest.raises(ValueError, match="metadata must be a BatchMetadata, got list"):
            check([1, 2])
        with pytest.raises(ValueError, match="cache_spec must be a CacheSpec, a PackedKV or None, got int"):
            jattn.check_batch(batch(), 7)

    def test_traced_metadata_is_rejected(self):
        with pytest.raises(ValueError, match=r"metadata is traced\. Call check_batch outside of jax\.jit"):
            jax.jit(check)(batch())
