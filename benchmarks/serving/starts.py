"""Seconds until an engine serves, in two processes: with nothing kept, and with what the first one kept."""

import argparse
import subprocess
import sys
import tempfile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `python -m benchmarks starts` takes."""
    parser.add_argument("--all", action="store_true", help="wait for every executable: minutes, not seconds")
    parser.add_argument("--out", help="folder of the rows")


def main(arguments: argparse.Namespace) -> None:
    """Both rows; this process leaves the GPU alone, whose memory the others need."""
    out = [] if arguments.out is None else ["--out", arguments.out]
    with tempfile.TemporaryDirectory() as folder:
        case = "start" if arguments.all else "ready"
        for _ in ("nothing is kept", "what the first kept"):
            command = [sys.executable, "-m", "benchmarks", "engine", case, "--cache-dir", folder, *out]
            subprocess.run(command, check=True)
