"""Options and startup of an engine that spans several nodes: node 0 serves, and all other nodes follow it."""

import argparse
import functools
import sys
from collections.abc import Callable

import jax

from jattn.models import load
from jattn.serving.cli.options import make_engine
from jattn.serving.engine.processes import ProcessError
from pallas_kernels.checks import require_positive


def add_node_options(parser: argparse.ArgumentParser) -> None:
    """Add the multi-node options, named as in vLLM."""
    parser.add_argument(
        "--nnodes",
        type=int,
        default=1,
        metavar="N",
        help="number of nodes; each runs one process that uses all of its devices (default: %(default)s)",
    )
    parser.add_argument(
        "--node-rank",
        type=int,
        default=0,
        metavar="N",
        help="rank of this node, from 0 to nnodes - 1 (default: %(default)s)",
    )
    parser.add_argument(
        "--master-addr", default="127.0.0.1", metavar="HOST", help="address of node 0 (default: %(default)s)"
    )
    parser.add_argument(
        "--master-port",
        type=int,
        default=29501,
        metavar="N",
        help="port of node 0 for coordination (default: %(default)s)",
    )


def runs_on_nodes(
    command: Callable[[argparse.Namespace], None],
) -> Callable[[argparse.Namespace], None]:
    """Make a command join the other nodes first, and run only on node 0; all other nodes follow it.

    Raises:
        ChildProcessError: If a process of the engine fails.
    """

    @functools.wraps(command)
    def run(args: argparse.Namespace) -> None:
        join_nodes(args)
        try:
            (follow if args.node_rank else command)(args)
        except ProcessError as error:
            raise ChildProcessError(str(error)) from error

    return run


def join_nodes(args: argparse.Namespace) -> None:
    """Connect to the processes of the other nodes, before JAX initializes its devices.

    Raises:
        ValueError: If the node rank is out of range, or the tensor-parallel size is not the number of
            devices of all nodes.
    """
    nnodes, rank = args.nnodes, args.node_rank
    require_positive(nnodes=nnodes)
    if not 0 <= rank < nnodes:
        raise ValueError(f"--node-rank must be in [0, {nnodes - 1}] with --nnodes {nnodes}, got {rank}.")
    if nnodes == 1:
        return
    size = args.tensor_parallel_size
    if size < nnodes:
        raise ValueError(
            f"--tensor-parallel-size must be the total number of devices of the {nnodes} nodes, got {size}."
        )
    jax.distributed.initialize(f"{args.master_addr}:{args.master_port}", nnodes, rank)
    if size != jax.device_count():
        raise ValueError(
            f"--tensor-parallel-size must be the total number of devices of the {nnodes} nodes"
            f" ({jax.device_count()}), got {size}."
        )


def follow(args: argparse.Namespace) -> None:
    """Run the steps that node 0 broadcasts, until node 0 ends."""
    engine = make_engine(args, load)
    print(f"jattn: node {args.node_rank} of {args.nnodes} follows node 0", file=sys.stderr, flush=True)
    engine.follow()
