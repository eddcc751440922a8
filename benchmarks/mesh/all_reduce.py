"""All-reduce over devices by XLA and by the kernel, alone and fused with residual and RMSNorm."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.runner import wall_time
from jattn.models.layers import RMSNorm, add_and_norm
from jattn.parallel import TP
from pallas_kernels.collectives import PeerMemory, all_reduce, all_reduce_rms_norm, make_peer_memory

CHAIN = 32
EPS = 1e-6
NCCL_TOLERANCE = 2**-5  # NCCL rounds to bf16 after each addition, 7 times on 8 GPUs; the kernel rounds once

type AllReduce = Callable[..., Any]


def measure_sums(sizes: tuple[tuple[int, int], ...], mesh: Mesh) -> Iterator[dict[str, Any]]:
    """Yield rows with the time of an all-reduce in a chain of dependent ones, after a check of its result.

    Args:
        sizes: Rows and width of the arrays.
        mesh: Devices.

    Raises:
        SystemExit: A result is wrong.
    """
    max_rows, max_width = (max(size[axis] for size in sizes) for axis in (0, 1))
    peers = make_peer_memory(mesh, TP, max_rows=max_rows, width=max_width)
    for rows, width in sizes:
        replicate = functools.partial(jax.device_put, device=NamedSharding(mesh, P()))
        values = jax.random.normal(jax.random.key(2), (rows, width), jnp.bfloat16)
        x, residual = replicate(values), replicate(values / 2)
        weight = replicate(jax.random.normal(jax.random.key(1), (width,), jnp.bfloat16))
        sums = {"sum": _psum, "all_reduce": _all_reduce, "two_shots": _two_shots}
        for name, function in sums.items():
            run = _jit_on(mesh, _chain(functools.partial(function, count=mesh.shape[TP])))
            if not _is_close(run(x, peers), x, NCCL_TOLERANCE if name == "sum" else 0.0):
                raise SystemExit(f"{name} of {rows} rows returns a wrong result. No rows are recorded.")
            us = wall_time(run, x, peers, layers=1) / CHAIN
            yield {"name": f"{name}_{rows}x{width}", "bytes": x.nbytes, "us": us}
        expected = None
        norms = {
            "sum_norm": _sum_norm,
            "all_reduce_norm": _all_reduce_norm,
            "two_shots_norm": _two_shots_norm,
        }
        for name, function in norms.items():
            result = _jit_on(mesh, function)(x, residual, weight, peers)[1]
            expected = result if expected is None else expected
            if not _is_close(result, expected, NCCL_TOLERANCE):
                raise SystemExit(f"{name} of {rows} rows returns a wrong result. No rows are recorded.")
            us = wall_time(_jit_on(mesh, _norm_chain(function)), x, residual, weight, peers, layers=1)
            yield {"name": f"{name}_{rows}x{width}", "bytes": x.nbytes, "us": us / CHAIN}


def _is_close(result: jax.Array, expected: jax.Array, tolerance: float) -> bool:
    """Return whether all differences are at most `tolerance` times the largest expected value."""
    actual, reference = (np.asarray(array, np.float32) for array in (result, expected))
    return bool(np.abs(actual - reference).max() <= tolerance * np.abs(reference).max())


def _jit_on(mesh: Mesh, function: AllReduce) -> AllReduce:
    """Return the jitted shard_map of a function of replicated arrays and, last, of the peer memory."""

    def run(*args: Any) -> Any:
        specs = (*(P() for _ in args[1:]), P(*mesh.axis_names))
        return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)(*args)

    return jax.jit(run)


def _chain(function: AllReduce) -> AllReduce:
    function = jax.jit(function)  # lowered once

    def chain(x: jax.Array, peers: PeerMemory) -> jax.Array:
        for _ in range(CHAIN):
            x = function(x, peers)
        return x

    return chain


def _norm_chain(function: AllReduce) -> AllReduce:
    function = jax.jit(function)

    def chain(x: jax.Array, residual: jax.Array, weight: jax.Array, peers: PeerMemory) -> jax.Array:
        for _ in range(CHAIN):
            residual, x = function(x, residual, weight, peers)
        return x

    return chain


def _psum(x: jax.Array, peers: PeerMemory, *, count: int) -> jax.Array:
    """Sum x over the devices, scaled so that the result equals x."""
    del peers
    return jax.lax.psum(x * jnp.asarray(1 / count, x.dtype), TP)


def _all_reduce(x: jax.Array, peers: PeerMemory, *, count: int, shots: int = 1) -> jax.Array:
    return all_reduce(x * jnp.asarray(1 / count, x.dtype), peers, axis_name=TP, shots=shots)


_two_shots = functools.partial(_all_reduce, shots=2)


def _sum_norm(
    x: jax.Array, residual: jax.Array, weight: jax.Array, peers: PeerMemory
) -> tuple[jax.Array, jax.Array]:
    del peers
    norm = RMSNorm(len(weight), eps=EPS, is_offset=False, dtype=weight.dtype)
    norm.weight[...] = weight
    return add_and_norm(residual, jax.lax.psum(x, TP), norm, allow_kernel=True)


def _all_reduce_norm(
    x: jax.Array, residual: jax.Array, weight: jax.Array, peers: PeerMemory, *, shots: int = 1
) -> tuple[jax.Array, jax.Array]:
    return all_reduce_rms_norm(x, residual, weight, peers, axis_name=TP, eps=EPS, shots=shots)


_two_shots_norm = functools.partial(_all_reduce_norm, shots=2)
