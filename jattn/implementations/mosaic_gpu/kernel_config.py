"""Kernel configurations that a plan chooses from."""

import dataclasses

from jattn.spec import AttentionSpec
from pallas_kernels import paged_decode, varlen_prefill
from pallas_kernels.shared import Score


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeKernelConfig:
    """paged_decode, of one size.

    Attributes:
        sizes: What it is compiled for.
        list_block_size: Keys of a listed block; None = it reads all that the spec's numbers let queries see.
        lists_have_head_bits: Whether lists say which query heads see a block.
    """

    sizes: paged_decode.DecodeSizes
    list_block_size: int | None = None
    lists_have_head_bits: bool = False

    def __str__(self) -> str:
        over = "" if self.list_block_size is None else f" over lists of blocks of {self.list_block_size}"
        return f"paged_decode{over}"

    @property
    def tiles(self) -> str:
        """Its tiles in few words."""
        return _in_words(self.sizes.max_rows, self.sizes)

    @property
    def split(self) -> str:
        """How the keys of a request are shared among thread blocks."""
        fixed = self.sizes.split_kv
        return f"{self.sizes.ctas} equal spans" if fixed is None else f"every {fixed} keys"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillKernelConfig:
    """varlen_prefill, of one size.

    Attributes:
        sizes: What it is compiled for.
        has_lists: Whether it walks through lists of tiles.
        is_packed: Whether keys are outside a paged cache.
        is_read_first: Whether cache_read first makes an 8-bit cache's keys 16-bit.
        widens: Whether it reads an 8-bit cache itself, and widens what it reads.
    """

    sizes: varlen_prefill.PrefillSizes
    has_lists: bool = False
    is_packed: bool = False
    is_read_first: bool = False
    widens: bool = False

    def __str__(self) -> str:
        first = "cache_read, " if self.is_read_first else ""
        over = " over lists of tiles" if self.has_lists else " over 8 bits" if self.widens else ""
        return f"{first}varlen_prefill{over}"

    @property
    def tiles(self) -> str:
        """Its tiles in few words."""
        heads = self.sizes.pack_gqa
        shared = "" if heads == 1 else f", {heads} heads of {self.sizes.tile_tokens} tokens each"
        return _in_words(self.sizes.tile_q, self.sizes) + shared

    @property
    def split(self) -> str:
        """How a request's work is shared among thread blocks."""
        most = self.sizes.max_splits
        return "by tiles of queries" + ("" if most == 1 else f", the keys of each in up to {most} splits")


type KernelConfig = DecodeKernelConfig | PrefillKernelConfig


def _in_words(queries: int, sizes: paged_decode.DecodeSizes | varlen_prefill.PrefillSizes) -> str:
    return f"{queries} x {sizes.tile_kv} keys, {sizes.stages} stages"


def score_of(spec: AttentionSpec) -> Score:
    """The part of a spec that kernels compute scores by."""
    return Score(
        scale=spec.softmax_scale,
        causal=spec.causal,
        window=spec.window or (None, None),
        chunk_size=spec.chunk_size,
        soft_cap=spec.soft_cap,
        sqrt_alibi=spec.sqrt_alibi,
    )
