import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jattn
from jattn.batch.slots import compute_slot_mapping
from jattn.vllm.kv_cache import (
    compute_slot_mapping_start_idx,
    fill_slot_mapping_tail,
    physical_to_logical_mapping,
)
from tests.cache.test_cache import random_kv, spec
from tests.golden_cases import golden


def test_reshape_and_cache_equals_write_kv_on_the_packed_layout():
    cache = jattn.PagedCache.create(spec(layout="packed"))
    key, value = random_kv(3)
    slots = jnp.asarray([3, -1, 9])
    expected = jattn.write_kv(jattn.PagedCache.create(spec(layout="packed")), key, value, slots)
    k, v = jattn.vllm.reshape_and_cache(key, value, cache.k, cache.v, slots)
    np.testing.assert_array_equal(k, expected.k)
    np.testing.assert_array_equal(v, expected.v)


@pytest.mark.parametrize("scale_shape", [float, jnp.asarray, lambda scale: jnp.asarray([scale])])
def test_reshape_and_cache_divides_by_the_scales(scale_shape):
    shapes = spec(layout="packed", dtype=jnp.float8_e4m3fn)
    cache = jattn.PagedCache.create(shapes)
    ones = jnp.ones((1, 2, 16))
    k, v = jattn.vllm.reshape_and_cache(
        ones, ones, cache.k, cache.v, jnp.asarray([0]), k_scale=scale_shape(0.5), v_scale=scale_shape(0.25)
    )
    assert float(k[0, 0, 0, 0, 0]) == 2
    assert float(v[0, 0, 0, 0]) == 4


BLOCK_SIZE = 4


@golden("v0_slot_mapping_sliding_window")
def test_v0_writes_only_the_last_window_of_a_prompt(case):
    start_idx = compute_slot_mapping_start_idx(
        True, case["query_len"], case["context_len"], case["sliding_window"]
    )
    positions = np.arange(case["context_len"], case["seq_len"])
    slots = compute_slot_mapping(
        [case["block_table"]], np.zeros_like(positions), positions, case["block_size"], start_idx=start_idx
    )
    assert slots.tolist() == case["expected"]


def test_v0_writes_all_tokens_of_decodes_and_without_a_window():
    assert compute_slot_mapping_start_idx(False, 10, 0, 8) == 0
    assert compute_slot_mapping_start_idx(True, 10, 0, None) == 0
    assert compute_slot_mapping_start_idx(True, 7, 0, 8) == 0


@golden("common_metadata_slot_fill")
def test_tail_is_filled_in_a_new_array(traced_once, case):
    slots = np.array(case["slot_mapping"])
    assert fill_slot_mapping_tail(slots, case["num_actual_tokens"]).tolist() == case["expected"]
    assert slots.tolist() == case["slot_mapping"]
    counts = [case["num_actual_tokens"], 0, len(slots)]
    traced = traced_once(fill_slot_mapping_tail, *((jnp.asarray(slots), jnp.int32(n)) for n in counts))
    assert [t.tolist() for t in traced] == [case["expected"], [-1] * len(slots), case["slot_mapping"]]


@golden("physical_to_logical_mapping")
def test_inverse_block_table_equals_vllm(case):
    args = (case["block_table"], case["seq_lens"], case["block_size"], case["total_blocks"])
    assert physical_to_logical_mapping(*args).tolist() == [case["expected"]]


def logical_by_scanning(table, seq_lens, total_blocks):
    expected_table = [[-1] * total_blocks for _ in table]
    for row, (blocks, seq_len) in enumerate(zip(table, seq_lens, strict=True)):
        for position in range(seq_len):
            block = blocks[position // BLOCK_SIZE]
            if 0 < block < total_blocks:
                expected_table[row][block] = position // BLOCK_SIZE
    return expected_table


@given(
    st.lists(st.lists(st.integers(-1, 7), min_size=3, max_size=3), min_size=2, max_size=2),
    st.lists(st.integers(0, 12), min_size=2, max_size=2),
)
def test_inverse_block_table_contains_the_last_use_of_each_block(table, seq_lens):
    expected = logical_by_scanning(table, seq_lens, 6)
    assert physical_to_logical_mapping(table, seq_lens, BLOCK_SIZE, 6).tolist() == expected


def test_traced_inverse_equals_the_scan(traced_once):
    batches = [([[3, 5, 1], [0, 3, 3]], [12, 9]), ([[2, -7, 99], [4, 4, 1]], [5, 0])]
    run = functools.partial(physical_to_logical_mapping, block_size=BLOCK_SIZE, total_blocks=6)
    traced = traced_once(run, *(tuple(map(jnp.array, batch)) for batch in batches))
    assert [t.tolist() for t in traced] == [logical_by_scanning(*batch, 6) for batch in batches]


def test_inverse_block_table_requires_one_length_per_row():
    with pytest.raises(ValueError, match=r"seq_lens must have one entry per request \(1\), got \(2,\)"):
        physical_to_logical_mapping([[1]], [1, 1], 4, 4)
