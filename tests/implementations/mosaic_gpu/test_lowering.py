"""Every combination of features that attend accepts lowers for an H200, so that none fails only on a GPU."""

import pytest

from tests import aot
from tests.implementations.mosaic_gpu.attend_aot_cases import aot_cases

pytestmark = pytest.mark.kernels

PARTS = 4


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_pair_of_features_lowers_or_is_refused_by_name(part):
    aot.require_plugin()
    names = list(aot_cases())[part::PARTS]
    refusals = aot.lower_all("tests.implementations.mosaic_gpu.attend_aot_cases", names)
    assert list(refusals) == names
    messages = [text for text in refusals.values() if text]
    assert all("there is no kernel for" in text or "not supported" in text for text in messages), messages
    assert len(messages) < len(names) / 10, messages
