"""Suites in several processes, each with an equal part of the devices: `--processes N` starts them."""

import argparse
import os
import socket
import subprocess
import sys
import time

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh

from jattn.parallel import CP, TP

COMMAND = (sys.executable, "-m", "benchmarks")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a suite that can run in several processes."""
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        help="Number of processes, each with an equal part of the devices. Default: 1.",
    )
    parser.add_argument(
        "--coordinator", help="HOST:PORT of the coordinator, if this process was started as one of several."
    )
    parser.add_argument(
        "--process-id", type=int, default=0, help="Index of this process. Process 0 writes the rows."
    )


def launch_or_join(arguments: argparse.Namespace) -> bool:
    """Launch the processes and wait for them, or join the others if this is one of them.

    Call it before JAX initializes its devices.

    Args:
        arguments: Arguments of the suite.

    Returns:
        Whether other processes ran the suite, so that this one has nothing left to do.

    Raises:
        SystemExit: A process failed, and the others were killed; or --devices is not a multiple of
            --processes.
    """
    count = arguments.processes
    if count == 1:
        return False
    if arguments.devices % count:
        raise SystemExit(f"--devices {arguments.devices} must be a multiple of --processes {count}.")
    if arguments.coordinator is None:
        _launch(count, arguments.devices // count)
        return True
    jax.config.update("jax_num_cpu_devices", arguments.devices // count)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(arguments.coordinator, count, arguments.process_id)
    return False


def on_host(array: jax.Array) -> np.ndarray:
    """Return an array as a numpy array.

    If other processes hold parts of it, all processes must call this function.
    """
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def one_device_mesh() -> Mesh:
    """Return a mesh of this process's first device, for the measurement that the others are compared with."""
    return Mesh(np.array(jax.local_devices()[:1]).reshape(1, 1), (TP, CP), axis_types=(AxisType.Auto,) * 2)


def _launch(count: int, gpus_per_process: int) -> None:
    """Run this command in `count` processes and wait for them."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{sock.getsockname()[1]}"
    all_gpus = ",".join(map(str, range(count * gpus_per_process)))
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or all_gpus).split(",")
    processes = []
    for index in range(count):
        gpus = ",".join(visible[index * gpus_per_process : (index + 1) * gpus_per_process])
        command = [*COMMAND, *sys.argv[1:]]
        command += ["--coordinator", coordinator, "--process-id", str(index)]
        processes.append(subprocess.Popen(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": gpus}))
    try:
        statuses: list[int | None] = [None]
        while None in statuses and not any(statuses):
            time.sleep(0.2)
            statuses = [process.poll() for process in processes]
    finally:
        for process in processes:  # otherwise they would wait for the failed one until a timeout
            process.kill()
            process.wait()
    if any(statuses):
        raise SystemExit(f"the processes exited with {statuses}. No more rows are recorded.")
