import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jattn.vllm.local import (
    make_local_attention_virtual_batches,
    make_padded_local_attention_virtual_batches,
    max_local_attention_virtual_batches,
)
from tests.golden_cases import golden

BLOCK_SIZE, CHUNK, MAX_BLOCKS = 2, 4, 15
# (new tokens, context) of each request
requests = st.tuples(st.integers(0, 11), st.integers(0, 12))


def starts_of(query_lens):
    return np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)


def table_of(num_reqs, columns=MAX_BLOCKS):
    return np.arange(num_reqs * columns, dtype=np.int32).reshape(num_reqs, columns)


def chunk_by_chunk(rows, chunk):
    """(row, chunk number, new tokens, keys) of every chunk with a new token, by walking the positions."""
    batches = []
    for row, (query_len, context) in enumerate(rows):
        for position in range(context, context + query_len):
            number = position // chunk
            if not batches or batches[-1][:2] != (row, number):
                batches.append((row, number, 0, 0))
            _, _, count, _ = batches[-1]
            batches[-1] = (row, number, count + 1, position - number * chunk + 1)
    return batches


def check_against_vllm(case):
    got = make_local_attention_virtual_batches(
        case["attn_chunk_size"],
        starts_of(case["query_lens"]),
        case["seq_lens"],
        case["block_table"],
        case["block_size"],
    )
    assert got.q_lens.tolist() == case["expected_q_seqlens"]
    assert got.cu_seqlens_q.tolist() == case["expected_cu_seqlens_q"]
    assert got.k_lens.tolist() == case["expected_k_seqlens"]
    assert got.block_table_local.tolist() == case["expected_block_table"]
    assert got.cu_seqlens_q.dtype == got.k_lens.dtype == np.int32


@golden("make_local_attention_virtual_batches")
def test_virtual_batches_equal_vllm(case):
    check_against_vllm(case)


@golden("make_local_attention_virtual_batches_seed_docstring")
def test_virtual_batches_equal_vllms_docstring(case):
    check_against_vllm(case)


def test_columns_past_the_table_are_read_as_the_last():
    table = table_of(3, columns=9)
    got = make_local_attention_virtual_batches(4, starts_of([4, 10, 5]), [6, 17, 9], table, 2)
    expected = [[0, 1], [2, 3], [11, 12], [13, 14], [15, 16], [17, 17], [20, 21], [22, 23]]
    assert got.block_table_local.tolist() == expected


