"""How far back a model looks: keys that no layer sees any more need no place."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from flax import nnx

from jattn.nn import PagedAttention
from jattn.serving.engine.block_manager import BlockManager
from jattn.serving.engine.block_tables import NULL_BLOCK

SEES_ALL = (None, None)  # of a layer without a window or chunks


@dataclasses.dataclass(frozen=True)
class Reach:
    """Of a model whose layers all have a window or chunks, or of those layers of it that have.

    Attributes:
        layers: For each kind of layer its left window and its chunk_size, as `AttentionSpec` has them; one of
            them may be None.
    """

    layers: frozenset[tuple[int | None, int | None]]

    def first_visible(self, position: int) -> int:
        """The first position that some layer sees from `position` or from a later one."""
        return min(_first_visible(position, *layer) for layer in self.layers)

    @property
    def span(self) -> int:
        """Most positions before a query that it may see."""
        reaches = ([r for r in (left, chunk and chunk - 1) if r is not None] for left, chunk in self.layers)
        return max(map(min, reaches))

    def blocks_at_once(self, num_new: int, block_size: int) -> int:
        """Most blocks that a request with so many new tokens in a step has need of at once."""
        return -(-(self.span + num_new) // block_size) + 1

    def blocks_of_all(self, max_num_seqs: int, max_num_batched_tokens: int, block_size: int) -> int:
        """Most blocks that so many requests have need of, with so many new tokens in a step in all.

        Each may hold the block before its window and begin another behind it.
        """
        return max_num_seqs * (-(-self.span // block_size) + 2) + -(-max_num_batched_tokens // block_size)

    def fits(self, num_tokens: int, block_size: int) -> bool:
        """Whether a request of any length runs, a token at a time, in a cache of so many tokens."""
        return num_tokens >= self.span + block_size


def _first_visible(position: int, left: int | None, chunk_size: int | None) -> int:
    in_window = 0 if left is None else position - left
    in_chunk = 0 if chunk_size is None else position // chunk_size * chunk_size
    return max(in_window, in_chunk, 0)


def reach_of(model: Any) -> Reach | None:
    """What a model's PagedAttention layers say; None where one of them sees all, or there is none."""
    layers = _layers_of(model)
    return Reach(layers) if layers and SEES_ALL not in layers else None


def near_layers_of(model: Any) -> tuple[bool, ...]:
    """Which layers of a model have blocks of their own, which see less than others; empty = none."""
    return tuple(getattr(model, "near_layers", ()))


def near_reach_of(model: Any) -> Reach | None:
    """What the layers say that have blocks of their own; None where there are none."""
    return Reach(_layers_of(model) - {SEES_ALL}) if near_layers_of(model) else None


def _layers_of(model: Any) -> frozenset[tuple[int | None, int | None]]:
    specs = [module.spec for _, module in nnx.iter_modules(model) if isinstance(module, PagedAttention)]
    return frozenset((spec.window[0] if spec.window else None, spec.chunk_size) for spec in specs)


def turning_length_of(model: Any) -> int | None:
    """Tokens of a request beyond which a model turns all its keys otherwise; None = of no length."""
    ropes = [module.rope for _, module in nnx.iter_modules(model) if isinstance(module, PagedAttention)]
    lengths: list[int | None] = [getattr(rope, "turning_length", None) for rope in ropes]
    return min((length for length in lengths if length is not None), default=None)


def found_within(reach: Reach, manager: BlockManager, digests: Sequence[bytes]) -> tuple[int, ...]:
    """The published blocks of the longest beginning behind which a request may go on.

    Only those must be there that the next token sees; in the place of those before stands the null block.

    Source: vLLM V1 `SlidingWindowManager.find_longest_cache_hit`.
    """
    size, first_there, best = manager.block_size, 0, (0, 0)
    for count, digest in enumerate(digests, 1):
        if not manager.is_published(digest):
            first_there = count
        first = min(reach.first_visible(count * size) // size, count)
        if first_there <= first:
            best = first, count
    first, count = best
    return (NULL_BLOCK,) * first + manager.find(digests[first:count])
