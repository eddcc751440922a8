"""What the prefill kernel takes of an SM: shared memory, barriers, registers; and what it writes."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.shared.memory import swizzled_smem
from pallas_kernels.shared.types import Memory
from pallas_kernels.varlen_prefill.bias import SLOPE_WIDTH
from pallas_kernels.varlen_prefill.loader import BLOCKS_AT_ONCE
from pallas_kernels.varlen_prefill.refs import (
    AlibiOperands,
    Inputs,
    NarrowBarriers,
    NarrowKeys,
    Outputs,
    Partials,
    Pipeline,
    Smem,
)
from pallas_kernels.varlen_prefill.schedule import TABLE_WIDTH
from pallas_kernels.varlen_prefill.spec import M, NarrowKV, PrefillSpec, f32
from pallas_kernels.varlen_prefill.splits import most_partials

REGISTERS = 65536  # of an SM
# Of a thread that widens, one that loads and one that computes, where keys have 8 bits.
WIDEN_REGISTERS, WIDENING_REGISTERS = 64, (32, 160)


def output_types(inputs: Inputs, spec: PrefillSpec) -> Outputs:
    """The output, the log-sum-exp of every token and head, partial results."""
    lse_shape = spec.shape.q_heads, inputs.query.shape[0]
    lse = jax.ShapeDtypeStruct(lse_shape, f32) if spec.returns_lse else None
    partials = _partial_types(spec) if spec.has_splits else None
    return Outputs(out=jax.ShapeDtypeStruct(inputs.query.shape, spec.dtype), lse=lse, partials=partials)


def _partial_types(spec: PrefillSpec) -> Partials:
    sizes, cut, items = spec.sizes, spec.shape.cut, spec.items_per_tile
    most = most_partials(spec.shape.q_heads, sizes)
    a_row = jax.ShapeDtypeStruct((most, items, sizes.tile_q), f32)
    out = jax.ShapeDtypeStruct((most, items, cut.chunks, sizes.tile_q, cut.width), f32)
    return Partials(out=out, top=a_row, total=a_row)


def smem_types(spec: PrefillSpec) -> Smem:
    """Shared memory: see refs.Smem."""
    sizes, cut, dtype = spec.sizes, spec.shape.cut, spec.dtype
    wgs = sizes.warpgroups
    tokens = (wgs, sizes.query_buffers, cut.chunks, M, cut.width)
    keys = (sizes.teams * sizes.stages, cut.chunks, sizes.tile_kv, cut.width)
    return Smem(
        query_and_out=plgpu.RefUnion((swizzled_smem(tokens, dtype),), (plgpu.SMEM(tokens, dtype),)),
        items=plgpu.SMEM((wgs, sizes.query_buffers, TABLE_WIDTH), jnp.int32),
        k=swizzled_smem(keys, dtype),
        v=swizzled_smem(keys, dtype),
        p=swizzled_smem((wgs, M, sizes.tile_kv), dtype) if spec.is_interpreted else None,
        columns=plgpu.SMEM((wgs, sizes.tile_kv), f32),
        alibi=_alibi_types(spec) if spec.adds_alibi_in_product else None,
        narrow=None if spec.narrow is None else _narrow_types(spec.narrow, keys),
    )


def _narrow_types(narrow: NarrowKV, keys: tuple[int, ...]) -> NarrowKeys:
    stages, _, tile_kv, _ = keys
    of_tokens = plgpu.SMEM((stages, tile_kv), f32)
    k_scale, v_scale = (of_tokens if scale == "token" else None for scale in narrow.scales)
    k, v = (swizzled_smem(keys, dtype) for dtype in narrow.dtypes)
    return NarrowKeys(k, v, k_scale, v_scale)


def _alibi_types(spec: PrefillSpec) -> AlibiOperands:
    operand = lambda rows: swizzled_smem(
        (spec.sizes.warpgroups, rows, SLOPE_WIDTH), spec.dtype, width=SLOPE_WIDTH
    )
    return AlibiOperands(slopes=operand(M), columns=operand(spec.sizes.tile_kv))


def pipeline_types(spec: PrefillSpec) -> Pipeline:
    """Barriers: see refs.Pipeline."""
    sizes = spec.sizes
    stages, buffers = sizes.teams * sizes.stages, sizes.warpgroups * sizes.query_buffers

    def of_stages(arrivals: int) -> Memory:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)

    return Pipeline(
        q_full=plgpu.Barrier(
            num_arrivals=spec.shape.cut.chunks * sizes.heads_per_tile + 1, num_barriers=buffers
        ),
        q_free=plgpu.Barrier(num_barriers=buffers),
        k_full=of_stages(spec.copies if spec.narrow is None else 1),
        v_full=of_stages(spec.copies if spec.narrow is None else 1),
        k_free=of_stages(sizes.team_size),
        v_free=of_stages(sizes.team_size),
        narrow=None if spec.narrow is None else NarrowBarriers(*map(of_stages, _narrow_arrivals(spec))),
    )


def _narrow_arrivals(spec: PrefillSpec) -> tuple[int, ...]:
    """Arrivals at the barriers of NarrowBarriers."""
    assert spec.narrow is not None
    assert spec.shape.in_cache is not None
    of_scales = [spec.shape.in_cache.copies * (scale == "token") for scale in spec.narrow.scales]
    return *(spec.copies + count for count in of_scales), 1, 1


def registers(spec: PrefillSpec) -> tuple[int, int]:
    """Of a thread that loads, and of one that computes."""
    shape, wgs = spec.shape, spec.sizes.warpgroups
    # Of 65536 registers: many copies a stage take more to load, narrow heads less to compute. Where a split's
    # columns are there besides, eight copies are many: of 24 registers the loading warp spilled 28 bytes.
    is_light = spec.copies > BLOCKS_AT_ONCE or shape.cut.padded_dim <= 64
    has_parts = shape.heads_at_once != shape.q_heads
    has_many = spec.has_splits and spec.copies == BLOCKS_AT_ONCE
    loads_more = spec.has_lists or has_many or has_parts
    load, compute = (40, 232) if is_light or loads_more else (24, 240)
    widen = 0 if spec.narrow is None else 2 * WIDEN_REGISTERS
    if wgs == 3:
        load, compute = 32, 160
    if widen:
        load, compute = WIDENING_REGISTERS
    # What a thread has at the start; asked for more in all, the warpgroups would wait for it for ever.
    at_start = REGISTERS // (128 * spec.num_warpgroups) // 8 * 8
    assert load + widen + wgs * compute <= spec.num_warpgroups * at_start
    return load, compute
