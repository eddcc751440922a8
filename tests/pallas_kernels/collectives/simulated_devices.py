"""The all-reduce kernel on one GPU that simulates several devices, each with a part of the thread blocks.

The blocks wait for each other, so all must be resident at once: at most 132 on an H200.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.collectives.ptx import exchange
from pallas_kernels.collectives.ptx.all_reduce import Norm, program
from pallas_kernels.collectives.ptx.exchange import Exchange, block_bytes_of, memory_bytes
from pallas_kernels.ptx.launch import WARPS, launch_ptx


class Devices:
    """Simulated devices and their memory."""

    def __init__(self, count: int, max_rows: int, width: int) -> None:
        self.count, self.block_bytes = count, block_bytes_of(max_rows, width)
        words = memory_bytes(count, self.block_bytes) // 4
        device_memory = np.full(words, exchange.EMPTY, np.uint32)
        device_memory[: exchange.COUNTERS // 4] = 0
        self.memory = jax.block_until_ready(jnp.asarray(np.tile(device_memory, (count, 1))))
        addresses = self.memory.unsafe_buffer_pointer() + 4 * words * np.arange(count, dtype=np.uint64)
        rows = [
            np.concatenate([np.array([d, 0], np.uint32), addresses.view(np.uint32)]) for d in range(count)
        ]
        self.tables = jnp.asarray(np.stack(rows).view(np.int32))

    def sums(
        self, parts: jax.Array, *residual_and_weight: jax.Array, norm: Norm | None, shots: int
    ) -> tuple[jax.Array, ...]:
        """Return each device's result for its part of [devices, rows, width]: [devices, rows, width]."""
        _, rows, width = parts.shape
        exchange = Exchange(rows, width, self.count, self.block_bytes, shots)
        operands = [self.tables, parts, *residual_and_weight]
        results = [jax.ShapeDtypeStruct(parts.shape, parts.dtype)] * (1 if norm is None else 2)
        # Bytes from a device's to the next one's; the stream and the weight are the same for all.
        strides = [4 * self.tables.shape[1], parts[0].nbytes, *(0 for _ in residual_and_weight)]
        strides += [parts[0].nbytes for _ in results]
        code = interleave_devices(
            program(exchange, norm, parts.dtype == jnp.bfloat16), strides, exchange.blocks
        )
        return launch_ptx(
            code,
            operands,
            name="sums",
            out_type=results,
            words=2 * WARPS,
            grid=(exchange.blocks * self.count,),
        )


def interleave_devices(code: str, strides: list[int], blocks: int) -> str:
    """Return a program in which the thread blocks of the devices follow each other."""
    shared, block, thread = (f"${len(strides) + n}" for n in range(3))
    begin = [
        f".reg .b64 o<{len(strides)}>; .reg .b32 nth, my_block;",
        f"div.u32 nth, {block}, {blocks}; rem.u32 my_block, {block}, {blocks};",
    ]
    begin += [
        f"mul.wide.u32 o{n}, nth, {stride}; add.s64 o{n}, o{n}, ${n};" for n, stride in enumerate(strides)
    ]
    names = {f"${n}": f"o{n}" for n in range(len(strides))} | {
        shared: shared,
        block: "my_block",
        thread: thread,
    }
    return "{ " + "\n".join(begin) + re.sub(r"\$\d+", lambda match: names[match[0]], code[1:])
