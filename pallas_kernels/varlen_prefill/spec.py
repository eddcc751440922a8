"""What is static about one prefill kernel: what it is compiled for."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.head_dims import HeadChunks
from pallas_kernels.shared.paged_kv import CacheTiling
from pallas_kernels.shared.score import Score
from pallas_kernels.shared.types import Interpret
from pallas_kernels.varlen_prefill.kernel_mask import KernelMask
from pallas_kernels.varlen_prefill.sizes import WARPGROUP_ROWS, PrefillSizes

W = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)
COLUMN = plgpu.Layout.WGMMA.reduce(0)
M = WARPGROUP_ROWS
f32 = jnp.float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillShape:
    """Sizes of a call.

    Attributes:
        q_heads: Query heads.
        group: Query heads of a kv head.
        cut: The cut of head_dim.
        in_cache: How a tile of keys is fetched from a paged cache; None where keys are packed.
        heads_at_once: Query heads whose keys and values are read side by side, where there are no lists.
        block_q: Queries of a block of queries, where lists tell the blocks of an item apart.
    """

    q_heads: int
    group: int
    cut: HeadChunks
    in_cache: CacheTiling | None
    heads_at_once: int
    block_q: int | None = None


class QuantizedKV(NamedTuple):
    """How keys and values of 8 bits are stored.

    Attributes:
        dtypes: Of keys, and of values.
        scales: Whose the scales of keys, and of values, are: "head", "channel" (and head) or "token" (and
            head); None: there are none.
    """

    dtypes: tuple[np.dtype, np.dtype]
    scales: tuple[str | None, str | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillSpec:
    """One kernel.

    Attributes:
        shape: Sizes of the call.
        score: The layer.
        sizes: The kernel's sizes.
        dtype: Of queries, keys and values.
        mask: Which keys a query sees besides, in tiles that are listed as seen in part; here its functions.
        has_lists: Items walk through lists of tiles, not through all that the score's mask leaves.
        has_alibi: Scores have a bias.
        returns_lse: The log-sum-exp is wanted.
        narrow: Of keys and values in 8 bits, which the kernel widens; None where they are of `dtype`.
        interpret: Interpret-mode parameters, or None for a GPU.
    """

    shape: PrefillShape
    score: Score
    sizes: PrefillSizes
    dtype: np.dtype
    mask: KernelMask | None
    has_lists: bool
    has_alibi: bool
    returns_lse: bool
    narrow: QuantizedKV | None = None
    interpret: Interpret = None

    @property
    def is_interpreted(self) -> bool:
        """There are no lanes, no operands in registers and no accumulators with a past."""
        return bool(self.interpret)

    @property
    def s_shape(self) -> tuple[int, int]:
        """A warpgroup's scores: its rows and a tile of keys."""
        return M, self.sizes.tile_kv

    @property
    def acc_shape(self) -> tuple[int, int]:
        """A warpgroup's output, of one chunk of a head."""
        return M, self.shape.cut.width

    @property
    def awaits_values_first(self) -> bool:
        """P V of the tile before is awaited before scores become probabilities, not behind that.

        Then no branch stands between exponentials and their sums: ptxas adds each as it comes. Heads of 64 at
        8 x 2k take 616 to 619 us over packed keys for 676 to 679, and 630 over blocks either way. Heads of
        128, whose P V takes twice as long, lose: 1 x 8k 705 for 700. Over lists it was not measured.
        """
        return self.shape.cut.padded_dim == M and not self.has_lists

    @property
    def has_splits(self) -> bool:
        """An item may be a split of its rows' keys."""
        return self.sizes.max_splits > 1

    @property
    def num_warpgroups(self) -> int:
        """Those that compute, one that loads and, where there are 8 bits, one for keys and one for values."""
        return self.sizes.warpgroups + (1 if self.narrow is None else 3)

    @property
    def items_per_tile(self) -> int:
        """Items of a tile of tokens: each is of one head, or of those that share the tile."""
        return self.shape.q_heads // self.sizes.pack_gqa

    @property
    def copies(self) -> int:
        """TMA copies that bring the keys of a tile, or its values."""
        in_cache = self.shape.in_cache
        return (1 if in_cache is None else in_cache.num_copies) * self.shape.cut.num_chunks

    @property
    def has_window(self) -> bool:
        """A row may see none of the request's first keys."""
        return self.score.window[0] is not None or self.score.chunk_size is not None

    @property
    def has_low_edge(self) -> bool:
        """A tile may begin before the first key that is seen: packed ones do before the request's first."""
        return self.has_window or self.shape.in_cache is None

    @property
    def adds_alibi_in_product(self) -> bool:
        """The tensor core adds the bias to the scores.

        What a soft cap would cap, too, or is no multiple of the column, is added outside of it. So are all
        biases in interpret mode, which runs short of threads where warpgroups do more between barriers.
        """
        score = self.score
        is_linear = self.has_alibi and score.soft_cap is None and score.scale > 0 and not score.sqrt_alibi
        return is_linear and not self.is_interpreted
