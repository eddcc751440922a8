"""How a head is cut for the tensor core, which takes the values' head_dim in units of 64.

A head_dim that 64 does not divide is cut into equal chunks of at most 64, and TMA fills each up to 64 with
zeros on the way into shared memory: no byte more is read, and the caller pads nothing.
"""

from typing import NamedTuple

import jax

from pallas_kernels.checks import require
from pallas_kernels.shared.memory import padded_slice
from pallas_kernels.shared.types import Index, Scalar

HEAD_DIMS = (32, 64, 80, 96, 112, 120, 128, 192, 256)
# In 8 bits 120 has no rows of 16 bytes, which TMA wants, and 112 would be cut into 7 chunks.
EIGHT_BIT_HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256)
UNIT = 64


class HeadChunks(NamedTuple):
    """A head of `chunks * chunk` elements, each chunk `width` wide in shared memory."""

    num_chunks: int
    chunk_dim: int
    width: int

    @property
    def is_padded(self) -> bool:
        """Shared memory holds more than global memory."""
        return self.width != self.chunk_dim

    @property
    def padded_dim(self) -> int:
        """Elements of a head in shared memory."""
        return self.num_chunks * self.width

    def split(self, x: jax.Array) -> jax.Array:
        """[..., head_dim] as [..., chunks, chunk] where TMA pads its chunks."""
        return x.reshape(*x.shape[:-1], self.num_chunks, self.chunk_dim) if self.is_padded else x

    def gmem_index(self, chunk: int, zero: Scalar) -> Index:
        """The last indices of what `split` returned: a chunk of a head, as wide as in shared memory.

        Args:
            chunk: Static.
            zero: A traced int32 0.
        """
        return (chunk, padded_slice(self.width, self.chunk_dim, zero)) if self.is_padded else ()


def head_chunks(head_dim: int, *, itemsize: int = 2) -> HeadChunks:
    """The cut of a head; whole where 64 divides it.

    Args:
        head_dim: Width of a head.
        itemsize: Bytes of an element: 2, or 1 for 8-bit keys or values.

    Raises:
        ValueError: There is none of this width.
    """
    served = HEAD_DIMS if itemsize == 2 else EIGHT_BIT_HEAD_DIMS
    require(head_dim in served, "head_dim", f"be one of {served}", head_dim)
    if head_dim % UNIT == 0:
        return HeadChunks(1, head_dim, head_dim)
    count = -(-head_dim // UNIT)
    while head_dim % (16 // itemsize * count):  # TMA wants strides of 16 bytes
        count += 1
    return HeadChunks(count, head_dim // count, UNIT)
