"""Parameters are placed on the host, the device or a mesh with the same values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.models import load
from jattn.models.loading import placement, pretrained
from jattn.models.loading.placement import read_parameter
from jattn.models.loading.safetensors_files import read_header
from jattn.models.loading.tensor_layouts import Join
from jattn.parallel import make_mesh
from tests.conftest import GOLDEN
from tests.models.tiny_checkpoints import CONFIGS, write_checkpoint

TIED, UNTIED = CONFIGS["llama3_rope"], CONFIGS["llama_biases"]


@pytest.mark.kernels
@pytest.mark.parametrize(("name", "dtype"), [("gpt_oss", jnp.bfloat16), ("phi3small", jnp.float32)])
def test_parameters_that_are_sent_in_pieces_are_the_same(monkeypatch, name, dtype):
    """A device receives large parameters in pieces and joins them."""
    read = lambda: jax.tree.leaves(load(GOLDEN / "hf" / name, dtype=dtype, progress=False))
    whole, sent = read(), []

    def send(view):
        sent.append(view.nbytes)
        return placement.put(view)

    by_device = lambda *args, **options: placement.read_parameter(*args, send, **options)
    monkeypatch.setattr(placement, "TRANSFER_BYTES", 5000)
    monkeypatch.setattr(pretrained, "read_parameter", by_device)
    for expected, actual in zip(whole, read(), strict=True):
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual, expected)
    assert 4000 < max(sent) <= 5000


def test_loading_on_a_mesh_requires_the_cpu_backend(tmp_path, monkeypatch):
    def local_devices(backend):
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setattr(jax, "local_devices", local_devices)
    with pytest.raises(NotImplementedError, match=r"JAX has no CPU backend .*: JAX_PLATFORMS=cuda,cpu"):
        load(tmp_path / "nowhere", mesh=make_mesh(), progress=False)


def test_read_parameter_accepts_a_put_function(tmp_path):
    write_checkpoint(tmp_path, {}, {"x": np.arange(12, dtype=np.float32).reshape(3, 4)})
    (tensor,) = read_header(tmp_path / "model.safetensors").values()
    placed = []

    def place(view):
        placed.append(view.shape)
        return jnp.array(view)

    actual = read_parameter([tensor], Join("whole", "kernel", (4, 3)), np.dtype(np.float32), place)
    np.testing.assert_array_equal(actual, np.arange(12).reshape(3, 4).T)
    assert placed == [(3, 4)]
