"""Operations on the KV caches between steps: copy blocks after forks, and free the caches."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jattn.cache.block_copy import copy_blocks

FACTOR = 16  # between sizes: few executables, and padding is cheap

type Pairs = Sequence[tuple[int, int]]


def free_caches(caches: Any) -> None:
    """Free the memory of caches at once, even if other references (such as a traceback) exist."""
    for array in jax.tree.leaves(caches):
        if isinstance(array, jax.Array):
            array.delete()


class BlockCopier:
    """Copies blocks within caches (`jattn.copy_blocks`), with executables for a few numbers of pairs.

    Sliding-window layers with a separate block table are copied separately.
    """

    def __init__(self, max_num_seqs: int, sliding_window_layers: Sequence[bool] = ()) -> None:
        """Prepare the sizes.

        Nothing is compiled yet; each request of a step writes into at most one shared block.

        Args:
            max_num_seqs: Maximum number of requests per step.
            sliding_window_layers: For each layer, whether it is a sliding-window layer with a separate block
                table. Empty: all layers share a block table, in any pytree of caches.
        """
        self._sliding_window_layers = sliding_window_layers
        self._sizes = [1]
        while self._sizes[-1] < max_num_seqs:
            self._sizes.append(FACTOR * self._sizes[-1])
        self._copy = jax.jit(copy_blocks, donate_argnums=0)
        self._executables: dict[tuple[int, int], jax.stages.Compiled] = {}  # by (group, size)

    def compilers(self, caches: Any) -> list[Callable[[], None]]:
        """Return functions that compile the missing executables, each callable in any thread.

        Args:
            caches: Caches to copy within. They are neither used nor donated.
        """
        groups = self._split(caches)
        keys = [(group, size) for group in range(len(groups)) for size in self._sizes]
        missing = [key for key in keys if key not in self._executables]
        lowered = [self._copy.lower(groups[group], np.zeros((size, 2), np.int32)) for group, size in missing]

        def compiler(key: tuple[int, int], lowered: jax.stages.Lowered) -> Callable[[], None]:
            return lambda: self._executables.update({key: lowered.compile()})

        return list(map(compiler, missing, lowered))

    def __call__(self, caches: Any, pairs: Pairs, sliding_window_pairs: Pairs = ()) -> Any:
        """Return the caches with each pair's source block copied to its target. The given caches are donated.

        Args:
            caches: Caches to copy within.
            pairs: (source, target) blocks.
            sliding_window_pairs: (source, target) blocks of layers that have their own blocks.
        """
        if not (pairs or sliding_window_pairs):
            return caches
        groups = self._split(caches)
        for group, group_pairs in enumerate((pairs, sliding_window_pairs)):
            if group_pairs:
                groups[group] = self._copy_group(group, groups[group], group_pairs)
        if not self._sliding_window_layers:
            return groups[0]
        iterators = tuple(map(iter, groups))
        return tuple(next(iterators[is_windowed]) for is_windowed in self._sliding_window_layers)

    def _copy_group(self, group: int, caches: Any, pairs: Pairs) -> Any:
        size = next((size for size in self._sizes if size >= len(pairs)), len(pairs))
        padded = np.full((size, 2), -1, np.int32)
        padded[: len(pairs)] = pairs
        return self._executables.get((group, size), self._copy)(caches, padded)

    def _split(self, caches: Any) -> list[Any]:
        """Return the caches of each group of layers that share blocks."""
        if not self._sliding_window_layers:
            return [caches]
        pairs = list(zip(caches, self._sliding_window_layers, strict=True))
        return [
            tuple(cache for cache, is_windowed in pairs if is_windowed == group) for group in (False, True)
        ]
