"""Loss against tokens and time, and what a head sees as it is trained."""

import numpy as np
from jaxtyping import Array, Bool
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from jattn.masks import Mask, dense

COLORS = ListedColormap(["#f2f2f2", "#1f4e79"])  # of a pair that is not seen, and of one that is
STAGES = 4  # of training, of which masks are drawn


def drawn(mask: Mask, tokens: int, q_heads: int, kv_heads: int) -> Bool[Array, "queries keys"]:
    """What the first head sees of a text."""
    return dense(mask, tokens, tokens, num_q_heads=q_heads, num_kv_heads=kv_heads)[0]


def draw_losses(histories: dict[str, dict[str, list[float]]]) -> Figure:
    """Bits a byte, averaged over 20 steps."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, unit in zip(axes, ("tokens", "seconds"), strict=True):
        for name, history in histories.items():
            width = min(20, len(history["bits"]))
            smooth = np.convolve(history["bits"], np.full(width, 1 / width), mode="valid")
            axis.plot(history[unit][width - 1 :], smooth, label=name)
        axis.set_xlabel(unit)
    axes[0].set_ylabel("bits a byte")
    axes[0].legend()
    return figure


def draw_held_out(held: dict[str, dict[str, np.ndarray]]) -> Figure:
    """Bits a byte by place in the text: of whole texts as lines, through the paged cache as dots."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, found in held.items():
        width = -(-found["whole"].shape[1] // 16)
        cuts = np.arange(0, found["whole"].shape[1], width)
        means = {kind: [x[:, cut : cut + width].mean() for cut in cuts] for kind, x in found.items()}
        (line,) = axes.plot(cuts, means["whole"], label=name)
        axes.plot(cuts, means["cached"], "o", color=line.get_color(), markersize=4)
    axes.set_xlabel("place in the text; dots: through the paged cache")
    axes.set_ylabel("held-out bits a byte")
    axes.legend()
    return figure


def draw_masks(seen: dict[str, list[np.ndarray]]) -> Figure:
    """A row a pattern, a square a stage of training."""
    figure = Figure(figsize=(2.2 * STAGES, 2.3 * len(seen)), layout="constrained")
    axes = figure.subplots(len(seen), STAGES, squeeze=False)
    for row, (name, stages) in zip(axes, seen.items(), strict=True):
        for axis, picture in zip(row, stages, strict=False):
            axis.imshow(picture, cmap=COLORS, vmin=0, vmax=1, interpolation="nearest")
        for axis in row:
            axis.set_xticks([])
            axis.set_yticks([])
        row[0].set_ylabel(name)
    return figure
