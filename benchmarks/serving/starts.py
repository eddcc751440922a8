"""Time until an engine is ready, with an empty compilation cache and with the cache of the first start."""

import argparse
import subprocess
import sys
import tempfile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks starts`."""
    parser.add_argument(
        "--all",
        action="store_true",
        help="Wait until every bucket is compiled, which takes minutes instead of seconds.",
    )
    parser.add_argument("--out", help="Directory for the result rows.")


def main(arguments: argparse.Namespace) -> None:
    """Start an engine in two processes, one after the other. This process does not use the GPU."""
    out = [] if arguments.out is None else ["--out", arguments.out]
    with tempfile.TemporaryDirectory() as folder:
        case = "start" if arguments.all else "ready"
        for _ in ("empty cache", "cache of the first process"):
            command = [sys.executable, "-m", "benchmarks", "engine", case, "--cache-dir", folder, *out]
            subprocess.run(command, check=True)
