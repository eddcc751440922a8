"""`jattn doctor`: what this machine gets."""

import argparse

from jattn.models.loading.pretrained import load_shapes
from jattn.serving.cli.options import add_engine_options, make_engine, require_silence
from jattn.serving.engine.doctor import report


def add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The command's options."""
    parser = commands.add_parser("doctor", help="which implementation this machine gets, and why")
    parser.set_defaults(run=doctor)
    parser.add_argument("--model", metavar="DIR", help="for each bucket that an engine of it would compile")
    add_engine_options(parser)


def doctor(args: argparse.Namespace) -> None:
    """Tells it of this machine, or of a model on it."""
    if args.model is None:
        require_silence(args, [add_engine_options], "be left out without a model (--model DIR)")
        print(report())
    else:
        print(make_engine(args, load_shapes).explain())
