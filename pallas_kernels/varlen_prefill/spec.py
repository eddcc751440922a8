"""The static description that one prefill kernel is compiled from."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.memory import HeadChunks
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
    """Static dimensions of a varlen_prefill call.

    Attributes:
        q_heads: Number of query heads.
        group: Query heads per KV head.
        head: Chunks that a head is loaded in.
        cache_tiling: How a tile of keys is fetched from a paged cache; None if keys are packed.
        heads_per_l2_group: Query heads that are processed together, so that their keys and values stay in L2.
            Without tile lists only.
        block_q: Queries per block of queries, if tile lists distinguish the blocks of a query tile.
    """

    q_heads: int
    group: int
    head: HeadChunks
    cache_tiling: CacheTiling | None
    heads_per_l2_group: int
    block_q: int | None = None


class QuantizedKV(NamedTuple):
    """Storage of an 8-bit KV cache.

    Attributes:
        dtypes: Dtypes of keys and values.
        scales: Granularity of the scales of keys and values: "head", "channel" (per head and channel) or
            "token" (per token and head); None without scales.
    """

    dtypes: tuple[np.dtype, np.dtype]
    scales: tuple[str | None, str | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillSpec:
    """Everything static about one prefill kernel.

    Attributes:
        shape: Dimensions of the call.
        score: Scale, soft cap, causality, window and chunk size of the layer.
        sizes: Tile sizes of the kernel.
        dtype: Dtype of queries and output, and of keys and values unless these are quantized.
        mask: Functions of the mask that applies to partial tiles of the tile lists, or None.
        has_lists: Whether work tiles follow tile lists, instead of all KV tiles that `score` leaves visible.
        has_alibi: Whether scores have an ALiBi bias.
        returns_lse: Whether the kernel writes the log-sum-exp.
        quantized: Storage of an 8-bit cache, which the kernel dequantizes; None for a 16-bit cache.
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
    quantized: QuantizedKV | None = None
    interpret: Interpret = None

    @property
    def is_interpreted(self) -> bool:
        """Whether the kernel runs in interpret mode: no lanes, register operands or running accumulators."""
        return bool(self.interpret)

    @property
    def s_shape(self) -> tuple[int, int]:
        """Shape of a warpgroup's scores: its rows and a tile of keys."""
        return M, self.sizes.tile_kv

    @property
    def acc_shape(self) -> tuple[int, int]:
        """Shape of one chunk of a warpgroup's output."""
        return M, self.shape.head.width

    @property
    def waits_for_values_first(self) -> bool:
        """Whether P V of the previous tile is awaited before, instead of after, the exponentials.

        Then no branch separates the exponentials from their sums, and ptxas adds each as it is computed.
        Heads of 64 at 8 x 2k take 616 to 619 us instead of 676 to 679 with packed keys, and 630 either way
        with a paged cache. Heads of 128, whose P V takes twice as long, lose: 1 x 8k takes 705 us instead of
        700. Tile lists were not measured.
        """
        return self.shape.head.padded_dim == M and not self.has_lists

    @property
    def has_splits(self) -> bool:
        """Whether a work tile may be one of several KV splits."""
        return self.sizes.max_splits > 1

    @property
    def num_warpgroups(self) -> int:
        """Number of warpgroups: the computing ones, the loading one and, for 8 bits, two that dequantize."""
        return self.sizes.warpgroups + (1 if self.quantized is None else 3)

    @property
    def work_tiles_per_query_tile(self) -> int:
        """Number of work tiles per query tile: one per head, or per group of packed heads."""
        return self.shape.q_heads // self.sizes.pack_gqa

    @property
    def num_copies(self) -> int:
        """Number of TMA copies that fill a stage of keys, or of values."""
        cache_tiling = self.shape.cache_tiling
        return (1 if cache_tiling is None else cache_tiling.num_copies) * self.shape.head.num_chunks

    @property
    def has_window(self) -> bool:
        """Whether the first keys of a request may be masked out for a row."""
        return self.score.window[0] is not None or self.score.chunk_size is not None

    @property
    def has_low_end(self) -> bool:
        """Whether a tile may start before the first visible key; tiles of packed keys may start too early."""
        return self.has_window or self.shape.cache_tiling is None

    @property
    def adds_alibi_by_mma(self) -> bool:
        """Whether the tensor core adds the ALiBi bias to the scores.

        A bias that a soft cap would cap as well, or that is not linear in the column, is added afterwards. So
        is every bias in interpret mode, which runs short of threads if warpgroups do more between barriers.
        """
        score = self.score
        is_linear = self.has_alibi and score.soft_cap is None and score.scale > 0 and not score.sqrt_alibi
        return is_linear and not self.is_interpreted
