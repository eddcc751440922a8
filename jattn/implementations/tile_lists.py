"""From a mask to the lists of tiles that varlen_prefill walks through, and which masks have such lists."""

import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from jattn.masks import (
    And,
    BigBird,
    BlockMask,
    Causal,
    Chunked,
    Coverage,
    LocalStrided,
    Mask,
    Or,
    Pairs,
    Window,
)
from jattn.sparsity.schedule import coverage_of_tiles
from jattn.spec import AttentionSpec
from pallas_kernels.list_tiles import MAX_PARTS, codes_of
from pallas_kernels.varlen_prefill import Schedule, TileLists, Tiles, make_lists
from pallas_kernels.varlen_prefill.lists import num_parts
from pallas_kernels.varlen_prefill.schedule import ALIGN, COLUMNS

MAX_POSITION = 2**30


class Parts(NamedTuple):
    """A mask as the kernel takes it.

    Attributes:
        formula: The part without arrays, computed in the kernel where a tile is seen in part.
        blocks: Block masks: all or nothing for a block of queries and a tile of keys.
        block_q: Queries of such a block; None where all queries are one.
    """

    formula: Mask | None
    blocks: tuple[BlockMask, ...]
    block_q: int | None


def parts_of(mask: Mask) -> Parts | str:
    """Takes a mask apart, or says why the kernel cannot take it."""
    factors = mask.masks if isinstance(mask, And) else (mask,)
    formulas = [factor for factor in factors if factor.is_static]
    blocks = [factor for factor in factors if isinstance(factor, BlockMask)]
    if len(formulas) + len(blocks) < len(factors):
        return "there is no kernel for masks with arrays other than BlockMask, alone or joined by &"
    sizes = {block.block_q for block in blocks} - {None}
    if len(sizes) > 1:
        return f"there is no kernel for block masks of several block_q ({sorted(map(str, sizes))}) together"
    formula = functools.reduce(operator.and_, formulas) if formulas else None
    return Parts(formula, tuple(blocks), next(iter(sizes), None))


def why_not_lists(mask: Mask, tiles: Tiles, *, is_packed: bool) -> str | None:
    """Why varlen_prefill cannot serve a mask; None if it can.

    Args:
        mask: Beyond the spec's numbers.
        tiles: The kernel's sizes.
        is_packed: Keys are not in a paged cache, so that tiles of keys may begin anywhere.
    """
    parts = parts_of(mask)
    if isinstance(parts, str):
        return parts
    if parts.blocks and is_packed:
        return "there is no kernel for block masks over keys outside a paged cache"
    for block in parts.blocks:
        if block.block_kv % tiles.tile_kv:
            served = f"multiples of {tiles.tile_kv} have one"
            return f"there is no kernel for blocks of {block.block_kv} keys ({served})"
    if parts.block_q is not None and num_parts(tiles.tile_q, parts.block_q) > MAX_PARTS:
        return f"there is no kernel for blocks of {parts.block_q} queries"
    return None


def has_narrow_blocks(mask: Mask, tile_kv: int) -> bool:
    """Whether some blocks of the mask are narrower than a tile of keys, so that tiles would waste work."""
    if isinstance(mask, And | Or):
        return any(has_narrow_blocks(part, tile_kv) for part in mask.masks)
    size = {BlockMask: "block_kv", LocalStrided: "block_size", BigBird: "block_size"}.get(type(mask))
    return size is not None and getattr(mask, size) % tile_kv != 0


def has_narrow_queries(mask: Mask, tile_q: int) -> bool:
    """Whether blocks of fewer queries than a tile has each see tiles of keys of their own."""
    parts = parts_of(mask)
    return isinstance(parts, Parts) and parts.block_q is not None and parts.block_q % tile_q != 0


