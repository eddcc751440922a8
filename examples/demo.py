"""Complete several prompts at once with the tiny model of this repository and print the speed.

python -m examples.demo [--model DIR] [--max-tokens N]
"""

import argparse
import pathlib
import shutil
import sys
import time
from collections.abc import Sequence

import jattn
from jattn.serving import Engine, GenerationResult

TINY_MODEL = pathlib.Path(__file__).parent / "tiny_model"
PROMPTS = (
    "def fibonacci(n):\n",
    "import os\nimport sys\n\n\ndef main(argv):\n",
    'class Stack:\n    """A stack of items."""\n\n    def __init__(self):\n        self._items = []\n',
    "try:\n    value = int(text)\nexcept ",
    '''def read_config(path):
    """Read the settings from a file.

    Lines are "name = value"; what follows a "#" is a comment and is ignored.
    """
    settings = {}
    with open(path, encoding="utf-8") as file:
        for line in file:
            line = line.split("#")[0].strip()
            if not line:
                continue
            name, value = line.split("=", 1)
            settings[name.strip()] = value.strip()
    return settings


def write_config(path, settings):
''',
)
COLORS = (36, 33, 32, 35, 34)
REDRAW_SECONDS = 0.05


class Screen:
    """Display of each request's text in its own block.

    On a terminal the blocks are redrawn as the texts grow; elsewhere they are printed at the end.
    """

    def __init__(self, prompts: Sequence[str], *, is_terminal: bool) -> None:
        self.prompts, self.is_terminal = prompts, is_terminal
        self.texts = [""] * len(prompts)
        self.num_lines = 0
        self.drawn_at = 0.0

    def on_token(self, index: int, token_id: int, text: str) -> None:
        """Append the text of a new token to its request."""
        self.texts[index] += text
        if self.is_terminal and time.monotonic() - self.drawn_at > REDRAW_SECONDS:
            self.drawn_at = time.monotonic()
            self.redraw()

    def redraw(self) -> None:
        """Draw the last lines of each request over the previous drawing."""
        width, height = shutil.get_terminal_size()
        per_block = max((height - 1) // len(self.prompts) - 1, 1)
        lines = []
        for i, (prompt, text) in enumerate(zip(self.prompts, self.texts, strict=True)):
            lines.append(self.header(i))
            visible = (prompt + text).expandtabs().split("\n")[-per_block:]
            lines += [self.colored(i, line[: width - 1]) for line in visible]
        self.erase()
        self.num_lines = len(lines)
        print("\n".join(lines), flush=True)

    def erase(self) -> None:
        """Erase the drawing."""
        if self.num_lines:
            print(f"\x1b[{self.num_lines}F\x1b[J", end="")
        self.num_lines = 0

    def close(self) -> None:
        """Print every request in full."""
        self.erase()
        for i, (prompt, text) in enumerate(zip(self.prompts, self.texts, strict=True)):
            print(self.header(i))
            print(prompt + self.colored(i, text))

    def header(self, index: int) -> str:
        """Return the line above a request's block."""
        return self.colored(index, f"--- request {index} ".ljust(60, "-"))

    def colored(self, index: int, text: str) -> str:
        """Return the text in the request's color; without a terminal, it has none."""
        return f"\x1b[{COLORS[index % len(COLORS)]}m{text}\x1b[0m" if self.is_terminal else text


def small_engine(model: jattn.models.Decoder) -> Engine:
    """Return an engine with two executables: for decoding, and for steps that also prefill 128 tokens."""
    max_blocks = min(model.config.max_position_embeddings // 16, 64)
    decodes = jattn.Bucket(max_decodes=8, max_blocks=max_blocks)
    mixed = jattn.Bucket(max_decodes=8, max_prefills=8, max_prefill_tokens=128, max_blocks=max_blocks)
    return Engine(
        model,
        num_blocks=max_blocks + 1,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        buckets=[decodes, mixed],
    )


def table(engine: Engine, results: Sequence[GenerationResult], compile_seconds: float) -> str:
    """Return a table of the latency and speed of each request and of all requests."""
    lines = [f"{'request':>7}  {'tokens':>6}  {'first token':>11}  {'tokens/s':>8}  finish reason"]
    for i, result in enumerate(results):
        metrics = result.metrics
        first = f"{metrics.time_to_first_token * 1e3:.0f} ms"
        speed = f"{metrics.tokens_per_second:8.1f}"
        lines.append(f"{i:7}  {metrics.num_tokens:6}  {first:>11}  {speed}  {result.finish_reason}")
    tokens = sum(result.metrics.num_tokens for result in results)
    seconds = max(result.metrics.time_total for result in results)
    first = f"{min(result.metrics.time_to_first_token for result in results) * 1e3:.0f} ms"
    lines.append(f"{'all':>7}  {tokens:6}  {first:>11}  {tokens / seconds:8.1f}")
    stats = engine.stats
    blocks = f"{stats.peak_blocks} of {stats.num_blocks} cache blocks at peak"
    compiles = f"{stats.num_compiles} compiles ({compile_seconds:.1f} s, not included in the times)"
    return "\n".join([*lines, f"{stats.num_steps} steps, {compiles}, {blocks}"])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--model",
        default=TINY_MODEL,
        metavar="DIR",
        help="Hugging Face model folder (default: the tiny model)",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=96,
        metavar="N",
        help="maximum number of new tokens per prompt (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    is_terminal = sys.stdout.isatty()
    engine = small_engine(jattn.models.load(args.model, progress=is_terminal))
    start = time.perf_counter()
    engine.precompile(progress=is_terminal)
    compile_seconds = time.perf_counter() - start
    screen = Screen(PROMPTS, is_terminal=is_terminal)
    results = engine.generate(PROMPTS, max_tokens=args.max_tokens, on_token=screen.on_token)
    screen.close()
    print("\n" + table(engine, results, compile_seconds))


if __name__ == "__main__":
    main()
