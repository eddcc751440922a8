"""A small model's server and crowds of 200 clients, of whom a tenth leave and a tenth talk nonsense.

Whoever stays must be told what the engine says to it alone; no block may be kept, no memory gained.
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
TEXT = "/v1/completions"
NONSENSE = [{"temperature": -1}, {"prompt": []}, {"n": "x"}, {"no_such": 1}, {"guided_regex": "(("}]
TINY_MODEL = pathlib.Path(__file__).parents[2] / "examples" / "tiny_model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `python -m benchmarks crowds` takes."""
    parser.add_argument("--minutes", type=float, default=10.0, help="[10]")
    parser.add_argument("--out", help="folder of the rows")


def main(arguments: argparse.Namespace) -> None:
    """One row."""
    bucket = jattn.Bucket(max_decodes=16, max_prefills=16, max_prefill_tokens=64, max_blocks=16)
    engine = Engine(
        jattn.models.load(TINY_MODEL), num_blocks=257, block_size=8, max_model_len=128, buckets=[bucket],
        max_num_seqs=16, max_num_batched_tokens=64,
    )  # fmt: skip
    name = f"crowds_{arguments.minutes:g}_minutes"
    Rows("crowds", arguments.out).add(name=name, **loaded(engine, 60 * arguments.minutes))


class Crowd:
    """Clients with prompts of their own, each of which knows what the engine says to it.

    Attributes:
        num_whole: Were told all of it.
        num_left: Hung up on purpose.
        num_refused: Talked nonsense, and were told so.
        lost: What became of the others; nobody should be among them.
    """

    def __init__(self, engine: Engine, seed: int, count: int = NUM_CLIENTS) -> None:
        """Asks the engine, which must have no server yet, or an idle one."""
        self._draw = random.Random(seed)
        lens = [self._draw.randint(1, 60) for _ in range(count)]
        self._prompts = [self._draw.choices(range(256), k=n) for n in lens]
        self._counts = [self._draw.randint(1, 40) for _ in range(count)]
        how: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True}
        params = [SamplingParams(seed=i, max_tokens=n, **how) for i, n in enumerate(self._counts)]
        self._want = [result.text for result in engine.generate(self._prompts, params)]
        self.num_whole = self.num_left = self.num_refused = 0
        self.lost: list[str] = []

    async def all_at_once(self, url: str) -> None:
        """Each asks once."""
        await asyncio.gather(*(self._one(url, i) for i in range(len(self._prompts))))

    async def _one(self, url: str, i: int) -> None:
        body = {"prompt": self._prompts[i], "max_tokens": self._counts[i], "seed": i}
        body |= {"temperature": 1.0, "ignore_eos": True}
        kind = self._draw.random()
        wrong = self._draw.choice(NONSENSE) if kind < 0.1 else {}
        patience = self._draw.randint(1, 5) if 0.1 <= kind < 0.2 else None
        try:
            said = await self._heard(url, body | wrong, patience)
        except (OSError, ValueError, IndexError, KeyError) as error:
            if wrong and isinstance(error, ServerError) and str(error).startswith("HTTP 400: "):
                self.num_refused += 1
            else:
                self.lost.append(f"{type(error).__name__}: {error}")
            return
        if said is None:
            self.num_left += 1
        elif said == (self._want[i], "length") and not wrong:
            self.num_whole += 1
        else:
            self.lost.append(f"{said}, not {self._want[i]!r}")

    async def _heard(self, url: str, body: dict[str, Any], patience: int | None) -> tuple[str, str] | None:
        """Text, and why it ended; None where the client's patience, of so many events, has."""
        text, reason = "", ""
        async with contextlib.aclosing(stream_events(url, TEXT, body)) as chunks:
            async for chunk in chunks:
                (choice,) = chunk["choices"]
                text, reason = text + choice["text"], choice["finish_reason"]
                patience = patience and patience - 1
                if patience == 0:
                    return None
        return text, reason


def loaded(engine: Engine, seconds: float) -> dict[str, Any]:
    """Crowd after crowd; what became of their clients, and the process's memory behind each, in MiB."""
    start, counts = time.perf_counter(), dict.fromkeys(("whole", "left", "refused", "lost"), 0)
    sizes: list[float] = []
    with serving(engine, []) as url:
        while time.perf_counter() < start + seconds:
            crowd = Crowd(engine, seed=len(sizes))
            asyncio.run(crowd.all_at_once(url))
            until_idle(engine)
            ended = (crowd.num_whole, crowd.num_left, crowd.num_refused, len(crowd.lost))
            counts = {name: counts[name] + n for name, n in zip(counts, ended, strict=True)}
            sizes.append(round(resident_bytes() / 2**20, 1))
            if crowd.lost:
                print(*crowd.lost, sep="\n")
    settled = sizes[len(sizes) // 3]  # executables and XLA's arenas are there by then
    row = {"seconds": time.perf_counter() - start, "at_once": NUM_CLIENTS, "requests": sum(counts.values())}
    memory = {"settled_mib": settled, "end_mib": sizes[-1], "resident_mib": sizes}
    return row | counts | {"used_blocks": engine.stats.num_used_blocks} | memory


def until_idle(engine: Engine, seconds: float = 20.0) -> None:
    """Waits until nobody has a block.

    Raises:
        TimeoutError: Somebody keeps one.
    """
    end = time.monotonic() + seconds
    while engine.stats.num_running or engine.stats.num_waiting or engine.stats.num_used_blocks:
        if time.monotonic() > end:
            raise TimeoutError(f"blocks are kept: {engine.stats}")
        time.sleep(0.005)


def resident_bytes() -> int:
    """Of this process."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096
