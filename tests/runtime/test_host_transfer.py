"""Host arrays of a step are transferred as one array and unpacked unchanged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import Bucket, DecodeGraphs
from jattn.runtime.host_transfer import TransferLayout

ARGUMENTS = {
    "ids": np.arange(-3, 4, dtype=np.int32),
    "seeds": np.array([[0, 2**32 - 1], [2**31, 5]], np.uint32),
    "scales": np.array([np.nan, -0.0, np.inf, 1e-45], np.float32),
    "is_last": np.array([True, False, True]),
    "none": np.zeros((0, 4), np.int32),
    "count": np.zeros((), np.int32) + 7,
    "half": np.ones(3, np.float16),
    "nothing": None,
}


def arrived(layout, arguments):
    packed, device_arrays = layout.pack(arguments)
    return jax.jit(layout.unpack)(packed, device_arrays)


def assert_same_bits(actual, expected):
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        if array is not None:
            assert (actual[name].shape, actual[name].dtype) == (array.shape, array.dtype)
            assert np.asarray(actual[name]).tobytes() == np.asarray(array).tobytes()


class TestLayout:
    def test_host_arrays_are_unpacked_unchanged(self):
        layout = TransferLayout.of(ARGUMENTS, from_host=True)
        packed, device_arrays = layout.pack(ARGUMENTS)
        assert (packed.dtype, packed.size) == (np.int32, 64 * 5)  # an empty array takes no space
        assert [x.dtype for x in device_arrays] == [np.float16]
        assert_same_bits(arrived(layout, ARGUMENTS), ARGUMENTS)

    @pytest.mark.parametrize("name", ["ids", "seeds", "scales", "is_last", "count"])
    def test_device_arrays_are_not_fetched(self, name):
        layout = TransferLayout.of(ARGUMENTS, from_host=True)
        with jax.transfer_guard_device_to_host("disallow"):
            actual = arrived(layout, ARGUMENTS | {name: jnp.asarray(ARGUMENTS[name])})
        assert_same_bits(actual, ARGUMENTS)

    def test_arrays_that_were_on_the_device_are_transferred_separately(self):
        before = {"last": jnp.arange(3), "ids": np.arange(3, dtype=np.int32)}
        layout = TransferLayout.of(before, from_host=True)
        packed, device_arrays = layout.pack(before)
        assert packed[:3].tolist() == [0, 1, 2]
        assert device_arrays == [before["last"]]

    def test_packing_is_optional(self):
        layout = TransferLayout.of(ARGUMENTS, from_host=False)
        packed, device_arrays = layout.pack(ARGUMENTS)
        assert packed is None
        assert len(device_arrays) == len(ARGUMENTS) - 1

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            (
                {"ids": np.zeros(8, np.int32)},
                r"compiled for an array int32\[7\], but was called with int32\[8\]",
            ),
            (
                {"ids": np.zeros(7, np.float32)},
                r"compiled for an array int32\[7\], but was called with float32\[7\]",
            ),
            ({"nothing": np.zeros(1, np.int32)}, "compiled for arguments with the structure PyTreeDef"),
        ],
    )
    def test_other_shapes_than_compiled_are_an_error(self, changed, message):
        with pytest.raises(ValueError, match=message):
            TransferLayout.of(ARGUMENTS, from_host=True).pack(ARGUMENTS | changed)


class TestGraphs:
    BUCKET = Bucket(max_decodes=3, max_blocks=2)

    def graphs(self):
        def step(params, caches, metadata, ids, last):
            return (params + metadata.seq_lens * ids, metadata.block_table, last), caches

        return DecodeGraphs(step, [self.BUCKET], from_host=True)

    def arguments(self, **options):
        metadata = jattn.build_batch_metadata(
            [1, 1], [5, 17], [[3], [1, 2]], block_size=16, bucket=self.BUCKET, **options
        )
        return metadata, np.array([2, 3, 4], np.int32), jnp.array([9])

    def test_step_receives_one_host_array(self):
        graphs = self.graphs()
        graph_options = {"block_size": 16, "inputs": lambda bucket: self.arguments()[1:], "progress": False}
        graphs.precompile(jnp.int32(1), jnp.zeros(4), **graph_options)
        (executable,) = graphs.executables.values()
        *_, packed, last = jax.tree.leaves(executable.args_info)
        # Lengths, starts, tables, slots, two counts; ids.
        assert (packed.dtype, packed.shape) == (jnp.int32, (64 * 7,))
        assert last.shape == (1,)
        assert len(jax.tree.leaves(executable.args_info)) == 4

    @pytest.mark.parametrize("to_device", [False, True])
    def test_step_equals_one_without_packing(self, to_device):
        graphs = self.graphs()
        for _ in range(2):
            (sums, table, last), _ = graphs(jnp.int32(1), jnp.zeros(4), *self.arguments(to_device=to_device))
            assert sums.tolist() == [1 + 5 * 2, 1 + 17 * 3, 1]
            assert table.tolist() == [[3, 0], [1, 2], [0, 0]]
            assert last.tolist() == [9]
        assert graphs.num_compiles == 1
