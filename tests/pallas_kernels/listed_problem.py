"""A contract's problem for kernels over lists of tiles, which read more than queries see."""

import dataclasses

import numpy as np

from tests import oracle
from tests.contract import Problem


class ListedProblem(Problem):
    """What lists may meet is finite, the rest NaN.

    Below a request's end a tile is read whole, from the first key on that some query sees by the spec's
    numbers: there keys that the mask hides are finite. With `sparse_tile_kv`, keys of a tile, so many of
    them: only in tiles that some query sees.
    """

    def __init__(self, case, seed=0, mask=None, sparse_tile_kv=None):
        self.sparse_tile_kv = sparse_tile_kv
        super().__init__(case, seed, mask)

    def _kv(self, k, v, k_scale, v_scale, live, slots):
        numbers = dataclasses.replace(self.spec, sparsity=None)
        by_numbers = oracle.reachable(numbers, dataclasses.replace(self.step, mask=None))
        for seen, mine in zip(by_numbers, slots, strict=True):
            met = np.maximum.accumulate(seen.any(axis=1))[:, None]
            if self.sparse_tile_kv is not None:
                tile = np.arange(len(mine)) // self.sparse_tile_kv
                listed = np.zeros((tile.max(initial=0) + 1, live.shape[1]), bool)
                np.logical_or.at(listed, tile, live[mine])
                met = met & listed[tile]
            live[mine] |= met
        return super()._kv(k, v, k_scale, v_scale, live, slots)
