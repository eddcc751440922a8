"""Tokens of a request as an array that grows."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int


class TokenBuffer:
    """Token ids, int32: looked at and taken into a step's table at once, where a list would be copied."""

    def __init__(self) -> None:
        """Starts empty."""
        self._ids, self._count = np.zeros(256, np.int32), 0

    def caught_up(self, token_ids: Sequence[int]) -> Int[np.ndarray, " tokens"]:
        """All of `token_ids`, which begin with those of the last time."""
        count = len(token_ids)
        if count > len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros(max(count, len(self._ids)), np.int32)])
        self._ids[self._count : count] = token_ids[self._count :]
        self._count = count
        return self._ids[:count]
