"""Shapes and dtypes are checked as the code runs; promotion is strict; a warning is an error."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu" if os.environ.get("JATTN_TEST_GPU") is None else "")

import jaxtyping

jaxtyping.install_import_hook(["jattn", "pallas_kernels"], "beartype.beartype")

import json
import pathlib

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
hypothesis.settings.register_profile("jattn", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.load_profile("jattn")

GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.fixture(scope="session")
def metadata_cases():
    """Numeric cases of vLLM's pure helpers: name -> list of cases."""
    cases = json.loads((GOLDEN / "metadata_cases.json").read_text())["cases"]
    return {name: case["items"] for name, case in cases.items()}
