"""The entry point of the `jattn` command line."""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence

from jattn.serving.cli.bench_serve import add_bench_serve
from jattn.serving.cli.chat import add_chat
from jattn.serving.cli.doctor import add_doctor
from jattn.serving.cli.generate import add_generate
from jattn.serving.cli.nodes import follow, join_nodes
from jattn.serving.cli.options import OneLineParser
from jattn.serving.cli.serve import VLLM_DEFAULTS, add_serve, expand_config
from jattn.serving.engine.doctor import version_of
from jattn.serving.engine.processes import ProcessError

INTERRUPTED = 130  # Exit status after Ctrl-C, as in shells.

# Options of `vllm serve` that have another name here, or are not needed or supported; see docs/vllm.md.
VLLM_OPTIONS = {
    "--gpu-memory-utilization": "set the size of the cache with --num-blocks",
    "--kv-cache-dtype": "use --quantization",
    "--attention-backend": "use --implementation",
    "--speculative-config": "use --speculative and --num-speculative-tokens",
    "--enforce-eager": "every step is compiled",
    "--generation-config": "generation_config.json is always read",
    "--download-dir": "models are not downloaded",
    "--tokenizer": "the model folder's tokenizer.json is used",
    "--data-parallel-size": "start one server per replica",
    "--pipeline-parallel-size": "use --tensor-parallel-size",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Command-line arguments; None uses the process's arguments.

    Returns:
        The exit status: 0, 1 with a message on stderr, or 130 after Ctrl-C.
    """
    try:
        args = _parse_args(expand_config(sys.argv[1:] if argv is None else argv))
        join_nodes(args)
        (follow if getattr(args, "node_rank", 0) else args.run)(args)
        sys.stdout.flush()
    except BrokenPipeError:  # The reader of a pipe, such as `head`, has closed it.
        # Without this, Python reports the closed pipe again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except (ValueError, NotImplementedError, OSError, ImportError, ProcessError) as error:
        print(f"jattn: {error}", file=sys.stderr)
        return 1
    return 0


def _parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments; unknown ones are reported as an error of their command."""
    args, unknown = build_parser().parse_known_args(argv)
    if args.command == "serve":
        for option in [word for word in unknown if word in VLLM_DEFAULTS]:
            unknown.remove(option)
            print(f"jattn: {option} has no effect: {VLLM_DEFAULTS[option]}.", file=sys.stderr)
    if unknown:
        message = f"unrecognized arguments: {' '.join(unknown)}{vllm_option_hints(unknown)}"
        OneLineParser(prog=f"jattn {args.command}").error(message)
    return args


def vllm_option_hints(unknown: Iterable[str]) -> str:
    """Return hints, in parentheses, for the unknown arguments that are options of vLLM; "" for none."""
    names = dict.fromkeys(word.partition("=")[0].replace("_", "-") for word in unknown)
    hints = [
        f"{name} is a vLLM option; in jattn, {VLLM_OPTIONS[name]}" for name in names if name in VLLM_OPTIONS
    ]
    return f" ({'; '.join(hints)})" if hints else ""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands and their options."""
    parser: argparse.ArgumentParser = OneLineParser(
        prog="jattn", description="LLM serving and attention tools for JAX on NVIDIA GPUs."
    )
    versions = [f"{name} {version_of(name)}" for name in ("jattn", "jax")]
    parser.add_argument("--version", action="version", version=", ".join(versions))
    commands = parser.add_subparsers(dest="command", required=True)
    for add_command in (add_generate, add_chat, add_serve, add_bench_serve, add_doctor):
        add_command(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
