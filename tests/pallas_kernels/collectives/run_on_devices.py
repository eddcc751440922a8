"""Sums over devices against their definition, on four CPU devices or on GPUs. Run by test_all_reduce.py."""

import functools
import sys

import jax

if "gpu" not in sys.argv:
    jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from pallas_kernels.collectives import (  # noqa: E402
    all_gather,
    all_reduce,
    all_reduce_rms_norm,
    make_peer_memory,
    reference,
)

LLAMA = {"eps": 1e-5}
GEMMA = {"eps": 1e-6, "is_offset": True, "rounds_once": True}
ROWS = (1, 8, 64, 129, 256)
ROWS_ON_CPU = (1, 129)  # which run XLA's collectives for any number of rows
CALLS = 500


def mesh_of(devices: int, num_other_devices: int = 1) -> jax.sharding.Mesh:
    """Return a mesh in which devices that reduce together are not adjacent if there are others, as tp
    before cp.
    """
    grid = np.array(jax.devices()[: devices * num_other_devices]).reshape(devices, num_other_devices)
    return jax.sharding.Mesh(grid, ("tp", "cp"))


class Sums:
    """All-reduces over the tp axis of a mesh; the arrays of the devices are stacked."""

    def __init__(
        self, mesh: jax.sharding.Mesh, width: int, dtype: object, shots: tuple[int | None, ...]
    ) -> None:
        self.mesh, self.width, self.dtype, self.shots = mesh, width, jnp.dtype(dtype), shots
        self.peers = make_peer_memory(mesh, "tp", max_rows=max(ROWS), width=width)
        self.of_all = make_peer_memory(mesh, ("tp", "cp"), max_rows=max(ROWS), width=width)
        self.devices = mesh.shape["tp"]

    def drawn(self, *shape: int, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).normal(size=shape).astype(self.dtype)

    def run(self, function: object, *arrays: np.ndarray, are_all: bool = False) -> list[np.ndarray]:
        """Return each device's result for its part of the first array and for the other arrays: [tp, cp,
        ...].

        Args:
            function: Function of these arrays, peers and axis_name.
            arrays: The first has a part per device, [tp, cp, ...].
            are_all: Whether the devices of both axes reduce together, instead of those along tp.
        """
        by_device, whole = P("tp", "cp"), P()
        peers, axis_name = (self.of_all, ("tp", "cp")) if are_all else (self.peers, "tp")

        def each(peers, x, *other_arrays):
            actual = function(x.reshape(x.shape[2:]), *other_arrays, peers, axis_name=axis_name)
            return jax.tree.map(lambda part: part[None, None], actual)

        specs = (by_device, by_device, *(whole for _ in arrays[1:]))
        run = jax.shard_map(each, mesh=self.mesh, in_specs=specs, out_specs=by_device, check_vma=False)
        placed = [self.placed(x, spec) for x, spec in zip(arrays, specs[1:], strict=True)]
        gathered = functools.partial(multihost_utils.process_allgather, tiled=True)
        return jax.tree.map(gathered, jax.tree.leaves(jax.jit(run)(peers, *placed)))

    def placed(self, x: np.ndarray, spec: P) -> jax.Array:
        """Return arrays placed on the devices, some of which may belong to other processes."""
        return jax.make_array_from_callback(x.shape, NamedSharding(self.mesh, spec), lambda index: x[index])

    def check(self, rows: int, shots: int | None) -> None:
        """Check a sum alone, which must be exact, and then with each norm."""
        num_groups = self.mesh.shape["cp"]
        parts = self.drawn(self.devices, num_groups, rows, self.width, seed=rows)
        residual, weight = self.drawn(rows, self.width, seed=1), self.drawn(self.width, seed=2)
        unit = float(jnp.finfo(self.dtype).eps)
        (total,) = self.run(functools.partial(all_reduce, shots=shots), parts)
        self.check_same(total)
        expected = np.stack([reference.all_reduce(parts[:, group]) for group in range(num_groups)])
        np.testing.assert_allclose(total[0].astype(np.float64), expected, rtol=unit, atol=unit / 64)
        for norm in (LLAMA, GEMMA):
            streams, normed = self.run(
                functools.partial(all_reduce_rms_norm, **norm, shots=shots), parts, residual, weight
            )
            self.check_same(streams)
            self.check_same(normed)
            for group in range(num_groups):
                expected = reference.all_reduce_rms_norm(parts[:, group], residual, weight, **norm)
                for actual, expected_array in zip((streams, normed), expected, strict=True):
                    actual = actual[0, group].astype(np.float64)
                    np.testing.assert_allclose(actual, expected_array, rtol=3 * unit, atol=unit)

    def check_all(self, rows: int) -> None:
        """Check sums and gathers over both axes, whose device order is JAX's."""
        shape = *self.mesh.devices.shape, rows, self.width
        parts = self.drawn(*shape, seed=rows)
        (total,) = self.run(all_reduce, parts, are_all=True)
        bits, unit = total.reshape(-1, rows, self.width).view(np.uint16), float(jnp.finfo(self.dtype).eps)
        np.testing.assert_array_equal(bits, np.broadcast_to(bits[:1], bits.shape))
        expected = reference.all_reduce(parts.reshape(-1, rows, self.width))
        np.testing.assert_allclose(total[0, 0].astype(np.float64), expected, rtol=unit, atol=unit / 64)
        numbers = np.random.default_rng(rows).normal(size=(*shape[:3], self.width // 2)).astype(np.float32)
        numbers[..., 0], numbers[..., 1] = -np.inf, -0.0
        for are_all in (False, True):
            (gathered,) = self.run(all_gather, numbers, are_all=are_all)  # [tp, cp, devices, rows, width]
            expected = (
                numbers.reshape(1, 1, -1, *numbers.shape[2:]) if are_all else numbers.swapaxes(0, 1)[None]
            )
            expected = np.broadcast_to(expected, gathered.shape)
            np.testing.assert_array_equal(gathered.view(np.uint32), expected.copy().view(np.uint32))

    def check_same(self, actual: np.ndarray) -> None:
        """Check that all devices that reduce together have the same bits."""
        bits = actual.view(np.uint16)
        np.testing.assert_array_equal(bits, np.broadcast_to(bits[:1], bits.shape))

    def check_calls(self) -> None:
        """Check consecutive calls with many and few rows in turn and different values."""
        rows = 64

        def many(x, peers, *, axis_name):
            device, offset = jax.lax.axis_index(axis_name), x.astype(jnp.int32)
            value = lambda call, device: ((offset + call * (3 + device) + device) % 61).astype(self.dtype)

            def body(call, wrong):
                local, every = value(call, device), [value(call, peer) for peer in range(self.devices)]
                expected = sum(every[1:], every[0])  # whole numbers below 256: exact
                actual = all_reduce(local, peers, axis_name=axis_name, shots=self.shots[-1])
                summed = all_reduce(
                    local[:1] + actual[:1] * 0, peers, axis_name=axis_name, shots=self.shots[0]
                )
                # The gathered values depend on the sum, since XLA might reorder the calls otherwise.
                as_f32 = lambda x: x[:9, ::2].astype(jnp.float32)
                gathered = all_gather(as_f32(local) + as_f32(summed) * 0, peers, axis_name=axis_name)
                wrong = wrong + jnp.sum(actual != expected) + jnp.sum(summed != expected[:1])
                return wrong + jnp.sum(gathered != jnp.stack([as_f32(x) for x in every]))

            return jax.lax.fori_loop(0, CALLS, body, jnp.int32(0))

        positions = np.arange(rows * self.width).reshape(rows, self.width) % 53
        (wrong,) = self.run(
            many, np.broadcast_to(positions, (*self.mesh.devices.shape, *positions.shape)).copy()
        )
        np.testing.assert_array_equal(wrong, 0)


def check_tables(mesh: jax.sharding.Mesh) -> None:
    """Check that device numbers are JAX's along the axes and map to that device's memory."""
    for axes in ("tp", "cp", ("tp", "cp"), ("cp", "tp")):
        peers = make_peer_memory(mesh, axes, max_rows=1, width=8)
        device_number = lambda axes=axes: jax.lax.axis_index(axes)[None, None]
        numbers = jax.shard_map(device_number, mesh=mesh, in_specs=(), out_specs=P("tp", "cp"))()
        table = np.asarray(peers.table)
        np.testing.assert_array_equal(table[..., 0], numbers)
        addresses = table[..., 2:].copy().view(np.uint64)
        own = {shard.device: shard.data.unsafe_buffer_pointer() for shard in peers.memory.addressable_shards}
        for index, device in np.ndenumerate(mesh.devices):
            assert int(addresses[index][table[index][0]]) == own[device]
        groups = np.unique(np.sort(addresses, axis=-1).reshape(mesh.devices.size, -1), axis=0)
        assert len(groups) * peers.devices == mesh.devices.size


def check_lowered(mesh: jax.sharding.Mesh) -> None:
    """Check that a sum lowers to one kernel on a GPU, without barriers or collectives of XLA."""
    peers = make_peer_memory(mesh, "tp", max_rows=1, width=8)

    def each(peers, x):
        return all_reduce(x.reshape(1, 8), peers, axis_name="tp")[None, None]

    by_device = P("tp", "cp")
    run = jax.shard_map(each, mesh=mesh, in_specs=by_device, out_specs=by_device, check_vma=False)
    x = jax.ShapeDtypeStruct((*mesh.devices.shape, 1, 8), jnp.bfloat16)
    text = jax.jit(run).trace(peers, x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    assert "uses_xla_collective_metadata = false" in text
    assert not [name for name in ("all_reduce", "all_gather") if f"stablehlo.{name}" in text]


def main(target: str) -> None:
    """Run the checks on the devices of all processes."""
    count = len(jax.devices())
    meshes = [mesh_of(2)] if count == 2 else [mesh_of(2, 2), mesh_of(4)]
    check_lowered(meshes[0])
    if target == "cpu" and jax.process_count() == 1:  # which sees all addresses
        check_tables(meshes[0])
    for mesh in meshes:
        for width, dtype in (
            ((68, jnp.bfloat16),) if target == "cpu" else ((4096, jnp.bfloat16), (1028, jnp.float16))
        ):
            sums = Sums(mesh, width, dtype, shots=(None,) if target == "cpu" else (1, 2))
            for rows in ROWS_ON_CPU if target == "cpu" else ROWS:
                for shots in sums.shots:
                    sums.check(rows, shots)
                sums.check_all(rows)
            sums.check_calls()
            print(f"{dict(mesh.shape)}, {width} wide: right", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
