"""What the kernel of queries' gradients works on: varlen_prefill's arrays and memory, and its own."""

from typing import NamedTuple

from pallas_kernels.shared.types import Ref
from pallas_kernels.varlen_prefill import refs as prefill


class QueryInputs(NamedTuple):
    """What the kernel reads, in global memory.

    Attributes:
        attention: Queries, keys, values, slopes and the tiles of queries; no sinks, which are in `stats`.
        grad_out: As the queries.
        stats: As refs.Inputs, 64 rows longer than the tokens at least.
        out: As the queries, where the kernel makes the second row of `stats`: the sum of outputs times their
            gradients, less a third row if there is one. Else None.
    """

    attention: prefill.Inputs
    grad_out: Ref
    stats: Ref
    out: Ref

    @property
    def steps_before(self) -> int:
        """Stages of keys and values that an item takes for its outputs, before its keys."""
        return 0 if self.out is None else 1


class QuerySmem(NamedTuple):
    """Shared memory.

    Attributes:
        attention: Queries, keys and values; the gradient leaves in the place of the queries.
        grad_out: As the queries: [warpgroups, query_buffers, chunks, 64, width], swizzled.
    """

    attention: prefill.Smem
    grad_out: Ref
