"""What a prefill kernel is compiled for: static sizes, arrays, shared memory and barriers.

The order of the fields of a NamedTuple is the order of the kernel's arguments and of its shared memory.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.score_mod import KernelScoreMod
from pallas_kernels.shared.layouts import WARPGROUP_ROWS
from pallas_kernels.shared.memory import PANEL, HeadChunks, TokenRows, swizzled_smem
from pallas_kernels.shared.paged_kv import CacheTiling, KvRefs
from pallas_kernels.shared.score import Score
from pallas_kernels.shared.softmax import LOG2E, SplitOutputs
from pallas_kernels.shared.types import Barriers, Interpret, Ref, ScratchType, f32
from pallas_kernels.varlen_prefill.kernel_mask import KernelMask
from pallas_kernels.varlen_prefill.schedule import (
    COLUMNS,
    LIST_COLUMNS,
    PACKED_LIST_COLUMNS,
    SPLIT_COLUMNS,
    TABLE_WIDTH,
    max_split_outputs,
)
from pallas_kernels.varlen_prefill.sizes import PrefillSizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillShape:
    """Static dimensions of a varlen_prefill call.

    Attributes:
        q_heads: Number of query heads.
        group: Query heads per KV head.
        head: Chunks that a head is loaded in.
        cache_tiling: How a run of keys is loaded from a paged cache; None if keys are packed.
        has_aligned_keys: Whether each request's first key is the first key of a tile, as in a paged cache.
        heads_per_l2_group: Query heads that are processed together, so that their keys and values stay in L2.
            Without tile lists only.
        block_q: Queries per block of queries, if tile lists distinguish the blocks of a query tile.
        list_block_size: Number of keys per entry of the tile lists if several entries fill a tile, else None.
    """

    q_heads: int
    group: int
    head: HeadChunks
    cache_tiling: CacheTiling | None
    has_aligned_keys: bool
    heads_per_l2_group: int
    block_q: int | None = None
    list_block_size: int | None = None


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
        has_lists: Whether work tiles follow tile lists, instead of all KV tiles that `score` leaves visible.
        has_alibi: Whether scores have an ALiBi bias.
        has_score_mod: Whether a score function changes the scores.
        max_score: Bound of the absolute scores that the score function returns, or None.
        returns_lse: Whether the kernel writes the log-sum-exp.
        quantized: Storage of an 8-bit cache, which the kernel dequantizes; None for a 16-bit cache.
        interpret: Interpret-mode parameters, or None for a GPU.
        is_interpreted: Whether the kernel runs in interpret mode: no lanes, register operands or running
            accumulators.
        s_shape: Shape of a warpgroup's scores: its rows and a tile of keys.
        acc_shape: Shape of one chunk of a warpgroup's output.
        num_warpgroups: Number of warpgroups: the computing ones, the loading one and, for 8 bits, two that
            dequantize.
        run_length: Number of consecutive keys in a tile: those of a list entry, of which several may fill a
            tile, or those of the tile.
        runs_per_tile: Number of runs of consecutive keys that fill a tile.
        copies_per_stage: Number of TMA copies that fill a stage of keys, or of values.
        work_tiles_per_query_tile: Number of work tiles per query tile: one per head, or per group of packed
            heads.
        has_splits: Whether a work tile may be one of several KV splits.
        has_window: Whether the first keys of a request may be masked out for a row.
        has_low_end: Whether a tile may start before the first visible key, because of a window or because it
            is not aligned.
        adds_alibi_by_mma: Whether the tensor core adds the ALiBi bias to the scores. A bias that a soft cap
            would cap as well, that is not linear in the column, or that a score function needs in natural
            units, is added afterwards. So is every bias in interpret mode, which runs short of threads if
            warpgroups do more between barriers.
        waits_for_values_first: Whether P V of the previous tile is awaited before, instead of after, the
            exponentials. Then no branch separates the exponentials from their sums, and ptxas adds each as it
            is computed: with heads of 64 and packed keys, 8 x 2k takes 9 % less time. Heads of 128, whose P V
            takes twice as long, lose 1 %. Not measured with tile lists.
        score_factor: Factor that converts biased scores to base-2 exponents; 1.0 if `Bias.apply` scales them.
            Not used with a score function.
        table_columns: Names of the columns of the schedule's table.
        load_registers: Registers per thread that loads; unused with per_warp_mma.
        compute_registers: Registers per thread that computes; unused with per_warp_mma.
    """

    shape: PrefillShape
    score: Score
    sizes: PrefillSizes
    dtype: np.dtype
    has_lists: bool
    has_alibi: bool
    returns_lse: bool
    quantized: QuantizedKV | None = None
    has_score_mod: bool = False
    max_score: float | None = None
    interpret: Interpret = None
    is_interpreted: bool = dataclasses.field(init=False)
    s_shape: tuple[int, int] = dataclasses.field(init=False)
    acc_shape: tuple[int, int] = dataclasses.field(init=False)
    num_warpgroups: int = dataclasses.field(init=False)
    run_length: int = dataclasses.field(init=False)
    runs_per_tile: int = dataclasses.field(init=False)
    copies_per_stage: int = dataclasses.field(init=False)
    work_tiles_per_query_tile: int = dataclasses.field(init=False)
    has_splits: bool = dataclasses.field(init=False)
    has_window: bool = dataclasses.field(init=False)
    has_low_end: bool = dataclasses.field(init=False)
    adds_alibi_by_mma: bool = dataclasses.field(init=False)
    waits_for_values_first: bool = dataclasses.field(init=False)
    score_factor: float = dataclasses.field(init=False)
    table_columns: tuple[str, ...] = dataclasses.field(init=False)
    load_registers: int = dataclasses.field(init=False)
    compute_registers: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        score, sizes, shape, tiling = self.score, self.sizes, self.shape, self.shape.cache_tiling
        is_interpreted, score_scale = bool(self.interpret), score.soft_cap or score.scale
        has_window = score.window[0] is not None or score.chunk_size is not None
        is_linear = self.has_alibi and score.soft_cap is None and score.scale > 0 and not score.sqrt_alibi
        more_columns = SPLIT_COLUMNS if sizes.max_splits > 1 else ()
        run_length = shape.list_block_size or sizes.tile_kv
        runs_per_tile = sizes.tile_kv // run_length
        copies_per_stage = (
            (1 if tiling is None else tiling.copies_per_run) * runs_per_tile * shape.head.num_chunks
        )
        list_columns = LIST_COLUMNS if runs_per_tile == 1 else PACKED_LIST_COLUMNS
        num_warpgroups = sizes.warpgroups
        if not sizes.per_warp_mma:
            num_warpgroups += 1 if self.quantized is None else 3
        # Of the SM's registers, many copies per stage need more for loading, and small heads fewer for
        # computing. With KV splits, whose columns the loading warp holds as well, eight copies are many.
        needs_few_registers = copies_per_stage > MAX_COPIES_AT_ONCE or shape.head.padded_dim <= PANEL
        has_head_groups = shape.heads_per_l2_group != shape.q_heads
        has_many_copies = sizes.max_splits > 1 and copies_per_stage == MAX_COPIES_AT_ONCE
        loads_more = self.has_lists or has_many_copies or has_head_groups
        load, compute = (40, 232) if needs_few_registers or loads_more else (24, 240)
        dequantizing = 0 if self.quantized is None else 2 * DEQUANTIZE_REGISTERS
        if sizes.warpgroups == 3:
            load, compute = 32, 160
        if dequantizing:
            load, compute = QUANTIZED_REGISTERS
        # Registers per thread at launch. If more were requested in total, the warpgroups would wait forever.
        at_launch = REGISTERS // (128 * num_warpgroups) // 8 * 8
        fits = load + dequantizing + sizes.warpgroups * compute <= num_warpgroups * at_launch
        assert fits or sizes.per_warp_mma
        score_factor = score_scale * LOG2E if score.soft_cap is not None or score.scale > 0 else 1.0
        vars(self).update(
            is_interpreted=is_interpreted,
            s_shape=(sizes.warpgroup_rows, sizes.tile_kv),
            acc_shape=(sizes.warpgroup_rows, shape.head.width),
            num_warpgroups=num_warpgroups,
            run_length=run_length,
            runs_per_tile=runs_per_tile,
            copies_per_stage=copies_per_stage,
            work_tiles_per_query_tile=shape.q_heads // sizes.pack_gqa,
            has_splits=sizes.max_splits > 1,
            has_window=has_window,
            has_low_end=has_window or not self.shape.has_aligned_keys,
            adds_alibi_by_mma=is_linear
            and not is_interpreted
            and not self.has_score_mod
            and not sizes.per_warp_mma,
            waits_for_values_first=shape.head.padded_dim == PANEL and not self.has_lists,
            score_factor=score_factor,
            table_columns=(*COLUMNS, *(list_columns if self.has_lists else more_columns)),
            load_registers=load,
            compute_registers=compute,
        )


