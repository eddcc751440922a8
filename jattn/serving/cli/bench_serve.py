"""`jattn bench-serve`: measure the latency and throughput of a server at several request rates."""

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

from jattn.serving.cli.openai_client import ServerError, parse_url, stream_events
from pallas_kernels.checks import require_positive

LATENCIES = ("time_to_first_token", "inter_token_latency", "end_to_end")
PERCENTILES = (50, 90, 99)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.set_defaults(run=bench_serve)
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="URL of the server (default: %(default)s)"
    )
    parser.add_argument("--api-key", metavar="KEY", help="API key of the server (default: none)")
    parser.add_argument(
        "--model", metavar="NAME", help="model name to request (default: the server's only model)"
    )
    parser.add_argument(
        "--request-rate",
        type=float,
        nargs="+",
        default=[4.0],
        metavar="R",
        help="requests per second, with one run per value; inf sends all at once (default: 4)",
    )
    parser.add_argument(
        "--num-prompts",
        type=int,
        default=100,
        metavar="N",
        help="number of requests per run (default: %(default)s)",
    )
    parser.add_argument(
        "--input-len",
        type=int,
        default=1024,
        metavar="N",
        help="length of each prompt, in tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--output-len",
        type=int,
        default=256,
        metavar="N",
        help="number of new tokens per request (default: %(default)s)",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        default=256,
        metavar="N",
        help="prompts are random token ids below this number (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="random seed of prompts and arrival times (default: %(default)s)",
    )
    parser.add_argument("--json", metavar="FILE", help="write the results to this JSON file")
    parser.add_argument(
        "--plot", metavar="FILE", help="plot the results to this file (needs the extra 'plot')"
    )


@dataclasses.dataclass
class RequestTimes:
    """Measurements of one request, in seconds since it was due.

    Counting from the due time instead of the send time includes the wait for a sender that is late.

    Attributes:
        arrivals: Arrival times of the chunks with text.
        end: Time at which the response was complete.
        num_tokens: Number of new tokens, as counted by the server.
        error: Error message, or None if the request succeeded.
    """

    arrivals: list[float] = dataclasses.field(default_factory=list)
    end: float = 0.0
    num_tokens: int = 0
    error: str | None = None


def bench_serve(args: argparse.Namespace) -> None:
    """Run the benchmark at each rate, print a table, and write the requested files."""
    sizes = {"num_prompts": args.num_prompts, "input_len": args.input_len, "output_len": args.output_len}
    require_positive(**sizes, vocab_size=args.vocab_size)
    for rate in args.request_rate:
        require_positive(request_rate=rate)
    parse_url(args.url)
    _require_writable(args.json, args.plot)
    rows = []
    for rate in args.request_rate:
        prompts = random_prompts(args.num_prompts, args.input_len, args.vocab_size, random.Random(args.seed))
        send, rng = functools.partial(_send, args), random.Random(args.seed + 1)
        start = time.perf_counter()
        times = asyncio.run(send_at_rate(send, prompts, rate, rng))
        rows.append(summarize(times, rate, time.perf_counter() - start) | sizes)
        print("\n".join(([] if rows[1:] else [HEADER]) + [format_row(rows[-1])]), flush=True)
    if args.json is not None:
        pathlib.Path(args.json).write_text(json.dumps([_to_json(row) for row in rows], indent=1) + "\n")
    if args.plot is not None:
        plot(rows, args.plot)
    if not any(row["num_ok"] for row in rows):
        raise ServerError("All requests failed; see the errors above.")


def _to_json(row: dict[str, Any]) -> dict[str, Any]:
    """Replace an infinite rate, which JSON cannot hold, by vLLM's "inf"."""
    return row | ({"request_rate": "inf"} if row["request_rate"] == math.inf else {})


def _require_writable(json_file: str | None, plot_file: str | None) -> None:
    """Check before a long run that its results can be written.

    Raises:
        OSError: If a file cannot be written.
        ValueError: If matplotlib does not support the file format of the plot.
        ImportError: If matplotlib is not installed.
    """
    if plot_file is not None:
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
        formats = sorted(pyplot.Figure().canvas.get_supported_filetypes())
        if pathlib.Path(plot_file).suffix[1:].lower() not in formats:
            raise ValueError(f"--plot must have one of the file extensions {formats}, got {plot_file}.")
    for file in filter(None, (json_file, plot_file)):
        pathlib.Path(file).open("a").close()


def random_prompts(count: int, length: int, vocab_size: int, rng: random.Random) -> list[list[int]]:
    """Return prompts of random token ids."""
    return [rng.choices(range(vocab_size), k=length) for _ in range(count)]


