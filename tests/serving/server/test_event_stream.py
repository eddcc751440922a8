"""Streams end where nobody takes them, and not where there is nothing to take."""

import asyncio

import pytest

from jattn.serving.server.event_stream import WRITE, EventStream

SECONDS = 0.1


async def sent(num_events, *, pauses=0.0, sends=0.0):
    """Bodies that were taken, and how long that took; with seconds before each event, and to take it."""
    is_closed, bodies = False, []

    async def events():
        nonlocal is_closed
        try:
            for number in range(num_events):
                await asyncio.sleep(pauses)
                yield b"%d" % number
        finally:
            is_closed = True

    async def send(message):
        await asyncio.sleep(sends if message.get("body") else 0.0)
        bodies.append(message.get("body"))

    start = asyncio.get_running_loop().time()
    await EventStream(events(), seconds=SECONDS).stream_response(send)
    assert is_closed
    return bodies, asyncio.get_running_loop().time() - start


def test_events_may_come_as_late_as_they_like():
    bodies, _ = asyncio.run(sent(3, pauses=2.5 * SECONDS))
    assert bodies == [None, b"0", b"1", b"2", b""]


def test_many_events_may_take_longer_than_each_of_them():
    bodies, seconds = asyncio.run(sent(8, sends=SECONDS / 4))
    assert len(bodies) == 10
    assert seconds > SECONDS


@pytest.mark.parametrize("pauses", [0.0, SECONDS / 2, 1.5 * SECONDS])
def test_an_event_that_is_not_taken_in_time_ends_the_stream(pauses):
    bodies, seconds = asyncio.run(sent(3, pauses=pauses, sends=60.0))
    assert bodies == [None]
    assert SECONDS <= seconds - pauses < 20 * SECONDS


def test_events_go_a_short_way_as_long_as_it_takes_them():
    taken, sent = [], []

    async def events():
        for number in range(4):
            yield b"%d" % number

    def write(event):
        if event in (b"1", b"2"):  # the client is slow: these wait for it
            return False
        taken.append(event)
        return True

    async def send(message):
        if message["type"] == "http.response.body":
            sent.append((message["body"], message["more_body"]))

    async def receive():
        await asyncio.sleep(60)

    scope = {"type": "http", "extensions": {WRITE: write}}
    asyncio.run(EventStream(events(), seconds=SECONDS)(scope, receive, send))
    assert taken == [b"0", b"3"]
    assert sent == [(b"1", True), (b"2", True), (b"", False)]
