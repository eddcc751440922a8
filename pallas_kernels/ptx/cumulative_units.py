"""Running sums of the units of lists: where each row of a schedule ends, by one thread block."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from pallas_kernels.ptx.fallback import with_fallback
from pallas_kernels.ptx.launch import THREADS, WARPS, block_exclusive_sum, launch_ptx


def _by_xla(counts: Int32[Array, " rows"], *, listed: int, unit: int) -> Int32[Array, " rows"]:
    units = jax.lax.div(counts * listed + (unit - 1), jnp.full_like(counts, unit))
    return jnp.cumsum(jnp.maximum(units, 1), dtype=jnp.int32)


@with_fallback(_by_xla)
def cumulative_units(counts: Int32[Array, " rows"], *, listed: int, unit: int) -> Int32[Array, " rows"]:
    """One past each row's last unit; a row has one at least. XLA's cumulative sum takes two kernels, 3.5 us.

    Args:
        counts: Sparse blocks of each row.
        listed: Static: keys of such a block.
        unit: Static: keys of a unit.
    """
    code = program(rows=counts.shape[0], listed=listed, unit=unit)
    like_counts = jax.ShapeDtypeStruct(counts.shape, jnp.int32)
    return launch_ptx(code, (counts,), name="unit_ends", out_type=(like_counts,), words=WARPS)[0]


def program(*, rows: int, listed: int, unit: int) -> str:
    """PTX of a thread, which has neighbouring rows.

    Operands: $0 and $1 the addresses of the counts and the ends, $2 that of shared memory; $4 the thread.
    """
    each = range(-(-rows // THREADS))
    is_row = lambda n: f"add.u32 x, first, {n}; setp.lt.u32 p, x, {rows};"
    lines = [
        f".reg .b32 u<{len(each)}>, lane, warp, x, sum, top, own, before, first;",
        ".reg .b64 at; .reg .pred p, is_first;",
        "and.b32 lane, $4, 31; shr.u32 warp, $4, 5; setp.eq.u32 is_first, lane, 0;",
        f"mul.lo.u32 first, $4, {len(each)}; mov.b32 own, 0; mad.wide.u32 at, first, 4, $0;",
        *(f"{is_row(n)} mov.b32 u{n}, 0; @p ld.global.b32 u{n}, [at + {4 * n}];" for n in each),
        *(
            f"mad.lo.u32 u{n}, u{n}, {listed}, {unit - 1}; div.u32 u{n}, u{n}, {unit}; "
            f"max.u32 u{n}, u{n}, 1; add.u32 own, own, u{n};"
            for n in each
        ),
        *block_exclusive_sum("$2", 0),
        "mad.wide.u32 at, first, 4, $1;",
        *(
            f"{is_row(n)} add.u32 before, before, u{n}; @p st.global.b32 [at + {4 * n}], before;"
            for n in each
        ),
    ]
    return "{ " + "\n".join(lines) + " }"
