"""Sums over the devices of a model: by whom, and what is refused."""

import pathlib
import subprocess
import sys

import jax.numpy as jnp
import pytest

from jattn.models import load, use_peer_memory
from jattn.parallel import make_mesh
from tests.conftest import GOLDEN

LLAMA = GOLDEN / "hf" / "llama"


@pytest.mark.kernels
def test_layers_sum_by_all_reduce_and_tokens_stay_the_same():
    command = [sys.executable, "-m", "tests.models.summing_decoders"]
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=400)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == ["llama: 1 executables", "gemma3: 1 executables"]


def test_memory_for_sums_is_no_weight():
    model = load(LLAMA, mesh=make_mesh(), dtype=jnp.bfloat16, progress=False)
    use_peer_memory(model, max_rows=1)
    assert model.peers.table.shape == (1, 1, 4)
    assert model.peers.memory.shape[:2] == (1, 1)


def test_a_model_without_a_mesh_sums_nothing(types_unchecked):
    model = load(LLAMA, progress=False)
    with pytest.raises(ValueError, match=r"model must be on a mesh \(load\(DIR, mesh=\)\), got None"):
        use_peer_memory(model)
    with pytest.raises(ValueError, match="max_rows must be a int"):
        use_peer_memory(model, max_rows=1.0)
