"""A step's kernels are lowered and compiled once per kind of layer, for any number of layers."""

import pytest

from tests import aot
from tests.models.decoder_aot_cases import NUM_LAYERS, aot_cases

MODULE = "tests.models.decoder_aot_cases"
pytestmark = pytest.mark.kernels


def test_kernels_are_lowered_once_for_any_number_of_layers():
    aot.require_plugin()
    # Norm, write, decode, merge; and the prompts' kernel. Gemma2's windowed and full layers are two kinds.
    kernels = {"qwen3": 5, "gemma2": 8}
    expected = {f"{family}-{n}": count for family, count in kernels.items() for n in NUM_LAYERS}
    assert aot.calls_lowered(MODULE, list(aot_cases())) == expected


def test_ptxas_runs_once_per_kernel_for_several_layers():
    aot.require_plugin()
    (kernels,) = aot.compile_all(MODULE, [f"qwen3-{NUM_LAYERS[-1]}"]).values()
    assert len(kernels) == 5
