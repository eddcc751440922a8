"""Plots of masks, scores and schedules; needs matplotlib (the `plot` extra)."""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.masks import Mask, dense
from jattn.masks.checks import require_ints
from jattn.score_mod import ScoreFunction, ScoreMod, as_score_mod
from jattn.sparsity.tile_schedule import TileSchedule, expand_schedule

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EMPTY, PARTIAL, FULL = 0, 1, 2
COLORS = ("#f2f2f2", "#8fb8de", "#1f4e79")


def plot(
    mask_or_schedule: Mask | TileSchedule,
    seq_len: int | None = None,
    *,
    num_heads: int = 4,
    score_mod: ScoreMod | ScoreFunction | None = None,
    **dense_kwargs: Any,
) -> "Figure":
    """Plot a mask or the scores of its pairs, or a schedule by tiles, with one square per head.

    Args:
        mask_or_schedule: Mask or schedule to plot. All query tiles of a schedule are drawn, row after row.
        seq_len: Number of queries and keys of a mask; None for a schedule.
        num_heads: Maximum number of query heads to plot. A mask that does not depend on heads is drawn once.
        score_mod: Score function of a mask's layer. The colors are then what it makes of a score of 0, for
            the visible pairs of the first row of the batch.
        **dense_kwargs: Keyword arguments of `dense` for a mask, such as num_q_heads.

    Raises:
        ValueError: If seq_len is missing for a mask; if seq_len or an option is given for a schedule; or if
            `dense` rejects the mask.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    colors: dict[str, Any] = {"cmap": ListedColormap(COLORS), "vmin": EMPTY, "vmax": FULL}
    if score_mod is None:
        heads = coverage_image(mask_or_schedule, seq_len, num_heads=num_heads, **dense_kwargs)
    else:
        heads = score_image(mask_or_schedule, seq_len, score_mod, num_heads=num_heads, **dense_kwargs)
        colors = {"cmap": "viridis", "vmin": np.nanmin(heads), "vmax": np.nanmax(heads)}
    figure = Figure(figsize=(2.4 * len(heads), 2.7), layout="constrained")
    axes = figure.subplots(1, len(heads), squeeze=False, sharex=True, sharey=True)[0]
    for head, (axis, image) in enumerate(zip(axes, heads, strict=True)):
        picture = axis.imshow(image, interpolation="nearest", **colors)
        axis.set_title(f"head {head}", fontsize=9)
        axis.tick_params(labelsize=7)
    if score_mod is not None:
        figure.colorbar(picture, ax=axes, label="score", shrink=0.7)
    is_schedule = isinstance(mask_or_schedule, TileSchedule)
    axes[0].set_ylabel("query tile" if is_schedule else "query", fontsize=8)
    figure.supxlabel("key tile" if is_schedule else "key", fontsize=8)
    return figure


def coverage_image(
    mask_or_schedule: Mask | TileSchedule,
    seq_len: int | None = None,
    *,
    num_heads: int = 4,
    **dense_kwargs: Any,
) -> np.ndarray:
    """Return the image that `plot` draws: [heads, queries, keys] .

    It has EMPTY or FULL per pair of a mask, or EMPTY, PARTIAL or FULL per tile of a schedule.
    """
    require_ints(1, num_heads=num_heads)
    if isinstance(mask_or_schedule, TileSchedule):
        if seq_len is not None or dense_kwargs:
            names = ", ".join(["seq_len"] * (seq_len is not None) + list(dense_kwargs))
            raise ValueError(f"{names} can be passed for masks only. Omit them for a TileSchedule.")
        partial, full = (np.asarray(x).swapaxes(0, 1) for x in expand_schedule(mask_or_schedule))
        return (partial * PARTIAL + full * FULL)[:num_heads]
    if seq_len is None:
        raise ValueError("Pass seq_len to plot a mask.")
    return np.asarray(dense(mask_or_schedule, seq_len, seq_len, **dense_kwargs))[:num_heads] * FULL


def score_image(
    mask: Mask | TileSchedule,
    seq_len: int | None,
    score_mod: ScoreMod | ScoreFunction,
    *,
    num_heads: int = 4,
    num_q_heads: int = 1,
    **dense_kwargs: Any,
) -> np.ndarray:
    """Return the scores that `plot` draws: [heads, queries, keys], NaN for pairs that are not visible."""
    visible = (
        coverage_image(mask, seq_len, num_heads=num_heads, num_q_heads=num_q_heads, **dense_kwargs) > EMPTY
    )
    shape = min(num_heads, num_q_heads), *visible.shape[1:]
    head, query, key = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in range(3))
    modify = as_score_mod(score_mod)
    assert modify is not None
    scores = modify(jnp.zeros(shape), jnp.int32(0), head, query, key)
    return np.where(visible, np.asarray(scores), np.nan)
