"""The command line: `jattn generate`, `jattn serve` and others."""

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
from jattn.serving.cli.serve import add_serve, with_config
from jattn.serving.engine.doctor import version_of
from jattn.serving.engine.processes import ProcessError

INTERRUPTED = 130  # the status of what Ctrl-C ended, as shells have it


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: Its words; None = those of the process.

    Returns:
        The exit status: 0, 1 with a message on stderr, or 130 after Ctrl-C.
    """
    try:
        args = _parsed(with_config(sys.argv[1:] if argv is None else argv))
        join_nodes(args)
        (follow if getattr(args, "node_rank", 0) else args.run)(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` say, has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains as it exits
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except (ValueError, NotImplementedError, OSError, ImportError, ProcessError) as error:
        print(f"jattn: {error}", file=sys.stderr)
        return 1
    return 0


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """What the words ask for; words that are no options are an error of their command."""
    args, unknown = build_parser().parse_known_args(words)
    if unknown:
        told = f"unrecognized arguments: {' '.join(unknown)}{told_of(unknown)}"
        OneLineParser(prog=f"jattn {args.command}").error(told)
    return args


def build_parser() -> argparse.ArgumentParser:
    """All commands with their options."""
    parser: argparse.ArgumentParser = OneLineParser(prog="jattn", description="Attention and serving in JAX.")
    versions = [f"{name} {version_of(name)}" for name in ("jattn", "jax")]
    parser.add_argument("--version", action="version", version=", ".join(versions))
    commands = parser.add_subparsers(dest="command", required=True)
    for add in (add_generate, add_chat, add_serve, add_bench_serve, add_doctor):
        add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())


ELSEWHERE = {
    "--gpu-memory-utilization": "--num-blocks says how large the caches are",
    "--kv-cache-dtype": "it is --quantization",
    "--attention-backend": "it is --implementation",
    "--speculative-config": "it is --speculative and --num-speculative-tokens",
    "--enforce-eager": "every step is compiled",
    "--enable-chunked-prefill": "prompts are always computed in chunks",
    "--enable-auto-tool-choice": "tools are always served",
    "--generation-config": "generation_config.json is always read",
    "--trust-remote-code": "no code of a checkpoint is run",
    "--download-dir": "nothing is downloaded",
    "--tokenizer": "it is the folder's tokenizer.json",
    "--data-parallel-size": "start a server for each",
    "--pipeline-parallel-size": "--tensor-parallel-size spreads a model over devices",
}


def told_of(unknown: Iterable[str]) -> str:
    """What an error says in brackets of vLLM's options among words that are none here; of others nothing."""
    names = dict.fromkeys(word.partition("=")[0].replace("_", "-") for word in unknown)
    told = [f"{name} is vLLM's: here {ELSEWHERE[name]}" for name in names if name in ELSEWHERE]
    return f" ({'; '.join(told)})" if told else ""