def kernel_mask(mask: Mask, spec: AttentionSpec, *, is_prefill: bool) -> dict[str, Any]:
    """What varlen_prefill wants to know of a mask besides its lists."""
    parts = parts_of(mask)
    assert isinstance(parts, Parts)
    formula: Callable[[Any, Any, Any], Any] | None = None
    if parts.formula is not None:
        heads = spec.num_q_heads, spec.num_kv_heads
        sees = parts.formula.sees
        formula = lambda head, query, key: sees(Pairs(head, jnp.int32(0), query, key, heads, is_prefill))
    return {"mask": formula, "block_q": parts.block_q}


def tile_lists(
    mask: Mask,
    spec: AttentionSpec,
    schedule: Schedule,
    tiles: Tiles,
    *,
    max_seq_len: int,
    is_packed: bool = False,
    is_prefill: bool = True,
) -> TileLists:
    """The lists of a step's tiles of queries under a mask and the spec's numbers. Traced.

    Args:
        mask: Beyond the spec's numbers; why_not_lists is None.
        spec: The layer.
        schedule: The tiles of queries.
        tiles: The kernel's sizes.
        max_seq_len: Static bound of the requests' lengths.
        is_packed: Static: whether keys are not in a paged cache, so that tiles of keys may begin anywhere.
        is_prefill: Static: whether the queries stand in the prefill region.
    """
    parts = parts_of(mask)
    assert isinstance(parts, Parts)
    column = {name: schedule.table[:, i] for i, name in enumerate(COLUMNS)}
    skew = column["kv_start"] % ALIGN if is_packed else None
    first = jnp.maximum(column["position"] + column["begin"], 0)
    last = column["position"] + column["end"] - 1
    max_kv_tiles = -(-(max_seq_len + (ALIGN - 1) * is_packed) // tiles.tile_kv)

    def coverage(mask: Mask, first: Any, last: Any, *, is_inside_blocks: bool = False) -> Coverage:
        return coverage_of_tiles(
            mask,
            rows=column["req"],
            first_query=first,
            num_queries=last - first + 1,
            seq_lens=column["seq_len"],
            num_heads=(spec.num_q_heads, spec.num_kv_heads),
            size=(tiles.tile_q, tiles.tile_kv),
            max_kv_tiles=max_kv_tiles,
            skew=skew,
            is_prefill=is_prefill,
            is_inside_blocks=is_inside_blocks,
        )

    numbers = _of_spec(spec) if parts.formula is None else _of_spec(spec) & parts.formula
    some, every = coverage(numbers, first, last)
    first_key = jnp.arange(max_kv_tiles, dtype=jnp.int32)[None, :] * tiles.tile_kv
    if skew is not None:
        first_key = first_key - skew[:, None]
    is_inside = (first_key >= 0) & (first_key + tiles.tile_kv <= column["seq_len"][:, None])
    every &= is_inside[:, None, :]
    seen_by_part = []
    if parts.blocks:
        blocks = functools.reduce(operator.and_, parts.blocks)
        size = parts.block_q or MAX_POSITION
        for part in range(num_parts(tiles.tile_q, size) if parts.block_q else 1):
            begin = (first // size + part) * size
            ends = jnp.maximum(begin, first), jnp.minimum(begin + (size - 1), last)
            seen = coverage(blocks, *ends, is_inside_blocks=True).some
            every &= seen | (ends[1] < ends[0])[:, None, None]
            seen_by_part.append(seen)
        some &= functools.reduce(operator.or_, seen_by_part)
    # Items that share keys follow each other, so that their keys stay in L2, if that leaves all SMs busy.
    per_kv_head = schedule.table.shape[0] * spec.q_heads_per_kv_head
    sets = spec.num_kv_heads if per_kv_head >= 2 * tiles.workers else 1
    return make_lists(schedule, codes_of(some, every, seen_by_part), sets=sets)


def _of_spec(spec: AttentionSpec) -> Mask:
    """What the spec's numbers let queries see, as a mask."""
    left, right = spec.window or (None, None)
    mask: Mask = Window(left, right)
    if spec.causal:
        mask = mask & Causal()
    return mask if spec.chunk_size is None else mask & Chunked(spec.chunk_size)