async def send_at_rate(
    send: Callable[[list[int], float], Coroutine[Any, Any, RequestTimes]],
    prompts: Sequence[list[int]],
    rate: float,
    rng: random.Random,
) -> list[RequestTimes]:
    """Send requests as a Poisson process, without waiting for earlier requests to finish.

    Args:
        send: Function of a prompt and its due time (`time.perf_counter`) that sends one request.
        prompts: Prompts of the requests, as token ids.
        rate: Mean number of requests per second.
        rng: Random number generator of the intervals between requests.

    Returns:
        The measurements of the requests, in the order of the prompts.
    """
    tasks, due = [], time.perf_counter()
    for prompt in prompts:
        tasks.append(asyncio.create_task(send(prompt, due)))
        due += rng.expovariate(rate)
        await asyncio.sleep(max(due - time.perf_counter(), 0))
    return await asyncio.gather(*tasks)


async def _send(args: argparse.Namespace, prompt: list[int], due: float) -> RequestTimes:
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": args.output_len, "ignore_eos": True}
    body |= {"temperature": 0.0, "stream_options": {"include_usage": True}}
    if args.model is not None:
        body["model"] = args.model
    times = RequestTimes()
    try:
        async for chunk in stream_events(args.url, "/v1/completions", body, args.api_key):
            if chunk["choices"]:
                times.arrivals.append(time.perf_counter() - due)
            if chunk.get("usage"):
                times.num_tokens = chunk["usage"]["completion_tokens"]
    except (OSError, ValueError) as error:
        times.error = str(error) or type(error).__name__
    times.end = time.perf_counter() - due
    return times


def summarize(requests: Sequence[RequestTimes], rate: float, seconds: float) -> dict[str, Any]:
    """Summarize a run: counts, throughput, and percentiles of the latencies in milliseconds.

    Args:
        requests: Measurements of the run's requests.
        rate: Requests per second.
        seconds: Duration of the run.
    """
    succeeded = [times for times in requests if times.error is None and times.arrivals]
    latencies = {
        "time_to_first_token": [times.arrivals[0] for times in succeeded],
        "inter_token_latency": [gap for times in succeeded for gap in np.diff(times.arrivals).tolist()],
        "end_to_end": [times.end for times in succeeded],
    }
    errors = sorted({times.error for times in requests if times.error is not None})
    row: dict[str, Any] = {"request_rate": rate, "seconds": seconds, "errors": errors}
    num_tokens = sum(times.num_tokens for times in succeeded)
    row |= {"num_ok": len(succeeded), "num_failed": len(requests) - len(succeeded), "num_tokens": num_tokens}
    row["tokens_per_second"] = num_tokens / seconds
    for name, values in latencies.items():
        percentiles = (
            (np.percentile(values, PERCENTILES) * 1e3).tolist() if values else [None] * len(PERCENTILES)
        )
        row[f"{name}_ms"] = {f"p{p}": value for p, value in zip(PERCENTILES, percentiles, strict=True)}
        row[f"{name}_ms"]["mean"] = float(np.mean(values)) * 1e3 if values else None
    return row


HEADER = (
    f"{'requests/s':>10} {'ok':>6} {'failed':>6} {'tokens/s':>9}  "
    f"{'first token (ms)':^23}  {'inter-token (ms)':^23}  {'end to end (ms)':^23}\n"
    f"{'':34} " + " ".join(f"{f'p{p}':>7}" for _ in LATENCIES for p in PERCENTILES)
)


def format_row(row: dict[str, Any]) -> str:
    """Return the table row of a run, followed by its error messages."""
    counts = f"{row['request_rate']:>10g} {row['num_ok']:>6} {row['num_failed']:>6}"
    latencies = [row[f"{name}_ms"][f"p{p}"] for name in LATENCIES for p in PERCENTILES]
    line = f"{counts} {row['tokens_per_second']:>9.1f}  " + " ".join(
        _format_cell(value) for value in latencies
    )
    return "\n".join([line, *(f"  {error}" for error in row["errors"])])


def _format_cell(value: float | None) -> str:
    return f"{'-' if value is None else f'{value:.1f}':>7}"


def plot(rows: Sequence[dict[str, Any]], file: str) -> None:
    """Plot each latency over the request rate, with one line per percentile."""
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(1, len(LATENCIES), figsize=(12, 3.5), layout="constrained")
    for axis, name in zip(axes, LATENCIES, strict=True):
        for percentile in PERCENTILES:
            values = [row[f"{name}_ms"][f"p{percentile}"] for row in rows]
            axis.plot([row["request_rate"] for row in rows], values, "o-", label=f"p{percentile}")
        axis.set(title=name.replace("_", " "), xlabel="requests per second", ylabel="ms", ylim=(0, None))
        axis.legend()
    figure.savefig(file)
    pyplot.close(figure)
