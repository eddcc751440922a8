"""`jattn serve` on an 8B-wide Qwen3 with random weights, beside its engine without a server: what HTTP costs.

The same prompts arrive at the same times, at the server from a process of its own. No row unless the server
says what the engine says, and every request has come to its end. `--draw ROWS --plot FILE` draws what was
measured before.
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
from jattn.serving.engine.config import prefill_sizes

RATES = (4.0, 16.0, 32.0)  # requests a second
LENS = {"input_len": 1024, "output_len": 256}
AT_ONCE = 10_000.0  # as many requests as a step holds, whose streams all bring a token a step
SECONDS = 8.0  # in which requests arrive, for each rate
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2} | {
    **{"num_key_value_heads": 1, "head_dim": 32, "vocab_size": 16384, "max_position_embeddings": 1024}
}
SMALL_LENS = {"input_len": 128, "output_len": 32}
PROMPT_IDS = 9999  # prompts' ids are below it
TIMES = ("time_to_first_token_ms", "inter_token_latency_ms", "end_to_end_ms")
type Run = tuple[float, dict[str, int]]  # requests a second; how many in all, and tokens of each
CLIENT = "import sys; from jattn.serving.cli.main import main; sys.exit(main())"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `python -m benchmarks serve` takes."""
    parser.add_argument("--cache-dir", help="where executables are kept from one run to the next")
    parser.add_argument("--out", help="folder of the rows")
    parser.add_argument("--small", action="store_true", help="a tiny model and short runs: whether it works")
    parser.add_argument("--draw", metavar="ROWS", help="measures nothing: a file of rows to draw")
    parser.add_argument("--plot", help="where to draw them (the extra jattn[plot])")


def main(arguments: argparse.Namespace) -> None:
    """Each rate, at the engine and at the server."""
    if arguments.draw is not None:
        lines = pathlib.Path(arguments.draw).read_text().splitlines()
        draw([json.loads(line) for line in lines], arguments.plot)
        return
    small = arguments.small
    config, lens = (QWEN3_8B | SMALL, SMALL_LENS) if small else (QWEN3_8B, LENS)
    rows, model = Rows("serve-small" if small else "serve", arguments.out), random_decoder(config)
    engine = engine_of(model, arguments.cache_dir, few=small)
    engine.precompile(progress=False)
    error = logprob_error(engine, model)
    if error > TOLERANCE:
        raise SystemExit(f"the engine's log-probabilities are {error} off: no rows")
    model.tokenizer = engine.tokenizer = word_tokenizer(config["vocab_size"])
    made = []
    for row in compared(engine, runs_of(RATES, 1.0 if small else SECONDS, **lens)):
        rows.add(name=f"rate_{row['request_rate']:g}", logprob_error=error, **row)
        made.append(row)
    if arguments.plot is not None:
        draw(made, arguments.plot)
    crowd = {"num_prompts": engine.scheduler.max_num_seqs, "input_len": 16, "output_len": lens["output_len"]}
    for row in compared(engine, [(AT_ONCE, crowd)]):
        rows.add(name="at_once", logprob_error=error, **row)


