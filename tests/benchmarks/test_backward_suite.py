"""The suite of gradients: which rows it prints, over what masks, and what a wrong kernel costs."""

import dataclasses
import functools
import re

import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.kernels import backward, backward_cases, flex_attention
from jattn import masks
from pallas_kernels import varlen_backward, varlen_prefill
from pallas_kernels.cases import PrefillCase

LENS = (150, 70)
CASE = PrefillCase(
    name="tiny", q_heads=2, kv_heads=1, head_dim=64, query_lens=LENS, context_lens=(0, 0)
)  # fmt: skip
TIMES = {"us": 3.0, "spread_us": [3.0, 3.0], "kernels_us": {"varlen_backward": 3.0}}


@pytest.fixture
def small(monkeypatch):
    """Masks that are something over a few keys."""
    monkeypatch.setattr(backward_cases, "BLOCK", 32)
    monkeypatch.setattr(backward_cases, "WINDOW", 40)
    monkeypatch.setattr(backward_cases, "COLUMNS", 12)
    monkeypatch.setattr(backward_cases, "SLASHES", 9)
    monkeypatch.setattr(backward_cases, "STRIDES", {"block_size": 16, "local_blocks": 2, "vert_stride": 4})
    monkeypatch.setattr(backward_cases, "document_lens", lambda tokens, seed: (90, tokens - 90))


@pytest.fixture
def rows(monkeypatch, small):
    """Interprets a case's kernels, without a GPU's clock; yields the function that does."""
    monkeypatch.setattr(backward, "kernel_times", lambda run, *arrays: (run(*arrays), TIMES))
    for package, name in ((varlen_prefill, "varlen_prefill"), (varlen_backward, "varlen_backward")):
        kernel = functools.partial(getattr(package, name), interpret=plgpu.InterpretGPUParams())
        monkeypatch.setattr(package, name, kernel)
        few = lambda *args, of=package.default_sizes, **how: dataclasses.replace(of(*args, **how), ctas=2)
        monkeypatch.setattr(package, "default_sizes", few)
    works = lambda modifier: [[backward.Work(case=CASE, modifier=modifier)]]
    return lambda modifier: list(backward.measure_all(works(modifier), has_peer=False))


@pytest.mark.kernels
@pytest.mark.parametrize(
    "modifier", ["sinks", "blocks_0.25", "local_strided", "documents_window", "vertical_slash"]
)
def test_a_row_has_both_passes_and_its_share_of_the_pairs(rows, modifier):
    (row,) = rows(modifier)
    assert (row["share"] < 1) is (modifier != "sinks")
    assert row["errors"].keys() == {"out", "lse", "query", "key", "value"}
    assert max(row["errors"].values()) < backward.TOLERANCE
    assert (row["us"], row["forward_us"], row["forward_lse_us"]) == (3.0, 3.0, 3.0)
    pairs = sum(n * (n + 1) / 2 for n in LENS)
    assert row["tflop_per_s"] == pytest.approx(10 * 2 * 64 * pairs * row["share"] / 3e6, rel=1e-4)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("modifier", "without", "what"),
    [
        ("vertical_slash", ("lists", "mask"), r"the error of \w+'s gradient must be less than 0.02"),
        ("sinks", ("sinks",), r"the error of lse must be less than 0.02"),
    ],
)
def test_a_kernel_that_overlooks_a_modifier_has_no_row(rows, monkeypatch, capsys, modifier, without, what):
    package, name = (
        (varlen_backward, "varlen_backward") if "mask" in without else (varlen_prefill, "varlen_prefill")
    )
    right = getattr(package, name)
    wrong = lambda *args, **given: right(*args, **{k: x for k, x in given.items() if k not in without})
    monkeypatch.setattr(package, name, wrong)
    assert rows(modifier) == []
    assert re.search(what, capsys.readouterr().out)


def test_a_case_that_cannot_be_lowered_costs_its_own_row(rows, monkeypatch, capsys):
    def fails(works):
        raise NotImplementedError("no such case")

    monkeypatch.setattr(backward, "lower", fails)
    assert rows("plain") == []
    assert "tiny plain: NotImplementedError: no such case" in capsys.readouterr().out


@pytest.mark.parametrize("modifier", backward_cases.MASKS)
def test_every_pair_that_a_mask_leaves_is_counted(small, modifier):
    mask = backward_cases.make_mask(CASE, modifier)
    seen = pairs = 0
    for n in LENS:
        drawn = np.tril(masks.dense(mask, n, n, num_q_heads=2, num_kv_heads=1))
        assert np.diagonal(drawn, axis1=1, axis2=2).all()  # no query is without a key
        seen, pairs = seen + int(drawn.sum()), pairs + n * (n + 1)
    assert backward_cases.share_of_pairs(CASE, modifier, mask) == pytest.approx(seen / pairs, rel=1e-12)


@pytest.mark.parametrize(("modifier", "share"), [("plain", 1.0), ("sinks", 1.0), ("full", 300 / 151)])
def test_a_share_is_of_causal_pairs(modifier, share):
    case = dataclasses.replace(CASE, query_lens=(150,), context_lens=(0,))
    assert backward_cases.share_of_pairs(case, modifier, None) == pytest.approx(share, rel=1e-12)


def test_a_sink_weighs_about_as_much_as_half_of_the_keys():
    (sinks,) = backward_cases.per_head(CASE, "sinks").values()
    assert 20 < np.exp(sinks).min() < 55 < np.exp(sinks).max() < 150


@pytest.mark.parametrize("modifier", ["plain", "full", *backward_cases.MASKS])
@pytest.mark.parametrize("lens", [(160,), (90, 70)], ids=str)
def test_flex_attention_is_told_the_pairs_that_the_kernels_see(small, modifier, lens):
    """Of texts of different lengths, one behind the other, none sees another's."""
    case = dataclasses.replace(CASE, query_lens=lens, context_lens=(0,) * len(lens))
    mask = backward_cases.make_mask(case, modifier)
    visible = flex_attention.make_mask_mod(case, modifier, mask, np.asarray)
    place = np.arange(160)
    found = visible(np.zeros(1, int), np.arange(2)[:, None, None], place[:, None], place)
    expected = np.zeros((2, 160, 160), bool)
    for start, n in zip(np.cumsum(lens) - lens, lens, strict=True):
        every = np.ones((2, n, n), bool)
        drawn = every if mask is None else masks.dense(mask, n, n, num_q_heads=2, num_kv_heads=1)
        mine = slice(start, start + n)
        expected[:, mine, mine] = drawn if modifier == "full" else np.tril(drawn)
    np.testing.assert_array_equal(np.broadcast_to(found, expected.shape), expected)


def test_flex_attention_is_told_what_becomes_of_scores():
    capped = flex_attention.make_score_mod(CASE, "soft_cap", np.asarray)
    # torch's tensors have tanh as a method.
    assert capped(Tensor(60.0), 0, 0, 0, 0) == pytest.approx(30 * np.tanh(2.0))
    sloped = flex_attention.make_score_mod(CASE, "alibi", np.asarray)
    assert float(sloped(1.0, 0, 1, 7, 3)) == pytest.approx(1 - 4 * 2.0**-8)
    assert flex_attention.make_score_mod(CASE, "plain", np.asarray) is None


def test_sinks_have_no_peer():
    with pytest.raises(NotImplementedError, match="FlexAttention has no sinks"):
        flex_attention.measure(CASE, "sinks")


class Tensor(float):
    def __truediv__(self, other):
        return Tensor(float(self) / other)

    def tanh(self):
        return np.tanh(self)
