"""`jattn serve` with a Qwen3 of 8B sizes and random weights, beside its engine without a server.

The same prompts arrive at the same times; the server receives them from a client in another process. A row is
recorded only if the server returns the engine's text and every request finishes. `--draw ROWS --plot FILE`
draws rows that were measured before.
"""

import argparse
import asyncio
import contextlib
import importlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

import jattn
from benchmarks.models.random_decoder import random_decoder
from benchmarks.runner import Rows
from benchmarks.serving.engine import QWEN3_8B, TOLERANCE, logprob_error
from jattn.serving import AsyncEngine, Engine, SamplingParams
from jattn.serving.cli.bench_serve import PERCENTILES, RequestTimes, random_prompts, send_at_rate, summarize
from jattn.serving.cli.openai_client import stream_events

RATES = (4.0, 16.0, 32.0)  # requests per second
LENS = {"input_len": 1024, "output_len": 256}
AT_ONCE = 10_000.0  # request rate at which all streams run at the same time
SECONDS = 8.0  # duration of the arrivals at each rate
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2} | {
    **{"num_key_value_heads": 1, "head_dim": 32, "vocab_size": 16384, "max_position_embeddings": 1024}
}
SMALL_LENS = {"input_len": 128, "output_len": 32}
PROMPT_IDS = 9999  # exclusive upper limit of the token ids in prompts
TIMES = ("time_to_first_token_ms", "inter_token_latency_ms", "end_to_end_ms")
type Run = tuple[float, dict[str, int]]  # requests per second; num_prompts, input_len and output_len
CLIENT = "import sys; from jattn.serving.cli.main import main; sys.exit(main())"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks serve`."""
    parser.add_argument("--cache-dir", help="Directory of the compilation cache. Default: none.")
    parser.add_argument("--out", help="Directory for the result rows.")
    parser.add_argument(
        "--small", action="store_true", help="Use a tiny model and short runs, to test the suite."
    )
    parser.add_argument("--draw", metavar="ROWS", help="Draw the rows of this file and measure nothing.")
    parser.add_argument("--plot", help="File of the picture. Requires jattn[plot].")


def main(arguments: argparse.Namespace) -> None:
    """Measure the engine and the server at every request rate."""
    if arguments.draw is not None:
        lines = pathlib.Path(arguments.draw).read_text().splitlines()
        plot([json.loads(line) for line in lines], arguments.plot)
        return
    small = arguments.small
    config, lens = (QWEN3_8B | SMALL, SMALL_LENS) if small else (QWEN3_8B, LENS)
    rows, model = Rows("serve-small" if small else "serve", arguments.out), random_decoder(config)
    engine = make_engine(model, arguments.cache_dir, small=small)
    engine.precompile(progress=False)
    error = logprob_error(engine, model)
    if error > TOLERANCE:
        raise SystemExit(f"the engine's log-probabilities are {error} off. No rows are recorded.")
    model.tokenizer = engine.tokenizer = word_tokenizer(config["vocab_size"])
    measured = []
    for row in measure(engine, runs_at_rates(RATES, 1.0 if small else SECONDS, **lens)):
        rows.add(name=f"rate_{row['request_rate']:g}", logprob_error=error, **row)
        measured.append(row)
    if arguments.plot is not None:
        plot(measured, arguments.plot)
    at_once = {
        "num_prompts": engine.scheduler.max_num_seqs,
        "input_len": 16,
        "output_len": lens["output_len"],
    }
    for row in measure(engine, [(AT_ONCE, at_once)]):
        rows.add(name="at_once", logprob_error=error, **row)


def make_engine(model: Any, cache_dir: str | None, *, small: bool = False) -> Engine:
    """Create an engine with the default buckets that these rates need.

    Args:
        model: Model to serve.
        cache_dir: Directory of the compilation cache; None disables the cache.
        small: Whether to allow 32 requests instead of 256 and to compile only a few small buckets.
    """
    max_num_seqs = 32 if small else 256
    decodes = (max_num_seqs,) if small else (8, 16, 32, 64, 96, 128, 192, 256)
    sizes: list[dict[str, int]] = [{"max_decodes": count} for count in decodes]
    # The smallest holds a prompt of 1,024 tokens.
    for tokens in (512,) if small else (8192, 6144, 4096, 3072, 2048, 1024):
        prefills = {"max_prefills": max_num_seqs, "max_prefill_tokens": tokens}
        sizes += [{"max_decodes": count, **prefills} for count in (0, max_num_seqs // 4, max_num_seqs)]
    return Engine(
        model,
        num_blocks=400 if small else 24_000,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=512 if small else 8192,
        buckets=[jattn.Bucket(max_blocks=64 if small else 512, **size) for size in sizes],
        enable_prefix_caching=False,  # every rate has the same prompts
        cascade_attention=False,
        cache_dir=cache_dir,
    )


def runs_at_rates(rates: Sequence[float], seconds: float, **lens: int) -> list[Run]:
    """Return a run for each rate.

    Args:
        rates: Requests per second.
        seconds: Duration of the arrivals.
        **lens: input_len and output_len, tokens per request.
    """
    return [(rate, {"num_prompts": max(round(rate * seconds), 1), **lens}) for rate in rates]


def measure(engine: Engine, runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """Yield a row for each run: the engine's and the server's times, and their differences.

    Raises:
        SystemExit: The server returns another text than the engine, or a request does not finish.
    """
    busiest = max(runs, key=lambda run: run[0])
    asyncio.run(run_engine(engine, *busiest))  # warm-up: first runs of an executable are slower
    (prompt,) = random_prompts(1, busiest[1]["input_len"], PROMPT_IDS, random.Random(2))
    expected = engine.generate([prompt], SamplingParams(max_tokens=16, ignore_eos=True))[0].text
    for rate, sizes in runs:
        engine_run = asyncio.run(run_engine(engine, rate, sizes))
        cpu_seconds: list[float] = []
        with serving(engine, cpu_seconds) as url:
            require_same_text(url, prompt, expected)
            before = engine.stats.time_to_first_token
            sum_before, count_before = before.sum, before.count
            server_run = run_server(url, rate, sizes)
            after = engine.stats.time_to_first_token
            first_token_s = (after.sum - sum_before) / (after.count - count_before)
        repeated_run = asyncio.run(run_engine(engine, rate, sizes))
        for run in (engine_run, server_run, repeated_run):
            if run["num_failed"] or run["num_tokens"] != sizes["num_prompts"] * sizes["output_len"]:
                raise SystemExit(f"not all requests finished: {run}. No rows are recorded.")
        row = compare_runs(engine_run, server_run)
        # The second engine run shows the difference between two runs without a server.
        row |= {f"engine_again_{kind}_p50": repeated_run[kind]["p50"] for kind in TIMES[:2]}
        row["engine_again_tokens_per_s"] = repeated_run["tokens_per_second"]
        first_token_ms = server_run["time_to_first_token_ms"]["mean"]
        row["first_token_outside_engine_ms_mean"] = first_token_ms - 1e3 * first_token_s
        row["http_process_us_per_token"] = 1e6 * cpu_seconds[0] / server_run["num_tokens"]
        yield {"request_rate": rate, **sizes, **row}


def compare_runs(engine: dict[str, Any], server: dict[str, Any]) -> dict[str, Any]:
    """Return both runs in one row, with the server's cost: a share of throughput, and milliseconds."""
    row: dict[str, Any] = {}
    for name, run in (("engine", engine), ("server", server)):
        row[f"{name}_tokens_per_s"] = run["tokens_per_second"]
        for kind in TIMES:
            row |= {f"{name}_{kind}_{p}": value for p, value in run[kind].items()}
    row["throughput_cost"] = 1 - server["tokens_per_second"] / engine["tokens_per_second"]
    for kind in TIMES[:2]:
        row[f"{kind}_p50_cost"] = server[kind]["p50"] - engine[kind]["p50"]
    return row


async def run_engine(engine: Engine, rate: float, sizes: dict[str, int]) -> dict[str, Any]:
    """Send the requests of a run to the engine, without a server, and return the summary of their times."""
    params = SamplingParams(max_tokens=sizes["output_len"], ignore_eos=True)
    prompts = random_prompts(sizes["num_prompts"], sizes["input_len"], PROMPT_IDS, random.Random(0))
    start = time.perf_counter()
    async with AsyncEngine(engine) as async_engine:

        async def send(prompt: list[int], due: float) -> RequestTimes:
            times = RequestTimes()
            async for output in async_engine.generate(prompt, params):
                times.arrivals.append(time.perf_counter() - due)
                times.num_tokens += len(output.new_token_ids)
            times.end = time.perf_counter() - due
            return times

        request_times = await send_at_rate(send, prompts, rate, random.Random(1))
    return summarize(request_times, rate, time.perf_counter() - start)


def run_server(url: str, rate: float, sizes: dict[str, int]) -> dict[str, Any]:
    """Run `jattn bench-serve` in another process and return its summary."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    options += [f"--url={url}", f"--request-rate={rate}", f"--vocab-size={PROMPT_IDS}", "--seed=0"]
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "rows.json"
        command = [sys.executable, "-c", CLIENT, "bench-serve", *options, f"--json={file}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (row,) = json.loads(file.read_text())
    return row


@contextlib.contextmanager
def serving(engine: Engine, cpu_seconds: list[float]) -> Iterator[str]:
    """Run a server of an engine and yield its URL.

    Args:
        engine: Idle engine.
        cpu_seconds: List to which the CPU seconds of the HTTP process are appended at the end.
    """
    server: Any = importlib.import_module("jattn.serving.server")
    options = server.ServerOptions(port=0)
    sock = server.create_server_socket(options)
    http = server.HttpProcess(options, sock, log_level="warning")
    http.serve(engine)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    try:
        while not is_ready(url):
            if http.has_ended:
                raise SystemExit("the server ended before it was ready")
            time.sleep(0.05)
        start = process_cpu_seconds(http.pid)
        yield url
        cpu_seconds.append(process_cpu_seconds(http.pid) - start)
    finally:
        http.signal(signal.SIGTERM)
        http.wait()
        sock.close()


def is_ready(url: str) -> bool:
    """Return whether the server accepts requests."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:  # status 503, or no process accepts the connection yet
        return False


def process_cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process, from /proc."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def require_same_text(url: str, prompt: list[int], expected: str) -> None:
    """Send a prompt to the server with greedy sampling and check the completion.

    Raises:
        SystemExit: The completion is not the expected text.
    """
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0.0, "ignore_eos": True}

    async def complete() -> str:
        chunks = [chunk async for chunk in stream_events(url, "/v1/completions", body)]
        return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])

    text = asyncio.run(complete())
    if text != expected:
        raise SystemExit(f"the server returns {text!r}, the engine {expected!r}. No rows are recorded.")


def word_tokenizer(vocab_size: int) -> Any:
    """Create a tokenizer in which every id is a word, as real detokenization mostly decodes words."""
    tokenizers = importlib.import_module("tokenizers")
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={f"Ġ{i}": i for i in range(vocab_size)}, merges=[])
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def plot(rows: Sequence[dict[str, Any]], file: str) -> None:
    """Plot the times to the first token and between tokens by request rate.

    Args:
        rows: Rows of `measure`.
        file: File of the picture.
    """
    rows = [row for row in rows if row["request_rate"] < AT_ONCE]
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    rates = [row["request_rate"] for row in rows]
    for panel, kind in zip(panels, TIMES, strict=False):
        for index, percentile in enumerate(PERCENTILES):
            for name, line_style in (("engine", "o--"), ("server", "o-")):
                values = [row[f"{name}_{kind}_p{percentile}"] for row in rows]
                panel.plot(rates, values, line_style, color=f"C{index}", label=f"{name}, p{percentile}")
        title = kind.removesuffix("_ms").replace("_", " ")
        panel.set(title=title, xlabel="requests per second", ylabel="ms", ylim=(0, None))
    panels[0].legend()
    figure.savefig(file)
    pyplot.close(figure)
