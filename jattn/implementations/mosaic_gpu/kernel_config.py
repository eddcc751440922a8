"""Configurations of the attention kernels."""

import dataclasses

from jattn.spec import AttentionSpec
from pallas_kernels import paged_decode, varlen_prefill
from pallas_kernels.shared import Score


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeKernelConfig:
    """Configuration of paged_decode.

    Attributes:
        sizes: Tile sizes and resources that the kernel is compiled for.
        list_block_size: Number of keys per listed block; None without block lists.
        lists_have_head_bits: Whether each list entry has a bit per query head that visits the block.
    """

    sizes: paged_decode.DecodeSizes
    list_block_size: int | None = None
    lists_have_head_bits: bool = False

    def __str__(self) -> str:
        size = self.list_block_size
        over = {None: "", 1: " over lists of keys"}.get(size, f" over lists of blocks of {size}")
        return f"paged_decode{over}"

    @property
    def tiles(self) -> str:
        """Short description of the kernel's tiles."""
        return _describe_tiles(self.sizes.max_rows, self.sizes)

    @property
    def split(self) -> str:
        """Short description of how the keys of a request are split among thread blocks."""
        fixed = self.sizes.split_kv
        return f"{self.sizes.ctas} equal spans" if fixed is None else f"every {fixed} keys"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillKernelConfig:
    """Configuration of varlen_prefill.

    Attributes:
        sizes: Tile sizes and resources that the kernel is compiled for.
        has_aligned_keys: Whether the keys of each request start at a multiple of 8 keys, as in a paged cache.
        has_lists: Whether the kernel visits the KV tiles of a list.
        list_block_size: Number of keys per listed block if tiles hold several listed blocks, else None.
        rows_per_token: Number of query heads that are taken as rows of one head, see query_rows.py.
        is_packed: Whether keys are outside a paged cache.
        uses_cache_read: Whether cache_read dequantizes an 8-bit cache before the kernel runs.
        dequantizes: Whether the kernel itself dequantizes an 8-bit cache.
        columns_sizes: Sizes of a second call of the kernel over gathered columns, see gathered_columns.py;
            None if no columns are gathered.
    """

    sizes: varlen_prefill.PrefillSizes
    has_aligned_keys: bool
    has_lists: bool = False
    list_block_size: int | None = None
    rows_per_token: int = 1
    is_packed: bool = False
    uses_cache_read: bool = False
    dequantizes: bool = False
    columns_sizes: varlen_prefill.PrefillSizes | None = None

    @property
    def columns(self) -> "PrefillKernelConfig":
        """Configuration of the call over gathered columns."""
        assert self.columns_sizes is not None
        return PrefillKernelConfig(
            sizes=self.columns_sizes, has_lists=True, is_packed=True, has_aligned_keys=False
        )

    def __str__(self) -> str:
        first = "cache_read, " if self.uses_cache_read else ""
        over = " over lists of tiles" if self.has_lists else " over 8 bits" if self.dequantizes else ""
        if self.list_block_size is not None:
            over = f" over lists of blocks of {self.list_block_size}"
        return f"{first}varlen_prefill{over}"

    @property
    def tiles(self) -> str:
        """Short description of the kernel's tiles."""
        heads = self.sizes.pack_gqa * self.rows_per_token
        shared = "" if heads == 1 else f", {heads} heads of {self.sizes.tile_q // heads} tokens each"
        return _describe_tiles(self.sizes.tile_q, self.sizes) + shared

    @property
    def split(self) -> str:
        """Short description of how the work of a request is split among thread blocks."""
        max_splits = self.sizes.max_splits
        splits = "" if max_splits == 1 else f", the keys of each in up to {max_splits} splits"
        return "by tiles of queries" + splits


type KernelConfig = DecodeKernelConfig | PrefillKernelConfig


def _describe_tiles(queries: int, sizes: paged_decode.DecodeSizes | varlen_prefill.PrefillSizes) -> str:
    return f"{queries} x {sizes.tile_kv} keys, {sizes.stages} stages"


def score_of(spec: AttentionSpec, rows_per_token: int = 1) -> Score:
    """Return the Score of a spec: how kernels compute and mask attention scores."""
    return Score(
        scale=spec.softmax_scale,
        causal=spec.causal,
        window=spec.window or (None, None),
        chunk_size=spec.chunk_size,
        soft_cap=spec.soft_cap,
        sqrt_alibi=spec.sqrt_alibi,
        rows_per_token=rows_per_token,
    )
