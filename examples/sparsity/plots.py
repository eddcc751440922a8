"""Plots of the comparison: masks per head, attention mass over density, time over density."""

import pathlib

from matplotlib import colormaps
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from examples.sparsity.measure import Result
from jattn.masks import dense

COLORS = ListedColormap(["#f2f2f2", "#1f4e79"])  # masked out, visible


def save_plots(
    results: dict[str, Result], tokens: int, timed_tokens: int, out: pathlib.Path
) -> list[pathlib.Path]:
    """Save all plots and return their paths."""
    paths = []
    for name, figure in (
        ("masks", draw_masks(results, tokens)),
        ("mass", draw_mass(results)),
        ("speed", draw_speed(results, timed_tokens)),
    ):
        paths.append(out / f"{name}.png")
        figure.savefig(paths[-1], dpi=110)
    return paths


def draw_masks(results: dict[str, Result], tokens: int) -> Figure:
    """Draw the middle layer's mask of each head, two patterns per row."""
    sparse_results = {name: result for name, result in results.items() if name != "dense"}
    num_heads = next(iter(results.values())).mass.shape[1]
    num_rows = -(-len(sparse_results) // 2)
    figure = Figure(figsize=(2.4 * num_heads, 1.4 * num_rows), layout="constrained")
    axes = figure.subplots(num_rows, 2 * num_heads, squeeze=False).reshape(-1, num_heads)
    for row in axes[len(sparse_results) :]:
        for axis in row:
            axis.set_axis_off()
    for row, (name, result) in zip(axes, sparse_results.items(), strict=False):
        head_masks = dense(
            result.mask, tokens, tokens, num_q_heads=num_heads, num_kv_heads=result.num_kv_heads
        )
        for axis, head_mask in zip(row, head_masks, strict=True):
            axis.imshow(head_mask, cmap=COLORS, vmin=0, vmax=1, interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
        row[0].set_title(name, fontsize=8, loc="left")
    return figure


def draw_mass(results: dict[str, Result]) -> Figure:
    """Draw retained attention mass and bits per byte over density."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for i, (name, result) in enumerate(results.items()):
        color = colormaps["tab20"](i % 20)
        left.plot(result.density.mean(axis=1), result.mass.mean(axis=1), ".", alpha=0.35, color=color)
        left.plot(result.density.mean(), result.mass.mean(), "o", color=color)
        right.plot(result.density.mean(), result.bits, "o", color=color, label=name)
    left.set(xlabel="density", ylabel="retained attention mass (small: layers)")
    right.set(xlabel="density", ylabel="bits per byte, held out")
    figure.legend(loc="outside lower center", ncols=3, fontsize=7)
    return figure


def draw_speed(results: dict[str, Result], timed_tokens: int) -> Figure:
    """Draw the time per layer over density."""
    figure = Figure(figsize=(5, 4), layout="constrained")
    axis = figure.subplots()
    for name, result in results.items():
        point = result.speed.density, result.speed.milliseconds
        axis.plot(*point, "o")
        axis.annotate(name, point, fontsize=6, xytext=(4, 2), textcoords="offset points")
    names = ", ".join(sorted({result.speed.implementation for result in results.values()}))
    label = f"ms per layer, {timed_tokens} tokens ({names})"
    axis.set(xlabel="density", ylabel=label, xlim=(0, None), ylim=(0, None))
    return figure
