"""Pieces of PTX programs whose 1,024 threads count together.

Registers that they use: lane, warp, x, sum, top, the predicates p and is_first, which is set in lane 0.
"""

from collections.abc import Iterator

WARPGROUPS = 8
THREADS = 128 * WARPGROUPS
WARPS = THREADS // 32


def wait_for_all() -> Iterator[str]:
    """All threads wait for each other; warpgroups' own barriers have the numbers up to WARPGROUPS."""
    yield f"bar.sync {WARPGROUPS + 1}, {THREADS};"


def sum_before(memory: str, totals: int) -> Iterator[str]:
    """The register before = the sum of the register own of all threads before this one.

    Args:
        memory: Register with an address of shared memory.
        totals: Bytes behind it, where WARPS words are free.
    """
    up = lambda name: (
        f"shfl.sync.up.b32 x|p, {name}, {1 << n}, 0, -1; @p add.u32 {name}, {name}, x;" for n in range(5)
    )
    yield "mov.b32 before, own;"
    yield from up("before")
    yield "shfl.sync.idx.b32 top, before, 31, 31, -1; sub.u32 before, before, own;"
    yield f"mad.lo.u32 x, warp, 4, {memory}; @is_first st.shared.b32 [x + {totals}], top;"
    yield from wait_for_all()
    yield f"mad.lo.u32 x, lane, 4, {memory}; ld.shared.b32 sum, [x + {totals}];"
    yield from up("sum")
    yield "sub.u32 x, warp, 1; shfl.sync.idx.b32 sum, sum, x, 31, -1; setp.ne.u32 p, warp, 0;"
    yield "@p add.u32 before, before, sum;"
