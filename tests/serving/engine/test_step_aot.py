"""Steps of an engine compiled for an H200: kernels run them, and caches are updated in place."""

import pytest

from tests import aot
from tests.serving.engine.step_aot_cases import aot_cases

pytestmark = pytest.mark.kernels


def test_steps_with_drafts_and_cascades_run_on_kernels():
    aot.require_plugin()
    reports = aot.apart_reports("tests.serving.engine.step_aot_cases", list(aot_cases()))
    kernels_by_case = {case: aot.kernels_in(report) for case, report in reports.items()}
    names = {case: {kernel.name for kernel in kernels} for case, kernels in kernels_by_case.items()}
    has = lambda case, kernel: any(kernel in name for name in names[case])
    for case in names:
        assert has(case, "paged_decode"), names
    assert has("cascade", "varlen_prefill"), names
    assert not has("drafts", "varlen_prefill"), names
    assert all(kernel.spilled_bytes == 0 for kernels in kernels_by_case.values() for kernel in kernels)