# ------------------------------------------------------------------------------------- arrays
class PrefillScheduleRefs(NamedTuple):
    """The work tiles of a step.

    Attributes:
        table: One row per query tile [tiles, columns] with schedule.COLUMNS; with KV splits one row per
            split, extended by schedule.SPLIT_COLUMNS; with tile lists one row per work tile, extended by
            schedule.LIST_COLUMNS or PACKED_LIST_COLUMNS.
        num_valid: Number of valid rows of the table, [1].
        entries: Lists of KV tiles, or of blocks of `list_block_size` keys [lists, max_list]; None if every KV
            tile that the score leaves is visited.
    """

    table: Ref
    num_valid: Ref
    entries: Ref


class PrefillInputs(NamedTuple):
    """Arrays that the kernel reads.

    Attributes:
        query: Queries [tokens, q_heads, head_dim], or [..., chunks, chunk] if the head is chunked.
        kv: Keys and values.
        slopes: ALiBi slopes times log2(e), f32 [q_heads], or None.
        sinks: Attention sinks times log2(e), f32 [q_heads], or None.
        schedule: Work tiles of the step.
        mask: Mask of the partial tiles of the tile lists, or None.
        score_mod: Score function, or None.
    """

    query: TokenRows
    kv: KvRefs
    slopes: Ref
    sinks: Ref
    schedule: PrefillScheduleRefs
    mask: KernelMask | None
    score_mod: KernelScoreMod | None = None


