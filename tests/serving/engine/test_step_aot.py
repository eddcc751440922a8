"""Steps of an engine compiled without a GPU: kernels run them, and caches are updated in place."""

import pytest

from tests import aot
from tests.serving.engine.step_aot_cases import aot_cases

pytestmark = pytest.mark.kernels


CASES = "tests.serving.engine.step_aot_cases"


@pytest.mark.parametrize("is_empty", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_steps_with_drafts_and_cascades_run_on_kernels(is_empty):
    """Names of kernels and aliased caches need no instructions; tests of each kernel compile those."""
    aot.require_plugin()
    kernels_by_case = {
        name: aot.kernels_in(aot.reports(CASES, [name], is_empty=is_empty)[name]) for name in aot_cases()
    }
    names = {case: {kernel.name for kernel in kernels} for case, kernels in kernels_by_case.items()}
    has = lambda case, kernel: any(kernel in name for name in names[case])
    for case in names:
        assert has(case, "paged_decode"), names
    assert has("cascade", "varlen_prefill"), names
    assert not has("drafts", "varlen_prefill"), names
    assert all(kernel.spilled_bytes == 0 for kernels in kernels_by_case.values() for kernel in kernels)


@pytest.mark.parametrize(
    ("gpu", "is_empty"),
    [
        ("8.0", False),
        *((gpu, True) for gpu in ("8.9", "12.0")),
        *(pytest.param(gpu, False, marks=pytest.mark.slow) for gpu in ("8.9", "12.0")),
    ],
)
def test_a_decode_step_of_another_architecture_compiles_with_its_kernels(gpu, is_empty):
    aot.require_plugin()
    kernels = aot.kernels_in(aot.reports(CASES, ["drafts"], gpu, is_empty=is_empty)["drafts"])
    assert {kernel.name.partition("_mosaic")[0] for kernel in kernels} == {
        "add_norm",
        "qkv_write",
        "paged_decode",
        "paged_decode_combine",
    }
    assert [kernel for kernel in kernels if kernel.spilled_bytes] == []
