"""Layout of query heads as the rows of paged_decode's tiles."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_decode.entry import from_rows, heads_to_rows, to_rows
from pallas_kernels.paged_decode.spec import DecodeShape
from pallas_kernels.shared.memory import head_chunks
from pallas_kernels.shared.softmax import LOG2E


def shape_of(*, kv_heads=2, group=3, query_len=1, row_tiles=1, rows=None, tile_q=8):
    rows = group * query_len if rows is None else rows
    return DecodeShape(
        kv_heads=kv_heads,
        row_tiles=row_tiles,
        rows=rows,
        group=group,
        query_len=query_len,
        block_size=16,
        is_hnd=False,
        head=head_chunks(64),
        tile_q=tile_q,
        list_block_size=None,
    )


SHAPES = [
    shape_of(),
    shape_of(query_len=2),
    shape_of(group=9, rows=16, tile_q=16),  # of odd size: padded
    shape_of(group=7, query_len=3, row_tiles=3, rows=8),  # 21 rows in tiles of 8
]


class TestQueryRows:
    @pytest.mark.parametrize("shape", SHAPES, ids=["plain", "speculative", "padded", "tiled"])
    def test_from_rows_inverts_to_rows(self, shape):
        tokens, q_heads = 3 * shape.query_len, shape.kv_heads * shape.group
        x = jnp.arange(tokens * q_heads * 64, dtype=jnp.float32).reshape(tokens, q_heads, 64)
        rows = to_rows(x, shape)
        assert rows.shape == (3, shape.kv_heads * shape.row_tiles, shape.rows, 64)
        np.testing.assert_array_equal(from_rows(rows, shape), x)

    def test_rows_of_a_kv_head_are_ordered_by_token_then_head(self):
        x = jnp.asarray([[0, 1, 2, 3], [10, 11, 12, 13]])  # tokens of one request by query heads
        rows = to_rows(x, shape_of(group=2, query_len=2))
        np.testing.assert_array_equal(rows, [[[0, 1, 10, 11], [2, 3, 12, 13]]])

    def test_heads_to_rows_repeats_the_number_and_pads_with_zeros(self):
        actual = heads_to_rows(jnp.asarray([1.0, 2.0]), shape_of(kv_heads=1, group=2, query_len=2))
        np.testing.assert_allclose(actual, [[LOG2E, 2 * LOG2E, LOG2E, 2 * LOG2E, 0, 0, 0, 0]])
        assert heads_to_rows(None, shape_of()) is None
