import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jattn.masks.local_strided import LocalStrided, get_head_sliding_step
from jattn.vllm.block_patterns import decode_block_pattern, dense_to_crow_col, prefill_block_pattern
from tests.golden_cases import golden

matrices = st.lists(st.lists(st.sampled_from([0, 1, -2]), min_size=4, max_size=4), min_size=3, max_size=3)


def listed(pattern):
    """The last axis as the list of its true places."""
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


def test_vllms_prefill_forgets_the_head_groups_when_asked():
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

    def sees(head, a, b):
        shift = (tp_rank * q_heads + head) * step_q
        if options["homo_head_group"]:
            shift = (tp_rank * kv_heads + head // 2) * step_kv
        if options["homo_head"]:
            shift = 0
        return b <= a and (a - b < options["local_blocks"] or (b + shift + 1) % options["vert_stride"] == 0)

    for head in range(q_heads):
        for b in range(num_blocks):
            for a in range(num_blocks):
                assert prefill[head, a, b] == sees(head, a, b)
            for request, seq_len in enumerate(seq_lens):
                last = (seq_len - 1) // 4
                assert decode[request, head, b] == (seq_len > 0 and sees(head, last, b))


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


def test_patterns_need_blocks():
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
            places = [place for place, value in enumerate(values) if value]
            assert col[head, crow[head, row] : crow[head, row + 1]].tolist() == places
        assert (col[head, crow[head, -1] :] == -1).all()
    assert col.shape[1] == max(crow[:, -1])


@pytest.mark.parametrize(
    ("shape", "crow"), [((0, 3), (1,)), ((3, 0), (4,)), ((2, 0, 3), (2, 1)), ((0, 3, 3), (0, 4))]
)
def test_an_empty_matrix_has_no_columns(shape, crow):
    made = dense_to_crow_col(np.zeros(shape))
    np.testing.assert_array_equal(made.crow, np.zeros(crow))
    assert made.col.size == 0


def test_compressed_rows_need_a_matrix():
    with pytest.raises(ValueError, match=r"x must have 2 or 3 axes, got \(2,\)"):
        dense_to_crow_col([1, 0])
