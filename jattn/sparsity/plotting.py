"""Pictures of masks and schedules; needs matplotlib, the `plot` extra."""

from typing import TYPE_CHECKING, Any

import numpy as np

from jattn.masks import Mask, dense
from jattn.masks.checks import require_ints
from jattn.sparsity.tile_schedule import TileSchedule, expand_schedule
from pallas_kernels.checks import require

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EMPTY, PARTIAL, FULL = 0, 1, 2
COLORS = ("#f2f2f2", "#8fb8de", "#1f4e79")


def plot(
    what: Mask | TileSchedule, seq_len: int | None = None, *, num_heads: int = 4, **options: Any
) -> "Figure":
    """Draws a mask pair by pair, or a schedule tile by tile; one square a head.

    Args:
        what: A mask, or the schedule of one; of a schedule every tile of queries is drawn, row after row.
        seq_len: Of a mask: queries and keys.
        num_heads: How many query heads to draw at most: the first ones. One, where all see the same.
        options: Of a mask: `dense`'s; num_q_heads where it tells heads apart by their numbers.

    Raises:
        ValueError: seq_len is not given for a mask; it or an option is for a schedule; or as `dense`.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    heads = classes(what, seq_len, num_heads=num_heads, **options)
    figure = Figure(figsize=(2.4 * len(heads), 2.7), layout="constrained")
    axes = figure.subplots(1, len(heads), squeeze=False, sharex=True, sharey=True)[0]
    for head, (axis, picture) in enumerate(zip(axes, heads, strict=True)):
        axis.imshow(picture, cmap=ListedColormap(COLORS), vmin=EMPTY, vmax=FULL, interpolation="nearest")
        axis.set_title(f"head {head}", fontsize=9)
        axis.tick_params(labelsize=7)
    unit = "tile of " if isinstance(what, TileSchedule) else ""
    axes[0].set_ylabel(f"{unit}queries", fontsize=8)
    figure.supxlabel(f"{unit}keys", fontsize=8)
    return figure


def classes(
    what: Mask | TileSchedule, seq_len: int | None = None, *, num_heads: int = 4, **options: Any
) -> np.ndarray:
    """What `plot` draws: [heads, queries, keys] of 0 = not seen, 1 = in part, 2 = seen."""
    require_ints(1, num_heads=num_heads)
    is_schedule = isinstance(what, TileSchedule)
    rule = "be given for a mask, and for a mask only"
    require(is_schedule == (seq_len is None), "seq_len", rule, seq_len)
    if isinstance(what, TileSchedule):
        require(not options, "options", "be given for a mask only", ", ".join(options))
        partial, full = (np.asarray(x).swapaxes(0, 1) for x in expand_schedule(what))
        return (partial * PARTIAL + full * FULL)[:num_heads]
    assert seq_len is not None
    return np.asarray(dense(what, seq_len, seq_len, **options))[:num_heads] * FULL
