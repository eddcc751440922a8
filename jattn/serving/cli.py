"""The command line: `jattn generate` and `jattn doctor`."""

import argparse
import functools
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from jattn.cache.spec import QUANTIZATION_ALIASES, QUANTIZATIONS
from jattn.implementations.choice import IMPLEMENTATIONS
from jattn.models import load
from jattn.models.loading import load_shapes
from jattn.models.scales import CalibrationWarning
from jattn.serving.doctor import report
from jattn.serving.engine import Engine
from jattn.serving.outputs import GenerationResult
from jattn.serving.sampling_params import SamplingParams


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: Its words; None = those of the process.

    Returns:
        The exit status: 0, or 1 with a message on stderr.
    """
    args = _parser().parse_args(argv)
    try:
        if args.command == "doctor":
            print(report() if args.model is None else _engine(args, load_shapes).explain())
        else:
            _generate(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, `head` say, has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains as it exits
    except (ValueError, NotImplementedError, FileNotFoundError, ImportError) as error:
        print(f"jattn: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jattn", description="Attention and serving in JAX.")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="which implementation this machine gets, and why")
    doctor.add_argument("--model", metavar="DIR", help="for each bucket that an engine of it would compile")
    _add_engine_options(doctor)
    generate = commands.add_parser("generate", help="complete prompts, streaming the text")
    generate.add_argument("prompts", nargs="*", metavar="PROMPT", help="none: the whole of stdin is one")
    generate.add_argument("--model", required=True, metavar="DIR", help="a Hugging Face folder")
    generate.add_argument("--max-tokens", type=int, default=64, metavar="N", help="of each prompt [64]")
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 = greedy [0]")
    generate.add_argument("--top-k", type=int, metavar="K", help="only the K likeliest tokens")
    generate.add_argument("--top-p", type=float, default=1.0, metavar="P", help="only the likeliest P [1]")
    generate.add_argument("--min-p", type=float, default=0.0, metavar="P", help="as likely as P x best [0]")
    generate.add_argument("--seed", type=int, metavar="N", help="the same seed draws the same text")
    _add_engine_options(generate)
    return parser


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--implementation", choices=IMPLEMENTATIONS, help="of the attention [the best]")
    formats = [*filter(None, QUANTIZATIONS), *QUANTIZATION_ALIASES]
    parser.add_argument("--quantization", choices=formats, help="of the cache [none]")
    parser.add_argument("--skip-layers", type=_layers, default=(), metavar="N,N", help="not quantised [none]")
    parser.add_argument("--max-num-seqs", type=int, default=16, metavar="N", help="requests of a step [16]")
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=512, metavar="N", help="tokens of a step [512]"
    )
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens of a block [16]")


def _engine(args: argparse.Namespace, load: Callable[[str], Any]) -> Any:
    """The engine that the options ask for; what its caches lack is told on stderr."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", CalibrationWarning)
        engine = Engine(
            load(args.model),
            implementation=args.implementation,
            quantization=args.quantization,
            skip_layers=args.skip_layers,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            block_size=args.block_size,
        )
    for warning in told:
        print(f"jattn: {warning.message}", file=sys.stderr)
    return engine


def _layers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _generate(args: argparse.Namespace) -> None:
    sampling_params = SamplingParams(
        temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p, seed=args.seed
    )
    prompts = args.prompts or [sys.stdin.read()]
    is_terminal = sys.stderr.isatty()
    engine = _engine(args, functools.partial(load, progress=is_terminal))
    printer = StreamPrinter(prompts, lambda text: print(text, end="", flush=True))
    results = engine.generate(
        prompts, sampling_params=sampling_params, max_tokens=args.max_tokens, on_token=printer.on_token
    )
    printer.close()
    if is_terminal:
        print(_summary(results, engine.stats.num_compiles), file=sys.stderr)


def _summary(results: Sequence[GenerationResult], num_compiles: int) -> str:
    tokens = sum(len(result.token_ids) for result in results)
    first = min(result.metrics.time_to_first_token for result in results)
    total = max(result.metrics.time_total for result in results)
    speed = f"{tokens / total:.1f} a second ({num_compiles} compiles included)"
    return f"{tokens} tokens, the first after {first:.2f} s, {speed}"


class StreamPrinter:
    """Prints tokens as they come: one prompt as it grows, several in lines with their prompt's number."""

    def __init__(self, prompts: Sequence[str], write: Callable[[str], object]) -> None:
        """Writes the prompts, each at the start of its completion."""
        self._write = write
        self._has_labels = len(prompts) > 1
        self._lines = [""] * len(prompts)
        for index, prompt in enumerate(prompts):
            self.on_token(index, None, prompt)

    def on_token(self, index: int, token_id: int | None, text: str) -> None:
        """Takes a piece of a prompt's text."""
        if not self._has_labels:
            self._write(text)
            return
        *whole, self._lines[index] = (self._lines[index] + text).split("\n")
        for line in whole:
            self._write(f"[{index}] {line}\n")

    def close(self) -> None:
        """Ends the lines that are not ended."""
        if not self._has_labels:
            self._write("\n")
        for index, line in enumerate(self._lines):
            if line:
                self._write(f"[{index}] {line}\n")


if __name__ == "__main__":
    sys.exit(main())
