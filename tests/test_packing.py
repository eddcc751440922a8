"""Arrays that go to devices as one array come out of it as they were."""

import jax
import jax.numpy as jnp
import numpy as np

from jattn.packing import Packing


def test_arrays_of_the_host_are_one_array_on_the_way():
    there = jnp.arange(3)
    tree = {
        "ids": np.array([[1, -2], [3, 4]], np.int32),
        "count": np.asarray(7, np.int32),
        "seed": np.array([2**32 - 1], np.uint32),
        "top_p": np.array([0.5, -0.0], np.float32),
        "mask": np.array([True]),
        "there": there,
        "none": np.zeros((0, 2), np.int32),
    }
    packing = Packing.of(tree)
    words, rest = packing.pack(tree)
    assert words.dtype == np.int32
    assert words.shape == (8,)
    assert [leaf is there or leaf.dtype == bool for leaf in rest] == [True, True]
    got = jax.jit(packing.unpack)(words, rest)
    assert jax.tree.structure(got) == jax.tree.structure(tree)
    for name, wanted in tree.items():
        assert got[name].dtype == wanted.dtype
        np.testing.assert_array_equal(got[name], wanted)


def test_shapes_are_packed_as_the_arrays_of_the_host():
    arrays = {"ids": np.zeros((2, 3), np.int32), "there": jnp.zeros(2)}
    assert Packing.of(arrays) == Packing.of(arrays | {"ids": jax.ShapeDtypeStruct((2, 3), np.int32)})
