"""A step's kernels are lowered and compiled once per kind of layer, for any number of layers."""

import pytest

from tests import aot
from tests.models.decoder_aot_cases import NUM_LAYERS

MODULE = "tests.models.decoder_aot_cases"
pytestmark = pytest.mark.kernels


def test_kernels_are_lowered_once_for_any_number_of_layers():
    aot.require_plugin()
    # Gemma2's windowed and full layers are two kinds, each with its attention kernels.
    assert aot.calls_lowered(MODULE, [f"gemma2-{n}" for n in NUM_LAYERS]) == {"gemma2-2": 8, "gemma2-4": 8}


def test_ptxas_runs_once_per_kernel_for_several_layers():
    aot.require_plugin()
    (report,) = aot.reports(MODULE, [f"qwen3-{NUM_LAYERS[-1]}"], is_empty=True).values()
    # Norm, write, decode, combine, and the prompts' kernel.
    assert (aot.calls_in(report), len(aot.kernels_in(report))) == (5, 5)
