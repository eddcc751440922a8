"""The check of BackwardProblem detects gradients that lack any one tile."""

import numpy as np
import pytest

from pallas_kernels.shared.score import Score
from tests.pallas_kernels.varlen_backward.backward_problem import (
    GRADIENTS,
    BackwardProblem,
    Setting,
    visible_keys,
)

TILE, TOKENS = 64, 290
FIRST_ROWS = range(0, TOKENS - TILE + 1, 16)  # a tile begins at any row of its request


def weights_of(problem):
    """Return P and dS of a single request in float64: [q_heads, queries, keys]."""
    q, k, v, grad, out = (
        np.asarray(problem.arrays[name], np.float64).swapaxes(0, 1)
        for name in ("query", "key", "value", "grad_out", "out")
    )
    score, tokens = problem.setting.score, q.shape[1]
    visible = visible_keys(score, np.arange(tokens), tokens)
    s = np.where(visible, q @ k.swapaxes(1, 2) * score.scale, -np.inf)
    p = np.exp(s - problem.lse[:, :, None].astype(np.float64))
    expected = (grad * out).sum(axis=2, keepdims=True)
    return p, p * (grad @ v.swapaxes(1, 2) - expected) * score.scale


def gradients(problem, p, ds):
    """Return the gradients for these P and dS."""
    q, k, grad = (np.asarray(problem.arrays[name], np.float64) for name in ("query", "key", "grad_out"))
    spread = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
    grads = (
        np.einsum("hqk,khd->qhd", ds, spread),
        np.einsum("hqk,qhd->khd", ds, q).sum(axis=1, keepdims=True),
        np.einsum("hqk,qhd->khd", p, grad).sum(axis=1, keepdims=True),
    )
    return dict(zip(GRADIENTS, grads, strict=True))


@pytest.mark.parametrize("window", [(None, None), (150, 0)], ids=str)
def test_any_lost_tile_is_detected(window):
    lens, score = (TOKENS,), Score(scale=0.125, window=window)
    problem = BackwardProblem(Setting(query_lens=lens, seq_lens=lens, score=score, heads=(2, 1), gap=0))
    p, ds = weights_of(problem)
    right = gradients(problem, p, ds)
    problem.check(right.values())
    visible = visible_keys(score, np.arange(TOKENS), TOKENS)
    tiles = [
        np.s_[head, first : first + TILE, key : key + TILE]
        for head in range(2)
        for first in FIRST_ROWS
        for key in FIRST_ROWS
        if visible[first : first + TILE, key : key + TILE].all()
    ]
    assert len(tiles) > 40
    for tile in tiles:
        is_kept = np.ones_like(p)
        is_kept[tile] = 0
        wrong = gradients(problem, p * is_kept, ds * is_kept)
        for name in GRADIENTS:  # a kernel may lose it on its way to one of them
            with pytest.raises(AssertionError, match=f"{name}'s gradient is off by"):
                problem.check((right | {name: wrong[name]}).values())
