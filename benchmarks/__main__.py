"""Run a benchmark suite: `python -m benchmarks SUITE [CASE ...]` prints rows and appends them to a file."""

import argparse
import importlib
import types

SUITES = {
    "decode": "kernels.decode",
    "prefill": "kernels.prefill",
    "backward": "kernels.backward",
    "backward-peers": "kernels.flex_attention",
    "training": "kernels.training",
    "sparse": "kernels.sparse",
    "write": "kernels.write",
    "experts": "kernels.experts",
    "tune": "kernels.tune",
    "graphs": "models.graphs",
    "phi3small": "models.phi3small",
    "quantization": "models.quantization",
    "load": "models.load",
    "engine": "serving.engine",
    "engine-model": "serving.engine_model",
    "starts": "serving.starts",
    "serve": "serving.serve",
    "drafts": "serving.drafts",
    "crowds": "serving.crowds",
    "cascades": "serving.cascades",
    "host": "serving.host",
    "mesh": "mesh.mesh",
    "scaling-model": "mesh.scaling_model",
    "gpu-tests": "gpu_tests.gpu_tests",
    "table": "tables.pages",
}


def suite(name: str) -> types.ModuleType:
    """Return the module of a suite. It defines `add_arguments(parser)` and `main(arguments)`."""
    return importlib.import_module(f"benchmarks.{SUITES[name]}")


def main() -> None:
    """Run the suite named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="suite", required=True)
    for name in SUITES:
        module = suite(name)
        module.add_arguments(commands.add_parser(name, help=(module.__doc__ or "").splitlines()[0]))
    arguments = parser.parse_args()
    suite(arguments.suite).main(arguments)


if __name__ == "__main__":
    main()