class PrefillOutputs(NamedTuple):
    """Arrays that the kernel writes.

    Attributes:
        out: Output [tokens, ...], otherwise like the queries.
        lse: Log-sum-exp f32 [q_heads, tokens], or None.
        split_outputs: Results of query tiles whose keys are split; the combine kernel completes `out` and
            `lse` from them. Their axis `tiles` is work_tiles_per_query_tile. None without KV splits.
    """

    out: Ref
    lse: Ref
    split_outputs: SplitOutputs | None


class CombineRefs(NamedTuple):
    """Arrays that the combine kernel reads, and the output and LSE that it updates in place.

    Attributes:
        split_outputs: Results of the splits.
        table: Table of the schedule, like PrefillScheduleRefs.table.
        num_valid: Number of split query tiles, [1].
        rows: Row in the table of each split query tile's first split.
        sinks: Attention sinks, like PrefillInputs.sinks.
        out: Output, like PrefillOutputs.out.
        lse: Log-sum-exp, like PrefillOutputs.lse.
    """

    split_outputs: SplitOutputs
    table: Ref
    num_valid: Ref
    rows: Ref
    sinks: Ref
    out: Ref
    lse: Ref


class AlibiOperands(NamedTuple):
    """Operands of a matrix product that adds ALiBi to the scores.

    Its K axis has 16 columns, most of them zero.

    Attributes:
        slopes: Slope of each row as 16-bit terms that add up to it, [warpgroups, 64, 16].
        columns: Index of each key within its tile, [warpgroups, tile_kv, 16].
    """

    slopes: Ref
    columns: Ref


class QuantizedKvSmem(NamedTuple):
    """Stages of 8-bit keys and values, as the cache stores them.

    Attributes:
        k: Keys [stages, chunks, tile_kv, width], swizzled.
        v: Values, like `k`.
        k_scale: Scale of each key, f32 [stages, tile_kv], or None.
        v_scale: Scale of each value, like `k_scale`.
    """

    k: Ref
    v: Ref
    k_scale: Ref
    v_scale: Ref


