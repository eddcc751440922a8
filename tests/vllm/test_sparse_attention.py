import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jattn.masks.local_strided import LocalStrided, get_head_sliding_step
from jattn.vllm.sparse_attention import (
    decode_block_pattern,
    dense_to_crow_col,
    make_local_attention_virtual_batches,
    make_padded_local_attention_virtual_batches,
    max_local_attention_virtual_batches,
    prefill_block_pattern,
)
from tests.golden_cases import golden

matrices = st.lists(st.lists(st.sampled_from([0, 1, -2]), min_size=4, max_size=4), min_size=3, max_size=3)


def listed(pattern):
    """Return the last axis as a list of the indices of true values."""
    if pattern.ndim == 1:
        return np.flatnonzero(pattern).tolist()
    return [listed(part) for part in pattern]


@golden("get_head_sliding_step")
def test_sliding_step_equals_vllm(case):
    assert get_head_sliding_step(case["n_heads"], case["vert_stride"], case["homo_head"]) == case["expected"]


@golden("blocksparse_prefill_block_pattern")
def test_prefill_pattern_equals_vllm(case):
    heads = case["num_heads_total"]
    sparsity = LocalStrided(
        local_blocks=case["local_blocks"], vert_stride=case["vert_stride"], homo_head=case["homo_head"]
    )
    assert sparsity.head_sliding_step(heads, heads) == case["head_sliding_step"]
    assert (
        listed(prefill_block_pattern(sparsity, heads, heads, case["num_blocks"])) == case["attended_k_blocks"]
    )


@golden("blocksparse_decode_block_pattern")
def test_decode_pattern_equals_vllm(case):
    sparsity = LocalStrided(
        block_size=case["sparse_block_size"],
        **{
            k: case[k]
            for k in ("local_blocks", "vert_stride", "homo_head", "homo_head_group", "tp_rank", "tp_size")
        },
    )
    q_heads, kv_heads = case["num_heads_per_rank"], case["num_kv_heads_per_rank"]
    assert sparsity.head_sliding_step(q_heads, kv_heads) == case["head_sliding_step"]
    assert list(sparsity.active_head_range(q_heads)) == case["active_head_range"]
    pattern = decode_block_pattern(sparsity, q_heads, kv_heads, [case["seq_len"]], 30)
    assert listed(pattern[0]) == case["attended_k_blocks"]


def test_vllms_prefill_ignores_head_groups_if_requested():
    options = dict(local_blocks=1, vert_stride=4, homo_head_group=True)
    consistent = prefill_block_pattern(LocalStrided(**options), 4, 2, 8)
    as_vllm = prefill_block_pattern(LocalStrided(**options, vllm_prefill_heads=True), 4, 2, 8)
    assert listed(consistent[:, 7]) == [[3, 7], [3, 7], [1, 5, 7], [1, 5, 7]]
    assert listed(as_vllm[:, 7]) == [[3, 7], [2, 6, 7], [1, 5, 7], [0, 4, 7]]
    decode = decode_block_pattern(
        LocalStrided(block_size=16, **options, vllm_prefill_heads=True), 4, 2, [128], 8
    )
    assert listed(decode[0]) == listed(consistent[:, 7])


