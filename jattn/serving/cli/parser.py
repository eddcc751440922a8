"""The argument parser of all commands, and the switches of vLLM that it accepts."""

import argparse
from collections.abc import Sequence
from typing import NoReturn

# Switches of `vllm serve` that select what jattn does anyway.
VLLM_DEFAULTS = {
    "--async-scheduling": "a step is always prepared while the one before it runs",
    "--disable-log-requests": "requests are not logged",
    "--enable-auto-tool-choice": "automatic tool choice is always enabled",
    "--enable-chunked-prefill": "chunked prefill is always enabled",
    "--enable-prompt-tokens-details": "the usage always contains the cached tokens",
    "--trust-remote-code": "code in checkpoints is never run",
}


def normalize_options(argv: Sequence[str]) -> list[str]:
    """Return the arguments with dashes for underscores in the names of options: --max_tokens, as in vLLM."""
    words: list[str] = []
    for i, word in enumerate(argv):
        if word == "--":
            return [*words, *argv[i:]]
        name, equals, value = word.partition("=")
        words.append((name.replace("_", "-") if name.startswith("--") else name) + equals + value)
    return words


class OneLineParser(argparse.ArgumentParser):
    """Argument parser that reports an error in one line, without the list of options."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2."""
        self.exit(2, f"{self.prog}: {message}. See {self.prog} --help.\n")