class PrefillSmem(NamedTuple):
    """Shared memory of a thread block.

    The warpgroups of a team share the stages of `k`, `v` and `quantized`. All other arrays have one slice per
    warpgroup.

    Attributes:
        query_and_out: Two views of the same memory: ((queries,), (out,)). Queries [warpgroups, query_buffers,
            chunks, 64, width], swizzled, which the output replaces; and the memory without swizzling, for an
            output of which only some rows are valid.
        table_row: Row of the schedule's table for each buffered work tile [warpgroups, query_buffers,
            TABLE_WIDTH].
        k: Stages of keys [teams * stages, chunks, tile_kv, width], swizzled.
        v: Stages of values, like `k`.
        p: Probabilities [warpgroups, 64, tile_kv] if the matrix product cannot read registers; else None.
        columns: Column indices 0, 1, 2 ... f32 [warpgroups, tile_kv].
        alibi: Operands of the ALiBi product, or None.
        quantized: Stages of an 8-bit cache, from which `k` and `v` are dequantized; else None.
    """

    query_and_out: Ref
    table_row: Ref
    k: Ref
    v: Ref
    p: Ref
    columns: Ref
    alibi: AlibiOperands | None
    quantized: QuantizedKvSmem | None


class WarpPrefillSmem(NamedTuple):
    """Shared memory of a thread block with PrefillSizes.per_warp_mma.

    Attributes:
        query: Queries of each warpgroup [warpgroups, chunks, warpgroup_rows, width], swizzled.
        k: Stages of keys [stages, chunks, tile_kv, width], swizzled.
        v: Stages of values, like `k`.
        columns: Column indices 0, 1, 2 ... f32 [warpgroups, tile_kv].
    """

    query: Ref
    k: Ref
    v: Ref
    columns: Ref


class QuantizedKvBarriers(NamedTuple):
    """Barriers between the loading warp and the dequantizing warpgroups, [stages] each.

    Their meaning is that of `k_full`, `v_full`, `k_free` and `v_free` in PrefillBarriers.
    """

    k_full: Barriers
    v_full: Barriers
    k_free: Barriers
    v_free: Barriers


class PrefillBarriers(NamedTuple):
    """Barriers between the loading warps and the computing warpgroups; see the figure in kernel.py.

    Attributes:
        q_full: Queries and the table row of a work tile have arrived [warpgroups * query_buffers].
        q_free: Queries and the table row have been read, and the output that replaced the queries has been
            copied to global memory [warpgroups * query_buffers].
        k_full: Keys have arrived, or have been dequantized [teams * stages].
        v_full: Values have arrived, or have been dequantized [teams * stages].
        k_free: All warpgroups of a team have read the keys [teams * stages].
        v_free: All warpgroups of a team have read the values [teams * stages].
        quantized: Barriers of an 8-bit cache, or None.
    """

    q_full: Barriers
    q_free: Barriers
    k_full: Barriers
    v_full: Barriers
    k_free: Barriers
    v_free: Barriers
    quantized: QuantizedKvBarriers | None


# ------------------------------------------------------------------------------------- types
REGISTERS = 65536  # per SM
MAX_COPIES_AT_ONCE = 8  # TMA copies of a tile whose block ids the loading warp keeps in registers
SLOPE_WIDTH = 16  # K of one wgmma instruction
# Registers of a thread that dequantizes, and of one that loads and one that computes beside it.
DEQUANTIZE_REGISTERS, QUANTIZED_REGISTERS = 64, (32, 160)


def split_output_types(spec: PrefillSpec) -> SplitOutputs:
    """Return the types of the split outputs."""
    sizes, head, work_tiles = spec.sizes, spec.shape.head, spec.work_tiles_per_query_tile
    num = max_split_outputs(spec.shape.q_heads, sizes)
    row_type = jax.ShapeDtypeStruct((num, work_tiles, sizes.tile_q), f32)
    out = jax.ShapeDtypeStruct((num, work_tiles, head.num_chunks, sizes.tile_q, head.width), f32)
    return SplitOutputs(out=out, row_max=row_type, row_sum=row_type)