@given(
    local_blocks=st.integers(0, 3),
    vert_stride=st.integers(1, 5),
    homo_head=st.booleans(),
    homo_head_group=st.booleans(),
    tp_rank=st.integers(0, 1),
    seq_lens=st.lists(st.integers(0, 20), min_size=1, max_size=3),
)
def test_patterns_follow_the_definition_block_by_block(seq_lens, tp_rank, **options):
    q_heads, kv_heads, num_blocks = 4, 2, 5
    sparsity = LocalStrided(block_size=4, tp_rank=tp_rank, tp_size=2, **options)
    prefill = prefill_block_pattern(sparsity, q_heads, kv_heads, num_blocks)
    decode = decode_block_pattern(sparsity, q_heads, kv_heads, seq_lens, num_blocks)
    step_q = max(1, options["vert_stride"] // 8)
    step_kv = max(1, options["vert_stride"] // 4)

    def visible(head, a, b):
        shift = (tp_rank * q_heads + head) * step_q
        if options["homo_head_group"]:
            shift = (tp_rank * kv_heads + head // 2) * step_kv
        if options["homo_head"]:
            shift = 0
        return b <= a and (a - b < options["local_blocks"] or (b + shift + 1) % options["vert_stride"] == 0)

    for head in range(q_heads):
        for b in range(num_blocks):
            for a in range(num_blocks):
                assert prefill[head, a, b] == visible(head, a, b)
            for request, seq_len in enumerate(seq_lens):
                last = (seq_len - 1) // 4
                assert decode[request, head, b] == (seq_len > 0 and visible(head, last, b))


def test_tensor_parallel_devices_hold_slices_of_one_pattern():
    options = dict(local_blocks=1, vert_stride=5)
    whole = prefill_block_pattern(LocalStrided(**options), 4, 4, 9)
    parts = [prefill_block_pattern(LocalStrided(**options, tp_rank=r, tp_size=2), 2, 2, 9) for r in range(2)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_stride_1_is_dense():
    assert prefill_block_pattern(LocalStrided(local_blocks=0, vert_stride=1), 2, 2, 6).sum() == 2 * 21


def test_traced_decode_pattern_equals_the_host_one(traced_once):
    sparsity = LocalStrided(block_size=16, local_blocks=2, vert_stride=4)
    run = functools.partial(decode_block_pattern, sparsity, 4, 2, num_blocks=9)
    batches = [[0, 1, 130], [16, 17, 100]]
    traced = traced_once(lambda lens: run(seq_lens=lens), *((jnp.array(lens),) for lens in batches))
    for seq_lens, pattern in zip(batches, traced, strict=True):
        np.testing.assert_array_equal(pattern, run(seq_lens=seq_lens))


def test_patterns_reject_num_blocks_below_1():
    with pytest.raises(ValueError, match="num_blocks must be positive, got 0"):
        prefill_block_pattern(LocalStrided(), 1, 1, 0)
    with pytest.raises(ValueError, match="num_blocks must be positive, got -1"):
        decode_block_pattern(LocalStrided(), 1, 1, [1], -1)


@golden("dense_to_crow_col")
def test_compressed_rows_equal_vllm(case):
    crow, col = dense_to_crow_col(case["x"])
    assert (crow.tolist(), col.tolist()) == (case["crow"], case["col"])


@given(st.lists(matrices, min_size=1, max_size=3))
def test_compressed_rows_list_the_nonzeros_and_end_in_padding(x):
    crow, col = dense_to_crow_col(x)
    for head, matrix in enumerate(x):
        for row, values in enumerate(matrix):
            indices = [index for index, value in enumerate(values) if value]
            assert col[head, crow[head, row] : crow[head, row + 1]].tolist() == indices
        assert (col[head, crow[head, -1] :] == -1).all()
    assert col.shape[1] == max(crow[:, -1])


@pytest.mark.parametrize(
    ("shape", "crow"), [((0, 3), (1,)), ((3, 0), (4,)), ((2, 0, 3), (2, 1)), ((0, 3, 3), (0, 4))]
)
def test_empty_matrix_has_no_columns(shape, crow):
    result = dense_to_crow_col(np.zeros(shape))
    np.testing.assert_array_equal(result.crow, np.zeros(crow))
    assert result.col.size == 0


def test_compressed_rows_reject_vectors():
    with pytest.raises(ValueError, match=r"x must have 2 or 3 axes, got \(2,\)"):
        dense_to_crow_col([1, 0])


BLOCK_SIZE, CHUNK, MAX_BLOCKS = 2, 4, 15
# (new tokens, context) of each request
requests = st.tuples(st.integers(0, 11), st.integers(0, 12))


def starts_of(query_lens):
    return np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)


def table_of(num_reqs, columns=MAX_BLOCKS):
    return np.arange(num_reqs * columns, dtype=np.int32).reshape(num_reqs, columns)


def chunk_by_chunk(rows, chunk):
    """Return (row, chunk number, new tokens, keys) of each chunk with a new token, by a loop over
    positions.
    """
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
    actual = make_local_attention_virtual_batches(
        case["attn_chunk_size"],
        starts_of(case["query_lens"]),
        case["seq_lens"],
        case["block_table"],
        case["block_size"],
    )
    assert actual.q_lens.tolist() == case["expected_q_seqlens"]
    assert actual.cu_seqlens_q.tolist() == case["expected_cu_seqlens_q"]
    assert actual.k_lens.tolist() == case["expected_k_seqlens"]
    assert actual.block_table_local.tolist() == case["expected_block_table"]
    assert actual.cu_seqlens_q.dtype == actual.k_lens.dtype == np.int32


@golden("make_local_attention_virtual_batches")
def test_virtual_batches_equal_vllm(case):
    check_against_vllm(case)


@golden("make_local_attention_virtual_batches_seed_docstring")
def test_virtual_batches_equal_vllms_docstring(case):
    check_against_vllm(case)


def test_columns_past_the_table_are_read_as_the_last():
    table = table_of(3, columns=9)
    actual = make_local_attention_virtual_batches(4, starts_of([4, 10, 5]), [6, 17, 9], table, 2)
    expected = [[0, 1], [2, 3], [11, 12], [13, 14], [15, 16], [17, 17], [20, 21], [22, 23]]
    assert actual.block_table_local.tolist() == expected


@given(st.lists(requests, min_size=1, max_size=5), st.sampled_from([2, 4, 6]))
def test_virtual_batches_are_the_chunks_that_new_tokens_touch(rows, chunk):
    query_lens, seq_lens = [q for q, _ in rows], [q + c for q, c in rows]
    table = table_of(len(rows))
    actual = make_local_attention_virtual_batches(chunk, starts_of(query_lens), seq_lens, table, BLOCK_SIZE)
    expected = chunk_by_chunk(rows, chunk)
    assert list(zip(actual.q_lens.tolist(), actual.k_lens.tolist(), strict=True)) == [
        batch[2:] for batch in expected
    ]
    assert actual.cu_seqlens_q.tolist() == starts_of(actual.q_lens).tolist()
    for blocks, (row, number, _, keys) in zip(actual.block_table_local, expected, strict=True):
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
    actual = make_local_attention_virtual_batches(chunk, starts_of(query_lens), seq_lens, table, 16)
    assert len(actual.q_lens) == count
    assert count <= max_local_attention_virtual_batches(chunk, max_num_seqs, sum(query_lens))


def most_chunks(num_tokens, num_reqs, chunk):
    """Return the largest number of chunks touched, over all distributions of tokens and all alignments."""
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
def test_bound_is_reached(chunk, num_reqs):
    for num_tokens in range(12):
        bound = max_local_attention_virtual_batches(chunk, num_reqs, num_tokens)
        assert bound == most_chunks(num_tokens, num_reqs, chunk)


def test_chunk_size_must_be_a_multiple_of_block_size():
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
        ([0, 4], [2], [[0]], r"seq_lens_np must include the new tokens .*\[4\]\), got \[2\]"),
        ([0, 1, 2], [1, 1], [[0]], r"block_table must have 2 rows, got shape \(1, 1\)"),
        ([0, 1], [[1]], [[0]], r"seq_lens_np must have one entry per request, got shape \(1, 1\)"),
    ],
)
def test_arrays_of_different_requests_are_rejected(starts, seq_lens, table, message):
    with pytest.raises(ValueError, match=message):
        make_local_attention_virtual_batches(4, starts, seq_lens, table, 4)
