"""The static sizes of a step: a change of them recompiles."""

import dataclasses

from jattn.pytree import set_ints
from pallas_kernels.checks import require, require_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bucket:
    """The static sizes of a step's two regions, `[decode tokens | prefill tokens]`.

    Attributes:
        max_decodes: Rows of the decode region; each owns `decode_query_len` tokens.
        max_prefills: Rows of the prefill region.
        max_prefill_tokens: Tokens of the prefill region, all rows together.
        decode_query_len: Tokens of a decode row: 1, or 1 + k with k speculative tokens.
        max_blocks: Columns of the block table; None = as many as the longest request of the batch needs.
    """

    max_decodes: int = 0
    max_prefills: int = 0
    max_prefill_tokens: int = 0
    decode_query_len: int = 1
    max_blocks: int | None = None

    def __post_init__(self) -> None:
        set_ints(self, "max_decodes", "max_prefills", "max_prefill_tokens", "decode_query_len")
        if self.max_blocks is not None:
            set_ints(self, "max_blocks")
        for name in ("max_decodes", "max_prefills", "max_prefill_tokens"):
            require(getattr(self, name) >= 0, name, "be at least 0", getattr(self, name))
        if self.max_prefill_tokens:
            require(
                self.max_prefills > 0,
                "max_prefills",
                f"be positive with {self.max_prefill_tokens} prefill tokens",
                0,
            )
        require_positive(decode_query_len=self.decode_query_len)
        require(
            self.max_blocks is None or self.max_blocks >= 0, "max_blocks", "be at least 0", self.max_blocks
        )

    @property
    def max_reqs(self) -> int:
        """Rows of both regions."""
        return self.max_decodes + self.max_prefills

    @property
    def max_decode_tokens(self) -> int:
        """Tokens of the decode region: where the prefill region starts."""
        return self.max_decodes * self.decode_query_len

    @property
    def max_tokens(self) -> int:
        """Tokens of both regions."""
        return self.max_decode_tokens + self.max_prefill_tokens
