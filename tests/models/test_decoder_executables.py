"""A step's kernels are lowered and compiled once per kind of layer, for any number of layers."""

import pytest

from tests import aot
from tests.models.decoder_aot_cases import NUM_LAYERS, aot_cases

MODULE = "tests.models.decoder_aot_cases"
pytestmark = pytest.mark.kernels


def counts_per_num_layers(counts):
    """Return the counts of each family, by number of layers."""
    few, many = NUM_LAYERS
    ends = [name.removesuffix(f"-{few}") for name in counts if name.endswith(f"-{few}")]
    return {name: (counts[f"{name}-{few}"], counts[f"{name}-{many}"]) for name in ends}


@pytest.fixture(scope="module")
def reports():
    """Return ptxas's report of each of Qwen3's steps, compiled in a separate process."""
    aot.require_plugin()
    return aot.apart_reports(MODULE, [name for name in aot_cases() if name.startswith("qwen3")])


def test_kernels_are_lowered_once_for_any_number_of_layers(reports):
    counts = {name: aot.calls_in(report) for name, report in reports.items()}
    counts |= aot.calls_lowered(MODULE, [name for name in aot_cases() if name.startswith("gemma2")])
    # Norm, write, decode, merge; and the prompts' kernel. Gemma2's windowed and full layers are two kinds.
    assert counts_per_num_layers(counts) == {"qwen3": (5, 5), "gemma2": (8, 8)}


def test_ptxas_runs_once_per_kernel_for_any_number_of_layers(reports):
    runs = counts_per_num_layers({name: len(aot.kernels_in(report)) for name, report in reports.items()})
    assert runs == {"qwen3": (5, 5)}
