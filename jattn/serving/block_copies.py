"""Copies of blocks between an engine's steps: what forks write into is theirs alone."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jattn.cache.move import copy_blocks

FACTOR = 4  # from one size to the next: few to compile, and what a copy is padded with costs no step


class BlockCopies:
    """`jattn.copy_blocks` within caches of one shape, compiled ahead for a few numbers of pairs."""

    def __init__(self, max_num_seqs: int) -> None:
        """Compiles nothing yet; each request of a step writes into one shared block at most."""
        self._sizes = [1]
        while self._sizes[-1] < max_num_seqs:
            self._sizes.append(FACTOR * self._sizes[-1])
        self._copy = jax.jit(copy_blocks, donate_argnums=0)
        self._executables: dict[int, jax.stages.Compiled] = {}

    def compilers(self, caches: Any) -> list[Callable[[], None]]:
        """What compiles those that are not compiled yet, each to be called in whatever thread.

        Args:
            caches: Those that will be copied within. Neither run nor donated.
        """
        missing = [size for size in self._sizes if size not in self._executables]
        lowered = [self._copy.lower(caches, np.zeros((size, 2), np.int32)) for size in missing]

        def compiler(size: int, lowered: jax.stages.Lowered) -> Callable[[], None]:
            return lambda: self._executables.update({size: lowered.compile()})

        return list(map(compiler, missing, lowered))

    def __call__(self, caches: Any, pairs: Sequence[tuple[int, int]]) -> Any:
        """The caches, each pair's source copied onto its target. Those given are donated."""
        size = next((size for size in self._sizes if size >= len(pairs)), len(pairs))
        padded = np.full((size, 2), -1, np.int32)
        padded[: len(pairs)] = pairs
        return self._executables.get(size, self._copy)(caches, padded)
