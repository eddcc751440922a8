"""Which GPU architecture the kernels of a call are built for."""

import types

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import architectures


def test_device_of_returns_the_first_arrays_device(monkeypatch):
    array = jnp.zeros(2)
    cpu, other = jax.devices("cpu")[0], types.SimpleNamespace(platform="elsewhere", id=0)
    monkeypatch.setattr(jax, "devices", lambda platform=None: [cpu if platform == "cpu" else other])
    # Without the checks of annotations: `other` is no jax.Device.
    device_of = getattr(architectures.device_of, "__wrapped__", architectures.device_of)
    platform_of = lambda *trees: device_of(*trees).platform
    assert platform_of([np.zeros(2), None], {"a": array}) == "cpu"
    assert platform_of(np.zeros(2)) == platform_of() == "elsewhere"
    traced = []
    jax.eval_shape(lambda x: traced.append(platform_of(x)), array)
    assert traced == ["elsewhere"]
    for default in (cpu, "cpu"):
        with jax.default_device(default):
            assert platform_of() == "cpu"


def test_kernels_are_built_for_the_target_then_for_the_device_then_for_hopper(monkeypatch):
    assert architectures.kernel_architecture(jnp.zeros(1)) == "9.0"  # interpret mode on a CPU
    device = types.SimpleNamespace(platform="gpu", compute_capability="8.9")
    monkeypatch.setattr(architectures, "device_of", lambda *_: device)
    assert architectures.kernel_architecture() == "8.9"
    with architectures.target("rtx5090"):
        assert architectures.kernel_architecture() == "12.0"
    device.compute_capability = "7.5"
    assert architectures.kernel_architecture() == "9.0"


def test_each_gpu_name_has_a_known_architecture():
    assert set(architectures.GPUS.values()) == set(architectures.ARCHITECTURES)
