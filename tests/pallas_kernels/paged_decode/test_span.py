"""Keys of the tiles of a span."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_decode.span import TileKeys


class TestTileKeys:
    keys = TileKeys(
        run_starts=(jnp.int32(32), jnp.int32(96)), head_bits=(jnp.int32(1), jnp.int32(2)), run_length=2
    )
    rows = jnp.arange(4)

    def test_row_has_the_key_and_the_head_bits_of_its_run(self):
        np.testing.assert_array_equal(self.keys.row_positions(self.rows), [32, 33, 96, 97])
        np.testing.assert_array_equal(self.keys.row_head_bits(self.rows), [1, 1, 2, 2])

    @pytest.mark.parametrize(("low", "high", "exceeds"), [(32, 98, False), (33, 98, True), (32, 97, True)])
    def test_exceed_checks_the_first_and_the_last_key(self, low, high, exceeds):
        assert bool(self.keys.has_key_outside(jnp.int32(low), jnp.int32(high))) == exceeds
