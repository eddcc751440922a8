"""Problems for kernels over tile lists, which read whole tiles and so more keys than queries see."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests import oracle
from tests.attention_problems import AttentionProblem
from tests.contract import Problem
from tests.regions import attend_region


class TileListProblem(AttentionProblem):
    """A problem that has numbers in every key of a listed tile, and poison elsewhere.

    A listed tile is read whole, from the first key that some query sees according to the spec: keys in it
    that the mask hides contain numbers. With `sparse_tile_kv` (keys per tile), only tiles that some query
    sees contain numbers.
    """

    sparse_tile_kv: int | None = None

    def _finite_keys(self, seen):
        numbers = dataclasses.replace(self.spec, sparsity=None)
        by_numbers = oracle.reachable(numbers, dataclasses.replace(self.step, mask=None, seen=None))
        in_range = [np.maximum.accumulate(visible.any(axis=1))[:, None] for visible in by_numbers]
        if self.sparse_tile_kv is None:
            return [visible | finite for visible, finite in zip(seen, in_range, strict=True)]
        return [
            visible | (finite & self._in_listed_tiles(visible))
            for visible, finite in zip(seen, in_range, strict=True)
        ]

    def _in_listed_tiles(self, visible):
        tile = np.arange(len(visible)) // self.sparse_tile_kv
        listed = np.zeros((tile.max(initial=0) + 1, visible.shape[1]), bool)
        np.logical_or.at(listed, tile, visible)
        return listed[tile]


class TileListCase(TileListProblem, Problem):
    """A tile-list problem of a case of the contract."""

    def __init__(self, case, seed=0, mask=None, sparse_tile_kv=None):
        self.sparse_tile_kv = sparse_tile_kv
        super().__init__(case, seed, mask)

    def check_region(self, region, mask, interpret=None):
        """Check the outputs of the kernels for the region that has all requests."""
        run = functools.partial(attend_region, spec=self.spec, interpret=interpret)
        sinks, slopes = (None if x is None else jnp.asarray(x) for x in (self.sinks, self.slopes))
        arrays = {"query": jnp.asarray(self.query), "kv": self.kv, "metadata": region, "mask": mask}
        self.check(*jax.jit(run)(**arrays, sinks=sinks, alibi_slopes=slopes))
