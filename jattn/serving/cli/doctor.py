"""`jattn doctor`: report which attention implementation this machine uses, and why."""

import argparse

import pallas_kernels
from jattn.models.loading.pretrained import load_shapes
from jattn.serving.cli.options import MODEL_HELP, add_engine_options, make_engine, require_defaults
from jattn.serving.engine.doctor import report


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.set_defaults(run=doctor)
    parser.add_argument(
        "--model", metavar="NAME", help=f"{MODEL_HELP}; report every bucket its engine compiles"
    )
    parser.add_argument(
        "--device", metavar="GPU", help="report for this GPU, such as h100, instead of the one that JAX finds"
    )
    add_engine_options(parser)


def doctor(args: argparse.Namespace) -> None:
    """Print the report for this machine, or for a model on it."""
    with pallas_kernels.target(args.device):
        if args.model is None:
            require_defaults(args, [add_engine_options], "requires --model NAME.")
            print(report())
        else:
            print(make_engine(args, load_shapes).explain())