def smem_types(spec: PrefillSpec) -> PrefillSmem:
    """Return the types of the shared memory; see PrefillSmem."""
    sizes, head, dtype = spec.sizes, spec.shape.head, spec.dtype
    wgs = sizes.warpgroups
    queries = (wgs, sizes.query_buffers, head.num_chunks, WARPGROUP_ROWS, head.width)
    keys = (sizes.teams * sizes.stages, head.num_chunks, sizes.tile_kv, head.width)
    return PrefillSmem(
        query_and_out=plgpu.RefUnion((swizzled_smem(queries, dtype),), (plgpu.SMEM(queries, dtype),)),
        table_row=plgpu.SMEM((wgs, sizes.query_buffers, TABLE_WIDTH), jnp.int32),
        k=swizzled_smem(keys, dtype),
        v=swizzled_smem(keys, dtype),
        p=swizzled_smem((wgs, WARPGROUP_ROWS, sizes.tile_kv), dtype) if spec.is_interpreted else None,
        columns=plgpu.SMEM((wgs, sizes.tile_kv), f32),
        alibi=_alibi_types(spec) if spec.adds_alibi_by_mma else None,
        quantized=None if spec.quantized is None else _quantized_types(spec.quantized, keys),
    )


def warp_smem_types(spec: PrefillSpec) -> WarpPrefillSmem:
    """Return the types of the shared memory; see WarpPrefillSmem."""
    sizes, head, dtype = spec.sizes, spec.shape.head, spec.dtype
    keys = swizzled_smem((sizes.stages, head.num_chunks, sizes.tile_kv, head.width), dtype)
    return WarpPrefillSmem(
        query=swizzled_smem((sizes.warpgroups, head.num_chunks, sizes.warpgroup_rows, head.width), dtype),
        k=keys,
        v=keys,
        columns=plgpu.SMEM((sizes.warpgroups, sizes.tile_kv), f32),
    )


def _quantized_types(quantized: QuantizedKV, keys: tuple[int, ...]) -> QuantizedKvSmem:
    stages, _, tile_kv, _ = keys
    token_scale = plgpu.SMEM((stages, tile_kv), f32)
    k_scale, v_scale = (token_scale if scale == "token" else None for scale in quantized.scales)
    k, v = (swizzled_smem(keys, dtype) for dtype in quantized.dtypes)
    return QuantizedKvSmem(k, v, k_scale, v_scale)


def _alibi_types(spec: PrefillSpec) -> AlibiOperands:
    def operand(rows: int) -> ScratchType:
        return swizzled_smem((spec.sizes.warpgroups, rows, SLOPE_WIDTH), spec.dtype, width=SLOPE_WIDTH)

    return AlibiOperands(slopes=operand(WARPGROUP_ROWS), columns=operand(spec.sizes.tile_kv))


def barrier_types(spec: PrefillSpec) -> PrefillBarriers:
    """Return the types of the barriers; see PrefillBarriers."""
    sizes = spec.sizes
    stages, buffers = sizes.teams * sizes.stages, sizes.warpgroups * sizes.query_buffers
    stage_barriers = functools.partial(plgpu.Barrier, num_barriers=stages)
    q_arrivals = spec.shape.head.num_chunks * sizes.pack_gqa + 1
    # With an 8-bit cache K and V are filled by a dequantizing warpgroup, which arrives once.
    kv_arrivals = spec.copies_per_stage if spec.quantized is None else 1
    quantized = None
    if spec.quantized is not None:
        quantized = QuantizedKvBarriers(
            *[stage_barriers(num_arrivals=count) for count in _quantized_arrivals(spec)]
        )
    return PrefillBarriers(
        q_full=plgpu.Barrier(num_arrivals=q_arrivals, num_barriers=buffers),
        q_free=plgpu.Barrier(num_barriers=buffers),
        k_full=stage_barriers(num_arrivals=kv_arrivals),
        v_full=stage_barriers(num_arrivals=kv_arrivals),
        k_free=stage_barriers(num_arrivals=sizes.team_size),
        v_free=stage_barriers(num_arrivals=sizes.team_size),
        quantized=quantized,
    )


def warp_barrier_types(num_warpgroups: int, *, is_interpreted: bool) -> ScratchType:
    """Return the barrier at which warpgroups meet in interpret mode; None if there is none."""
    return plgpu.Barrier(num_arrivals=num_warpgroups) if is_interpreted and num_warpgroups > 1 else None


def _quantized_arrivals(spec: PrefillSpec) -> tuple[int, ...]:
    """Return the numbers of arrivals at the barriers of QuantizedKvBarriers."""
    assert spec.quantized is not None
    assert spec.shape.cache_tiling is not None
    scale_copies = [
        spec.shape.cache_tiling.copies_per_run * (scale == "token") for scale in spec.quantized.scales
    ]
    return *(spec.copies_per_stage + count for count in scale_copies), 1, 1
