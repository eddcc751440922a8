import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jattn.batch.context_parallel import get_dcp_local_seq_lens
from jattn.vllm.context_parallel import (
    compute_dcp_slot_mapping,
    cp_lse_combine,
    mask_empty_context_lse,
    max_dcp_local_seq_len,
)
from tests.golden_cases import golden

INF = float("inf")


@golden("get_dcp_local_seq_lens")
def test_local_lengths_equal_vllm(case):
    args = (case["dcp_world_size"], case["interleave"])
    everywhere = get_dcp_local_seq_lens(case["seq_lens"], args[0], None, args[1])
    assert everywhere.T.tolist() == case["expected_per_rank"]
    for rank, expected in enumerate(case["expected_per_rank"]):
        assert get_dcp_local_seq_lens(case["seq_lens"], args[0], rank, args[1]).tolist() == expected
    assert [max_dcp_local_seq_len(n, *args) for n in case["seq_lens"]] == case["max_local_bound"]


@given(st.lists(st.integers(0, 70), min_size=1, max_size=4), st.integers(1, 5), st.integers(1, 5))
def test_local_lengths_count_the_positions_of_each_rank(seq_lens, size, interleave):
    local = get_dcp_local_seq_lens(seq_lens, size, cp_kv_cache_interleave_size=interleave)
    for row, seq_len in zip(local, seq_lens, strict=True):
        owners = [position // interleave % size for position in range(seq_len)]
        assert row.tolist() == [owners.count(rank) for rank in range(size)]
        assert max(row) <= max_dcp_local_seq_len(seq_len, size, interleave)


def test_traced_lengths_and_rank_equal_the_host_ones(traced_once):
    seq_lens = [0, 5, 17, 128]
    run = lambda lens, rank: get_dcp_local_seq_lens(lens, 3, rank, 4)
    traced = traced_once(run, *((jnp.array(seq_lens), jnp.int32(rank)) for rank in range(3)))
    for rank, local in enumerate(traced):
        np.testing.assert_array_equal(local, run(seq_lens, rank))


@golden("dcp_slot_mapping")
def test_slots_equal_vllm_on_each_rank(traced_once, case):
    positions = np.array(case["positions"])
    run = functools.partial(
        compute_dcp_slot_mapping,
        block_size=case["block_size"],
        dcp_size=case["dcp_world_size"],
        cp_kv_cache_interleave_size=case["interleave"],
    )
    table, rows = np.array([case["block_table_row"]]), np.zeros_like(positions)
    expected = case["expected_slot_mapping_per_rank"]
    for rank, slots in enumerate(expected):
        assert run(table, rows, positions, dcp_rank=rank).tolist() == slots
    arrays = tuple(map(jnp.asarray, (table, rows, positions)))
    jitted = traced_once(
        lambda *args: run(*args[:3], dcp_rank=args[3]),
        *((*arrays, jnp.int32(r)) for r in range(len(expected))),
    )
    assert [slots.tolist() for slots in jitted] == expected


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 40))
def test_rank_stores_its_tokens_densely_and_in_order(size, interleave, per_block, seq_len):
    block_size = interleave * per_block
    table = [[3, 0, 7, 5, 2] * 10]
    lens = get_dcp_local_seq_lens([seq_len], size, cp_kv_cache_interleave_size=interleave)[0]
    for rank in range(size):
        slots = compute_dcp_slot_mapping(
            table,
            [0] * seq_len,
            list(range(seq_len)),
            block_size,
            dcp_size=size,
            dcp_rank=rank,
            cp_kv_cache_interleave_size=interleave,
        )
        stored = [slot for slot in slots.tolist() if slot >= 0]
        assert stored == [table[0][i // block_size] * block_size + i % block_size for i in range(lens[rank])]


def test_padding_has_no_slot_on_any_rank():
    slots = [
        compute_dcp_slot_mapping([[4]], [0, 0, -1], [-1, 4, 0], 2, dcp_size=2, dcp_rank=rank).tolist()
        for rank in range(2)
    ]
    assert slots == [[-1] * 3] * 2


def test_slots_beyond_int32_are_rejected():
    with pytest.raises(ValueError, match=r"ids of at most 134217727 \(slots are int32\), got 134217728"):
        compute_dcp_slot_mapping([[2**27]], [0], [0], 16, dcp_size=2, dcp_rank=0)


def test_interleave_must_divide_block_size():
    with pytest.raises(ValueError, match=r"block_size must be a multiple of .*_size \(3\), got 4"):
        compute_dcp_slot_mapping([[0]], [0], [0], 4, dcp_size=2, dcp_rank=0, cp_kv_cache_interleave_size=3)
    with pytest.raises(ValueError, match="dcp_size must be positive, got 0"):
        get_dcp_local_seq_lens([1], 0)
    with pytest.raises(ValueError, match="interleave_size must be positive, got -1"):
        max_dcp_local_seq_len(1, 2, -1)


def combine_in_float64(out, lse, base):
    """Combine ranks by the definition, with weights base ** lse of any size."""
    out, lse = np.asarray(out, np.float64), np.asarray(lse, np.float64)
    lse = np.where(np.isfinite(lse), lse, -np.inf)
    weights = base**lse
    total = weights.sum(axis=0)
    combined = np.zeros(out.shape[1:])
    for rank_out, weight in zip(out, weights, strict=True):
        combined += np.where(weight > 0, weight / np.where(total > 0, total, 1), 0)[
            ..., None
        ] * np.nan_to_num(rank_out)
    with np.errstate(divide="ignore"):
        return combined, np.log(total) / np.log(base)


@golden("cp_lse_combine")
def test_combination_equals_vllm(traced_once, case):
    out = jnp.array(case["partial_out"], jnp.float32)
    lse = jnp.array(np.array(case["partial_lse"], object).astype(float), jnp.float32)
    (combined,) = traced_once(cp_lse_combine, (out, lse))
    np.testing.assert_allclose(combined.out, case["expected_out"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(combined.lse, case["expected_lse"], rtol=1e-6)


@pytest.mark.parametrize(("is_lse_base_on_e", "base"), [(True, np.e), (False, 2.0)])
def test_combination_follows_the_definition_in_either_base(is_lse_base_on_e, base):
    rng = np.random.default_rng(0)
    out = rng.normal(size=(3, 5, 2, 4)).astype(np.float32)
    lse = (4 * rng.normal(size=(3, 5, 2))).astype(np.float32)
    actual = cp_lse_combine(jnp.asarray(out), jnp.asarray(lse), is_lse_base_on_e=is_lse_base_on_e)
    want_out, expected_lse = combine_in_float64(out, lse, base)
    np.testing.assert_allclose(actual.out, want_out, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(actual.lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("no_keys", [-INF, INF, float("nan")])
def test_rank_without_keys_contributes_nothing_even_if_its_output_is_nan(no_keys):
    out = jnp.array([[[[jnp.nan, 7.0]]], [[[2.0, 3.0]]]])
    actual = cp_lse_combine(out, jnp.array([[[no_keys]], [[1.5]]]))
    assert actual.out.tolist() == [[[2.0, 3.0]]]
    assert actual.lse.tolist() == [[1.5]]


def test_output_without_any_keys_is_zero():
    actual = cp_lse_combine(jnp.full((2, 1, 1, 2), jnp.nan), jnp.full((2, 1, 1), -jnp.inf))
    assert actual.out.tolist() == [[[0.0, 0.0]]]
    assert actual.lse.tolist() == [[-INF]]


@pytest.mark.kernels
def test_gradients_of_ranks_and_tokens_without_keys_are_0():
    out = jnp.array([[[[1.0, 2.0]], [[jnp.nan, 1.0]]], [[[jnp.nan, 7.0]], [[5.0, jnp.nan]]]])
    lse = jnp.array([[[0.5], [-jnp.inf]], [[-jnp.inf], [-jnp.inf]]])  # the second token has no key anywhere

    def total(out, lse):
        joined = cp_lse_combine(out, lse)
        return joined.out.sum() + joined.lse[0].sum() + jnp.where(joined.lse[1] > 0, joined.lse[1], 0).sum()

    d_out, d_lse = jax.grad(total, argnums=(0, 1))(out, lse)
    assert d_out.tolist() == [[[[1.0, 1.0]], [[0.0, 0.0]]], [[[0.0, 0.0]], [[0.0, 0.0]]]]
    assert d_lse.tolist() == [[[1.0], [0.0]], [[0.0], [0.0]]]


@pytest.mark.usefixtures("types_unchecked")
def test_int_outputs_and_lists_are_rejected():
    with pytest.raises(ValueError, match="partial_out must hold floats, got int32"):
        cp_lse_combine(jnp.ones((2, 1, 1, 2), jnp.int32), jnp.zeros((2, 1, 1)))
    with pytest.raises(ValueError, match="partial_lse must be an array, got list"):
        cp_lse_combine(jnp.ones((1, 1, 1, 2)), [[[0.0]]])


def test_large_lse_does_not_overflow():
    actual = cp_lse_combine(jnp.array([[[[1.0]]], [[[3.0]]]]), jnp.full((2, 1, 1), 1000.0))
    assert actual.out.tolist() == [[[2.0]]]
    np.testing.assert_allclose(actual.lse, 1000 + np.log(2), rtol=1e-6)


@golden("mask_empty_context_lse")
def test_masked_tokens_equal_vllm(traced_once, case):
    starts, context = case["query_start_loc"], case["context_start_loc"]
    lse = np.arange(case["num_heads"] * starts[-1], dtype=np.float32).reshape(case["num_heads"], -1)
    first, stop = case["expected_neg_inf_token_range"]
    expected = lse.copy()
    expected[:, first:stop] = -np.inf
    np.testing.assert_array_equal(mask_empty_context_lse(lse, starts, context), expected)
    (traced,) = traced_once(
        mask_empty_context_lse, tuple(map(jnp.asarray, (lse, np.array(starts), np.array(context))))
    )
    np.testing.assert_array_equal(traced, expected)


@pytest.mark.parametrize("xp", [np, jnp])
def test_lse_of_an_empty_step_keeps_its_dtype(xp):
    for starts in ([0], [0, 0]):
        masked = mask_empty_context_lse(xp.zeros((4, 0), np.float32), starts, starts)
        assert (masked.dtype, masked.shape) == (np.float32, (4, 0))


def test_padding_tokens_keep_their_lse():
    lse = np.ones((1, 4), np.float32)
    assert mask_empty_context_lse(lse, [0, 1, 2], [0, 3, 3]).tolist() == [[1.0, -INF, 1.0, 1.0]]


@pytest.mark.usefixtures("types_unchecked")
def test_unknown_rank_and_mismatched_shapes_are_rejected():
    for rank in (2, -1):
        with pytest.raises(ValueError, match=rf"dcp_rank must lie in \[0, 2\), got {rank}"):
            get_dcp_local_seq_lens([5, 9], 2, rank)
    out, lse = jnp.zeros((2, 3, 4, 8)), jnp.zeros((2, 4, 3))
    with pytest.raises(ValueError, match=r"partial_lse must have shape \(2, 3, 4\) .*, got \(2, 4, 3\)"):
        cp_lse_combine(out, lse)
    with pytest.raises(ValueError, match=r"context_start_loc must have shape \(2,\) .*, got \(3,\)"):
        mask_empty_context_lse(np.zeros((2, 5)), [0, 2], [0, 0, 7])
    with pytest.raises(ValueError, match=r"dcp_rank must lie in \[0, 2\), got 5"):
        compute_dcp_slot_mapping([[1, 2]], [0, 0], [0, 1], 4, dcp_size=2, dcp_rank=5)
    with pytest.raises(ValueError, match=r"positions must have shape \(1,\) .*, got \(3,\)"):
        compute_dcp_slot_mapping([[1, 2]], [0], [0, 1, 2], 4, dcp_size=2, dcp_rank=0)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dcp_size": 2.5}, r"dcp_size must be an int, got 2\.5"),
        ({"cp_kv_cache_interleave_size": 1.5}, r"cp_kv_cache_interleave_size must be an int, got 1\.5"),
    ],
)
def test_non_int_rank_sizes_are_rejected(sizes, message, types_unchecked):
    """Floats would silently compute lengths and slots of no rank: 4 of 10 keys on each of 2.5 ranks."""
    sizes = {"dcp_size": 2} | sizes
    table = ([[1, 2]], [0], [5], 3)
    for run in (
        lambda: get_dcp_local_seq_lens([10], **sizes),
        lambda: max_dcp_local_seq_len(10, **sizes),
        lambda: compute_dcp_slot_mapping(*table, **sizes, dcp_rank=0),
    ):
        with pytest.raises(ValueError, match=message):
            run()


def test_rank_out_of_range_is_rejected_for_every_array_type(types_unchecked):
    """An unknown rank would get only -1 slots and write nothing."""
    slots_of = lambda rank: compute_dcp_slot_mapping([[1, 2]], [0], [5], 4, dcp_size=2, dcp_rank=rank)
    for rank in (np.array(7), None):
        with pytest.raises(ValueError, match=rf"dcp_rank must lie in \[0, 2\), got {rank}"):
            slots_of(rank)
    with pytest.raises(ValueError, match=r"dcp_rank must have shape \(\) \(a scalar\), got \(1,\)"):
        slots_of([0])
    with pytest.raises(ValueError, match=r"dcp_rank must lie in \[0, 2\), got 5"):
        get_dcp_local_seq_lens(jnp.array([10]), 2, np.array(5))
    assert slots_of(np.array(1)).tolist() == slots_of(1).tolist() == [6]


def test_max_local_length_of_numpy_ints_does_not_wrap(types_unchecked):
    for length in (np.int8(127), np.array(127, np.int8), jnp.array(127, jnp.int8)):
        assert int(max_dcp_local_seq_len(length, 2, 4)) == 64
    largest = 2**31 - 1
    for length in (np.int32(largest), jnp.array(largest, jnp.int32)):
        assert int(max_dcp_local_seq_len(length, 2, 4)) == 2**30
    with pytest.raises(ValueError, match=r"max_seq_len must be an int, got 10\.5"):
        max_dcp_local_seq_len(10.5, 2)
