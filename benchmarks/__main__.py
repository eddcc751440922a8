"""`python -m benchmarks SUITE [CASE ...]`: rows to the terminal and to benchmarks/results."""

import argparse

from benchmarks import (
    backward,
    backward_peers,
    cascades,
    crowds,
    decode,
    drafts,
    engine,
    engine_model,
    experts,
    gpu_tests,
    graphs,
    host,
    load,
    mesh,
    phi3small,
    prefill,
    quantization,
    scaling_model,
    serve,
    sparse,
    starts,
    table,
    training,
    tune,
    write,
)

SUITES = {
    "decode": decode,
    "prefill": prefill,
    "backward": backward,
    "backward-peers": backward_peers,
    "training": training,
    "sparse": sparse,
    "tune": tune,
    "graphs": graphs,
    "host": host,
    "engine": engine,
    "engine-model": engine_model,
    "starts": starts,
    "serve": serve,
    "drafts": drafts,
    "crowds": crowds,
    "cascades": cascades,
    "quantization": quantization,
    "experts": experts,
    "load": load,
    "phi3small": phi3small,
    "mesh": mesh,
    "scaling-model": scaling_model,
    "gpu-tests": gpu_tests,
    "table": table,
    "write": write,
}


def main() -> None:
    """Runs a suite."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    suites = parser.add_subparsers(dest="suite", required=True)
    for name, suite in SUITES.items():
        suite.add_arguments(suites.add_parser(name, help=suite.__doc__))
    arguments = parser.parse_args()
    SUITES[arguments.suite].main(arguments)


if __name__ == "__main__":
    main()
