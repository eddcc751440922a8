"""The contract's problems detect errors: losing a tile of keys changes the results noticeably."""

import numpy as np
import pytest

from tests import contract, oracle
from tests.attention_problems import NEEDLE_EVERY
from tests.contract import CASES, Problem, case_id

# As long as the prefill kernel's: several tiles of every width.
LONG = {"prompts": ([150, 0, 3, 70], [150, 0, 3, 70], 1), "behind": ([70, 3, 131], [270, 130, 132], 1)}


def costs_of_lost_tiles(problem):
    """Return for each (request, KV head, tile of 64 keys) the error of the worst row without it, in
    allowed errors.
    """
    spec, step = problem.spec, problem.step
    exact = oracle.answers(spec, step)
    allowed = oracle.allowed_errors(spec, step, problem.dtype, exact)
    costs = {}
    for r, (answer, bound) in enumerate(zip(exact, allowed, strict=True)):
        for h in range(spec.num_q_heads):
            g, (probs, _) = h // spec.q_heads_per_kv_head, oracle.weights(spec, step, r, h)
            tiles = np.arange(probs.shape[1]) // NEEDLE_EVERY
            for tile in np.unique(tiles[(probs > 0).any(axis=0)]):
                lost = np.where(tiles == tile, probs, 0.0)
                remaining_output, remaining_prob = (
                    answer.out[:, h] - lost @ step.v[r][:, g],
                    1 - lost.sum(axis=1)[:, None],
                )
                changed = np.where(
                    remaining_prob > 1e-9,
                    remaining_output / np.where(remaining_prob > 1e-9, remaining_prob, 1.0),
                    0.0,
                )
                bounds = np.where(bound.out[:, h] > 0, bound.out[:, h], 1.0)
                cost = (np.abs(changed - answer.out[:, h]).max(axis=1) / bounds).max()
                costs[r, g, tile] = max(costs.get((r, g, tile), 0.0), cost)
    return costs


@pytest.mark.parametrize("case", CASES[::6], ids=case_id)
def test_a_lost_tile_of_keys_costs_more_than_rounding(case):
    costs = costs_of_lost_tiles(Problem(case))
    assert costs
    assert min(costs.values()) > 3


@pytest.mark.kernels
@pytest.mark.parametrize("region", LONG)
@pytest.mark.parametrize("change", [{}, {"soft_cap": 5.0}, {"alibi": "linear", "sinks": True}], ids=str)
def test_a_lost_tile_of_a_long_prompt_costs_more_than_rounding(monkeypatch, region, change):
    monkeypatch.setattr(contract, "REGIONS", contract.REGIONS | LONG)
    plain = {name: values[0] for name, values in contract.FACTORS.items()}
    case = plain | {"region": region, "heads": (4, 2), "head_dim": 64, "dtype": "bfloat16"} | change
    costs = costs_of_lost_tiles(Problem(case))
    assert len(costs) >= 8
    assert min(costs.values()) > 3
