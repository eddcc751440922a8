"""A tile of pairs as masks are asked about it, where a row is a key and a column a query."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.head_dims import UNIT
from pallas_kernels.varlen_backward.spec import COLUMN, ROW
from pallas_kernels.varlen_prefill import WORD, PairTile, Words


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeyRows(PairTile):
    """PairTile on its side: what there is one of for each query lies along the columns.

    `shape` is queries and keys as there; what is of pairs has keys first.

    Attributes:
        staged: [queries] int32 of shared memory, the warpgroup's own: see `rows_from`.
    """

    staged: Any

    @property
    def queries(self) -> Any:
        """Position of each query."""
        return plgpu.broadcasted_iota(jnp.int32, self.shape[:1], 0, layout=COLUMN) + self.first_query

    @property
    def key(self) -> Any:
        """Position of each pair's key."""
        return self._of_keys(self._keys() + self.first_key)

    def wide(self, x: Any) -> Any:
        """One value a query to one a pair."""
        return lax.broadcast_in_dim(x, self.shape[::-1], [1])

    def of_rows(self, x: Any) -> Any:
        """One value to that of each query."""
        return plgpu.layout_cast(lax.broadcast_in_dim(x, self.shape[:1], []), COLUMN)

    def rows_from(self, ref: Any, index: tuple[Any, ...], first: Any) -> Any:
        """A value for each query, int32: `ref[*index, first + query]`.

        A thread has two neighbouring columns and would load both at once, which `first` must then be even
        for. So they come as rows, one by one, and turn into columns in shared memory.
        """
        plgpu.commit_smem()  # what was there has been read
        for begin in range(0, self.shape[0], UNIT):
            rows = plgpu.load(ref.at[(*index, pl.ds(first + begin, UNIT))], layout=ROW, optimized=False)
            self.staged[pl.ds(begin, UNIT)] = rows
        plgpu.commit_smem()
        return plgpu.load(self.staged, layout=COLUMN, optimized=False)

    def has_bits(self, words: Words) -> Any:
        """Whether a pair's bit is set: Bool."""
        key, bits = self._of_keys(self._keys()), self.wide(words[0])
        for nth, word in enumerate(words[1:], 1):
            bits = jnp.where(key >= nth * WORD, self.wide(word), bits)
        return lax.shift_right_logical(bits, key & (WORD - 1)) & 1 != 0

    def masked(self, s: Any, words: Words) -> Any:
        """The scores of pairs whose bits are set, -inf for the others."""
        return jnp.where(self.has_bits(words), s, -jnp.inf)

    def _keys(self) -> Any:
        return plgpu.broadcasted_iota(jnp.int32, self.shape[1:], 0, layout=ROW)

    def _of_keys(self, x: Any) -> Any:
        return lax.broadcast_in_dim(x, self.shape[::-1], [0])
