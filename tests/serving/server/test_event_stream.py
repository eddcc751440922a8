"""Time limits of event streams."""

import asyncio

import pytest

from jattn.serving.server.event_stream import EventStream

SECONDS = 0.1


async def sent(num_events, *, pauses=0.0, sends=0.0):
    """Send a stream and return the bodies and the duration.

    Each event is generated after `pauses` seconds and takes `sends` seconds to send.
    """
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
    await EventStream(events(), send_timeout=SECONDS).stream_response(send)
    assert is_closed
    return bodies, asyncio.get_running_loop().time() - start


def test_waiting_for_an_event_has_no_time_limit():
    bodies, _ = asyncio.run(sent(3, pauses=2.5 * SECONDS))
    assert bodies == [None, b"0", b"1", b"2", b""]


def test_time_limit_applies_to_each_event_not_to_the_stream():
    bodies, seconds = asyncio.run(sent(8, sends=SECONDS / 4))
    assert len(bodies) == 10
    assert seconds > SECONDS


@pytest.mark.parametrize("pauses", [0.0, SECONDS / 2, 1.5 * SECONDS])
def test_event_that_exceeds_the_time_limit_ends_the_stream(pauses):
    bodies, seconds = asyncio.run(sent(3, pauses=pauses, sends=60.0))
    assert bodies == [None]
    assert SECONDS <= seconds - pauses < 20 * SECONDS
