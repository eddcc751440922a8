"""What the decode kernel is compiled for: static sizes, arrays, shared memory and barriers.

The order of the fields of a NamedTuple is the order of the kernel's arguments and of its shared memory.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.paged_decode.sizes import DecodeSizes
from pallas_kernels.ptx.warp_mma import WARPS
from pallas_kernels.score_mod import KernelScoreMod
from pallas_kernels.shared.memory import PANEL, HeadChunks, swizzled_smem
from pallas_kernels.shared.paged_kv import CacheTiling, KvRefs
from pallas_kernels.shared.score import Score
from pallas_kernels.shared.softmax import SplitOutputs
from pallas_kernels.shared.types import Barriers, Interpret, Ref, Scalar, ScratchType, f32


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeShape:
    """Sizes of the arrays of a call.

    Attributes:
        kv_heads: Number of KV heads.
        row_tiles: Number of tiles of query rows per KV head.
        rows: Number of valid query rows of a tile, ordered by decode token, then by query head. The last tile
            may hold fewer.
        group: Number of query heads per KV head.
        query_len: Number of query tokens per request.
        block_size: Number of tokens per cache block.
        is_hnd: Whether blocks are [kv_heads, block_size, head_dim].
        head: Division of a head into chunks.
        tile_q: `rows` rounded up for the tensor core.
        list_block_size: Number of keys per sparse block if each KV head of each request has a list of blocks;
            None if every key is visited. With lists, a row of the schedule, of the queries and of the results
            is one KV head of a request, so that lists of any lengths keep all thread blocks busy. Without
            lists, it is a request.
        lists_have_head_bits: Whether each entry of a list says which query heads of the group visit the
            block.
    """

    kv_heads: int
    row_tiles: int
    rows: int
    group: int
    query_len: int
    block_size: int
    is_hnd: bool
    head: HeadChunks
    tile_q: int
    list_block_size: int | None
    lists_have_head_bits: bool = False

    def row_request(self, row: Scalar, head_tile: Scalar) -> tuple[Scalar, Scalar]:
        """Return the request of a schedule row, and the index of a tile among the request's query tiles.

        Args:
            row: Schedule row.
            head_tile: Index of the tile of query rows within this schedule row.
        """
        if not self.list_block_size:
            return row, head_tile
        request = lax.div(row, jnp.int32(self.kv_heads))
        return request, (row - request * self.kv_heads) * self.row_tiles + head_tile


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSpec:
    """Everything that is static about a call.

    Attributes:
        shape: Sizes of the arrays.
        score: Score function of the layer.
        sizes: Sizes of the kernel.
        num_spans: Number of spans of the schedule. For each span, there is one thread block per tile of query
            rows.
        dtype: 16-bit dtype of the queries, in which the tensor core multiplies.
        has_token_scales: Whether keys, and whether values, have a scale per token and head.
        has_score_mod: Whether a score function changes the scores.
        interpret: Parameters of interpret mode, or None for a GPU.
        is_interpreted: Whether the kernel runs in interpret mode, which has no PTX.
        tile: Shape of a tile of scores: keys by query rows.
        head_tiles: Number of tiles of query rows per row of the schedule.
        run_length: Number of consecutive keys in a tile: the size of a sparse block, at most that of a tile.
        cache_tiling: TMA copies that load a run of consecutive keys from the cache.
    """

    shape: DecodeShape
    score: Score
    sizes: DecodeSizes
    num_spans: int
    dtype: DTypeLike
    has_token_scales: tuple[bool, bool]
    has_score_mod: bool = False
    interpret: Interpret = None
    is_interpreted: bool = dataclasses.field(init=False)
    tile: tuple[int, int] = dataclasses.field(init=False)
    head_tiles: int = dataclasses.field(init=False)
    run_length: int = dataclasses.field(init=False)
    cache_tiling: CacheTiling = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        shape, tile_kv = self.shape, self.sizes.tile_kv
        run_length = min(shape.list_block_size or tile_kv, tile_kv)
        vars(self).update(
            is_interpreted=bool(self.interpret),
            tile=(tile_kv, shape.tile_q),
            head_tiles=shape.row_tiles if shape.list_block_size else shape.kv_heads * shape.row_tiles,
            run_length=run_length,
            cache_tiling=CacheTiling(
                block_size=shape.block_size, run_length=run_length, is_hnd=shape.is_hnd, head=shape.head
            ),
        )


class DecodeListRefs(NamedTuple):
    """Lists of sparse blocks, one per schedule row. Both fields are None if there are no lists.

    Attributes:
        ids: Sparse block ids of each list, [schedule_rows, max_listed].
        counts: Length of each list, [schedule_rows].
    """

    ids: Ref
    counts: Ref


class DecodeInputs(NamedTuple):
    """Arrays that the kernel reads.

    Attributes:
        query: Queries [schedule_rows, head_tiles, rows, head_dim], or [..., num_chunks, chunk_dim].
        kv: Keys and values.
        seq_lens: Number of keys of each request, [reqs].
        unit_ends: `DecodeSchedule.unit_ends`, [schedule_rows].
        slopes: ALiBi slopes times log2(e), f32 [head_tiles, tile_q]; None without ALiBi.
        sinks: Attention sinks times log2(e), f32 [head_tiles, tile_q]; None without sinks.
        lists: Sparse blocks to visit.
        score_mod: Score function, or None.
    """

    query: Ref
    kv: KvRefs
    seq_lens: Ref
    unit_ends: Ref
    slopes: Ref
    sinks: Ref
    lists: DecodeListRefs
    score_mod: KernelScoreMod | None = None


class DecodeOutputs(NamedTuple):
    """Arrays that the kernel writes.

    Attributes:
        out: Outputs of the requests that lie in one span, of the shape of the queries.
        lse: Log-sum-exps of these requests, f32 [schedule_rows, head_tiles, tile_q].
        splits: Split outputs of the requests that lie in several spans, with accumulators O^T. Their axis
            `tiles` is head_tiles. Entries without a segment are not written.
    """

    out: Ref
    lse: Ref
    splits: SplitOutputs


class DecodeSmem(NamedTuple):
    """Shared memory of a thread block.

    Attributes:
        q: Queries of the current and, with TMA, the next segment, [1 or 2, num_chunks, tile_q, width].
        k: Tiles of keys, [stages, num_chunks, tile_kv, width].
        v: Tiles of values, [stages, num_chunks, tile_kv, width].
        k_scale: Scales of the keys per token, f32 [stages, tile_kv]; None without scales per token.
        v_scale: Scales of the values per token, f32 [stages, tile_kv]; None without scales per token.
        dequantized: Values of one tile in 16 bits, [num_chunks, tile_kv, width]; in interpret mode also its
            keys. None if values are not dequantized here.
        p: Probabilities, [tile_q, tile_kv]; None with WarpMma, which keeps them in registers.
        warp_outputs: Results of the four warps of WarpMma, f32 [warps, head_dim + 2, tile_q]; else None.
    """

    q: Ref
    k: Ref
    v: Ref
    k_scale: Ref
    v_scale: Ref
    dequantized: Ref
    p: Ref
    warp_outputs: Ref


class DecodeBarriers(NamedTuple):
    """Barriers that say when a query buffer or a stage of keys or values is full, and when it is free."""

    q_full: Barriers
    q_free: Barriers
    k_full: Barriers
    v_full: Barriers
    k_free: Barriers
    v_free: Barriers


def output_types(inputs: DecodeInputs, spec: DecodeSpec) -> DecodeOutputs:
    """Return the shapes and dtypes of the kernel's outputs."""
    shape, head, tile_q = spec.shape, spec.shape.head, spec.shape.tile_q
    reqs, ids = inputs.query.shape[0], inputs.lists.ids
    max_kv = inputs.kv.block_table.shape[1] * shape.block_size
    if ids is not None:
        max_kv = ids.shape[1] * (shape.list_block_size or 0)
    sizes = spec.sizes
    splits = reqs + spec.num_spans if sizes.split_kv is None else reqs * (-(-max_kv // sizes.split_kv))
    per_query = jax.ShapeDtypeStruct((splits, spec.head_tiles, tile_q), f32)
    split_out = jax.ShapeDtypeStruct((splits, spec.head_tiles, head.num_chunks, head.width, tile_q), f32)
    return DecodeOutputs(
        out=jax.ShapeDtypeStruct(inputs.query.shape, spec.dtype),
        lse=jax.ShapeDtypeStruct((reqs, spec.head_tiles, tile_q), f32),
        splits=SplitOutputs(split_out, per_query, per_query),
    )


def smem_types(kv: KvRefs, spec: DecodeSpec) -> ScratchType:
    """Return the scratch shapes in shared memory for a cache of these dtypes and scales; see `smem_refs`.

    Without TMA no loads are in flight at the end of a segment, so that the outputs of the warps may take the
    place of everything else.
    """
    sizes, head, tile_q = spec.sizes, spec.shape.head, spec.shape.tile_q
    stage = head.num_chunks, sizes.tile_kv, head.width
    # Interpret mode takes no operand from registers, so dequantized keys pass through shared memory there.
    is_dequantized = kv.v.dtype != spec.dtype or (spec.is_interpreted and kv.k.dtype != spec.dtype)
    scale_smem = plgpu.SMEM((sizes.stages, sizes.tile_kv), f32)
    swizzle_width = head.width if sizes.per_warp_mma else PANEL
    dequantized = swizzled_smem(stage, spec.dtype) if is_dequantized and not sizes.per_warp_mma else None
    warp_outputs = plgpu.SMEM((WARPS, head.padded_dim + 2, tile_q), f32) if sizes.per_warp_mma else None
    queries = swizzled_smem((2 if sizes.uses_tma else 1, head.num_chunks, tile_q, head.width), spec.dtype)
    types = DecodeSmem(
        q=queries,
        k=swizzled_smem((sizes.stages, *stage), kv.k.dtype, width=swizzle_width),
        v=swizzled_smem((sizes.stages, *stage), kv.v.dtype, width=swizzle_width),
        k_scale=scale_smem if spec.has_token_scales[0] else None,
        v_scale=scale_smem if spec.has_token_scales[1] else None,
        dequantized=dequantized,
        p=None if sizes.per_warp_mma else swizzled_smem((tile_q, sizes.tile_kv), spec.dtype),
        warp_outputs=warp_outputs,
    )
    return types if sizes.uses_tma else plgpu.RefUnion(types._replace(warp_outputs=None), warp_outputs)


def smem_refs(scratch: Ref, spec: DecodeSpec) -> DecodeSmem:
    """Return the shared memory of a thread block from the references to the scratch of `smem_types`."""
    if spec.sizes.uses_tma:
        return scratch
    tiles, warp_outputs_s = scratch  # they share memory
    return tiles._replace(warp_outputs=warp_outputs_s)


def barrier_types(spec: DecodeSpec) -> DecodeBarriers:
    """Return the scratch shapes of the barriers.

    Each TMA copy arrives once at the full barrier of its buffer.
    """
    stages, num_chunks = spec.sizes.stages, spec.shape.head.num_chunks
    copies = spec.sizes.tile_kv // spec.cache_tiling.tokens_per_copy
    k_copies, v_copies = [copies * (num_chunks + has_scales) for has_scales in spec.has_token_scales]
    return DecodeBarriers(
        q_full=plgpu.Barrier(num_arrivals=num_chunks, num_barriers=2),
        q_free=plgpu.Barrier(num_barriers=2),
        k_full=plgpu.Barrier(num_arrivals=k_copies, num_barriers=stages),
        v_full=plgpu.Barrier(num_arrivals=v_copies, num_barriers=stages),
        k_free=plgpu.Barrier(num_barriers=stages),
        v_free=plgpu.Barrier(num_barriers=stages),
    )
