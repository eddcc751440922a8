"""`jattn bench-serve`: how long a server lets its clients wait, at several rates of requests."""

import argparse
import asyncio
import dataclasses
import functools
import importlib
import json
import math
import pathlib
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np

from jattn.serving.cli.openai_client import ServerError, address, events
from pallas_kernels.checks import require, require_positive

TIMES = ("time_to_first_token", "inter_token_latency", "end_to_end")
PERCENTILES = (50, 90, 99)


def add_bench_serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The command's options."""
    parser = commands.add_parser("bench-serve", help="measure a server with OpenAI's API")
    parser.set_defaults(run=bench_serve)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="[http://127.0.0.1:8000]")
    parser.add_argument("--api-key", metavar="KEY", help="of the server")
    parser.add_argument("--model", metavar="NAME", help="as the server calls it [whatever it serves]")
    rates = {"type": float, "nargs": "+", "default": [4.0], "metavar": "R"}
    parser.add_argument("--request-rate", **rates, help="requests a second, one run each [4]")  # type: ignore[arg-type]
    parser.add_argument("--num-prompts", type=int, default=100, metavar="N", help="of a run [100]")
    parser.add_argument("--input-len", type=int, default=1024, metavar="N", help="tokens of a prompt [1024]")
    parser.add_argument("--output-len", type=int, default=256, metavar="N", help="new tokens [256]")
    parser.add_argument(
        "--vocab-size", type=int, default=256, metavar="N", help="prompts' ids are below [256]"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of prompts and arrivals [0]")
    parser.add_argument("--json", metavar="FILE", help="where to write all of it")
    parser.add_argument("--plot", metavar="FILE", help="where to draw it (the extra jattn[plot])")


@dataclasses.dataclass
class Sample:
    """One request, in seconds from when it was due: a sender that is late has others wait, too.

    Attributes:
        arrivals: When each chunk with text came.
        end: When the answer was whole.
        num_tokens: New ones, as the server counts.
        error: What went wrong; None = nothing.
    """

    arrivals: list[float] = dataclasses.field(default_factory=list)
    end: float = 0.0
    num_tokens: int = 0
    error: str | None = None


def bench_serve(args: argparse.Namespace) -> None:
    """Runs each rate, prints a table, writes what is to be written."""
    sizes = {"num_prompts": args.num_prompts, "input_len": args.input_len, "output_len": args.output_len}
    require_positive(**sizes, vocab_size=args.vocab_size)
    for rate in args.request_rate:
        require_positive(request_rate=rate)
    address(args.url)
    _require_writable(args.json, args.plot)
    rows = []
    for rate in args.request_rate:
        prompts = drawn_prompts(args.num_prompts, args.input_len, args.vocab_size, random.Random(args.seed))
        ask, draws = functools.partial(_ask, args), random.Random(args.seed + 1)
        start = time.perf_counter()
        samples = asyncio.run(arriving(ask, prompts, rate, draws))
        rows.append(summary(samples, rate, time.perf_counter() - start) | sizes)
        print("\n".join(([] if rows[1:] else [HEADER]) + [as_line(rows[-1])]), flush=True)
    if args.json is not None:
        pathlib.Path(args.json).write_text(json.dumps([_as_json(row) for row in rows], indent=1) + "\n")
    if args.plot is not None:
        draw(rows, args.plot)
    if not any(row["num_ok"] for row in rows):
        raise ServerError("no request was answered.")


def _as_json(row: dict[str, Any]) -> dict[str, Any]:
    """A run as it is written: JSON has no infinity, and "inf" is vLLM's word for all at once."""
    return row | ({"request_rate": "inf"} if row["request_rate"] == math.inf else {})


def _require_writable(json_file: str | None, plot: str | None) -> None:
    """Finds out before a long run what could not be written behind it.

    Raises:
        OSError: A file cannot be written.
        ValueError: No picture ends as the plot does.
        ImportError: There is nothing to draw it with.
    """
    if plot is not None:
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
        kinds = sorted(pyplot.Figure().canvas.get_supported_filetypes())
        require(pathlib.Path(plot).suffix[1:].lower() in kinds, "plot", f"end as one of {kinds}", plot)
    for file in filter(None, (json_file, plot)):
        pathlib.Path(file).open("a").close()


def drawn_prompts(count: int, length: int, vocab_size: int, draw: random.Random) -> list[list[int]]:
    """Random token ids."""
    return [draw.choices(range(vocab_size), k=length) for _ in range(count)]


async def arriving(
    ask: Callable[[list[int], float], Coroutine[Any, Any, Sample]],
    prompts: Sequence[list[int]],
    rate: float,
    draw: random.Random,
) -> list[Sample]:
    """Asks with each prompt, as they come in a Poisson process, whatever became of those before.

    Args:
        ask: What asks with a prompt that is due at a time of `time.perf_counter`.
        prompts: Of the requests.
        rate: How many a second.
        draw: Of the times between them.
    """
    tasks, due = [], time.perf_counter()
    for prompt in prompts:
        tasks.append(asyncio.create_task(ask(prompt, due)))
        due += draw.expovariate(rate)
        await asyncio.sleep(max(due - time.perf_counter(), 0))
    return await asyncio.gather(*tasks)


async def _ask(args: argparse.Namespace, prompt: list[int], due: float) -> Sample:
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": args.output_len, "ignore_eos": True}
    body |= {"temperature": 0.0, "stream_options": {"include_usage": True}}
    if args.model is not None:
        body["model"] = args.model
    sample = Sample()
    try:
        async for chunk in events(args.url, "/v1/completions", body, args.api_key):
            if chunk["choices"]:
                sample.arrivals.append(time.perf_counter() - due)
            if chunk.get("usage"):
                sample.num_tokens = chunk["usage"]["completion_tokens"]
    except (OSError, ValueError) as error:
        sample.error = str(error) or type(error).__name__
    sample.end = time.perf_counter() - due
    return sample


def summary(samples: Sequence[Sample], rate: float, seconds: float) -> dict[str, Any]:
    """A run in numbers: times in milliseconds, by percentile."""
    good = [sample for sample in samples if sample.error is None and sample.arrivals]
    times = {
        "time_to_first_token": [sample.arrivals[0] for sample in good],
        "inter_token_latency": [gap for sample in good for gap in np.diff(sample.arrivals).tolist()],
        "end_to_end": [sample.end for sample in good],
    }
    errors = sorted({sample.error for sample in samples if sample.error is not None})
    row: dict[str, Any] = {"request_rate": rate, "seconds": seconds, "errors": errors}
    num_tokens = sum(sample.num_tokens for sample in good)
    row |= {"num_ok": len(good), "num_failed": len(samples) - len(good), "num_tokens": num_tokens}
    row["tokens_per_second"] = num_tokens / seconds
    for name, values in times.items():
        told = (np.percentile(values, PERCENTILES) * 1e3).tolist() if values else [None] * len(PERCENTILES)
        row[f"{name}_ms"] = {f"p{p}": value for p, value in zip(PERCENTILES, told, strict=True)}
        row[f"{name}_ms"]["mean"] = float(np.mean(values)) * 1e3 if values else None
    return row


HEADER = (
    f"{'requests/s':>10} {'ok':>6} {'failed':>6} {'tokens/s':>9}  "
    f"{'first token, ms':^23}  {'between two, ms':^23}  {'whole, ms':^23}\n"
    f"{'':34} " + " ".join(f"{f'p{p}':>7}" for _ in TIMES for p in PERCENTILES)
)


def as_line(row: dict[str, Any]) -> str:
    """A run as a row of the table."""
    counts = f"{row['request_rate']:>10g} {row['num_ok']:>6} {row['num_failed']:>6}"
    times = [row[f"{name}_ms"][f"p{p}"] for name in TIMES for p in PERCENTILES]
    line = f"{counts} {row['tokens_per_second']:>9.1f}  " + " ".join(_cell(value) for value in times)
    return "\n".join([line, *(f"  {error}" for error in row["errors"])])


def _cell(value: float | None) -> str:
    return f"{'-' if value is None else f'{value:.1f}':>7}"


def draw(rows: Sequence[dict[str, Any]], file: str) -> None:
    """One panel for each time, a line for each percentile, over the rates."""
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, panels = pyplot.subplots(1, len(TIMES), figsize=(12, 3.5), layout="constrained")
    for panel, name in zip(panels, TIMES, strict=True):
        for percentile in PERCENTILES:
            values = [row[f"{name}_ms"][f"p{percentile}"] for row in rows]
            panel.plot([row["request_rate"] for row in rows], values, "o-", label=f"p{percentile}")
        panel.set(title=name.replace("_", " "), xlabel="requests a second", ylabel="ms", ylim=(0, None))
        panel.legend()
    figure.savefig(file)
    pyplot.close(figure)
