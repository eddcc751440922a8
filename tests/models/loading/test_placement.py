"""Parameters are placed on the host, the device or a mesh with the same values."""

import mmap

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
from tests.models.tiny_checkpoints import CONFIGS, random_tensors, write_checkpoint

TIED, UNTIED = CONFIGS["llama3_rope"], CONFIGS["llama_biases"]


@pytest.mark.kernels
@pytest.mark.parametrize(("name", "dtype"), [("gpt_oss", jnp.bfloat16), ("phi3small", jnp.float32)])
def test_host_and_device_placement_give_the_same_parameters(monkeypatch, name, dtype):
    """A host parameter is written in pieces; a device receives the pieces and joins them."""
    read = lambda: jax.tree.leaves(load(GOLDEN / "hf" / name, dtype=dtype, progress=False))
    whole, sent = read(), []
    monkeypatch.setattr(placement, "_TRANSPOSED_BYTES", 1000)
    by_host = read()

    def send(view):
        sent.append(view.nbytes)
        return placement.put(view)

    by_device = lambda *args, is_on_host, **options: placement.read_parameter(*args, send, **options)
    monkeypatch.setattr(placement, "TRANSFER_BYTES", 5000)
    monkeypatch.setattr(pretrained, "read_parameter", by_device)
    for a, b, c in zip(whole, by_host, read(), strict=True):
        assert a.dtype == b.dtype == c.dtype
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(a, c)
    assert 4000 < max(sent) <= 5000


def test_host_parameters_are_written_without_a_copy(tmp_path):
    model = load(write_checkpoint(tmp_path, TIED, random_tensors(TIED)), progress=False)
    kernel = model.layers[0].mlp.down_proj.kernel[...]
    start = kernel.unsafe_buffer_pointer()
    assert start % mmap.PAGESIZE == 0  # separately allocated memory


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
