"""Fixtures of the tests of varlen_prefill."""

import dataclasses

import pytest

from pallas_kernels.varlen_prefill import sizes as sizes_module


@pytest.fixture
def few_thread_blocks(request, monkeypatch):
    """Use few thread blocks on a CPU, since idle ones take time in interpret mode."""
    if "gpu" not in request.keywords:
        for name in ("TABLE", "LIST_TABLE"):
            few = {k: dataclasses.replace(sizes, ctas=2) for k, sizes in getattr(sizes_module, name).items()}
            monkeypatch.setattr(sizes_module, name, few)