@given(st.lists(requests, min_size=1, max_size=5), st.sampled_from([2, 4, 6]))
def test_virtual_batches_are_the_chunks_that_new_tokens_touch(rows, chunk):
    query_lens, seq_lens = [q for q, _ in rows], [q + c for q, c in rows]
    table = table_of(len(rows))
    got = make_local_attention_virtual_batches(chunk, starts_of(query_lens), seq_lens, table, BLOCK_SIZE)
    expected = chunk_by_chunk(rows, chunk)
    assert list(zip(got.q_lens.tolist(), got.k_lens.tolist(), strict=True)) == [
        batch[2:] for batch in expected
    ]
    assert got.cu_seqlens_q.tolist() == starts_of(got.q_lens).tolist()
    for blocks, (row, number, _, keys) in zip(got.block_table_local, expected, strict=True):
        for offset in range(keys):
            assert blocks[offset // BLOCK_SIZE] == table[row, (number * chunk + offset) // BLOCK_SIZE]


def test_traced_batches_equal_the_numpy_ones_and_end_in_empty_rows(traced_once):
    batches = [
        [(4, 2), (10, 7), (5, 4)],
        [(1, 0), (0, 0), (1, 12)],
        [(11, 3), (11, 2), (11, 1)],
        [(0, 0)] * 3,
    ]
    table, bound = table_of(3), max_local_attention_virtual_batches(CHUNK, 3, 33)

    def build(starts, seq_lens, table):
        return make_padded_local_attention_virtual_batches(
            CHUNK, starts, seq_lens, table, BLOCK_SIZE, max_virtual_batches=bound
        )

    arrays = [(starts_of([q for q, _ in b]), np.array([q + c for q, c in b], np.int32)) for b in batches]
    traced = traced_once(build, *((jnp.asarray(a), jnp.asarray(s), jnp.asarray(table)) for a, s in arrays))
    for (starts, seq_lens), padded in zip(arrays, traced, strict=True):
        live = make_local_attention_virtual_batches(CHUNK, starts, seq_lens, table, BLOCK_SIZE)
        count = len(live.q_lens)
        assert padded.q_lens.shape == (bound,)
        for name in ("q_lens", "k_lens", "block_table_local"):
            np.testing.assert_array_equal(getattr(padded, name)[:count], getattr(live, name))
        np.testing.assert_array_equal(padded.cu_seqlens_q[: count + 1], live.cu_seqlens_q)
        assert (np.asarray(padded.cu_seqlens_q[count:]) == starts[-1]).all()
        assert not padded.q_lens[count:].any()
        assert not padded.k_lens[count:].any()


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "chunk", "max_num_seqs", "count"),
    [
        ([1000], [1000], 256, 1, 4),
        ([1000], [1255], 256, 1, 5),
        ([300, 700, 90], [300, 1400, 90], 128, 4, 10),
        ([64, 64], [64, 64], 256, 2, 2),
        ([1, 1, 1, 1], [16, 32, 48, 64], 16, 4, 4),
    ],
)
def test_vllms_batches_stay_within_the_bound(query_lens, seq_lens, chunk, max_num_seqs, count):
    table = np.zeros((len(seq_lens), 100), np.int32)
    got = make_local_attention_virtual_batches(chunk, starts_of(query_lens), seq_lens, table, 16)
    assert len(got.q_lens) == count
    assert count <= max_local_attention_virtual_batches(chunk, max_num_seqs, sum(query_lens))


def most_chunks(num_tokens, num_reqs, chunk):
    """The most chunks touched, over all ways to deal the tokens to requests and all alignments."""
    alone = [
        max((len(chunk_by_chunk([(n, context)], chunk)) for context in range(chunk)), default=0)
        for n in range(num_tokens + 1)
    ]

    @functools.cache
    def best(tokens, reqs):
        if reqs == 0:
            return 0 if tokens == 0 else -1000
        return max(alone[n] + best(tokens - n, reqs - 1) for n in range(tokens + 1))

    return best(num_tokens, num_reqs)


@pytest.mark.parametrize("chunk", [1, 2, 3, 4])
@pytest.mark.parametrize("num_reqs", [1, 2, 3])
def test_the_bound_is_the_least_one(chunk, num_reqs):
    for num_tokens in range(12):
        bound = max_local_attention_virtual_batches(chunk, num_reqs, num_tokens)
        assert bound == most_chunks(num_tokens, num_reqs, chunk)


def test_chunks_must_hold_whole_blocks():
    with pytest.raises(ValueError, match=r"attn_chunk_size must be a multiple of block_size \(4\), got 6"):
        make_local_attention_virtual_batches(6, [0, 1], [1], [[0]], 4)
    with pytest.raises(ValueError, match="block_size must be positive, got 0"):
        make_local_attention_virtual_batches(6, [0, 1], [1], [[0]], 0)
    with pytest.raises(ValueError, match="attn_chunk_size must be positive, got 0"):
        max_local_attention_virtual_batches(0, 1, 1)


@pytest.mark.usefixtures("types_unchecked")
@pytest.mark.parametrize(
    ("starts", "seq_lens", "table", "message"),
    [
        ([4], [4], [[0]], r"query_start_loc_np must have 2 entries, got \(1,\)"),
        ([0, 4], [2], [[0]], r"seq_lens_np must count the new tokens \[4\], got \[2\]"),
        ([0, 1, 2], [1, 1], [[0]], r"block_table must have 2 rows, got shape \(1, 1\)"),
        ([0, 1], [[1]], [[0]], r"seq_lens_np must have one entry per request, got shape \(1, 1\)"),
    ],
)
def test_arrays_of_other_requests_are_refused(starts, seq_lens, table, message):
    with pytest.raises(ValueError, match=message):
        make_local_attention_virtual_batches(4, starts, seq_lens, table, 4)
