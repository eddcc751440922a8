"""The kernels of modules compile before them, once each."""

import pytest

from tests import aot


@pytest.mark.kernels
def test_xla_finds_the_kernels_that_were_compiled_beforehand():
    aot.require_plugin()
    cases = "tests.pallas_kernels.paged_decode.decode_aot_cases"
    name = "gqa4-d64-plain-block8-NHD-float16"
    before, after = aot.kernels_beforehand(cases, [name])[name]
    assert len(before) == 2  # the splits and their combination
    assert after == []
