"""The block tables of all requests, as one array that is edited and not made anew."""

from collections.abc import Sequence

import numpy as np

NULL_BLOCK = 0  # what padding points to; never handed out


class BlockTables:
    """A row of block ids for each request, in an array that grows with the requests and the longest of them.

    Behind a request's last block its row holds null blocks.
    """

    def __init__(self) -> None:
        """Starts without requests."""
        self._array = np.full((8, 8), NULL_BLOCK, np.int32)
        self._row_of: dict[int, int] = {}
        self._free_rows = list(range(8))
        self._blocks: dict[int, list[int]] = {}  # the same, for those who take them one by one
        self._lens = np.zeros(8, np.int64)  # of each row

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._row_of

    def blocks(self, request_id: int) -> list[int]:
        """A request's blocks; not to be changed."""
        return self._blocks[request_id]

    def rows(self, request_ids: Sequence[int]) -> np.ndarray:
        """A copy of some rows, as wide as the longest of them: int32 [reqs, blocks]."""
        rows = np.asarray([self._row_of[one] for one in request_ids], np.int64)
        return self._array[rows, : self._lens[rows].max(initial=0)]

    def add(self, request_id: int, blocks: Sequence[int]) -> None:
        """A row for a new request."""
        if not self._free_rows:
            num_rows = len(self._array)
            self._free_rows = list(range(num_rows, 2 * num_rows))
            self._array = np.pad(self._array, ((0, num_rows), (0, 0)), constant_values=NULL_BLOCK)
            self._lens = np.pad(self._lens, (0, num_rows))
        self._row_of[request_id], self._blocks[request_id] = self._free_rows.pop(), []
        self.append(request_id, blocks)

    def append(self, request_id: int, blocks: Sequence[int]) -> None:
        """Puts blocks behind a request's last one."""
        owned = self._blocks[request_id]
        first, end = len(owned), len(owned) + len(blocks)
        owned.extend(blocks)
        width = self._array.shape[1]
        if end > width:
            more = max(width, end - width)
            self._array = np.pad(self._array, ((0, 0), (0, more)), constant_values=NULL_BLOCK)
        row = self._row_of[request_id]
        self._array[row, first:end], self._lens[row] = blocks, end

    def put(self, request_id: int, index: int, block: int) -> None:
        """Puts another block in the place of one."""
        self._blocks[request_id][index] = self._array[self._row_of[request_id], index] = block

    def remove(self, request_id: int) -> None:
        """A row is free again."""
        row = self._row_of.pop(request_id)
        self._array[row, : len(self._blocks.pop(request_id))] = NULL_BLOCK
        self._lens[row] = 0
        self._free_rows.append(row)
