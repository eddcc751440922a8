"""Options of an engine that several processes run, one on each node: the first serves, the others follow."""

import argparse
import sys

import jax

from jattn.models import load
from jattn.serving.cli.options import make_engine
from pallas_kernels.checks import require, require_positive


def add_node_options(parser: argparse.ArgumentParser) -> None:
    """As vLLM has them."""
    parser.add_argument(
        "--nnodes", type=int, default=1, metavar="N", help="processes, with all devices of a node each [1]"
    )
    parser.add_argument("--node-rank", type=int, default=0, metavar="N", help="which of them this is [0]")
    parser.add_argument("--master-addr", default="127.0.0.1", metavar="HOST", help="of node 0 [127.0.0.1]")
    parser.add_argument("--master-port", type=int, default=29501, metavar="N", help="likewise [29501]")


def join_nodes(args: argparse.Namespace) -> None:
    """Waits for the processes of the other nodes, before jax looks at its devices.

    Raises:
        ValueError: There is no such node, or there are fewer devices in all.
    """
    nnodes, rank = getattr(args, "nnodes", 1), getattr(args, "node_rank", 0)
    require_positive(nnodes=nnodes)
    require(0 <= rank < nnodes, "node_rank", f"be one of {nnodes} (nnodes), from 0 on", rank)
    if nnodes == 1:
        return
    size = args.tensor_parallel_size
    rule = f"be all devices of the {nnodes} nodes (nnodes)"
    require(size >= nnodes, "tensor_parallel_size", rule, size)
    jax.distributed.initialize(f"{args.master_addr}:{args.master_port}", nnodes, rank)
    require(size == jax.device_count(), "tensor_parallel_size", f"{rule}, {jax.device_count()}", size)


def follow(args: argparse.Namespace) -> None:
    """Runs what node 0 runs, until that has ended."""
    engine = make_engine(args, load)
    print(f"jattn: node {args.node_rank} of {args.nnodes} follows node 0", file=sys.stderr, flush=True)
    engine.follow()
