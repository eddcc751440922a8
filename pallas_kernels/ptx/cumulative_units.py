"""Prefix sum of the units of a decode schedule, by one thread block; see paged_decode.schedule for units.

    register  contents
    --------  ------------------------------------------------------------------
    u<n>      units of the thread's n-th schedule row
    first     index of the thread's first schedule row
    own       units of all rows of the thread
    before    units of all rows before the current one
    at        address of an array element

The registers lane, warp, x, sum, top, p and is_first are those of `launch`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from pallas_kernels.ptx.fallback import with_fallback
from pallas_kernels.ptx.launch import THREADS, WARPS, block_exclusive_sum, launch_ptx


def _cumulative_units(counts: Int32[Array, " rows"], *, listed: int, unit: int) -> Int32[Array, " rows"]:
    units = jax.lax.div(counts * listed + (unit - 1), jnp.full_like(counts, unit))
    return jnp.cumsum(jnp.maximum(units, 1), dtype=jnp.int32)


@with_fallback(_cumulative_units)
def cumulative_units(counts: Int32[Array, " rows"], *, listed: int, unit: int) -> Int32[Array, " rows"]:
    """Return, for each schedule row, one past the index of its last unit; a row has at least one unit.

    XLA's cumulative sum takes two kernels, 3.5 us.

    Args:
        counts: Number of blocks in the block list of each schedule row.
        listed: Static: number of keys of a block of the list.
        unit: Static: number of keys of a unit.
    """
    code = program(rows=counts.shape[0], listed=listed, unit=unit)
    out_type = jax.ShapeDtypeStruct(counts.shape, jnp.int32)
    return launch_ptx(code, (counts,), name="cumulative_units", out_type=(out_type,), words=WARPS)[0]


def program(*, rows: int, listed: int, unit: int) -> str:
    """Return the PTX code that each thread executes, for consecutive rows.

    Operands: $0 and $1 are the addresses of the counts and the results. $2 is the address of shared memory.
    $4 is the thread index.
    """
    thread_rows = range(-(-rows // THREADS))

    def is_row(n: int) -> str:
        return f"add.u32 x, first, {n}; setp.lt.u32 p, x, {rows};"

    lines = [
        f".reg .b32 u<{len(thread_rows)}>, lane, warp, x, sum, top, own, before, first;",
        ".reg .b64 at; .reg .pred p, is_first;",
        "and.b32 lane, $4, 31; shr.u32 warp, $4, 5; setp.eq.u32 is_first, lane, 0;",
        f"mul.lo.u32 first, $4, {len(thread_rows)}; mov.b32 own, 0; mad.wide.u32 at, first, 4, $0;",
        # Load the counts and convert them to units.
        *(f"{is_row(n)} mov.b32 u{n}, 0; @p ld.global.b32 u{n}, [at + {4 * n}];" for n in thread_rows),
        *(
            f"mad.lo.u32 u{n}, u{n}, {listed}, {unit - 1}; div.u32 u{n}, u{n}, {unit}; "
            f"max.u32 u{n}, u{n}, 1; add.u32 own, own, u{n};"
            for n in thread_rows
        ),
        # Add the units of all earlier threads, then store the running sum.
        *block_exclusive_sum("$2", 0),
        "mad.wide.u32 at, first, 4, $1;",
        *(
            f"{is_row(n)} add.u32 before, before, u{n}; @p st.global.b32 [at + {4 * n}], before;"
            for n in thread_rows
        ),
    ]
    return "{ " + "\n".join(lines) + " }"
