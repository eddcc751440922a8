"""Sums over devices: XLA's and the kernel's, alone and with the residual and the norm behind them."""

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
NCCL_TOLERANCE = 2**-5  # NCCL rounds to bf16 after each of its additions: 7 on 8 GPUs; the kernel rounds once

type Sum = Callable[..., Any]


def measure_sums(sizes: tuple[tuple[int, int], ...], mesh: Mesh) -> Iterator[dict[str, Any]]:
    """Rows of each size: microseconds of a sum over the devices, in a chain of them; each is right first.

    Args:
        sizes: Rows and width of what is summed.
        mesh: The devices.
    """
    most, widest = (max(size[axis] for size in sizes) for axis in (0, 1))
    peers = make_peer_memory(mesh, TP, max_rows=most, width=widest)
    for rows, width in sizes:
        draw = lambda *shape: jax.random.normal(jax.random.key(len(shape)), shape, jnp.bfloat16)
        whole = functools.partial(jax.device_put, device=NamedSharding(mesh, P()))
        x, residual, weight = whole(draw(rows, width)), whole(draw(rows, width) / 2), whole(draw(width))
        for name, one in {"sum": _psum, "all_reduce": _all_reduce, "two_shots": _two_shots}.items():
            run = _on(mesh, _chain_of(functools.partial(one, count=mesh.shape[TP])))
            if not _is_close(run(x, peers), x, 0 if name != "sum" else NCCL_TOLERANCE):
                raise SystemExit(f"{name} of {rows} rows is wrong: no rows")
            us = wall_time(run, x, peers, layers=1) / CHAIN
            yield {"name": f"{name}_{rows}x{width}", "bytes": x.nbytes, "us": us}
        wanted = None
        norms = {
            "sum_norm": _sum_norm,
            "all_reduce_norm": _all_reduce_norm,
            "two_shots_norm": _two_shots_norm,
        }
        for name, one in norms.items():
            got = _on(mesh, one)(x, residual, weight, peers)[1]
            wanted = got if wanted is None else wanted
            if not _is_close(got, wanted, NCCL_TOLERANCE):
                raise SystemExit(f"{name} of {rows} rows is wrong: no rows")
            us = wall_time(_on(mesh, _chain_of_norms(one)), x, residual, weight, peers, layers=1)
            yield {"name": f"{name}_{rows}x{width}", "bytes": x.nbytes, "us": us / CHAIN}


def _is_close(found: jax.Array, wanted: jax.Array, tolerance: float) -> bool:
    """Return whether no number is further off than `tolerance` times the largest one."""
    got, want = (np.asarray(array, np.float32) for array in (found, wanted))
    return bool(np.abs(got - want).max() <= tolerance * np.abs(want).max())


def _on(mesh: Mesh, function: Sum) -> Sum:
    """A function of arrays that all devices have, and the peers' memory, as jitted for a mesh."""

    def run(*args: Any) -> Any:
        specs = (*(P() for _ in args[1:]), P(*mesh.axis_names))
        return jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)(*args)

    return jax.jit(run)


def _chain_of(one: Sum) -> Sum:
    one = jax.jit(one)  # lowered once

    def chain(x: jax.Array, peers: PeerMemory) -> jax.Array:
        for _ in range(CHAIN):
            x = one(x, peers)
        return x

    return chain


def _chain_of_norms(one: Sum) -> Sum:
    one = jax.jit(one)

    def chain(x: jax.Array, stream: jax.Array, weight: jax.Array, peers: PeerMemory) -> jax.Array:
        for _ in range(CHAIN):
            stream, x = one(x, stream, weight, peers)
        return x

    return chain


def _psum(x: jax.Array, peers: PeerMemory, *, count: int) -> jax.Array:
    """The product keeps x as it is."""
    del peers
    return jax.lax.psum(x * jnp.asarray(1 / count, x.dtype), TP)


def _all_reduce(x: jax.Array, peers: PeerMemory, *, count: int, shots: int = 1) -> jax.Array:
    return all_reduce(x * jnp.asarray(1 / count, x.dtype), peers, axis_name=TP, shots=shots)


_two_shots = functools.partial(_all_reduce, shots=2)


def _sum_norm(
    x: jax.Array, stream: jax.Array, weight: jax.Array, peers: PeerMemory
) -> tuple[jax.Array, jax.Array]:
    del peers
    norm = RMSNorm(len(weight), eps=EPS, is_offset=False, dtype=weight.dtype)
    norm.weight[...] = weight
    return add_and_norm(stream, jax.lax.psum(x, TP), norm, allow_kernel=True)


def _all_reduce_norm(
    x: jax.Array, stream: jax.Array, weight: jax.Array, peers: PeerMemory, *, shots: int = 1
) -> tuple[jax.Array, jax.Array]:
    return all_reduce_rms_norm(x, stream, weight, peers, axis_name=TP, eps=EPS, shots=shots)


_two_shots_norm = functools.partial(_all_reduce_norm, shots=2)
