"""Supported head dimensions and how a head is divided into chunks for the tensor core.

The tensor core takes the head_dim of values in multiples of 64. A head_dim that is not a multiple of 64 is
divided into equal chunks of at most 64 elements, and TMA pads each to 64 with zeros on the way into shared
memory: no extra byte is read, and the caller pads nothing.
"""

from typing import NamedTuple

import jax

from pallas_kernels.checks import require
from pallas_kernels.shared.memory import padded_slice
from pallas_kernels.shared.types import Index, Scalar

HEAD_DIMS = (32, 64, 80, 96, 112, 120, 128, 192, 256)
# In 8 bits a head of 120 has no rows of a multiple of 16 bytes, which TMA requires, and 112 would need 7
# chunks.
EIGHT_BIT_HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256)
PANEL = 64  # rows or columns of one operand tile of a backward product; see varlen_backward.refs


class HeadChunks(NamedTuple):
    """The division of a head into chunks.

    Attributes:
        num_chunks: Number of chunks per head.
        chunk_dim: Number of elements of a chunk in global memory.
        width: Number of elements of a chunk in shared memory, at least `chunk_dim`.
    """

    num_chunks: int
    chunk_dim: int
    width: int

    @property
    def is_padded(self) -> bool:
        """Return whether a chunk is larger in shared memory than in global memory."""
        return self.width != self.chunk_dim

    @property
    def padded_dim(self) -> int:
        """Elements of a head in shared memory."""
        return self.num_chunks * self.width

    def split(self, x: jax.Array) -> jax.Array:
        """Reshape [..., head_dim] to [..., num_chunks, chunk_dim] if TMA pads the chunks."""
        return x.reshape(*x.shape[:-1], self.num_chunks, self.chunk_dim) if self.is_padded else x

    def gmem_index(self, chunk: int, zero: Scalar) -> Index:
        """Return the last indices of a chunk in an array that `split` returned; its size is `width`.

        Args:
            chunk: Static index of the chunk.
            zero: Traced int32 that is 0.
        """
        return (chunk, padded_slice(self.width, self.chunk_dim, zero)) if self.is_padded else ()


def head_chunks(head_dim: int, *, itemsize: int = 2) -> HeadChunks:
    """Return the chunks of a head; one chunk if 64 divides head_dim.

    Args:
        head_dim: Elements per head.
        itemsize: Bytes per element: 2, or 1 for 8-bit keys or values.

    Raises:
        ValueError: If head_dim is not supported.
    """
    supported = HEAD_DIMS if itemsize == 2 else EIGHT_BIT_HEAD_DIMS
    require(head_dim in supported, "head_dim", f"be one of {supported}", head_dim)
    if head_dim % PANEL == 0:
        return HeadChunks(1, head_dim, head_dim)
    count = -(-head_dim // PANEL)
    while head_dim % (16 // itemsize * count):  # TMA requires strides of a multiple of 16 bytes
        count += 1
    return HeadChunks(count, head_dim // count, PANEL)
