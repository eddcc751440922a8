"""Memory of a kernel: the chunks of a head, the alignment of arrays, slices for TMA, swizzled tiles, stores.

A **chunk** is a part of a head that is copied by itself and is a tile of its own in shared memory. A
**panel** is 64 columns of a tile, in 16 bits the 128 bytes of a row of the swizzle: the tensor core takes the
head_dim of values in panels. A head whose head_dim is a multiple of 64 is one chunk of one or more panels,
except in the dk/dv kernel with wgmma, where each panel is a chunk. Another head_dim is divided into equal
chunks of at most 64 elements, and TMA pads each to a panel with zeros on the way into shared memory: no extra
byte is read, and the caller pads nothing.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.checks import require
from pallas_kernels.shared.types import Index, Ref, Scalar, ScratchType, Slice

# A copy of a contiguous range within bounds needs no tensor map: any length from 16 bytes works, without the
# alignment to 128 bytes that a tensor map requires.
BULK_COPY = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
ALIGN = 8  # TMA fills shared memory in units of 8 rows, so tiles start at rows that are multiples of 8
ALIGNED_BYTES = 256  # alignment that Mosaic GPU requires of a kernel's arrays
HEAD_DIMS = (32, 64, 80, 96, 112, 120, 128, 192, 256)
# In 8 bits a head of 120 has no rows of a multiple of 16 bytes, which TMA requires, and 112 would need 7
# chunks.
EIGHT_BIT_HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256)
PANEL = 64  # columns per panel; kernels also process rows in groups of this size


# ------------------------------------------------------------------------------------- arrays
def copy_if_unaligned(x: jax.Array) -> jax.Array:
    """Return `x`, copied if it may be a slice that starts at an address a kernel does not accept.

    XLA for GPUs passes a slice of rows to a kernel without a copy if it starts at a multiple of 128 bytes,
    but a kernel refuses a start between two multiples of ALIGNED_BYTES ("Input buffer 3 is not 256-byte
    aligned"). Across an optimization barrier XLA makes the copy.
    """
    row_bytes = math.prod(x.shape[1:]) * x.dtype.itemsize
    return x if row_bytes % ALIGNED_BYTES == 0 else lax.optimization_barrier(x)


def pad_tokens(x: jax.Array, *, axis: int = 0, extra: int = 0) -> jax.Array:
    """Pad an axis of tokens to a multiple of 8, which TMA needs, and by `extra` tokens."""
    missing = -x.shape[axis] % ALIGN + extra
    if not missing:
        return copy_if_unaligned(x)
    return jnp.pad(x, [(0, missing if n == axis else 0) for n in range(x.ndim)])


class TokenRows(NamedTuple):
    """An array of tokens that TMA reads, see `split_tail`.

    Attributes:
        rows: All whole groups of 8 rows of the array.
        tail: Copy of the last rows; None if `rows` has all rows.
    """

    rows: Ref
    tail: Ref = None


def split_tail(x: jax.Array, num_rows: int) -> TokenRows:
    """Split an array into what TMA can read in place and a copy of its last rows, if that is needed.

    TMA fills shared memory in groups of 8 rows, and a group that exceeds the array reads past its memory.
    Padding would copy the entire array, whereas its whole groups can be read in place. The copy of the tail
    serves tiles of `num_rows` rows, each of which is read either from the array or from the copy.

    Args:
        x: Array whose first axis is the tokens.
        num_rows: Maximum number of rows per copy by TMA, a multiple of 8. Static.

    Returns:
        All whole groups of the array, and the last `num_rows` rows of the array padded to groups.
    """
    num_missing = -x.shape[0] % ALIGN
    tail_start = x.shape[0] + num_missing - num_rows
    if num_missing and tail_start <= 0:
        return TokenRows(pad_tokens(x))
    x = copy_if_unaligned(x)
    if not num_missing:
        return TokenRows(x)
    padding = ((0, num_missing), *[(0, 0)] * (x.ndim - 1))
    return TokenRows(x[: x.shape[0] + num_missing - ALIGN], jnp.pad(x[tail_start:], padding))


# ------------------------------------------------------------------------------------- heads and tiles
class HeadChunks(NamedTuple):
    """The division of a head into chunks.

    Attributes:
        num_chunks: Number of chunks per head.
        chunk_dim: Number of elements of a chunk in global memory.
        width: Number of elements of a chunk in shared memory, at least `chunk_dim`.
        padded_dim: Number of elements of a head in shared memory: those of all chunks.
        is_padded: Whether a chunk is larger in shared memory than in global memory.
    """

    num_chunks: int
    chunk_dim: int
    width: int
    padded_dim: int
    is_padded: bool

    def split(self, x: jax.Array) -> jax.Array:
        """Reshape [..., head_dim] to [..., num_chunks, chunk_dim] if TMA pads the chunks."""
        return x.reshape(*x.shape[:-1], self.num_chunks, self.chunk_dim) if self.is_padded else x

    def split_rows(self, x: TokenRows) -> TokenRows:
        """Apply `split` to the parts of an array."""
        return TokenRows(self.split(x.rows), None if x.tail is None else self.split(x.tail))

    def gmem_index(self, chunk: int, zero: Scalar) -> Index:
        """Return the last indices of a chunk in an array that `split` returned; its size is `width`.

        Args:
            chunk: Static index of the chunk.
            zero: Traced int32 that is 0.
        """
        return (chunk, padded_slice(self.width, self.chunk_dim, zero)) if self.is_padded else ()


def head_chunks(head_dim: int, *, itemsize: int = 2) -> HeadChunks:
    """Return the chunks of a head; one chunk if PANEL divides head_dim.

    Args:
        head_dim: Elements per head.
        itemsize: Bytes per element: 2, or 1 for 8-bit keys or values.

    Raises:
        ValueError: If head_dim is not supported.
    """
    supported = HEAD_DIMS if itemsize == 2 else EIGHT_BIT_HEAD_DIMS
    require(head_dim in supported, "head_dim", f"be one of {supported}", head_dim)
    if head_dim % PANEL == 0:
        return HeadChunks(1, head_dim, head_dim, head_dim, is_padded=False)
    count = -(-head_dim // PANEL)
    while head_dim % (16 // itemsize * count):  # TMA requires strides of a multiple of 16 bytes
        count += 1
    return HeadChunks(count, head_dim // count, PANEL, count * PANEL, is_padded=head_dim != count * PANEL)


def padded_slice(size: int, length: int, zero: Scalar) -> Slice:
    """Return a slice of the first `size` elements of an axis of `length`; TMA reads zeros past the end.

    A write through the slice drops what is past the end. JAX rejects a slice that is known to exceed the
    axis, so such a slice starts at a traced zero; the division tells the compiler that shared memory tiles
    divide it.

    Args:
        size: Static number of elements of the slice; may exceed `length`.
        length: Static length of the axis.
        zero: Traced int32 that is 0.
    """
    if size <= length:
        return pl.ds(0, size)
    return pl.ds(lax.div(zero, PANEL) * PANEL, size)


def swizzled_smem(shape: tuple[int, ...], dtype: DTypeLike, *, width: int = PANEL) -> ScratchType:
    """Return the type of shared memory that TMA fills and the tensor core reads; see `swizzle_bytes`."""
    return plgpu.SMEM(shape, dtype, transforms=swizzle_transforms(jnp.dtype(dtype).itemsize, width))


def swizzle_transforms(
    itemsize: int, width: int = PANEL
) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """Return the tiling and the swizzle of `swizzled_smem`."""
    swizzle = swizzle_bytes(itemsize, width)
    tiling = plgpu.TilingTransform((8, swizzle // itemsize))  # type: ignore[abstract]
    return tiling, plgpu.SwizzleTransform(swizzle)  # type: ignore[abstract]


def swizzle_bytes(itemsize: int, width: int = PANEL) -> int:
    """Return the bytes per row of the swizzle: the greatest common divisor of a row and 128."""
    return math.gcd(itemsize * width, 128)


def store_unoptimized(ref: Ref, value: jax.Array) -> None:
    """Store registers although the store is slow: rows shorter than a cache line, or bank conflicts.

    jax 0.12 requires `optimized=False` for such a store; jax 0.11 accepts the store and has no such argument.

    Args:
        ref: Slice of global or shared memory to overwrite.
        value: Registers of the same shape.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
