"""Hashes of cache blocks, by which requests with a common prefix find each other's blocks."""

import array
import hashlib
from collections.abc import Iterable, Sequence
from typing import overload

DIGEST_BYTES = 16  # With 2**32 blocks a collision has probability 2**-65.


class BlockHashes(Sequence[bytes]):
    """The digests of the full blocks of a growing token list; each covers its block and all tokens before it.

    Keys and values depend on all earlier tokens, so each digest includes the previous one (a hash chain, as
    in vLLM's prefix caching).
    """

    def __init__(self, block_size: int, token_ids: Iterable[int] = ()) -> None:
        """Start with the hashes of `token_ids`."""
        self.block_size = block_size
        self._digests: list[bytes] = []
        self._rest = array.array("q")  # tokens after the last full block
        self.num_tokens = 0
        self.extend(token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens."""
        num_before = len(self._rest)
        self._rest.extend(token_ids)
        self.num_tokens += len(self._rest) - num_before
        num_full = len(self._rest) // self.block_size
        for i in range(num_full):
            block = self._rest[i * self.block_size : (i + 1) * self.block_size]
            previous_digest = self._digests[-1] if self._digests else b""
            self._digests.append(
                hashlib.blake2b(previous_digest + block.tobytes(), digest_size=DIGEST_BYTES).digest()
            )
        del self._rest[: num_full * self.block_size]

    def copy(self) -> "BlockHashes":
        """Return an independent copy. Copying 32,000 tokens takes 13 us; hashing them takes 3 ms."""
        hashes = BlockHashes(self.block_size)
        hashes._digests, hashes._rest = self._digests.copy(), self._rest[:]
        hashes.num_tokens = self.num_tokens
        return hashes

    def __len__(self) -> int:
        return len(self._digests)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        return self._digests[index]
