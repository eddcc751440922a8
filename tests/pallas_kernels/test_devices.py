"""Where arrays are says which implementation serves them."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import support


class Elsewhere:
    """Where jax would put what says nothing else."""

    platform, id = "elsewhere", 0


def test_the_first_array_with_a_device_says_where(monkeypatch):
    here = jnp.zeros(2)
    cpu = jax.devices("cpu")[0]
    monkeypatch.setattr(jax, "devices", lambda platform=None: [cpu if platform == "cpu" else Elsewhere()])
    device_of = getattr(support.device_of, "__wrapped__", support.device_of)  # Elsewhere is no jax.Device
    found = lambda *trees: device_of(*trees).platform
    assert found([np.zeros(2), None], {"a": here}) == "cpu"
    assert found(np.zeros(2)) == found() == "elsewhere"
    traced = []
    jax.eval_shape(lambda x: traced.append(found(x)), here)
    assert traced == ["elsewhere"]
    for default in (cpu, "cpu"):
        with jax.default_device(default):
            assert found() == "cpu"


def test_what_is_not_there_for_the_kernels_is_named(monkeypatch):
    assert "JAX's platform here is 'cpu'" in support.why_not_on(jnp.zeros(1))
    older = Elsewhere()
    older.platform, older.compute_capability = "gpu", "8.0"
    monkeypatch.setattr(support, "device_of", lambda *_: older)
    assert support.why_not_on().endswith("compute capability 9.0, and this GPU has 8.0")
    older.compute_capability = "9.0"
    assert support.why_not_on() is None
