"""The prefill kernel: O = softmax(Q K^T) V of packed queries, 64 rows per warpgroup.

A persistent thread block processes work tiles (a query tile of one head, or of a few packed heads, with all
of its keys or one KV split), the longest first. One warpgroup loads, with one warp per team; the two or three
warpgroups before it compute, either as one team on the rows of one work tile or each as a team of its own.
Both sides iterate over the same work tiles (n; b = n % query_buffers) and KV tiles (i, over all work tiles of
the team; s = i % stages), and synchronize only through barriers:

    loading: warp t                      shared memory      computing: each warpgroup of team t
    ---------------                      -------------      -----------------------------------
    for each work tile n:                                   for each work tile n:
      its row of the schedule                                 wait q_full[b]
      for each KV tile i:                                     for each KV tile i:
        block ids, or entry of a list                           wait k_full[s]
        wait k_free[s]                                          issue S(i) = Q K(i)^T
        TMA: keys ---------------------> K [stages] ----------> issue O += P(i-1) V(i-1)
        if it is the first of n:                                await S(i)
          wait q_free[b]                                        arrive k_free[s]
          TMA: queries, the row -------> Q [buffers]            softmax: P(i), during P(i-1) V(i-1)
        wait v_free[s]                                          wait v_full[s], zero invisible values
        TMA: values -------------------> V [stages] ----------> await O
                                                                arrive v_free[s'], s' of tile i - 1
                                                                O *= alpha, if a row_max has changed
                                                              O += P V of the last tile, arrive v_free[s]
                                         Q [b] <------------- O / row_sum, in place of the queries
                                           TMA: --> out       lse --> global memory
                                                              arrive q_free[b] when it has left: during S
                                                              of work tile n + 1, or at once with one buffer

A `full` barrier completes when all TMA copies into its stage have landed. k_free and v_free complete when all
warpgroups of the team have arrived; Q, q_full and q_free belong to one warpgroup each. The first KV tile of a
work tile has only S; KV tiles that are not for a warpgroup's rows are released unread (KvPipeline.skip). The
result of a KV split goes from registers to global memory unnormalized, and combine.py merges the splits of a
query tile. Making the warpgroups issue in turn measured 1 to 5 % slower on an H200, so they do not.

An 8-bit cache is loaded into stages of its own, and two more warpgroups, one for keys and one for values, sit
between both sides (dequantize.py): they wait for an 8-bit stage and for a free stage of K or V, dequantize
the one into the other, and arrive where TMA does otherwise.

Modules: loader (left), pipeline (middle) and mainloop (right), which calls bias, masking, softmax and
epilogue; tile_scheduler and block_info say which tiles belong to whom, schedule and splits which there are.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.memory import swizzled_smem
from pallas_kernels.shared.softmax import SplitOutputs
from pallas_kernels.shared.types import Scalar, ScratchType
from pallas_kernels.varlen_prefill.bias import SLOPE_WIDTH
from pallas_kernels.varlen_prefill.dequantize import Dequantizer
from pallas_kernels.varlen_prefill.loader import MAX_COPIES_AT_ONCE, PrefillLoader
from pallas_kernels.varlen_prefill.mainloop import PrefillMainloop
from pallas_kernels.varlen_prefill.pipeline import QueryBuffers
from pallas_kernels.varlen_prefill.refs import (
    AlibiOperands,
    PrefillBarriers,
    PrefillInputs,
    PrefillOutputs,
    PrefillSmem,
    QuantizedKvBarriers,
    QuantizedKvSmem,
)
from pallas_kernels.varlen_prefill.schedule import TABLE_WIDTH
from pallas_kernels.varlen_prefill.spec import M, PrefillSpec, QuantizedKV, f32
from pallas_kernels.varlen_prefill.splits import max_split_outputs
from pallas_kernels.varlen_prefill.tile_scheduler import PrefillTileScheduler

REGISTERS = 65536  # per SM
# Registers of a thread that dequantizes, and of one that loads and one that computes beside it.
DEQUANTIZE_REGISTERS, QUANTIZED_REGISTERS = 64, (32, 160)


def prefill(inputs: PrefillInputs, spec: PrefillSpec, num_tokens: int) -> PrefillOutputs:
    """Run the prefill kernel; `num_tokens` is the number of tokens without padding."""
    kernel = plgpu.kernel(
        functools.partial(prefill_body, spec=spec),
        out_type=(output_types(inputs, spec, num_tokens),),
        scratch_types=(smem_types(spec), barrier_types(spec)),
        grid=(spec.sizes.ctas,),
        grid_names=("cta",),
        num_threads=spec.num_warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="varlen_prefill",
        interpret=spec.interpret,
    )
    (outputs,) = kernel(inputs)
    return outputs


def prefill_body(
    inputs: PrefillInputs,
    outputs: PrefillOutputs,
    smem: PrefillSmem,
    barriers: PrefillBarriers,
    *,
    spec: PrefillSpec,
) -> None:
    """Run one thread block: the first warpgroups compute, the next one loads, two more dequantize."""
    wg, num_computing = lax.axis_index("warpgroup"), spec.sizes.warpgroups
    scheduler = PrefillTileScheduler(inputs.schedule, spec)
    load_registers, compute_registers = register_counts(spec)

    @pl.when(wg == num_computing)
    def _() -> None:
        # The other warpgroups wait for these registers before they can take more.
        plgpu.set_max_registers(load_registers, action="decrease")

        @plgpu.warp_map
        def _(warp: Scalar) -> None:
            # One loading warp per team, so that no team waits for another's stages.
            for team in range(spec.sizes.teams):
                loader = PrefillLoader(inputs, smem, barriers, spec, team)
                pl.when(warp == team)(functools.partial(loader.load_all, scheduler))

    def run_dequantizer(index: int) -> None:
        plgpu.set_max_registers(DEQUANTIZE_REGISTERS, action="decrease")
        Dequantizer(inputs, smem, barriers, spec, index).run(scheduler)

    if spec.quantized is not None:
        for index in range(2):
            pl.when(wg == num_computing + 1 + index)(functools.partial(run_dequantizer, index))

    @pl.when(wg < num_computing)
    def _() -> None:
        plgpu.set_max_registers(compute_registers, action="increase")
        queries = QueryBuffers(smem, barriers, spec.sizes, wg)
        PrefillMainloop(inputs, outputs, smem, barriers, spec=spec, queries=queries).run(scheduler)


def output_types(inputs: PrefillInputs, spec: PrefillSpec, num_tokens: int) -> PrefillOutputs:
    """Return the types of the outputs."""
    lse = jax.ShapeDtypeStruct((spec.shape.q_heads, num_tokens), f32) if spec.returns_lse else None
    split_outputs = _split_output_types(spec) if spec.has_splits else None
    out = jax.ShapeDtypeStruct((num_tokens, *inputs.query.shape[1:]), spec.dtype)
    return PrefillOutputs(out=out, lse=lse, split_outputs=split_outputs)


def _split_output_types(spec: PrefillSpec) -> SplitOutputs:
    sizes, head, work_tiles = spec.sizes, spec.shape.head, spec.work_tiles_per_query_tile
    num = max_split_outputs(spec.shape.q_heads, sizes)
    row_type = jax.ShapeDtypeStruct((num, work_tiles, sizes.tile_q), f32)
    out = jax.ShapeDtypeStruct((num, work_tiles, head.num_chunks, sizes.tile_q, head.width), f32)
    return SplitOutputs(out=out, row_max=row_type, row_sum=row_type)


def smem_types(spec: PrefillSpec) -> PrefillSmem:
    """Return the types of the shared memory; see PrefillSmem."""
    sizes, head, dtype = spec.sizes, spec.shape.head, spec.dtype
    wgs = sizes.warpgroups
    queries = (wgs, sizes.query_buffers, head.num_chunks, M, head.width)
    keys = (sizes.teams * sizes.stages, head.num_chunks, sizes.tile_kv, head.width)
    return PrefillSmem(
        query_and_out=plgpu.RefUnion((swizzled_smem(queries, dtype),), (plgpu.SMEM(queries, dtype),)),
        tile_columns=plgpu.SMEM((wgs, sizes.query_buffers, TABLE_WIDTH), jnp.int32),
        k=swizzled_smem(keys, dtype),
        v=swizzled_smem(keys, dtype),
        p=swizzled_smem((wgs, M, sizes.tile_kv), dtype) if spec.is_interpreted else None,
        columns=plgpu.SMEM((wgs, sizes.tile_kv), f32),
        alibi=_alibi_types(spec) if spec.adds_alibi_by_mma else None,
        quantized=None if spec.quantized is None else _quantized_types(spec.quantized, keys),
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

    return AlibiOperands(slopes=operand(M), columns=operand(spec.sizes.tile_kv))


def barrier_types(spec: PrefillSpec) -> PrefillBarriers:
    """Return the types of the barriers; see PrefillBarriers."""
    sizes = spec.sizes
    stages, buffers = sizes.teams * sizes.stages, sizes.warpgroups * sizes.query_buffers

    def stage_barriers(arrivals: int) -> ScratchType:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)

    q_arrivals = spec.shape.head.num_chunks * sizes.pack_gqa + 1
    # With an 8-bit cache K and V are filled by a dequantizing warpgroup, which arrives once.
    kv_arrivals = spec.num_copies if spec.quantized is None else 1
    quantized = None
    if spec.quantized is not None:
        quantized = QuantizedKvBarriers(*map(stage_barriers, _quantized_arrivals(spec)))
    return PrefillBarriers(
        q_full=plgpu.Barrier(num_arrivals=q_arrivals, num_barriers=buffers),
        q_free=plgpu.Barrier(num_barriers=buffers),
        k_full=stage_barriers(kv_arrivals),
        v_full=stage_barriers(kv_arrivals),
        k_free=stage_barriers(sizes.team_size),
        v_free=stage_barriers(sizes.team_size),
        quantized=quantized,
    )


def _quantized_arrivals(spec: PrefillSpec) -> tuple[int, ...]:
    """Return the numbers of arrivals at the barriers of QuantizedKvBarriers."""
    assert spec.quantized is not None
    assert spec.shape.cache_tiling is not None
    scale_copies = [
        spec.shape.cache_tiling.num_copies * (scale == "token") for scale in spec.quantized.scales
    ]
    return *(spec.num_copies + count for count in scale_copies), 1, 1


def register_counts(spec: PrefillSpec) -> tuple[int, int]:
    """Return the registers per thread that loads, and per thread that computes."""
    shape, wgs = spec.shape, spec.sizes.warpgroups
    # Of 65536 registers, many copies per stage need more for loading, and small heads fewer for computing.
    # With the columns of a split besides, eight copies are many: with 24 registers the loading warp spilled
    # 28 bytes.
    needs_few_registers = spec.num_copies > MAX_COPIES_AT_ONCE or shape.head.padded_dim <= 64
    has_head_groups = shape.heads_per_l2_group != shape.q_heads
    has_many_copies = spec.has_splits and spec.num_copies == MAX_COPIES_AT_ONCE
    loads_more = spec.has_lists or has_many_copies or has_head_groups
    load, compute = (40, 232) if needs_few_registers or loads_more else (24, 240)
    dequantizing = 0 if spec.quantized is None else 2 * DEQUANTIZE_REGISTERS
    if wgs == 3:
        load, compute = 32, 160
    if dequantizing:
        load, compute = QUANTIZED_REGISTERS
    # Registers per thread at launch. If more were requested in total, the warpgroups would wait forever.
    at_launch = REGISTERS // (128 * spec.num_warpgroups) // 8 * 8
    assert load + dequantizing + wgs * compute <= spec.num_warpgroups * at_launch
    return load, compute
