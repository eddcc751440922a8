import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jattn.batch.slots import compute_slot_mapping

BLOCK_SIZE = 4
TABLE = [[5, 2, 9], [7, -1, 1]]
tokens = st.lists(st.tuples(st.integers(-1, 2), st.integers(-2, 13)), min_size=6, max_size=6)


def slot_of(row, position, first=0):
    if row not in (0, 1) or not 0 <= position < 12 or position < first:
        return -1
    block = TABLE[row][position // BLOCK_SIZE]
    return -1 if block < 0 else block * BLOCK_SIZE + position % BLOCK_SIZE


@given(tokens, st.integers(0, 5))
def test_slot_is_block_times_block_size_plus_offset_and_padding_is_negative(tokens, first):
    rows, positions = zip(*tokens, strict=True)
    slots = compute_slot_mapping(TABLE, rows, positions, BLOCK_SIZE, start_idx=first)
    assert slots.dtype == np.int32
    assert slots.tolist() == [slot_of(*token, first) for token in tokens]


def test_traced_slots_equal_host_slots(traced_once):
    batches = [([0, 0, 1, 1], [0, 11, 3, 4]), ([-1, 0, 2, 1], [0, 12, 0, -1])]
    run = functools.partial(compute_slot_mapping, block_size=BLOCK_SIZE)
    table = jnp.array(TABLE)
    traced = traced_once(
        run, *((table, jnp.array(rows), jnp.array(positions)) for rows, positions in batches)
    )
    assert [slots.tolist() for slots in traced] == [run(TABLE, *batch).tolist() for batch in batches]


@pytest.mark.usefixtures("types_unchecked")
def test_slots_are_int32_for_any_int_dtype_of_block_size():
    assert compute_slot_mapping([[1, 2]], [0], [5], np.int64(4)).dtype == np.int32


def test_slots_beyond_int32_are_rejected():
    last = 2**27 - 1
    assert compute_slot_mapping([[last, last + 1]], [0], [15], 16).tolist() == [2**31 - 1]
    with pytest.raises(ValueError, match=rf"ids of at most {last} \(slots are int32\), got {last + 1}"):
        compute_slot_mapping([[last, last + 1]], [0], [16], 16)


def test_block_size_must_be_positive():
    with pytest.raises(ValueError, match="block_size must be positive, got 0"):
        compute_slot_mapping(TABLE, [0], [0], 0)
