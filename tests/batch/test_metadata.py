"""BatchMetadata: positions, slots and padding of every token, and steps advanced on the device."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.batch.transitions import pad_tokens

BLOCK = 4


@st.composite
def batches(draw, max_reqs=5, decode_query_len=None):
    """Draw query_lens with leading decodes, seq_lens, a shuffled block table and decode_query_len."""
    decode_len = draw(st.sampled_from([1, 3])) if decode_query_len is None else decode_query_len
    decodes = draw(st.integers(0, max_reqs))
    prefills = draw(
        st.integers(0 if decodes else 1, max_reqs - decodes) if decodes < max_reqs else st.just(0)
    )
    query_lens = [decode_len] * decodes + [draw(st.integers(0, 9)) for _ in range(prefills)]
    seq_lens = [n + draw(st.integers(0, 11)) for n in query_lens]
    needed = [-(-n // BLOCK) for n in seq_lens]
    ids = draw(st.permutations(range(1, sum(needed) + 1)))
    table, offset = [], 0
    for n in needed:
        table.append(list(ids[offset : offset + n]))
        offset += n
    return query_lens, seq_lens, table, decode_len


def build(batch, bucket=None):
    query_lens, seq_lens, table, decode_len = batch
    return jattn.build_batch_metadata(
        query_lens, seq_lens, table, block_size=BLOCK, decode_query_len=decode_len, bucket=bucket
    )


def roomier(bucket, decodes=1, prefills=1, tokens=5, blocks=2):
    return jattn.Bucket(
        max_decodes=bucket.max_decodes + decodes,
        max_prefills=bucket.max_prefills + prefills,
        max_prefill_tokens=bucket.max_prefill_tokens + tokens,
        decode_query_len=bucket.decode_query_len,
        max_blocks=bucket.max_blocks + blocks,
    )


def bucket_for_all_batches(decode_query_len):
    """Return one bucket for all `batches`, so that device functions compile once."""
    sizes = {"max_decodes": 5, "max_prefills": 5, "max_prefill_tokens": 45, "max_blocks": 6}
    return jattn.Bucket(**sizes, decode_query_len=decode_query_len)


@jax.jit
def computed_arrays(metadata):
    return (
        metadata.query_lens,
        metadata.last_token_indices,
        metadata.is_valid_token,
        metadata.positions,
        metadata.token_rows,
    )


def assert_equals_a_loop(metadata, batch):
    """Assert that each live token has its row, position and slot, and that all other tokens are padding."""
    query_lens, seq_lens, table, decode_len = batch
    bucket = metadata.bucket
    decodes = 0
    while decodes < len(query_lens) and query_lens[decodes] == decode_len and decodes < bucket.max_decodes:
        decodes += 1
    token_rows, positions, slots, live = {}, {}, {}, set()
    seq_lens_of = np.asarray(metadata.seq_lens)
    query_lens_of, last_tokens, is_live, positions_of, rows_of = map(np.asarray, computed_arrays(metadata))
    next_prefill = bucket.max_decodes * decode_len
    for r, (n, total) in enumerate(zip(query_lens, seq_lens, strict=True)):
        row = r if r < decodes else bucket.max_decodes + r - decodes
        start = r * decode_len if r < decodes else next_prefill
        next_prefill += n if r >= decodes else 0
        assert seq_lens_of[row] == total
        for t in range(n):
            position = total - n + t
            live.add(start + t)
            token_rows[start + t], positions[start + t] = row, position
            slots[start + t] = table[r][position // BLOCK] * BLOCK + position % BLOCK
        if n:
            assert last_tokens[row] == start + n - 1
            assert query_lens_of[row] == n
    tokens = range(bucket.max_tokens)
    assert is_live.tolist() == [t in live for t in tokens]
    assert np.asarray(metadata.slot_mapping).tolist() == [slots.get(t, -1) for t in tokens]
    assert positions_of.tolist() == [positions.get(t, 0) for t in tokens]
    assert {t: rows_of[t] for t in live} == token_rows
    assert (seq_lens_of > 0).sum() == sum(n > 0 for n in seq_lens)
    starts = np.asarray(metadata.query_start_loc)
    assert starts[0] == 0
    assert (np.diff(starts) >= 0).all()


class TestBuild:
    @pytest.mark.kernels
    @hypothesis.settings(max_examples=25)
    @hypothesis.given(batches())
    def test_every_token_has_its_row_position_and_slot(self, batch):
        metadata = build(batch)
        assert_equals_a_loop(metadata, batch)
        np.testing.assert_array_equal(metadata.query_start_loc, np.concatenate([[0], np.cumsum(batch[0])]))

    @hypothesis.settings(max_examples=25)
    @hypothesis.given(batches())
    def test_a_larger_bucket_adds_padding_only(self, batch):
        assert_equals_a_loop(build(batch, bucket_for_all_batches(batch[-1])), batch)

    def test_padding_equals_vllm(self):
        bucket = jattn.Bucket(max_decodes=5, max_blocks=3)
        metadata = jattn.build_batch_metadata(
            [1, 1, 1], [5, 1, 9], [[7, 8], [3], [4, 5, 6]], block_size=4, bucket=bucket
        )
        assert metadata.query_start_loc.tolist() == [0, 1, 2, 3, 3, 3]
        assert metadata.seq_lens.tolist() == [5, 1, 9, 0, 0]
        assert metadata.slot_mapping.tolist() == [32, 12, 24, -1, -1]
        assert metadata.block_table.tolist() == [[7, 8, 0], [3, 0, 0], [4, 5, 6], [0, 0, 0], [0, 0, 0]]
        assert (int(metadata.num_decodes), int(metadata.num_prefills)) == (3, 0)

    def test_a_short_row_after_the_first_prefill_row_is_a_prefill_row(self):
        metadata = jattn.build_batch_metadata([1, 4, 1], [3, 4, 8], [[1], [2], [3, 4]], block_size=4)
        assert (metadata.bucket.max_decodes, metadata.bucket.max_prefills) == (1, 2)
        assert metadata.query_start_loc.tolist() == [0, 1, 5, 6]

    def test_batches_without_a_block_table_write_nothing(self):
        metadata = jattn.build_batch_metadata([3, 2], [3, 2], None)
        assert metadata.slot_mapping.tolist() == [-1] * 5
        assert metadata.block_table.shape == (2, 0)

    def test_block_tables_may_be_ragged_lists_or_arrays(self):
        expected = jattn.build_batch_metadata([1, 1], [5, 3], [[4, 2], [1]], block_size=4)
        for table in (np.asarray([[4, 2], [1, -9]]), jnp.asarray([[4, 2], [1, 0]])):
            actual = jattn.build_batch_metadata([1, 1], [5, 3], table, block_size=4)
            np.testing.assert_array_equal(actual.slot_mapping, expected.slot_mapping)

    @pytest.mark.parametrize("case", range(10))
    def test_vllms_batches_can_be_built(self, metadata_cases, case):
        case = metadata_cases["batch_specs"][case]
        needed = [-(-n // 16) for n in case["seq_lens"]]
        table = np.split(np.arange(1, sum(needed) + 1), np.cumsum(needed)[:-1])
        metadata = jattn.build_batch_metadata(case["query_lens"], case["seq_lens"], list(table))
        ends = np.cumsum(case["query_lens"])
        np.testing.assert_array_equal(metadata.query_start_loc[1:], ends)
        last = np.asarray(case["seq_lens"]) - 1
        np.testing.assert_array_equal(
            metadata.slot_mapping[ends - 1],
            [t[p // 16] * 16 + p % 16 for t, p in zip(table, last, strict=True)],
        )


@pytest.mark.usefixtures("types_unchecked")
class TestRefusals:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (([1, 2], [5], [[1, 2]]), r"seq_lens must have one entry per request \(2\), got 1"),
            (
                ([1, 6], [5, 5], [[1, 2], [3, 4]]),
                r"seq_lens\[1\] is 5, but request 1 has 6 query tokens",
            ),
            (([1], [5], [[1, 2], [3]]), r"block_table must have one row per request \(1\), got 2 rows"),
            (([1] * 8, [5] * 8, np.zeros((7, 64), int)), r"one row per request \(8\), got \(7, 64\)"),
            (([1], [9], [[1, 2]]), r"block_table\[0\] has 2 blocks of 4 tokens, but request 0 has 9 tokens"),
            (
                ([1], [5], [[1, -1]]),
                r"block_table\[0\] must have no negative block id among the blocks of its 5 tokens, got \[1, "
                r"-1\]",
            ),
            (([-1], [5], [[1, 2]]), r"query_lens must be at least 0, got \[-1\]"),
            (([1.5], [5], [[1, 2]]), "query_lens must be a list of ints, got float64"),
        ],
    )
    def test_inconsistent_lengths_are_rejected_by_name(self, arguments, message):
        query_lens, *rest = arguments
        with pytest.raises(ValueError, match=message):
            jattn.build_batch_metadata(np.asarray(query_lens), *rest, block_size=4)

    def test_a_batch_larger_than_its_bucket_is_rejected_with_the_sizes(self):
        bucket = jattn.Bucket(max_decodes=1, max_prefills=1, max_prefill_tokens=4, max_blocks=4)
        with pytest.raises(ValueError, match="prefill rows must fit the bucket's 1, got 2"):
            jattn.build_batch_metadata([1, 2, 2], [1, 2, 2], [[1], [2], [3]], bucket=bucket)
        with pytest.raises(ValueError, match="prefill tokens must fit the bucket's 4, got 5"):
            jattn.build_batch_metadata([1, 5], [1, 5], [[1], [2]], bucket=bucket)

    def test_decode_rows_beyond_their_region_are_reported_separately(self):
        bucket = jattn.Bucket(max_decodes=2, max_prefills=0, max_prefill_tokens=0, max_blocks=4)
        message = r"the bucket's 0 \(1 of 3 decode rows exceed max_decodes=2 and count as .*\), got 1"
        with pytest.raises(ValueError, match=message):
            jattn.build_batch_metadata([1, 1, 1], [1, 2, 2], [[1], [2], [3]], bucket=bucket)

    @pytest.mark.parametrize("which", ["query_lens", "seq_lens", "block_table"])
    @pytest.mark.parametrize("wrap", [lambda x: x, list], ids=["array", "list"])
    @pytest.mark.usefixtures("types_unchecked")
    def test_traced_lengths_are_rejected_with_a_hint(self, which, wrap):
        arguments = {"query_lens": [1], "seq_lens": [3], "block_table": [[1]]}
        build = lambda traced: jattn.build_batch_metadata(**arguments | {which: wrap(traced)}, block_size=4)
        with pytest.raises(
            ValueError, match=rf"{which}\S* is a traced array, but its values must be known on the host"
        ):
            jax.jit(build)(jnp.asarray(arguments[which]))

    def test_unordered_rows_are_rejected_with_the_reorder_function(self):
        bucket = jattn.Bucket(max_decodes=1, max_prefills=1, max_prefill_tokens=8, max_blocks=4)
        with pytest.raises(
            ValueError,
            match=r"1 decode rows come after.*jattn.vllm.reorder_batch_to_split_decodes_and_prefills",
        ):
            jattn.build_batch_metadata([3, 1], [3, 9], [[1], [2]], bucket=bucket)

    @pytest.mark.parametrize("bucket", [None, jattn.Bucket(max_decodes=4, max_blocks=6)])
    @pytest.mark.parametrize("build", [jattn.build_batch_metadata, jattn.build_cross_attention_metadata])
    def test_a_ragged_row_that_is_too_short_is_rejected(self, build, bucket):
        message = r"block_table\[1\] has 2 blocks of 16 tokens, but request 1 has 33 tokens"
        for table in ([[1, 2, 8], [3, 4], [5, 6, 7]], [np.asarray([1, 2, 8]), (3, 4), range(5, 8)]):
            with pytest.raises(ValueError, match=message):
                build([1, 1, 1], [33, 33, 40], table, bucket=bucket)

    def test_a_bucket_with_too_few_columns_is_rejected(self):
        bucket = jattn.Bucket(max_decodes=1, max_blocks=1)
        with pytest.raises(
            ValueError,
            match=r"bucket.max_blocks must be at least 2, the blocks of request 0 with 17 tokens, got 1",
        ):
            jattn.build_batch_metadata([1], [17], [[1, 2]], bucket=bucket)

    @pytest.mark.parametrize("build", [jattn.build_batch_metadata, jattn.build_cross_attention_metadata])
    @pytest.mark.parametrize(
        ("table", "message"),
        [
            ([[1, 2], [3, 2**32 + 4]], r"block_table\[1\] must hold block ids of at most .*4294967300\]"),
            ([[1, 2], [3, 2**70]], r"block_table\[1\] must be a list of ints, got object"),
            (np.asarray([[1, 2], [3, 2**40]]), r"block_table\[1\] must hold block ids of at most 536870911"),
            ([[1, 2], [3, 2**29]], r"block_table\[1\] must hold .* 536870911 \(slots are int32\), got"),
            ([[1, 2.5], [3, 4]], r"block_table\[0\] must be a list of ints, got float64"),
            ([[1, 2], np.asarray([3.0, 4.0])], r"block_table\[1\] must be a list of ints, got float64"),
            ([[1, 2], [3, True]], r"block_table\[1\] must be a list of ints, got bool"),
            ([[1, 2], ["a"]], r"block_table\[1\] must be a list of ints, got <U1"),
            ([[1, 2], 3], r"block_table\[1\] must be a list of ints, got shape \(\)"),
            ([[1, 2], None], r"block_table\[1\] must be a list of ints, got shape \(\)"),
            ([[1, 2], [[3, 4]]], r"block_table\[1\] must be a list of ints, got shape \(1, 2\)"),
            ([[1, 2], [[3], 4]], r"block_table\[1\] must be a list of ints, got \[\[3\], 4\]"),
            (np.asarray([1, 2]), r"block_table must have 2 axes, got shape \(2,\)"),
            (np.ones((2, 2)), "block_table must hold ints, got float64"),
            (jnp.ones((2, 2), bool), "block_table must hold ints, got bool"),
            (7, "block_table must be a table of block ids or None, got 7"),
            (
                [[1, 2], [-3, 4]],
                r"block_table\[1\] must have no negative block id .* its 7 tokens, got \[-3, 4\]",
            ),
        ],
    )
    def test_invalid_block_ids_are_reported_with_their_request(self, build, table, message):
        with pytest.raises(ValueError, match=message):
            build([1, 1], [8, 7], table, block_size=4)

    def test_block_table_past_a_requests_end_may_be_negative(self):
        table = np.asarray([[1, -7], [3, 4]])
        metadata = jattn.build_batch_metadata([1, 1], [4, 7], table, block_size=4)
        assert metadata.slot_mapping.tolist() == [7, 18]

    @pytest.mark.parametrize(
        ("query_lens", "seq_lens", "message"),
        [
            ([True, 1], [4, 7], "query_lens must be a list of ints, got bool"),
            ([1, 1], [4, 2**31], r"seq_lens must be at most 2147483647, got \[2147483648\]"),
            ([1, 1], [4, 2**70], "seq_lens must be a list of ints, got object"),
            ([1, [1]], [4, 7], r"query_lens must be a list of ints, got \[1, \[1\]\]"),
            (3, [4], r"query_lens must be a list of ints, got shape \(\)"),
        ],
    )
    def test_lengths_beyond_int32_are_rejected(self, query_lens, seq_lens, message):
        with pytest.raises(ValueError, match=message):
            jattn.build_batch_metadata(query_lens, seq_lens, None)

    @pytest.mark.parametrize("build", [jattn.build_batch_metadata, jattn.build_cross_attention_metadata])
    def test_buckets_of_other_types_are_rejected(self, build):
        with pytest.raises(ValueError, match="bucket must be a Bucket or None, got 8"):
            build([1], [4], [[1]], bucket=8)
        with pytest.raises(ValueError, match=r"decode_query_len must be an int, got 1.0"):
            build([1], [4], [[1]], decode_query_len=1.0)

    @pytest.mark.parametrize("block_size", [16.0, True, "16", None])
    def test_block_size_must_be_an_int(self, block_size):
        with pytest.raises(ValueError, match=f"block_size must be an int, got {block_size!r}"):
            jattn.build_batch_metadata([1], [4], [[1]], block_size=block_size)

    def test_cross_attention_lengths_are_checked_too(self):
        with pytest.raises(ValueError, match=r"kv_lens must have one entry per request \(2\), got 1"):
            jattn.build_cross_attention_metadata([1, 1], [3], [[1], [2]])


class TestDeviceSide:
    @pytest.mark.kernels
    @hypothesis.settings(max_examples=20)
    @hypothesis.given(batches(decode_query_len=1))
    def test_advance_equals_building_the_next_step(self, batch):
        query_lens, seq_lens, table, _ = batch
        hypothesis.assume(all(seq_lens))
        width = max(len(row) for row in table) + 1
        table = [row + [50 + r] + [0] * (width - len(row) - 1) for r, row in enumerate(table)]
        metadata = jattn.build_batch_metadata(query_lens, seq_lens, table, block_size=BLOCK)
        expected = jattn.build_batch_metadata(
            [1] * len(seq_lens), [n + 1 for n in seq_lens], table, block_size=BLOCK
        )
        actual = jax.jit(jattn.advance)(metadata)
        assert actual.bucket == expected.bucket
        jax.tree.map(np.testing.assert_array_equal, actual, expected)

    def test_advance_ends_rows_and_drops_rejected_tokens(self):
        metadata = jattn.build_batch_metadata(
            [3, 3, 3], [7, 5, 9], [[1, 2, 3]] * 3, block_size=4, decode_query_len=3
        )
        next_step = jax.jit(jattn.advance)(
            metadata, num_accepted=jnp.asarray([1, 3, 2]), is_running=jnp.asarray([True, False, True])
        )
        assert next_step.seq_lens.tolist() == [4 + 1 + 3, 0, 6 + 2 + 3]
        assert next_step.slot_mapping.tolist() == [9, 10, 11, -1, -1, -1, 12, 13, 14]
        assert next_step.query_start_loc.tolist() == [0, 3, 6, 9]

    def test_tokens_past_the_block_table_are_not_written(self):
        metadata = jattn.build_batch_metadata([1], [4], [[3]], block_size=4)
        assert jattn.advance(metadata).slot_mapping.tolist() == [-1]
        longer = jattn.advance(metadata, jnp.asarray([[3, 9]], jnp.int32))
        assert longer.slot_mapping.tolist() == [36]

    def test_update_block_table_recomputes_the_slots(self):
        metadata = jattn.build_batch_metadata([1, 3], [6, 3], [[1, 2], [3]], block_size=4)
        moved = jax.jit(jattn.update_block_table)(metadata, jnp.asarray([[8, 9], [5, 0]], jnp.int32))
        expected = jattn.build_batch_metadata([1, 3], [6, 3], [[8, 9], [5]], block_size=4)
        jax.tree.map(np.testing.assert_array_equal, moved, expected)

    @pytest.mark.kernels
    @hypothesis.settings(max_examples=20)
    @hypothesis.given(batches(), st.booleans())
    def test_pad_to_bucket_equals_building_with_the_bucket(self, batch, more_prefill):
        exact = build(batch)
        bucket = roomier(exact.bucket, prefills=more_prefill, tokens=5 * more_prefill)
        hypothesis.assume(bucket.max_prefills or not bucket.max_prefill_tokens)
        # The builder fills spare decode rows first; padding keeps each row in its region.
        hypothesis.assume(exact.bucket.max_prefills == 0 or batch[0][exact.bucket.max_decodes] != batch[3])
        padded = jax.jit(jattn.pad_to_bucket, static_argnums=1)(exact, bucket)
        jax.tree.map(np.testing.assert_array_equal, padded, build(batch, bucket))

    @pytest.mark.usefixtures("types_unchecked")
    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (
                lambda m: jattn.advance(m, num_accepted=jnp.ones(2)),
                "num_accepted must hold ints, got float32",
            ),
            (
                lambda m: jattn.advance(m, num_accepted=jnp.ones(3, int)),
                r"num_accepted must have shape \(2,\) .*, got \(3,\)",
            ),
            (
                lambda m: jattn.advance(m, is_running=jnp.ones(2, int)),
                "is_running must hold bools, got int32",
            ),
            (
                lambda m: jattn.advance(m, is_running=[True, False]),
                r"is_running must be an array, got \[True",
            ),
            (lambda m: jattn.advance(m, jnp.ones((2, 2))), "block_table must hold ints, got float32"),
            (
                lambda m: jattn.update_block_table(m, jnp.ones((3, 2), int)),
                r"block_table must have shape \(2, 2\) .*, got \(3, 2\)",
            ),
            (
                lambda m: jattn.update_block_table(m, jnp.ones(2, int)),
                r"block_table must have shape \(2, 'max_blocks'\) .*, got \(2,\)",
            ),
            (lambda m: jattn.update_block_table(m, [[1], [2]]), r"block_table must be an array, got \[\[1"),
            (
                lambda m: jattn.advance(m, np.full((2, 1), 2**32 + 1)),
                "block_table must hold int32s, got 4294967297",
            ),
            (
                lambda m: jattn.advance(m, num_accepted=np.full(2, 2**32 + 1)),
                "num_accepted must hold int32s, got 4294967297",
            ),
            (lambda m: jattn.pad_to_bucket(m, 4), "bucket must be a Bucket, got 4"),
            (
                lambda m: pad_tokens(jnp.ones(3), m.bucket, jattn.Bucket(max_decodes=4)),
                r"tokens must have the bucket's 2 tokens, got shape \(3,\)",
            ),
        ],
    )
    def test_arrays_of_other_row_counts_are_rejected_by_name(self, call, message):
        metadata = jattn.build_batch_metadata([1, 1], [6, 3], [[1, 2], [3]], block_size=4)
        with pytest.raises(ValueError, match=message):
            call(metadata)

    def test_a_smaller_bucket_is_refused(self):
        metadata = jattn.build_batch_metadata([1, 1], [6, 3], [[1, 2], [3]], block_size=4)
        for wrong, message in (
            ({"max_decodes": 1}, "bucket.max_decodes must be at least 2, got 1"),
            ({"max_decodes": 2, "max_blocks": 1}, "bucket.max_blocks must be at least 2, got 1"),
            (
                {"max_decodes": 2, "decode_query_len": 2},
                r"bucket.decode_query_len must be the metadata's \(1\), got 2",
            ),
        ):
            with pytest.raises(ValueError, match=message):
                jattn.pad_to_bucket(metadata, jattn.Bucket(**wrong))