def engine_of(model: Any, cache_dir: str | None, *, few: bool = False) -> Engine:
    """Of 256 requests, with what these rates need of the usual buckets; or of few, which compile soon."""
    rows = 32 if few else 256
    decodes = (rows,) if few else (8, 16, 32, 64, 96, 128, 192, 256)
    sizes: list[dict[str, int]] = [{"max_decodes": count} for count in decodes]
    for tokens in (512,) if few else prefill_sizes(8192)[:7]:  # down to a prompt's 1,024
        prompts = {"max_prefills": rows, "max_prefill_tokens": tokens}
        sizes += [{"max_decodes": beside, **prompts} for beside in (0, rows // 4, rows)]
    return Engine(
        model,
        num_blocks=400 if few else 24_000,
        max_num_seqs=rows,
        max_num_batched_tokens=512 if few else 8192,
        buckets=[jattn.Bucket(max_blocks=64 if few else 512, **size) for size in sizes],
        enable_prefix_caching=False,  # each rate has the same prompts
        cascade_attention=False,
        cache_dir=cache_dir,
    )


def runs_of(rates: Sequence[float], seconds: float, **lens: int) -> list[Run]:
    """What comes in so many seconds at each rate."""
    return [(rate, {"num_prompts": max(round(rate * seconds), 1), **lens}) for rate in rates]


def compared(engine: Engine, runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """A row for each run; the engine's numbers, the server's, and what lies between them."""
    busiest = max(runs, key=lambda run: run[0])
    asyncio.run(at_the_engine(engine, *busiest))  # what an executable's first runs make is not measured
    (prompt,) = random_prompts(1, busiest[1]["input_len"], PROMPT_IDS, random.Random(2))
    want = engine.generate([prompt], SamplingParams(max_tokens=16, ignore_eos=True))[0].text
    for rate, size in runs:
        alone = asyncio.run(at_the_engine(engine, rate, size))
        times: list[float] = []
        with serving(engine, times) as url:
            require_same_text(url, prompt, want)
            before = engine.stats.time_to_first_token
            total, count = before.sum, before.count
            served = at_the_server(url, rate, size)
            firsts = engine.stats.time_to_first_token
            first = (firsts.sum - total) / (firsts.count - count)
        again = asyncio.run(at_the_engine(engine, rate, size))
        for told in (alone, served, again):
            if told["num_failed"] or told["num_tokens"] != size["num_prompts"] * size["output_len"]:
                raise SystemExit(f"not all requests came to their end: {told}: no rows")
        row = (
            beside(alone, served)
            | {
                f"engine_again_{kind}_p50": again[kind]["p50"]  # what two runs differ by, without a server
                for kind in TIMES[:2]
            }
        )
        row["engine_again_tokens_per_s"] = again["tokens_per_second"]
        whole = served["time_to_first_token_ms"]["mean"]
        row["first_token_outside_engine_ms_mean"] = whole - 1e3 * first
        row["http_process_us_per_token"] = 1e6 * times[0] / served["num_tokens"]
        yield {"request_rate": rate, **size, **row}


def beside(engine: dict[str, Any], server: dict[str, Any]) -> dict[str, Any]:
    """Both runs in one row, and what the server costs: of throughput a share, of time milliseconds."""
    row: dict[str, Any] = {}
    for name, run in (("engine", engine), ("server", server)):
        row[f"{name}_tokens_per_s"] = run["tokens_per_second"]
        for kind in TIMES:
            row |= {f"{name}_{kind}_{p}": value for p, value in run[kind].items()}
    row["throughput_cost"] = 1 - server["tokens_per_second"] / engine["tokens_per_second"]
    for kind in TIMES[:2]:
        row[f"{kind}_p50_cost"] = server[kind]["p50"] - engine[kind]["p50"]
    return row


async def at_the_engine(engine: Engine, rate: float, sizes: dict[str, int]) -> dict[str, Any]:
    """One run without a server."""
    params = SamplingParams(max_tokens=sizes["output_len"], ignore_eos=True)
    prompts = random_prompts(sizes["num_prompts"], sizes["input_len"], PROMPT_IDS, random.Random(0))
    start = time.perf_counter()
    async with AsyncEngine(engine) as shared:

        async def ask(prompt: list[int], due: float) -> RequestTimes:
            sample = RequestTimes()
            async for output in shared.generate(prompt, params):
                sample.arrivals.append(time.perf_counter() - due)
                sample.num_tokens += len(output.new_token_ids)
            sample.end = time.perf_counter() - due
            return sample

        samples = await send_at_rate(ask, prompts, rate, random.Random(1))
    return summarize(samples, rate, time.perf_counter() - start)


def at_the_server(url: str, rate: float, sizes: dict[str, int]) -> dict[str, Any]:
    """One run of `jattn bench-serve`, in a process of its own."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    options += [f"--url={url}", f"--request-rate={rate}", f"--vocab-size={PROMPT_IDS}", "--seed=0"]
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "rows.json"
        command = [sys.executable, "-c", CLIENT, "bench-serve", *options, f"--json={file}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (row,) = json.loads(file.read_text())
    return row


@contextlib.contextmanager
def serving(engine: Engine, times: list[float]) -> Iterator[str]:
    """A server; where it listens. Seconds of a processor that its own process served go to `times`."""
    server_of: Any = importlib.import_module("jattn.serving.server")
    options = server_of.ServerOptions(port=0)
    sock = server_of.create_server_socket(options)
    http = server_of.HttpProcess(options, sock, log_level="warning")
    http.serve(engine)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    try:
        while not is_ready(url):
            if http.has_ended:
                raise SystemExit("the server ended before it was ready")
            time.sleep(0.05)
        start = processor_seconds(http.pid)
        yield url
        times.append(processor_seconds(http.pid) - start)
    finally:
        http.signal(signal.SIGTERM)
        http.wait()
        sock.close()


def is_ready(url: str) -> bool:
    """Whether the server takes requests."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except OSError:  # 503, or nobody accepts what the socket took
        return False


def processor_seconds(pid: int) -> float:
    """What a process has had of all processors, as Linux counts."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def require_same_text(url: str, prompt: list[int], want: str) -> None:
    """The server must say what the engine said before it, to a prompt alone, greedily."""
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0.0, "ignore_eos": True}

    async def served() -> str:
        chunks = [chunk async for chunk in stream_events(url, "/v1/completions", body)]
        return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])

    said = asyncio.run(served())
    if said != want:
        raise SystemExit(f"the server says {said!r}, the engine {want!r}: no rows")


def word_tokenizer(vocab_size: int) -> Any:
    """A tokenizer in which every id is a word, as incremental decoding has it to do with a real one."""
    tokenizers = importlib.import_module("tokenizers")
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={f"Ġ{i}": i for i in range(vocab_size)}, merges=[])
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def draw(rows: Sequence[dict[str, Any]], file: str) -> None:
    """Times to the first token and between two, over the rates: the engine dashed, the server solid."""
    rows = [row for row in rows if row["request_rate"] < AT_ONCE]
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    rates = [row["request_rate"] for row in rows]
    for panel, kind in zip(panels, TIMES, strict=False):
        for number, percentile in enumerate(PERCENTILES):
            for name, line in (("engine", "o--"), ("server", "o-")):
                values = [row[f"{name}_{kind}_p{percentile}"] for row in rows]
                panel.plot(rates, values, line, color=f"C{number}", label=f"{name}, p{percentile}")
        title = kind.removesuffix("_ms").replace("_", " ")
        panel.set(title=title, xlabel="requests a second", ylabel="ms", ylim=(0, None))
    panels[0].legend()
    figure.savefig(file)
    pyplot.close(figure)
