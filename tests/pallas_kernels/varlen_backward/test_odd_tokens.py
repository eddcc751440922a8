"""Arrays whose number of tokens is no multiple of 8 are read, and their gradients written, in place."""

import math

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.core import jaxprs_in_params

from pallas_kernels.shared.score import Score
from pallas_kernels.varlen_backward import default_sizes
from tests import aot
from tests.pallas_kernels.varlen_backward.backward_problem import BackwardProblem, Setting
from tests.pallas_kernels.varlen_backward.odd_aot_cases import aot_cases
from tests.pallas_kernels.varlen_backward.test_entry import grads_of, two_blocks

CASES = "tests.pallas_kernels.varlen_backward.odd_aot_cases"


def enlarged_arrays(jaxpr):
    """Return the shapes of all arrays that a program and its functions pad or concatenate."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("pad", "concatenate"):
            found += [x.aval.shape for x in eqn.outvars]
        for inner in jaxprs_in_params(eqn.params):
            found += enlarged_arrays(inner)
    return found


@pytest.mark.parametrize("name", list(aot_cases()))
def test_no_array_of_the_size_of_the_keys_is_padded_or_concatenated(name):
    function, (arrays,) = aot_cases()[name]
    shapes = enlarged_arrays(jax.make_jaxpr(function)(arrays).jaxpr)
    assert shapes  # the copies of the last rows
    assert [shape for shape in shapes if math.prod(shape) >= math.prod(arrays["key"].shape)] == []
    assert [x.shape for x in jax.eval_shape(function, arrays)] == [
        arrays[name].shape for name in ("query", "key", "value")
    ]


# Queries and keys. With several tiles, one tile of each array starts exactly where the array's tail does.
SEVERAL_TILES, PART_OF_A_TILE = ((147, 1, 119), (150, 4, 123)), ((33,), (17,))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("lens", "head_dim", "is_deterministic"),
    [
        (SEVERAL_TILES, 64, False),
        pytest.param(SEVERAL_TILES, 96, False, marks=SLOW),
        pytest.param(SEVERAL_TILES, 128, False, marks=SLOW),
        (PART_OF_A_TILE, 128, False),
        pytest.param(SEVERAL_TILES, 64, True, marks=SLOW),
        (SEVERAL_TILES, 96, True),
        (SEVERAL_TILES, 128, True),
        pytest.param(PART_OF_A_TILE, 128, True, marks=SLOW),
    ],
)
def test_gradients_of_odd_numbers_of_tokens_equal_float64(lens, head_dim, is_deterministic):
    """The incomplete group of 8 rows, which only the tail has, contains tokens, and then 3 rows of NaN."""
    query_lens, seq_lens = lens
    score = Score(scale=head_dim**-0.5)
    setting = Setting(query_lens=query_lens, seq_lens=seq_lens, score=score, head_dim=head_dim, gap=3)
    problem = BackwardProblem(setting)
    assert all(len(x) % 8 > setting.gap for x in problem.arrays.values())
    sizes = two_blocks(default_sizes(head_dim, deterministic=is_deterministic))
    problem.check(grads_of(problem, plgpu.InterpretGPUParams(), sizes))


@pytest.mark.parametrize("head_dim", [96, pytest.param(128, marks=SLOW)])
def test_backward_copies_neither_its_arrays_nor_its_gradients(head_dim):
    """Kernels of heads of 128 read the outputs themselves, so XLA has fewer arrays to copy."""
    aot.require_plugin()
    name = f"d{head_dim}-dq_kernel"
    assert aot.copied_bytes(CASES, [name])[name] < math.prod(aot_cases()[name][1][0]["key"].shape) * 2


@pytest.mark.parametrize("name", [pytest.param("d64", marks=SLOW), "d128"])
def test_mma_instructions_are_not_serialized_for_odd_numbers_of_tokens(name):
    """Heads of 128 need most registers."""
    aot.require_plugin()
    report = aot.reports(CASES, [name])[name]
    assert "serialized" not in report
    assert all(kernel.spilled_bytes <= 600 for kernel in aot.kernels_in(report))
