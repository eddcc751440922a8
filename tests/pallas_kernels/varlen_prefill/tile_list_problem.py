"""Problems for kernels over lists of tiles, which read more than queries see."""

import dataclasses

import numpy as np

from tests import oracle
from tests.attention_problems import AttentionProblem
from tests.contract import Problem


class Listed(AttentionProblem):
    """What lists may meet holds numbers, the rest poison.

    Below a request's end a tile is read whole, from the first key on that some query sees by the spec's
    numbers: there keys that the mask hides hold numbers. With `sparse_tile_kv`, keys of a tile, so many of
    them: only in tiles that some query sees.
    """

    sparse_tile_kv: int | None = None

    def _met(self, seen):
        numbers = dataclasses.replace(self.spec, sparsity=None)
        by_numbers = oracle.reachable(numbers, dataclasses.replace(self.step, mask=None, seen=None))
        met = [np.maximum.accumulate(hit.any(axis=1))[:, None] for hit in by_numbers]
        if self.sparse_tile_kv is None:
            return [hit | mine for hit, mine in zip(seen, met, strict=True)]
        return [hit | (mine & self._in_listed_tiles(hit)) for hit, mine in zip(seen, met, strict=True)]

    def _in_listed_tiles(self, hit):
        tile = np.arange(len(hit)) // self.sparse_tile_kv
        listed = np.zeros((tile.max(initial=0) + 1, hit.shape[1]), bool)
        np.logical_or.at(listed, tile, hit)
        return listed[tile]


class ListedProblem(Listed, Problem):
    """A contract's problem of this kind."""

    def __init__(self, case, seed=0, mask=None, sparse_tile_kv=None):
        self.sparse_tile_kv = sparse_tile_kv
        super().__init__(case, seed, mask)
