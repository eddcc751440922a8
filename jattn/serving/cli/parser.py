"""The argument parser of all commands, and the switches of vLLM that it accepts."""

import argparse
from collections.abc import Sequence
from typing import NoReturn

# Arguments of `vllm serve` that select what jattn does anyway.
VLLM_DEFAULTS = {
    "--async-scheduling": "a step is always prepared while the one before it runs",
    "--data-parallel-size=1": "one server is one replica",
    "--disable-log-requests": "requests are not logged",
    "--disable-log-stats": "statistics are not logged, only served at /metrics",
    "--enable-auto-tool-choice": "automatic tool choice is always enabled",
    "--enable-chunked-prefill": "chunked prefill is always enabled",
    "--enable-prompt-tokens-details": "the usage always contains the cached tokens",
    "--pipeline-parallel-size=1": "every device runs all layers",
    "--trust-remote-code": "code in checkpoints is never run",
}
VLLM_SHORT_OPTIONS = {"-dp": "--data-parallel-size", "-pp": "--pipeline-parallel-size"}


def normalize_options(argv: Sequence[str]) -> list[str]:
    """Return the arguments with dashes for underscores in the names of options: --max_tokens, as in vLLM.

    vLLM's options for data and pipeline parallelism get their long names, joined to their values by "=".
    """
    words: list[str] = []
    for i, word in enumerate(argv):
        if word == "--":
            return [*words, *argv[i:]]
        if words and words[-1] in VLLM_SHORT_OPTIONS.values():
            words[-1] += f"={word}"
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else VLLM_SHORT_OPTIONS.get(name, name)
        words.append(name + equals + value)
    return words


class OneLineParser(argparse.ArgumentParser):
    """Argument parser that reports an error in one line, without the list of options."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2."""
        self.exit(2, f"{self.prog}: {message}. See {self.prog} --help.\n")
