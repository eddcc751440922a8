"""What an engine does to caches between its steps: it copies blocks that forks write into, or frees all."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jattn.cache.block_copy import copy_blocks

FACTOR = 4  # from one size to the next: few to compile, and what a copy is padded with costs no step

type Pairs = Sequence[tuple[int, int]]


def free(caches: Any) -> None:
    """Gives the memory of caches back at once, whoever has them: the traceback of a failed call does."""
    for array in jax.tree.leaves(caches):
        if isinstance(array, jax.Array):
            array.delete()


class BlockCopies:
    """`jattn.copy_blocks` within caches of one shape, compiled ahead for a few numbers of pairs.

    Layers that have blocks of their own are copied apart from the others.
    """

    def __init__(self, max_num_seqs: int, near_layers: Sequence[bool] = ()) -> None:
        """Compiles nothing yet; each request of a step writes into one shared block at most.

        Args:
            max_num_seqs: Most requests of a step.
            near_layers: Which layers have blocks of their own; empty = all share theirs, in caches of any
                structure.
        """
        self._near_layers = near_layers
        self._sizes = [1]
        while self._sizes[-1] < max_num_seqs:
            self._sizes.append(FACTOR * self._sizes[-1])
        self._copy = jax.jit(copy_blocks, donate_argnums=0)
        self._executables: dict[tuple[int, int], jax.stages.Compiled] = {}  # by group and size

    def compilers(self, caches: Any) -> list[Callable[[], None]]:
        """What compiles those that are not compiled yet, each to be called in whatever thread.

        Args:
            caches: Those that will be copied within. Neither run nor donated.
        """
        groups = self._split(caches)
        every = [(nth, size) for nth in range(len(groups)) for size in self._sizes]
        missing = [key for key in every if key not in self._executables]
        lowered = [self._copy.lower(groups[nth], np.zeros((size, 2), np.int32)) for nth, size in missing]

        def compiler(key: tuple[int, int], lowered: jax.stages.Lowered) -> Callable[[], None]:
            return lambda: self._executables.update({key: lowered.compile()})

        return list(map(compiler, missing, lowered))

    def __call__(self, caches: Any, pairs: Pairs, near_pairs: Pairs = ()) -> Any:
        """The caches, each pair's source copied onto its target. Those given are donated.

        Args:
            caches: Those to copy within.
            pairs: (source, target) blocks.
            near_pairs: Likewise, in layers that have blocks of their own.
        """
        if not (pairs or near_pairs):
            return caches
        groups = self._split(caches)
        for nth, of_group in enumerate((pairs, near_pairs)):
            if of_group:
                groups[nth] = self._copied(nth, groups[nth], of_group)
        if not self._near_layers:
            return groups[0]
        each = tuple(map(iter, groups))
        return tuple(next(each[is_near]) for is_near in self._near_layers)

    def _copied(self, nth: int, caches: Any, pairs: Pairs) -> Any:
        size = next((size for size in self._sizes if size >= len(pairs)), len(pairs))
        padded = np.full((size, 2), -1, np.int32)
        padded[: len(pairs)] = pairs
        return self._executables.get((nth, size), self._copy)(caches, padded)

    def _split(self, caches: Any) -> list[Any]:
        """Those of layers that share blocks, together."""
        if not self._near_layers:
            return [caches]
        pairs = list(zip(caches, self._near_layers, strict=True))
        return [tuple(cache for cache, near in pairs if near == is_near) for is_near in (False, True)]
