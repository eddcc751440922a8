"""Many clients at once, some of whom leave and some of whom talk nonsense: nobody is lost, nothing leaks."""

import asyncio
import contextlib
import pathlib
import random
import time

import pytest

from jattn.serving import SamplingParams
from jattn.serving.commands.events import ServerError, events
from tests.serving.server.running import running, small_engine

TEXT = "/v1/completions"
NONSENSE = [{"temperature": -1}, {"prompt": []}, {"n": "x"}, {"no_such": 1}, {"guided_regex": "(("}]


class Crowd:
    """Clients with prompts of their own, each of which knows what the engine says to it."""

    def __init__(self, engine, count, seed):
        self.draw = random.Random(seed)
        lens = [self.draw.randint(1, 60) for _ in range(count)]
        self.prompts = [self.draw.choices(range(256), k=n) for n in lens]
        self.counts = [self.draw.randint(1, 40) for _ in range(count)]
        params = [SamplingParams(temperature=1.0, seed=i, max_tokens=n) for i, n in enumerate(self.counts)]
        self.want = [result.text for result in engine.generate(self.prompts, params)]
        self.num_whole = self.num_left = self.num_refused = 0

    async def all_at_once(self, url):
        await asyncio.gather(*(self.one(url, i) for i in range(len(self.prompts))))

    async def one(self, url, i):
        body = {"prompt": self.prompts[i], "max_tokens": self.counts[i], "seed": i, "temperature": 1.0}
        kind = self.draw.random()
        if kind < 0.1:
            with pytest.raises(ServerError, match=r"^400: "):
                await anext(events(url, TEXT, body | self.draw.choice(NONSENSE)))
            self.num_refused += 1
            return
        patience = self.draw.randint(1, 5) if kind < 0.2 else None
        text, reason = "", None
        async with contextlib.aclosing(events(url, TEXT, body)) as chunks:
            async for chunk in chunks:
                text += chunk["choices"][0]["text"]
                reason = chunk["choices"][0]["finish_reason"]
                patience = patience and patience - 1
                if patience == 0:
                    self.num_left += 1
                    return
        assert (text, reason) == (self.want[i], "length")
        self.num_whole += 1


@pytest.mark.kernels
def test_200_streams_at_once(engine):
    crowd = Crowd(engine, 200, seed=0)
    with running(engine) as server:
        asyncio.run(crowd.all_at_once(server.url))
        server.until(lambda: server.is_idle)
    assert crowd.num_whole + crowd.num_left + crowd.num_refused == 200
    assert min(crowd.num_whole, crowd.num_left, crowd.num_refused) > 5


@pytest.mark.slow
def test_ten_minutes_of_it_take_no_more_memory():
    engine = small_engine(max_num_seqs=16)
    with running(engine) as server:
        end, sizes = time.monotonic() + 600, []
        while time.monotonic() < end:
            crowd = Crowd(engine, 200, seed=len(sizes))
            asyncio.run(crowd.all_at_once(server.url))
            server.until(lambda: server.is_idle)
            assert crowd.num_whole + crowd.num_left + crowd.num_refused == 200
            sizes.append(resident_bytes())
    settled = sizes[len(sizes) // 3]  # executables and XLA's arenas are there by then
    assert sizes[-1] < settled + 50 * 2**20, sizes


def resident_bytes():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096
