"""Soak test of a small model's server with 200 concurrent clients: disconnects, invalid requests, memory.

A tenth of the clients disconnect early and a tenth send an invalid request. Every other client must receive
the text that the engine generates for its request alone. Afterwards no KV-cache block may be in use, and the
memory of the process must not grow.
"""

import argparse
import asyncio
import contextlib
import pathlib
import random
import time
from typing import Any

import jattn
from benchmarks.runner import Rows
from benchmarks.serving.serve import serving
from jattn.serving import Engine, SamplingParams
from jattn.serving.cli.openai_client import ServerError, stream_events

NUM_CLIENTS = 200
COMPLETIONS = "/v1/completions"
INVALID_FIELDS = [{"temperature": -1}, {"prompt": []}, {"n": "x"}, {"no_such": 1}, {"guided_regex": "(("}]
TINY_MODEL = pathlib.Path(__file__).parents[2] / "examples" / "tiny_model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks crowds`."""
    parser.add_argument("--minutes", type=float, default=10.0, help="Duration in minutes. Default: 10.")
    parser.add_argument("--out", help="Directory for the result rows.")


def main(arguments: argparse.Namespace) -> None:
    """Serve crowds of clients for the requested time and record one row."""
    bucket = jattn.Bucket(max_decodes=16, max_prefills=16, max_prefill_tokens=64, max_blocks=16)
    engine = Engine(
        jattn.models.load(TINY_MODEL), num_blocks=257, block_size=8, max_model_len=128, buckets=[bucket],
        max_num_seqs=16, max_num_batched_tokens=64,
    )  # fmt: skip
    name = f"crowds_{arguments.minutes:g}_minutes"
    Rows("crowds", arguments.out).add(name=name, **serve_crowds(engine, 60 * arguments.minutes))


class Crowd:
    """Clients with random requests, the expected text of each, and counts of their outcomes.

    Attributes:
        num_whole: Clients that received the expected text.
        num_left: Clients that disconnected on purpose.
        num_refused: Clients whose invalid request was refused with status 400.
        lost: Error message of every other client; expected to stay empty.
    """

    def __init__(self, engine: Engine, seed: int, count: int = NUM_CLIENTS) -> None:
        """Draw the requests and generate their expected texts.

        Args:
            engine: Engine without a server, or with an idle one.
            seed: Seed of the requests and of the clients' behaviour.
            count: Number of clients.
        """
        self._random = random.Random(seed)
        lens = [self._random.randint(1, 60) for _ in range(count)]
        self._prompts = [self._random.choices(range(256), k=n) for n in lens]
        self._max_tokens = [self._random.randint(1, 40) for _ in range(count)]
        params = [
            SamplingParams(seed=i, max_tokens=n, temperature=1.0, ignore_eos=True)
            for i, n in enumerate(self._max_tokens)
        ]
        self._expected = [result.text for result in engine.generate(self._prompts, params)]
        self.num_whole = self.num_left = self.num_refused = 0
        self.lost: list[str] = []

    async def send_all(self, url: str) -> None:
        """Send every client's request at once and wait for all outcomes."""
        await asyncio.gather(*(self._send(url, i) for i in range(len(self._prompts))))

    async def _send(self, url: str, i: int) -> None:
        body = {"prompt": self._prompts[i], "max_tokens": self._max_tokens[i], "seed": i}
        body |= {"temperature": 1.0, "ignore_eos": True}
        kind = self._random.random()
        invalid_field = self._random.choice(INVALID_FIELDS) if kind < 0.1 else {}
        max_events = self._random.randint(1, 5) if 0.1 <= kind < 0.2 else None
        try:
            completion = await self._receive(url, body | invalid_field, max_events)
        except (OSError, ValueError, IndexError, KeyError) as error:
            if invalid_field and isinstance(error, ServerError) and str(error).startswith("HTTP 400: "):
                self.num_refused += 1
            else:
                self.lost.append(f"{type(error).__name__}: {error}")
            return
        if completion is None:
            self.num_left += 1
        elif completion == (self._expected[i], "length") and not invalid_field:
            self.num_whole += 1
        else:
            self.lost.append(f"{completion}, not {self._expected[i]!r}")

    async def _receive(
        self, url: str, body: dict[str, Any], max_events: int | None
    ) -> tuple[str, str] | None:
        """Return the text and the finish reason, or None if the client disconnected after `max_events`."""
        text, reason, num_events = "", "", 0
        async with contextlib.aclosing(stream_events(url, COMPLETIONS, body)) as chunks:
            async for chunk in chunks:
                num_events += 1
                (choice,) = chunk["choices"]
                text, reason = text + choice["text"], choice["finish_reason"]
                if num_events == max_events:
                    return None
        return text, reason


def serve_crowds(engine: Engine, seconds: float) -> dict[str, Any]:
    """Serve one crowd after another and return a row.

    Args:
        engine: Engine to serve.
        seconds: Time after which no further crowd starts.

    Returns:
        The number of clients by outcome, the blocks still in use, and the resident memory of the process in
        MiB after each crowd, after a third of the crowds, and at the end.
    """
    start, counts = time.perf_counter(), dict.fromkeys(("whole", "left", "refused", "lost"), 0)
    sizes: list[float] = []
    with serving(engine, []) as url:
        while time.perf_counter() < start + seconds:
            crowd = Crowd(engine, seed=len(sizes))
            asyncio.run(crowd.send_all(url))
            wait_until_idle(engine)
            outcomes = (crowd.num_whole, crowd.num_left, crowd.num_refused, len(crowd.lost))
            counts = {name: counts[name] + n for name, n in zip(counts, outcomes, strict=True)}
            sizes.append(round(resident_bytes() / 2**20, 1))
            if crowd.lost:
                print(*crowd.lost, sep="\n")
    settled = sizes[len(sizes) // 3]  # by then everything is compiled and XLA has allocated its arenas
    row = {"seconds": time.perf_counter() - start, "at_once": NUM_CLIENTS, "requests": sum(counts.values())}
    memory = {"settled_mib": settled, "end_mib": sizes[-1], "resident_mib": sizes}
    return row | counts | {"used_blocks": engine.stats.num_used_blocks} | memory


def wait_until_idle(engine: Engine, seconds: float = 20.0) -> None:
    """Wait until no request runs or waits and no block is in use.

    Args:
        engine: Engine to wait for.
        seconds: Timeout.

    Raises:
        TimeoutError: Blocks or requests are left after the timeout.
    """
    end = time.monotonic() + seconds
    while engine.stats.num_running or engine.stats.num_waiting or engine.stats.num_used_blocks:
        if time.monotonic() > end:
            raise TimeoutError(f"the engine still has requests or blocks in use: {engine.stats}")
        time.sleep(0.005)


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096
