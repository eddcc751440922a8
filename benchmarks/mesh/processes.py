"""A suite in several processes, each with an equal part of the devices: `--processes N` starts them."""

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
    """What a suite of several processes takes."""
    parser.add_argument("--processes", type=int, default=1, help="each with an equal part of the devices")
    parser.add_argument("--coordinator", help="HOST:PORT: this is one of them, started by somebody else")
    parser.add_argument("--process-id", type=int, default=0, help="which, from 0 on; 0 writes the rows")


def is_started_elsewhere(arguments: argparse.Namespace) -> bool:
    """Starts the processes and waits for them, where there are to be several; else joins them, if it is one.

    To be called before anything asks for devices.

    Raises:
        SystemExit: One of them failed, and the others were ended; or devices are not equally many for each.
    """
    count = arguments.processes
    if count == 1:
        return False
    if arguments.devices % count:
        raise SystemExit(f"{arguments.devices} devices are no equal parts of {count} processes: no rows")
    if arguments.coordinator is None:
        _start(count, arguments.devices // count)
        return True
    jax.config.update("jax_num_cpu_devices", arguments.devices // count)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(arguments.coordinator, count, arguments.process_id)
    return False


def on_host(array: jax.Array) -> np.ndarray:
    """An array as numpy's, be parts of it on devices of other processes, which then call at once."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def one_device_mesh() -> Mesh:
    """Return a mesh of this process's first device, for the measurement that the others are compared with."""
    return Mesh(np.array(jax.local_devices()[:1]).reshape(1, 1), (TP, CP), axis_types=(AxisType.Auto,) * 2)


def _start(count: int, each: int) -> None:
    """This command in so many processes, which see so many GPUs each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    visible = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count * each)))).split(",")
    started = []
    for number in range(count):
        own = ",".join(visible[number * each : (number + 1) * each])
        command = [*COMMAND, *sys.argv[1:]]
        command += ["--coordinator", coordinator, "--process-id", str(number)]
        started.append(subprocess.Popen(command, env=os.environ | {"CUDA_VISIBLE_DEVICES": own}))
    try:
        statuses: list[int | None] = [None]
        while None in statuses and not any(statuses):
            time.sleep(0.2)
            statuses = [one.poll() for one in started]
    finally:
        for one in started:  # who waits for one that is gone waits long
            one.kill()
            one.wait()
    if any(statuses):
        raise SystemExit(f"processes ended with {statuses}: no more rows")
