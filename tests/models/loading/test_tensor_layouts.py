"""Layouts of parameters in checkpoints."""

import jax.numpy as jnp
import numpy as np

from jattn.models.loading.tensor_layouts import HFTensors, Join, to_hf


def test_a_projection_may_be_stored_transposed():
    tensors = {"up_proj": HFTensors(("c_fc",), is_transposed=True)}
    kernel = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    (stored,) = to_hf(tensors, ("up_proj", "kernel"), kernel).values()
    np.testing.assert_array_equal(stored, kernel)
    join = Join("whole", "kernel", (2, 3), is_transposed=True)
    np.testing.assert_array_equal(join([jnp.asarray(stored)]), kernel)
