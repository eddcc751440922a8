"""`jattn generate`: prompts completed, as their text comes."""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence

from jattn.models import load
from jattn.serving.cli.nodes import add_node_options
from jattn.serving.cli.options import (
    add_engine_options,
    add_sampling_options,
    make_engine,
    requested_implementations,
)
from jattn.serving.engine.outputs import GenerationResult
from jattn.serving.engine.sampling_params import SamplingParams, describe_params

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def add_generate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The command's options."""
    parser = commands.add_parser("generate", help="complete prompts, streaming the text")
    parser.set_defaults(run=generate)
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="none: the whole of stdin is one")
    parser.add_argument("--model", required=True, metavar="DIR", help="a Hugging Face folder")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="of each prompt [64]")
    add_sampling_options(parser)
    add_engine_options(parser)
    add_node_options(parser)


def generate(args: argparse.Namespace) -> None:
    """Completes prompts."""
    asked = requested_implementations(args)
    SamplingParams(**asked, max_tokens=args.max_tokens)  # an error now, not when the model is loaded
    prompts = args.prompts or [sys.stdin.read()]
    is_terminal = sys.stderr.isatty()
    engine = make_engine(args, functools.partial(load, progress=is_terminal))
    defaults = engine.default_sampling_params
    if told := describe_params(defaults):
        print(f"jattn: the checkpoint asks for {told}; --temperature 0 is greedy", file=sys.stderr)
    sampling_params = dataclasses.replace(defaults, **asked)
    write = lambda text: print(text, end="", flush=True)
    printer = StreamPrinter(prompts, write, has_colours=sys.stdout.isatty())
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
    """Prints tokens as they come: one prompt as it grows, several in lines with their prompt's number.

    Lines of a prompt begin with "> ", so that what the model wrote can be told from them in a file, too.
    """

    def __init__(
        self, prompts: Sequence[str], write: Callable[[str], object], *, has_colours: bool = False
    ) -> None:
        """Writes the prompts."""
        self._write = write
        self._has_labels = len(prompts) > 1
        self._lines = [""] * len(prompts)
        for index, prompt in enumerate(prompts):
            for line in prompt.removesuffix("\n").split("\n"):
                told = f"{self._label(index)}> {line}"
                self._write(f"{DIM}{told}{PLAIN}\n" if has_colours else f"{told}\n")

    def _label(self, index: int) -> str:
        return f"[{index}] " if self._has_labels else ""

    def on_token(self, index: int, token_id: int, text: str) -> None:
        """Takes a piece of a prompt's completion."""
        if not self._has_labels:
            self._write(text)
            return
        *whole, self._lines[index] = (self._lines[index] + text).split("\n")
        for line in whole:
            self._write(f"{self._label(index)}{line}\n")

    def close(self) -> None:
        """Ends the lines that are not ended."""
        if not self._has_labels:
            self._write("\n")
        for index, line in enumerate(self._lines):
            if line:
                self._write(f"{self._label(index)}{line}\n")
