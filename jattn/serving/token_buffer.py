"""Tokens of a request as an array that grows."""

from collections.abc import Sequence

import numpy as np


class TokenBuffer:
    """Token ids, int32: taken into a step's table at once, where a list would be read one by one."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        """Begins with `token_ids`."""
        self._count = len(token_ids)
        self._array = np.zeros(2 * self._count, np.int32)
        self._array[: self._count] = token_ids

    @property
    def view(self) -> np.ndarray:
        """All of them, until the next one comes."""
        return self._array[: self._count]

    def append(self, token_id: int) -> None:
        """Takes one more."""
        if self._count == len(self._array):
            self._array = np.concatenate([self._array, np.zeros_like(self._array)])
        self._array[self._count] = token_id
        self._count += 1
