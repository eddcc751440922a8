"""All-reduces over peer memory between a model's devices, and refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from jattn.models import collectives, load, use_peer_memory
from jattn.models.collectives import why_not_peer_memory
from jattn.models.loading.pretrained import load_shapes
from jattn.parallel import make_mesh
from jattn.serving.engine.weights import Weights
from tests.conftest import GOLDEN
from tests.subprocesses import run_module

LLAMA = GOLDEN / "hf" / "llama"


@pytest.mark.kernels
def test_peer_memory_all_reduces_give_the_same_tokens():
    done = run_module("tests.models.peer_memory_decoders")
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == [
        "llama {'tp': 2}: 1 executables", "gemma3 {'tp': 2}: 1 executables", "llama {'cp': 2}: 1 executables",
        "llama {'tp': 2, 'cp': 2}: 1 executables",
    ]  # fmt: skip


def test_peer_memory_is_not_a_weight():
    model = load(LLAMA, mesh=make_mesh(), dtype=jnp.bfloat16, progress=False)
    use_peer_memory(model, max_rows=1)
    assert model.peers.all_reduce_memory.table.shape == (1, 1, 4)
    assert model.peers.all_reduce_memory.memory.shape[:2] == (1, 1)
    assert model.peers.lse_memory is None


def test_use_peer_memory_refuses_models_without_a_mesh(types_unchecked):
    model = load(LLAMA, progress=False)
    with pytest.raises(
        ValueError,
        match=r"use_peer_memory requires a model on a mesh\. Load it with load\(DIR, mesh=\.\.\.\)",
    ):
        use_peer_memory(model)
    with pytest.raises(ValueError, match="use_peer_memory requires a model on a mesh"):
        use_peer_memory("examples/tiny_model")
    with pytest.raises(ValueError, match="max_rows must be a int"):
        use_peer_memory(model, max_rows=1.0)


class TestWhyNoPeerMemory:
    """Reasons why the commands, such as `jattn serve`, do not use peer memory."""

    def model(self, *, tp=2, cp=1, dtype=jnp.bfloat16, has_weights=True):
        model = load(LLAMA, dtype=dtype, progress=False) if has_weights else load_shapes(LLAMA, dtype=dtype)
        grid = np.array([jax.devices()[0]] * tp * cp).reshape(tp, cp)  # all entries are the same device
        model.mesh = Mesh(grid, ("tp", "cp"))
        return model

    def test_model_on_one_device_has_no_peer_memory(self):
        assert (
            why_not_peer_memory(load(LLAMA, progress=False))
            == "the model is on one device, so that there are no all-reduces"
        )
        assert (
            why_not_peer_memory(self.model(tp=1))
            == "the model is on one device, so that there are no all-reduces"
        )

    def test_devices_other_than_gpus_have_no_peer_memory(self):
        assert why_not_peer_memory(self.model()) == "the devices are not NVIDIA GPUs"
        assert why_not_peer_memory(self.model(tp=1, cp=2)) == "the devices are not NVIDIA GPUs"

    def test_abstract_model_has_no_peer_memory(self):
        assert why_not_peer_memory(self.model(has_weights=False)) == "the model has no weights"

    def test_unsupported_dtypes_and_device_counts_have_no_peer_memory(self, monkeypatch):
        monkeypatch.setattr(collectives, "GPU_PLATFORMS", ("cpu",))
        assert why_not_peer_memory(self.model()) is None
        assert why_not_peer_memory(self.model(cp=2)) is None
        assert why_not_peer_memory(self.model(dtype=jnp.float32)).startswith("there is no kernel for float32")
        assert why_not_peer_memory(self.model(tp=3, cp=3)).startswith("9 devices would sum together")


def test_new_weights_keep_the_peer_memory():
    """A copy would have another address than the one that the other devices write to."""
    model = load(LLAMA, mesh=make_mesh(), dtype=jnp.bfloat16, progress=False)
    use_peer_memory(model, max_rows=1)
    before = [
        model.peers.all_reduce_memory.table.get_value(),
        model.peers.all_reduce_memory.memory.get_value(),
    ]
    kernel = model.lm_head.kernel.get_value()
    copies = jax.tree.map(lambda x: np.asarray(x) * 1, nnx.state(model))
    Weights(model).update(copies)
    after = [
        model.peers.all_reduce_memory.table.get_value(),
        model.peers.all_reduce_memory.memory.get_value(),
    ]
    assert all(now is then for now, then in zip(after, before, strict=True))
    assert model.lm_head.kernel.get_value() is not kernel
