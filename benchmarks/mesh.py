"""Two GPUs of one host against one: decode attention, sums of a decode step, steps of an 8B-wide Qwen3.

Nothing is timed before its results are one device's. A row is written when it is there.
"""

import argparse
import functools
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.device_time import Rows, wall_time
from benchmarks.engine import QWEN3_8B
from benchmarks.graphs import flags
from benchmarks.mesh_attention import measure_attention
from benchmarks.mesh_steps import measure_steps
from jattn.parallel import TP, make_mesh
from pallas_kernels.cases import DecodeCase

CHAIN = 32
CASES = ("attention", "sums", "steps")


class Sizes(NamedTuple):
    """What is measured.

    Attributes:
        attention: A decode step's attention.
        sums: Rows and width of what is summed.
        config: Of the model.
        steps: Requests of each decode step, and their context.
    """

    attention: DecodeCase
    sums: tuple[tuple[int, int], ...]
    config: dict[str, Any]
    steps: tuple[tuple[int, int], ...]


LARGE = Sizes(
    DecodeCase(name="8x128k", q_heads=32, kv_heads=8, head_dim=128, kv_lens=(131072,) * 8),
    ((1, 4096), (8, 4096), (64, 4096)),
    QWEN3_8B,
    ((1, 1024), (64, 4096), (256, 1024)),
)
SMALL = Sizes(
    DecodeCase(name="2x128", q_heads=4, kv_heads=2, head_dim=16, kv_lens=(128,) * 2),
    ((1, 64), (2, 64)),
    QWEN3_8B
    | {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
    ((1, 32), (3, 48)),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `python -m benchmarks mesh` takes."""
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; default all")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--small", action="store_true", help="sizes that a CPU runs in seconds")
    parser.add_argument("--out", help="folder of the rows")


def main(arguments: argparse.Namespace) -> None:
    """Every case on one device and on several."""
    count = arguments.devices
    if len(jax.devices()) < count:
        print(f"mesh: {count} devices are wanted, {len(jax.devices())} are here: no rows", flush=True)
        return
    rows, mesh = Rows("mesh", arguments.out), make_mesh(tp=count)
    sizes = SMALL if arguments.small else LARGE
    measures = {
        "attention": lambda: measure_attention(sizes.attention, mesh),
        "sums": lambda: measure_sums(sizes.sums, mesh),
        "steps": lambda: measure_steps(sizes.config, sizes.steps, mesh),
    }
    start = time.perf_counter()
    for name in arguments.cases or CASES:
        for row in measures[name]():
            rows.add(**row, num_devices=count, after_s=time.perf_counter() - start, **flags())


def measure_sums(sizes: tuple[tuple[int, int], ...], mesh: Mesh) -> Iterator[dict[str, Any]]:
    """A row a size: microseconds of a sum over the devices, in a chain of them."""
    count = mesh.shape[TP]

    def sums(x: jax.Array, times: int) -> jax.Array:
        for _ in range(times):
            x = jax.lax.psum(x * jnp.asarray(1 / count, x.dtype), TP)
        return x

    @functools.partial(jax.jit, static_argnums=1)
    def run(x: jax.Array, times: int) -> jax.Array:
        chain = functools.partial(sums, times=times)
        return jax.shard_map(chain, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(x)

    for rows, width in sizes:
        x = jax.random.normal(jax.random.key(rows), (rows, width), jnp.bfloat16)
        x = jax.device_put(x, NamedSharding(mesh, P()))
        if not (run(x, 1) == x).all():
            raise SystemExit(f"a sum of {rows} rows is wrong: no rows")
        us = wall_time(lambda x: run(x, CHAIN), x, layers=1) / CHAIN
        yield {"name": f"sum_{rows}x{width}", "bytes": x.nbytes, "us": us}
