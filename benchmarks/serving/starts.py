"""Time until an engine is ready and at full speed, with an empty cache and with that of the first start."""

import argparse
import subprocess
import sys
import tempfile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks starts`."""
    parser.add_argument(
        "--first-minute",
        action="store_true",
        help="Also count the tokens in the first minute of an engine with an empty cache.",
    )
    parser.add_argument("--out", help="Directory for the result rows.")


def main(arguments: argparse.Namespace) -> None:
    """Start engines in processes, one after the other. This process does not use the GPU."""
    out = [] if arguments.out is None else ["--out", arguments.out]
    command = [sys.executable, "-m", "benchmarks", "engine"]
    with tempfile.TemporaryDirectory() as folder:
        for _ in ("empty cache", "cache of the first process"):
            subprocess.run([*command, "full_speed", "--cache-dir", folder, *out], check=True)
    if arguments.first_minute:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run([*command, "first_minute", "--cache-dir", folder, *out], check=True)
