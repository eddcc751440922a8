"""The entry point of the `jattn` command line."""

import argparse
import importlib
import importlib.util
import os
import pathlib
import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from jattn.serving.cli.parser import VLLM_DEFAULTS, OneLineParser, normalize_options
from jattn.version import version_of

# Help of each command. Its module, which may import JAX, is imported only to run it or to list its options.
COMMANDS = {
    "generate": "complete prompts, streaming the text",
    "chat": "chat with a model (needs the extra 'serve')",
    "serve": "serve a model over HTTP with the OpenAI API (needs the extra 'serve')",
    "bench-serve": "measure the latency and throughput of a server with the OpenAI API",
    "doctor": "show which attention implementation this machine uses, and why",
}
INTERRUPTED = 130  # Exit status after Ctrl-C, as in shells.

# Options of `vllm serve` that have another name here, or are not needed or supported; see docs/vllm.md.
VLLM_OPTIONS = {
    "--num-gpu-blocks-override": "use --num-blocks",
    "--gpu-memory-utilization": "set the size of the cache with --num-blocks",
    "--quantization": (
        "the quantization of weights is read from the checkpoint; for the KV cache, use --kv-cache-dtype"
    ),
    "--attention-backend": "use --implementation",
    "--speculative-config": "use --speculative and --num-speculative-tokens",
    "--enforce-eager": "every step is compiled",
    "--compilation-config": "every step is compiled, and there are no compilation options",
    "--hf-overrides": "edit config.json in the model folder",
    "--max-logprobs": "the maximum is always 20",
    "--uvicorn-log-level": "the level is always info",
    "--generation-config": "generation_config.json is always read",
    "--download-dir": "set the environment variable HF_HOME",
    "--tokenizer": "the model folder's tokenizer.json is used",
    "--data-parallel-size": "start one server per replica",
    "--pipeline-parallel-size": "use --tensor-parallel-size",
    "--enable-expert-parallel": "use --tensor-parallel-size, which shards every expert",
    "--enable-lora": "LoRA is not supported",
    "--swap-space": "preempted requests are recomputed, not swapped to the host",
    "--no-enable-chunked-prefill": "chunked prefill is always enabled; increase --max-num-batched-tokens",
    "--kv-cache-memory-bytes": "set the size of the cache with --num-blocks",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Command-line arguments; None uses the process's arguments.

    Returns:
        The exit status: 0, 1 with a message on stderr, or 130 after Ctrl-C.
    """
    try:
        args = _parse_args(sys.argv[1:] if argv is None else argv)
        _import_plugins(getattr(args, "plugin", []))
        args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:  # The reader of a pipe, such as `head`, has closed it.
        # Without this, Python reports the closed pipe again when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except (ValueError, NotImplementedError, OSError, ImportError) as error:
        message = str(error).replace("Pass implementation=None or 'xla'", "Omit --implementation, or use xla")
        print(f"jattn: {message}", file=sys.stderr)
        return 1
    return 0


def _parse_args(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments; unknown ones are reported as an error of their command."""
    argv = normalize_options(argv)
    if argv[:1] == ["serve"]:
        argv = _command_module("serve").expand_config(argv)
    args, unknown = build_parser(argv[:1]).parse_known_args(argv)
    if args.command == "serve":
        for option in [word for word in unknown if word in VLLM_DEFAULTS]:
            unknown.remove(option)
            print(f"jattn: {option} has no effect: {VLLM_DEFAULTS[option]}.", file=sys.stderr)
    if unknown:
        message = f"unrecognized arguments: {' '.join(unknown)}{vllm_option_hints(unknown)}"
        OneLineParser(prog=f"jattn {args.command}").error(message)
    return args


def _import_plugins(modules: Iterable[str]) -> None:
    """Import modules that are installed or in the current folder, or whose .py files are given.

    Raises:
        ImportError: If a module cannot be imported.
    """
    for module in modules:
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        try:
            if module.endswith(".py"):
                _import_file(pathlib.Path(module))
            else:
                importlib.import_module(module)
        except Exception as error:
            raise ImportError(f"--plugin {module}: {type(error).__name__}: {error}") from error


def _import_file(file: pathlib.Path) -> None:
    """Import a Python file as the module of its name."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)


def vllm_option_hints(unknown: Iterable[str]) -> str:
    """Return hints, in parentheses, for the unknown arguments that are options of vLLM; "" for none."""
    names = dict.fromkeys(word.partition("=")[0].replace("_", "-") for word in unknown)
    hints = [
        f"{name} is a vLLM option; in jattn, {VLLM_OPTIONS[name]}" for name in names if name in VLLM_OPTIONS
    ]
    return f" ({'; '.join(hints)})" if hints else ""


def build_parser(commands: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """Return the parser of all commands.

    Args:
        commands: Commands whose options the parser has.
    """
    parser: argparse.ArgumentParser = OneLineParser(
        prog="jattn", description="LLM serving and attention tools for JAX on NVIDIA GPUs."
    )
    versions = [f"{name} {version_of(name)}" for name in ("jattn", "jax")]
    parser.add_argument("--version", action="version", version=", ".join(versions))
    subparsers = parser.add_subparsers(dest="command", required=True)
    for name, description in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=description)
        if name in commands:
            _command_module(name).add_options(subparser)
    return parser


def _command_module(name: str) -> Any:
    return importlib.import_module(f"jattn.serving.cli.{name.replace('-', '_')}")


if __name__ == "__main__":
    sys.exit(main())
