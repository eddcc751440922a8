"""Plots of the losses, the held-out bits and the masks during training."""

import numpy as np
from jaxtyping import Array, Bool
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from jattn.masks import Mask, dense

COLORS = ListedColormap(["#f2f2f2", "#1f4e79"])  # masked out, visible
NUM_STAGES = 4  # moments of the training at which masks are plotted


def first_head_mask(mask: Mask, tokens: int, q_heads: int, kv_heads: int) -> Bool[Array, "queries keys"]:
    """Return the mask of the first head."""
    return dense(mask, tokens, tokens, num_q_heads=q_heads, num_kv_heads=kv_heads)[0]


def draw_losses(histories: dict[str, dict[str, list[float]]]) -> Figure:
    """Draw the training loss over tokens and over time, averaged over 20 steps."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for axis, unit in zip(axes, ("tokens", "seconds"), strict=True):
        for name, history in histories.items():
            width = min(20, len(history["bits"]))
            smooth = np.convolve(history["bits"], np.full(width, 1 / width), mode="valid")
            axis.plot(history[unit][width - 1 :], smooth, label=name)
        axis.set_xlabel(unit)
    axes[0].set_ylabel("bits per byte")
    axes[0].legend()
    return figure


def draw_held_out(held_out: dict[str, dict[str, np.ndarray]]) -> Figure:
    """Draw the held-out loss by position: full sequences as lines, decode with the paged cache as dots."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    for name, bits in held_out.items():
        width = -(-bits["whole"].shape[1] // 16)
        starts = np.arange(0, bits["whole"].shape[1], width)
        means = {run: [x[:, start : start + width].mean() for start in starts] for run, x in bits.items()}
        (line,) = axes.plot(starts, means["whole"], label=name)
        axes.plot(starts, means["cached"], "o", color=line.get_color(), markersize=4)
    axes.set_xlabel("position; dots: decode with the paged cache")
    axes.set_ylabel("held-out bits per byte")
    axes.legend()
    return figure


def draw_masks(stage_masks: dict[str, list[np.ndarray]]) -> Figure:
    """Draw masks: one row per pattern, one column per stage of the training."""
    figure = Figure(figsize=(2.2 * NUM_STAGES, 2.3 * len(stage_masks)), layout="constrained")
    axes = figure.subplots(len(stage_masks), NUM_STAGES, squeeze=False)
    for row, (name, stages) in zip(axes, stage_masks.items(), strict=True):
        for axis, mask in zip(row, stages, strict=False):
            axis.imshow(mask, cmap=COLORS, vmin=0, vmax=1, interpolation="nearest")
        for axis in row:
            axis.set_xticks([])
            axis.set_yticks([])
        row[0].set_ylabel(name)
    return figure
