"""check_batch passes what is right and names what is not."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.pytree import replace
from tests.batch.test_metadata import BLOCK, batches, build, holding_all, roomier

SPEC = jattn.CacheSpec(num_blocks=100, block_size=BLOCK, num_kv_heads=2, head_dim=8)
BUCKET = jattn.Bucket(max_decodes=3, max_prefills=2, max_prefill_tokens=8, max_blocks=3)


def batch(**changes):
    """Rows 0 and 1 decode a token after 6 and 3; row 3, behind a padding row, has 5 tokens after 4."""
    metadata = jattn.build_batch_metadata(
        [1, 1, 5], [7, 4, 9], [[1, 2], [3], [4, 5, 6]], block_size=BLOCK, bucket=BUCKET, to_device=False
    )
    for name, (index, value) in changes.items():
        array = getattr(metadata, name).copy()
        array[index] = value
        metadata = replace(metadata, **{name: array})
    return metadata


check = functools.partial(jattn.check_batch, cache_spec=SPEC)


class TestPasses:
    @hypothesis.settings(max_examples=40)
    @hypothesis.given(batches())
    def test_what_the_builder_makes(self, made):
        metadata = build(made)
        check(metadata)
        check(build(made, roomier(metadata.bucket)))
        largest = holding_all(made[-1])
        check(jattn.pad_to_bucket(build(made, largest), roomier(largest)))

    @hypothesis.settings(max_examples=15)
    @hypothesis.given(batches(decode_query_len=1))
    def test_every_step_that_follows_on_the_device(self, made):
        query_lens, seq_lens, table, length = made
        hypothesis.assume(all(seq_lens) and all(query_lens))
        table = [[*row, 90 - r] for r, row in enumerate(table)]
        metadata = build((query_lens, seq_lens, table, length), holding_all(length))
        is_running = jnp.arange(metadata.bucket.max_reqs) != 1
        for _ in range(2):
            metadata = jattn.advance(metadata, is_running=is_running)
            check(metadata)

    def test_tokens_that_are_not_written(self):
        check(batch(slot_mapping=(slice(None), -1)))

    def test_cross_attention(self):
        lens = ([1, 6, 3], [7, 2, 0])
        check(jattn.build_cross_attention_metadata(*lens, [[2, 1], [3], []], block_size=BLOCK))

    def test_a_prefix_that_is_shared_and_one_that_is_made_in_the_same_step(self):
        shared = jattn.build_batch_metadata([1, 1], [6, 7], [[1, 2], [1, 3]], block_size=BLOCK)
        check(shared)
        made_now = jattn.build_batch_metadata([7, 2], [7, 6], [[1, 2], [1, 3]], block_size=BLOCK)
        check(made_now)

    def test_blocks_that_a_window_has_left_may_be_the_null_block(self):
        check(jattn.build_batch_metadata([1, 1], [11, 10], [[0, 0, 3], [0, 4, 5]], block_size=BLOCK))

    def test_no_cache_where_all_keys_are_the_steps_own(self):
        jattn.check_batch(jattn.build_batch_metadata([1, 3], [1, 3], None, block_size=BLOCK), None)

    def test_keys_outside_a_cache(self):
        keys = jnp.zeros((9, 2, 8))
        kv = jattn.PackedKV(k=keys, v=keys, kv_start_loc=jnp.asarray([0, 7, 9]))
        jattn.check_batch(jattn.build_cross_attention_metadata([1, 6, 3], [7, 2, 0], None), kv)

    def test_an_empty_batch(self):
        check(jattn.build_batch_metadata([], [], [], block_size=BLOCK))
        check(jattn.build_batch_metadata([], [], [], block_size=BLOCK, bucket=BUCKET))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_lens": (3, -9)}, r"seq_lens\[3\] must be at least 0, got -9"),
        ({"seq_lens": (1, 13)}, r"seq_lens\[1\] must be at most 12, the 3 blocks of 4 tokens .*, got 13"),
        ({"seq_lens": (3, 3)}, r"seq_lens\[3\] must be at least the row's 5 new tokens.*, got 3"),
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
def test_an_array_that_was_changed_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        check(batch(**changes))


def test_what_stands_past_a_requests_end_is_not_looked_at():
    check(batch(block_table=((1, 2), 10_000)))


class TestOverlaps:
    def refuses(self, message, *arguments):
        metadata = jattn.build_batch_metadata(*arguments, block_size=BLOCK)
        with pytest.raises(ValueError, match=message):
            check(metadata)

    def test_two_requests_that_write_one_slot(self):
        message = r"slot_mapping has slot 6 twice, for rows 0 and 1"
        self.refuses(message, [1, 1], [7, 7], [[2, 1], [3, 1]])

    def test_one_request_that_writes_a_slot_twice(self):
        self.refuses("has slot 4 twice, for rows 0 and 0", [8], [8], [[1, 1]])

    def test_a_request_that_writes_behind_anothers_prefix_in_a_shared_block(self):
        message = r"Row 0 writes position 6 of block 1, which row 1 also uses.*4 tokens of context"
        self.refuses(message, [1, 1], [7, 5], [[2, 1], [3, 1]])

    def test_a_request_that_writes_what_another_has_at_another_position(self):
        message = r"block_table\[1\] has block 2 in column 1, but row 0 writes it as column 0"
        self.refuses(message, [4, 1], [4, 9], [[2], [3, 2, 4]])

    def test_tokens_in_the_null_block(self):
        padded = np.asarray([[1, 2, 8], [3, 4, 0], [5, 6, 7]])
        message = r"slot_mapping\[1\]=3 is in block 0, the null block, but row 1"
        self.refuses(message, [1, 1, 1], [9, 12, 10], padded)


class TestOtherArguments:
    def test_the_cache_has_other_blocks(self):
        spec = jattn.CacheSpec(num_blocks=100, block_size=16, num_kv_heads=2, head_dim=8)
        with pytest.raises(
            ValueError, match=r"metadata.block_size must equal the cache's block_size \(16\), got 4"
        ):
            jattn.check_batch(batch(), spec)

    def test_a_batch_built_without_blocks_does_not_read_a_cache(self):
        metadata = jattn.build_batch_metadata([1, 1], [7, 4], None, block_size=BLOCK)
        with pytest.raises(ValueError, match=r"seq_lens\[0\] must be at most 0, the 0 blocks.* got 7"):
            check(metadata)

    def test_a_decode_batch_without_a_cache_has_no_past_to_read(self):
        metadata = jattn.build_batch_metadata([1, 1], [1, 4], None)
        with pytest.raises(ValueError, match=r"seq_lens\[1\]=4 differs from the row's 1 new tokens"):
            jattn.check_batch(metadata, None)

    def test_keys_outside_a_cache_that_are_too_few(self):
        keys = jnp.zeros((5, 2, 8))
        kv = jattn.PackedKV(k=keys, v=keys, kv_start_loc=jnp.asarray([0, 3]))
        with pytest.raises(
            ValueError, match=r"kv_start_loc\[1\]=3 and the row's 4 keys exceed k, which has 5"
        ):
            jattn.check_batch(jattn.build_batch_metadata([1, 1], [3, 4], None), kv)
        kv = replace(kv, kv_start_loc=jnp.asarray([-1, 0]))
        with pytest.raises(
            ValueError, match=r"kv_start_loc\[0\]=-1 and the row's 3 keys exceed k, which has 5"
        ):
            jattn.check_batch(jattn.build_batch_metadata([1, 1], [3, 4], None), kv)

    def test_keys_outside_a_cache_are_never_written_into_one(self):
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
    def test_arrays_that_are_not_the_buckets(self, name, value, message):
        with pytest.raises(ValueError, match=message):
            check(replace(batch(), **{name: value}))

    @pytest.mark.usefixtures("types_unchecked")
    def test_what_is_no_metadata_and_no_cache_spec(self):
        with pytest.raises(ValueError, match="metadata must be a BatchMetadata, got list"):
            check([1, 2])
        with pytest.raises(ValueError, match="cache_spec must be a CacheSpec, a PackedKV or None, got int"):
            jattn.check_batch(batch(), 7)

    def test_inside_jit_there_are_no_numbers_to_check(self):
        with pytest.raises(ValueError, match=r"metadata is traced\. Call check_batch outside of jax\.jit"):
            jax.jit(check)(batch())
