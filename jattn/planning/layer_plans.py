"""What serves a kind of layer, and choices as lines of text."""

import dataclasses
from collections.abc import Sequence

from jattn.implementations.choice import Choice
from jattn.implementations.layers import Layer
from jattn.metadata.regions import REGIONS

COLUMNS = ("layer", "region", "implementation", "tiles", "split", "reason")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """What serves a kind of layer.

    Attributes:
        layer: The kind of layer.
        is_for_any_cache: No kernel was in question, so that the choice holds however keys are stored.
        decode: In the decode region; None without one.
        prefill: In the prefill region; None without one.
        works: Which of the plan's works each of the two is given; None = none, or one of the layer's own.
    """

    layer: Layer
    is_for_any_cache: bool
    decode: Choice | None
    prefill: Choice | None
    works: tuple[int | None, int | None] = (None, None)

    def covers(self, layer: Layer) -> bool:
        """Whether a layer is of this kind."""
        return layer == self.layer or (self.is_for_any_cache and layer.spec == self.layer.spec)

    @property
    def choices(self) -> tuple[tuple[str, Choice], ...]:
        """The regions that there are, by name, and what serves them."""
        pairs = zip(REGIONS, (self.decode, self.prefill), strict=True)
        return tuple((name, choice) for name, choice in pairs if choice is not None)


def table_lines(layers: Sequence[LayerPlan]) -> list[tuple[str, ...]]:
    """COLUMNS of each kind of layer and region."""
    return [
        (
            str(one.layer),
            region,
            choice.implementation if choice.kernel is None else f"{choice.implementation} {choice.kernel}",
            "" if choice.kernel is None else choice.kernel.tiles,
            "" if choice.kernel is None else choice.kernel.split,
            choice.reason or "",
        )
        for one in layers
        for region, choice in one.choices
    ]


def table(layers: Sequence[LayerPlan]) -> str:
    """Choices as lines of text, a kind of layer and a region each."""
    return aligned([COLUMNS, *table_lines(layers)])


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row is its head."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)
