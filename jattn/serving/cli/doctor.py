"""`jattn doctor`: report which attention implementation this machine uses, and why."""

import argparse

from jattn.models.loading.pretrained import load_shapes
from jattn.serving.cli.options import add_engine_options, make_engine, require_defaults
from jattn.serving.engine.doctor import report


def add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `doctor` command and its options."""
    parser = commands.add_parser(
        "doctor", help="show which attention implementation this machine uses, and why"
    )
    parser.set_defaults(run=doctor)
    parser.add_argument(
        "--model", metavar="DIR", help="Hugging Face model folder: report every bucket its engine compiles"
    )
    add_engine_options(parser)


def doctor(args: argparse.Namespace) -> None:
    """Print the report for this machine, or for a model on it."""
    if args.model is None:
        require_defaults(args, [add_engine_options], "requires --model DIR.")
        print(report())
    else:
        print(make_engine(args, load_shapes).explain())
