"""Plots of masks and schedules."""

import jax.numpy as jnp
import numpy as np
import pytest

from jattn import masks
from jattn.sparsity.plotting import coverage_image, plot, score_image
from jattn.sparsity.tile_schedule import schedule

MASK = masks.Causal() & (masks.OnlyHeads((1,)) | masks.Sinks(16))


def made():
    sizes = {"max_query_len": 48, "max_seq_len": 48, "tile_q": 16, "tile_kv": 16, "num_q_heads": 2}
    return schedule(MASK, jnp.asarray([48]), **sizes)


@pytest.mark.kernels
def test_schedule_is_drawn_per_tile():
    np.testing.assert_array_equal(coverage_image(made())[0], [[1, 0, 0], [2, 0, 0], [2, 0, 0]])
    np.testing.assert_array_equal(coverage_image(made())[1], [[1, 0, 0], [2, 1, 0], [2, 2, 1]])


def test_mask_is_drawn_per_pair():
    picture = coverage_image(MASK, 20, num_q_heads=2)
    np.testing.assert_array_equal(picture[1], 2 * np.tri(20))
    assert picture[0, 19].tolist() == [2] * 16 + [0] * 4


def test_score_function_is_drawn_for_visible_pairs():
    picture = score_image(
        masks.Causal(), 3, lambda s, b, h, q, k: s + (10 * h + q - k).astype(s.dtype), num_q_heads=2
    )
    nan = np.nan
    np.testing.assert_array_equal(picture[1], [[10, nan, nan], [11, 10, nan], [12, 11, 10]])
    with pytest.raises(ValueError, match="num_q_heads can be passed for masks only"):
        score_image(made(), None, lambda s, *_: s)


@pytest.mark.kernels
def test_plot_has_one_panel_per_head():
    pytest.importorskip("matplotlib")
    figure = plot(MASK, 20, num_q_heads=2, score_mod=lambda s, b, h, q, k: s - (q - k).astype(s.dtype))
    assert [axis.get_title() for axis in figure.axes] == ["head 0", "head 1", ""]  # and the color bar
    assert figure.axes[1].images[0].get_clim() == (-19, 0)
    for figure in (plot(MASK, 20, num_q_heads=2), plot(made())):
        assert [axis.get_title() for axis in figure.axes] == ["head 0", "head 1"]
        assert figure.axes[0].images[0].get_array().max() == 2


def test_mask_requires_a_length_and_a_schedule_rejects_it():
    with pytest.raises(ValueError, match="Pass seq_len to plot a mask"):
        coverage_image(MASK)
    with pytest.raises(ValueError, match="seq_len can be passed for masks only"):
        coverage_image(made(), 3)
    with pytest.raises(ValueError, match="num_q_heads can be passed for masks only"):
        coverage_image(made(), num_q_heads=7)
