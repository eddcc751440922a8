"""The bench's pictures: masks of each head, mass kept against density, speed against density."""

import pathlib

from matplotlib import colormaps
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from examples.sparsity.measure import Result
from jattn.masks import dense

COLORS = ListedColormap(["#f2f2f2", "#1f4e79"])  # of a pair that is not seen, and of one that is


def draw(results: dict[str, Result], tokens: int, timed_tokens: int, out: pathlib.Path) -> list[pathlib.Path]:
    """Writes the pictures; their paths."""
    written = []
    for name, figure in (
        ("masks", draw_masks(results, tokens)),
        ("mass", draw_mass(results)),
        ("speed", draw_speed(results, timed_tokens)),
    ):
        written.append(out / f"{name}.png")
        figure.savefig(written[-1], dpi=110)
    return written


def draw_masks(results: dict[str, Result], tokens: int) -> Figure:
    """Two patterns a row, one square a head: what the middle layer sees."""
    shown = {name: result for name, result in results.items() if name != "dense"}
    num_heads = next(iter(results.values())).mass.shape[1]
    num_rows = -(-len(shown) // 2)
    figure = Figure(figsize=(2.4 * num_heads, 1.4 * num_rows), layout="constrained")
    axes = figure.subplots(num_rows, 2 * num_heads, squeeze=False).reshape(-1, num_heads)
    for row in axes[len(shown) :]:
        for axis in row:
            axis.set_axis_off()
    for row, (name, result) in zip(axes, shown.items(), strict=False):
        seen = dense(result.mask, tokens, tokens, num_q_heads=num_heads, num_kv_heads=result.num_kv_heads)
        for axis, picture in zip(row, seen, strict=True):
            axis.imshow(picture, cmap=COLORS, vmin=0, vmax=1, interpolation="nearest")
            axis.set_xticks([])
            axis.set_yticks([])
        row[0].set_title(name, fontsize=8, loc="left")
    return figure


def draw_mass(results: dict[str, Result]) -> Figure:
    """Mass kept, and bits per byte, against density."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for nth, (name, result) in enumerate(results.items()):
        color = colormaps["tab20"](nth % 20)
        left.plot(result.density.mean(axis=1), result.mass.mean(axis=1), ".", alpha=0.35, color=color)
        left.plot(result.density.mean(), result.mass.mean(), "o", color=color)
        right.plot(result.density.mean(), result.bits, "o", color=color, label=name)
    left.set(xlabel="density", ylabel="attention mass kept (small: layers)")
    right.set(xlabel="density", ylabel="bits per byte, held out")
    figure.legend(loc="outside lower center", ncols=3, fontsize=7)
    return figure


def draw_speed(results: dict[str, Result], timed_tokens: int) -> Figure:
    """Time of a layer against density."""
    figure = Figure(figsize=(5, 4), layout="constrained")
    axis = figure.subplots()
    for name, result in results.items():
        place = result.speed.density, result.speed.milliseconds
        axis.plot(*place, "o")
        axis.annotate(name, place, fontsize=6, xytext=(4, 2), textcoords="offset points")
    names = ", ".join(sorted({result.speed.implementation for result in results.values()}))
    label = f"ms a layer, {timed_tokens} tokens ({names})"
    axis.set(xlabel="density", ylabel=label, xlim=(0, None), ylim=(0, None))
    return figure
