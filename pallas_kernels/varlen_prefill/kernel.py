"""The prefill kernel: O = softmax(Q K^T) V of packed queries, 64 rows a warpgroup.

A thread block stays on its SM and works through its share of the items (a tile of queries of a head, or of a
few that share it, before all of its keys or a split), the longest first. A warpgroup loads, a warp for each
team; the two or three before it compute, as one team on the rows of one item, or each as a team of its own.
Both sides go through the same items (n; b = n % query_buffers) and tiles of keys (i, over all items of the
team; s = i % stages), and meet at barriers only:

    loading: warp t                      shared memory      computing: each warpgroup of team t
    ---------------                      -------------      -----------------------------------
    for each item n:                                        for each item n:
      its row of the schedule                                 wait q_full[b]
      for each tile i:                                        for each tile i:
        block ids, or the tile of a list                        wait k_full[s]
        wait k_free[s]                                          issue S(i) = Q K(i)^T
        TMA: keys ---------------------> K [stages] ----------> issue O += P(i-1) V(i-1)
        if it is the item's first:                              await S(i)
          wait q_free[b]                                        arrive k_free[s]
          TMA: queries, the row -------> Q [buffers]            softmax: P(i), beside P(i-1) V(i-1)
        wait v_free[s]                                          wait v_full[s], clear what nobody sees
        TMA: values -------------------> V [stages] ----------> await O
                                                                arrive v_free[s'], s' of tile i - 1
                                                                O *= shrink, where a top has changed
                                                              O += P V of the last tile, arrive v_free[s]
                                         Q [b] <------------- O / total, in place of the queries
                                           TMA: --> out       lse --> global memory
                                                              arrive q_free[b] when it has left: beside S
                                                              of item n + 1, or at once with one buffer

A barrier `full` completes when all TMA copies into it have landed. k_free and v_free do when all warpgroups
of the team have arrived; Q, q_full and q_free are each warpgroup's own. Of an item's first tile there is only
S; tiles that are not for a warpgroup's rows it lets pass (Ring.skip). What a split brings goes from registers
to global memory as it is; merge.py adds up the splits of a tile. Making the warpgroups issue in turn measured
1 to 5 % slower on an H200, so they do not.

Keys of 8 bits come into stages of their own, and two warpgroups, one for keys and one for values, stand
between both sides (widening.py): they wait for what has come and for a stage of K or V that is free, fill it
with the same in 16 bits, and arrive where TMA does otherwise.

The rooms: loader (left), pipeline (middle), attention (right), which calls products, bias, masking, softmax
with its tops, values and store; items and query_rows say what is whose, schedule and splits what there is.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.memory import swizzled_smem
from pallas_kernels.shared.types import Scalar, ScratchType
from pallas_kernels.varlen_prefill.bias import SLOPE_WIDTH
from pallas_kernels.varlen_prefill.dequantize import Dequantizer
from pallas_kernels.varlen_prefill.loader import BLOCKS_AT_ONCE, PrefillLoader
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
    SplitOutputs,
)
from pallas_kernels.varlen_prefill.schedule import TABLE_WIDTH
from pallas_kernels.varlen_prefill.spec import M, PrefillSpec, QuantizedKV, f32
from pallas_kernels.varlen_prefill.splits import max_split_outputs
from pallas_kernels.varlen_prefill.tile_scheduler import PrefillTileScheduler


def prefill(inputs: PrefillInputs, spec: PrefillSpec) -> PrefillOutputs:
    """Output, and the log-sum-exp of every token and head."""
    kernel = plgpu.kernel(
        functools.partial(prefill_body, spec=spec),
        out_type=(output_types(inputs, spec),),
        scratch_types=(smem_types(spec), pipeline_types(spec)),
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
    pipeline: PrefillBarriers,
    *,
    spec: PrefillSpec,
) -> None:
    """What a thread block does: the first warpgroups compute, one loads, a warp a team, two widen."""
    wg, loads = lax.axis_index("warpgroup"), spec.sizes.warpgroups
    work = PrefillTileScheduler(inputs.schedule, spec)
    load_registers, compute_registers = register_counts(spec)

    @pl.when(wg == loads)
    def _() -> None:
        plgpu.set_max_registers(load_registers, action="decrease")

        @plgpu.warp_map
        def _(warp: Scalar) -> None:
            for team in range(spec.sizes.teams):
                loader = PrefillLoader(inputs, smem, pipeline, spec, team)
                pl.when(warp == team)(functools.partial(loader.load_share, work))

    def widen(nth: int) -> None:
        plgpu.set_max_registers(DEQUANTIZE_REGISTERS, action="decrease")
        Dequantizer(inputs, smem, pipeline, spec, nth).widen_share(work)

    if spec.narrow is not None:
        for nth in range(2):
            pl.when(wg == loads + 1 + nth)(functools.partial(widen, nth))

    @pl.when(wg < loads)
    def _() -> None:
        plgpu.set_max_registers(compute_registers, action="increase")
        queries = QueryBuffers(smem, pipeline, spec.sizes, wg)
        PrefillMainloop(inputs, outputs, smem, pipeline, spec=spec, queries=queries).attend_share(work)


REGISTERS = 65536  # of an SM
# Of a thread that widens, one that loads and one that computes, where keys have 8 bits.
DEQUANTIZE_REGISTERS, QUANTIZED_REGISTERS = 64, (32, 160)


def output_types(inputs: PrefillInputs, spec: PrefillSpec) -> PrefillOutputs:
    """The output, the log-sum-exp of every token and head, partial results."""
    lse_shape = spec.shape.q_heads, inputs.query.shape[0]
    lse = jax.ShapeDtypeStruct(lse_shape, f32) if spec.returns_lse else None
    partials = _partial_types(spec) if spec.has_splits else None
    return PrefillOutputs(
        out=jax.ShapeDtypeStruct(inputs.query.shape, spec.dtype), lse=lse, partials=partials
    )


def _partial_types(spec: PrefillSpec) -> SplitOutputs:
    sizes, cut, items = spec.sizes, spec.shape.cut, spec.items_per_tile
    most = max_split_outputs(spec.shape.q_heads, sizes)
    a_row = jax.ShapeDtypeStruct((most, items, sizes.tile_q), f32)
    out = jax.ShapeDtypeStruct((most, items, cut.num_chunks, sizes.tile_q, cut.width), f32)
    return SplitOutputs(out=out, top=a_row, total=a_row)


def smem_types(spec: PrefillSpec) -> PrefillSmem:
    """Shared memory: see refs.Smem."""
    sizes, cut, dtype = spec.sizes, spec.shape.cut, spec.dtype
    wgs = sizes.warpgroups
    tokens = (wgs, sizes.query_buffers, cut.num_chunks, M, cut.width)
    keys = (sizes.teams * sizes.stages, cut.num_chunks, sizes.tile_kv, cut.width)
    return PrefillSmem(
        query_and_out=plgpu.RefUnion((swizzled_smem(tokens, dtype),), (plgpu.SMEM(tokens, dtype),)),
        items=plgpu.SMEM((wgs, sizes.query_buffers, TABLE_WIDTH), jnp.int32),
        k=swizzled_smem(keys, dtype),
        v=swizzled_smem(keys, dtype),
        p=swizzled_smem((wgs, M, sizes.tile_kv), dtype) if spec.is_interpreted else None,
        columns=plgpu.SMEM((wgs, sizes.tile_kv), f32),
        alibi=_alibi_types(spec) if spec.adds_alibi_in_product else None,
        narrow=None if spec.narrow is None else _narrow_types(spec.narrow, keys),
    )


def _narrow_types(narrow: QuantizedKV, keys: tuple[int, ...]) -> QuantizedKvSmem:
    stages, _, tile_kv, _ = keys
    of_tokens = plgpu.SMEM((stages, tile_kv), f32)
    k_scale, v_scale = (of_tokens if scale == "token" else None for scale in narrow.scales)
    k, v = (swizzled_smem(keys, dtype) for dtype in narrow.dtypes)
    return QuantizedKvSmem(k, v, k_scale, v_scale)


def _alibi_types(spec: PrefillSpec) -> AlibiOperands:
    operand = lambda rows: swizzled_smem(
        (spec.sizes.warpgroups, rows, SLOPE_WIDTH), spec.dtype, width=SLOPE_WIDTH
    )
    return AlibiOperands(slopes=operand(M), columns=operand(spec.sizes.tile_kv))


def pipeline_types(spec: PrefillSpec) -> PrefillBarriers:
    """Barriers: see refs.Pipeline."""
    sizes = spec.sizes
    stages, buffers = sizes.teams * sizes.stages, sizes.warpgroups * sizes.query_buffers

    def of_stages(arrivals: int) -> ScratchType:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)

    return PrefillBarriers(
        q_full=plgpu.Barrier(
            num_arrivals=spec.shape.cut.num_chunks * sizes.pack_gqa + 1, num_barriers=buffers
        ),
        q_free=plgpu.Barrier(num_barriers=buffers),
        k_full=of_stages(spec.copies if spec.narrow is None else 1),
        v_full=of_stages(spec.copies if spec.narrow is None else 1),
        k_free=of_stages(sizes.team_size),
        v_free=of_stages(sizes.team_size),
        narrow=None if spec.narrow is None else QuantizedKvBarriers(*map(of_stages, _narrow_arrivals(spec))),
    )


def _narrow_arrivals(spec: PrefillSpec) -> tuple[int, ...]:
    """Arrivals at the barriers of NarrowBarriers."""
    assert spec.narrow is not None
    assert spec.shape.in_cache is not None
    of_scales = [spec.shape.in_cache.num_copies * (scale == "token") for scale in spec.narrow.scales]
    return *(spec.copies + count for count in of_scales), 1, 1


def register_counts(spec: PrefillSpec) -> tuple[int, int]:
    """Of a thread that loads, and of one that computes."""
    shape, wgs = spec.shape, spec.sizes.warpgroups
    # Of 65536 registers: many copies a stage take more to load, narrow heads less to compute. Where a split's
    # columns are there besides, eight copies are many: of 24 registers the loading warp spilled 28 bytes.
    is_light = spec.copies > BLOCKS_AT_ONCE or shape.cut.padded_dim <= 64
    has_parts = shape.heads_at_once != shape.q_heads
    has_many = spec.has_splits and spec.copies == BLOCKS_AT_ONCE
    loads_more = spec.has_lists or has_many or has_parts
    load, compute = (40, 232) if is_light or loads_more else (24, 240)
    widen = 0 if spec.narrow is None else 2 * DEQUANTIZE_REGISTERS
    if wgs == 3:
        load, compute = 32, 160
    if widen:
        load, compute = QUANTIZED_REGISTERS
    # What a thread has at the start; asked for more in all, the warpgroups would wait for it for ever.
    at_start = REGISTERS // (128 * spec.num_warpgroups) // 8 * 8
    assert load + widen + wgs * compute <= spec.num_warpgroups * at_start
    return load, compute
