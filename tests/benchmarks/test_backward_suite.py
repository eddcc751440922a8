"""The benchmark of gradients: its rows, its masks, and rows that a wrong kernel must not get."""

import dataclasses
import functools
import re

import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks.kernels import backward, backward_cases, flex_attention, score_mods
from benchmarks.kernels.cases import PrefillCase
from jattn import masks
from jattn.implementations.mosaic_gpu import prefill as forward
from pallas_kernels import varlen_backward, varlen_prefill

LENS = (150, 70)
CASE = PrefillCase(
    name="tiny", q_heads=2, kv_heads=1, head_dim=64, query_lens=LENS, context_lens=(0, 0)
)  # fmt: skip
TIMES = {"us": 3.0, "spread_us": [3.0, 3.0], "kernels_us": {"varlen_backward": 3.0}}


@pytest.fixture
def small(monkeypatch):
    """Use masks that are not trivial over a few keys."""
    monkeypatch.setattr(backward_cases, "WINDOW", 40)
    monkeypatch.setattr(backward_cases, "COLUMNS", 12)
    monkeypatch.setattr(backward_cases, "SELECTED_KEYS", 20)
    monkeypatch.setattr(backward_cases, "SLASHES", 9)
    monkeypatch.setattr(backward_cases, "STRIDES", {"block_size": 16, "local_blocks": 2, "vert_stride": 4})
    monkeypatch.setattr(backward_cases, "document_lens", lambda tokens, seed: (90, tokens - 90))


@pytest.fixture
def rows(monkeypatch, small):
    """Return a function that runs a case with interpreted kernels and fixed times."""
    monkeypatch.setattr(backward, "kernel_times", lambda run, *arrays: (run(*arrays), TIMES))
    for package in (varlen_prefill, varlen_backward):
        few = lambda *args, default_sizes=package.default_sizes, **options: dataclasses.replace(
            default_sizes(*args, **options), ctas=2
        )
        monkeypatch.setattr(package, "default_sizes", few)
    work = functools.partial(backward.Work, case=CASE, interpret=plgpu.InterpretGPUParams())
    return lambda modifier: list(backward.measure_all([[work(modifier=modifier)]], has_peer=False))


@pytest.mark.kernels
def test_row_has_both_passes_and_the_fraction_of_visible_pairs(rows):
    (row,) = rows("documents_window")
    assert row["share"] < 1
    assert row["errors"].keys() == {"out", "lse", "query", "key", "value"}
    assert max(row["errors"].values()) < backward.TOLERANCE
    assert (row["us"], row["forward_us"], row["forward_lse_us"]) == (3.0, 3.0, 3.0)
    pairs = sum(n * (n + 1) / 2 for n in LENS)
    assert row["tflop_per_s"] == pytest.approx(10 * 2 * 64 * pairs * row["share"] / 3e6, rel=1e-4)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("modifier", "without", "message"),
    [
        ("relative_table", ("score_mod",), r"the error of \w+ must be less than 0.02"),
        ("vertical_slash", ("lists", "mask"), r"the error of \w+'s gradient must be less than 0.02"),
        ("sinks", ("sinks",), r"the error of lse must be less than 0.02"),
    ],
)
def test_kernel_that_ignores_a_modifier_gets_no_row(rows, monkeypatch, capsys, modifier, without, message):
    module, name = (varlen_backward, "varlen_backward") if "mask" in without else (forward, "varlen_prefill")
    kernel = getattr(module, name)
    faulty_kernel = lambda *args, **options: kernel(
        *args, **{k: x for k, x in options.items() if k not in without}
    )
    monkeypatch.setattr(module, name, faulty_kernel)
    assert rows(modifier) == []
    assert re.search(message, capsys.readouterr().out)


@pytest.mark.kernels
@pytest.mark.parametrize("modifier", backward_cases.MASKS)
def test_fraction_of_pairs_equals_the_dense_mask(small, modifier):
    mask = backward_cases.make_mask(CASE, modifier)
    seen = pairs = 0
    for n in LENS:
        drawn = np.tril(masks.dense(mask, n, n, num_q_heads=2, num_kv_heads=1))
        assert np.diagonal(drawn, axis1=1, axis2=2).all()  # no query is without a key
        seen, pairs = seen + int(drawn.sum()), pairs + n * (n + 1)
    assert backward_cases.share_of_pairs(CASE, modifier, mask) == pytest.approx(seen / pairs, rel=1e-12)


@pytest.mark.parametrize(("modifier", "fraction"), [("plain", 1.0), ("sinks", 1.0), ("full", 300 / 151)])
def test_fraction_of_pairs_is_relative_to_causal_pairs(modifier, fraction):
    case = dataclasses.replace(CASE, query_lens=(150,), context_lens=(0,))
    assert backward_cases.share_of_pairs(case, modifier, None) == pytest.approx(fraction, rel=1e-12)


@pytest.mark.kernels
@pytest.mark.parametrize("modifier", ["plain", "full", *backward_cases.MASKS])
@pytest.mark.parametrize("lens", [(160,), (90, 70)], ids=str)
def test_flex_attention_mask_equals_that_of_the_kernels(small, modifier, lens):
    """Documents of different lengths follow each other and do not see each other."""
    case = dataclasses.replace(CASE, query_lens=lens, context_lens=(0,) * len(lens))
    mask = backward_cases.make_mask(case, modifier)
    visible = flex_attention.make_mask_mod(case, modifier, mask, np.asarray)
    positions = np.arange(160)
    actual = visible(np.zeros(1, int), np.arange(2)[:, None, None], positions[:, None], positions)
    expected = np.zeros((2, 160, 160), bool)
    for start, n in zip(np.cumsum(lens) - lens, lens, strict=True):
        all_pairs = np.ones((2, n, n), bool)
        drawn = all_pairs if mask is None else masks.dense(mask, n, n, num_q_heads=2, num_kv_heads=1)
        document = slice(start, start + n)
        expected[:, document, document] = drawn if modifier == "full" else np.tril(drawn)
    np.testing.assert_array_equal(np.broadcast_to(actual, expected.shape), expected)


def test_flex_attention_score_mods_equal_those_of_the_kernels():
    capped = flex_attention.make_score_mod(CASE, "soft_cap", np.asarray)
    # torch's tensors have tanh as a method.
    assert capped(Tensor(60.0), 0, 0, 0, 0) == pytest.approx(30 * np.tanh(2.0))
    sloped = flex_attention.make_score_mod(CASE, "alibi", np.asarray)
    assert float(sloped(1.0, 0, 1, 7, 3)) == pytest.approx(1 - 4 * 2.0**-8)
    biased = flex_attention.make_score_mod(CASE, "relative_table", np.asarray)
    table = score_mods.relative_table(2)
    assert float(biased(1.0, 0, 1, np.int32(70), np.int32(3))) == pytest.approx(1 + table[1, 32])
    assert float(biased(1.0, 0, 1, np.int32(7), np.int32(3))) == pytest.approx(1 + table[1, 4])
    assert flex_attention.make_score_mod(CASE, "plain", np.asarray) is None


class Tensor(float):
    def __truediv__(self, divisor):
        return Tensor(float(self) / divisor)

    def tanh(self):
        return np.tanh(self)
