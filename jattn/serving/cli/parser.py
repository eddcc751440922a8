"""The argument parser of all commands, and the switches of vLLM that it accepts."""

import argparse
from typing import NoReturn

# Switches of `vllm serve` that select what jattn does anyway.
VLLM_DEFAULTS = {
    "--disable-log-requests": "requests are not logged",
    "--enable-auto-tool-choice": "automatic tool choice is always enabled",
    "--enable-chunked-prefill": "chunked prefill is always enabled",
    "--enable-prompt-tokens-details": "the usage always contains the cached tokens",
    "--trust-remote-code": "code in checkpoints is never run",
}


class OneLineParser(argparse.ArgumentParser):
    """Argument parser that reports an error in one line, without the list of options."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2."""
        self.exit(2, f"{self.prog}: {message}. See {self.prog} --help.\n")
