"""`jattn generate`: complete prompts and stream the text."""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence

from jattn.models import load
from jattn.serving.cli.nodes import add_node_options, runs_on_nodes
from jattn.serving.cli.options import (
    add_engine_options,
    add_model_option,
    add_sampling_options,
    make_engine,
    sampling_options,
)
from jattn.serving.engine.outputs import GenerationResult
from jattn.serving.engine.sampling_params import SamplingParams, describe_params

DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.set_defaults(run=generate)
    parser.add_argument(
        "prompts", nargs="*", metavar="PROMPT", help="text to complete (default: all of stdin, as one prompt)"
    )
    add_model_option(parser)
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=64,
        metavar="N",
        help="maximum number of new tokens per prompt (default: %(default)s)",
    )
    add_sampling_options(parser)
    add_engine_options(parser)
    add_node_options(parser)


@runs_on_nodes
def generate(args: argparse.Namespace) -> None:
    """Complete the prompts and print each completion as it grows."""
    requested = sampling_options(args)
    SamplingParams(**requested, max_tokens=args.max_tokens)  # Report invalid values before loading the model.
    prompts = args.prompts or [sys.stdin.read()]
    if not args.prompts and not prompts[0]:
        raise ValueError("No prompt given. Pass PROMPT, or pipe text to stdin.")
    is_terminal = sys.stderr.isatty()
    engine = make_engine(args, functools.partial(load, progress=is_terminal))
    defaults = engine.default_sampling_params
    if description := describe_params(defaults):
        print(
            f"jattn: using the model's default sampling parameters: {description}."
            " Pass --temperature 0 for greedy decoding.",
            file=sys.stderr,
        )
    sampling_params = dataclasses.replace(defaults, **requested)
    printer = StreamPrinter(prompts, _write, has_colors=sys.stdout.isatty())
    results = engine.generate(
        prompts, sampling_params=sampling_params, max_tokens=args.max_tokens, on_token=printer.on_token
    )
    printer.close()
    if is_terminal:
        print(_summary(results, engine.stats.num_compiles), file=sys.stderr)


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _summary(results: Sequence[GenerationResult], num_compiles: int) -> str:
    num_tokens = sum(len(result.token_ids) for result in results)
    time_to_first = min(result.metrics.time_to_first_token for result in results)
    seconds = max(result.metrics.time_total for result in results)
    return (
        f"{num_tokens} tokens, {num_tokens / seconds:.1f} tokens/s, time to first token {time_to_first:.2f} s"
        f" (includes {num_compiles} compilations)"
    )


class StreamPrinter:
    """Printer of streamed completions.

    The completion of a single prompt is printed piece by piece. Several are printed in complete lines,
    prefixed with the index of their prompt. Prompt lines begin with "> ", which distinguishes them from the
    model's text in a file, too.
    """

    def __init__(
        self, prompts: Sequence[str], write: Callable[[str], object], *, has_colors: bool = False
    ) -> None:
        """Print the prompts.

        Args:
            prompts: The prompts, in the order of their indices.
            write: Function that writes text to the output.
            has_colors: Whether to dim the prompts with terminal escape codes.
        """
        self._write = write
        self._has_labels = len(prompts) > 1
        self._lines = [""] * len(prompts)
        for index, prompt in enumerate(prompts):
            for line in prompt.removesuffix("\n").split("\n"):
                text = f"{self._label(index)}> {line}"
                self._write(f"{DIM}{text}{PLAIN}\n" if has_colors else f"{text}\n")

    def _label(self, index: int) -> str:
        return f"[{index}] " if self._has_labels else ""

    def on_token(self, index: int, token_id: int, text: str) -> None:
        """Print the text of a new token."""
        if not self._has_labels:
            self._write(text)
            return
        *complete, self._lines[index] = (self._lines[index] + text).split("\n")
        for line in complete:
            self._write(f"{self._label(index)}{line}\n")

    def close(self) -> None:
        """Print the lines that do not end in a newline yet."""
        if not self._has_labels:
            self._write("\n")
        for index, line in enumerate(self._lines):
            if line:
                self._write(f"{self._label(index)}{line}\n")
