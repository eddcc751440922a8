"""Readers of an event loop receive outputs promptly without slowing the engine's thread."""

import asyncio
import time

from jattn.serving.engine.mailbox import Mailbox, RequestOutputCollector
from jattn.serving.engine.outputs import RequestError, RequestOutput

BUSY = 0.05  # seconds of a processor


def token(number):
    return RequestOutput(request_id=0, index=0, new_token_ids=[number], new_text=str(number))


def spin(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


async def reads(reader, outputs, seconds):
    while True:
        outputs.append((await reader.get()).new_token_ids)
        spin(seconds)


def read(work, *, seconds):
    """Return the outputs that readers received while `work` posted, with readers that take time per
    output.
    """

    async def main():
        mailbox, readers, outputs = (
            Mailbox(asyncio.get_running_loop()),
            [RequestOutputCollector(1), RequestOutputCollector(1)],
            ([], []),
        )
        tasks = [asyncio.create_task(reads(*pair, seconds)) for pair in zip(readers, outputs, strict=True)]
        await asyncio.sleep(0)
        await work(mailbox, *readers, *outputs)
        done, _ = await asyncio.wait(tasks, timeout=0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return outputs, [type(task.exception()) for task in done]

    return asyncio.run(main())


async def settled(seconds=0.0):
    await asyncio.sleep(seconds)
    for _ in range(5):
        await asyncio.sleep(0)


def test_fast_readers_get_every_steps_tokens():
    async def work(mailbox, first_reader, second_reader, *outputs):
        for number in range(5):
            mailbox.post([(first_reader, token(number)), (second_reader, token(number))])
            await settled(0.005)

    outputs, _ = read(work, seconds=0.0)
    assert outputs == ([[0], [1], [2], [3], [4]],) * 2


def test_slow_readers_get_merged_outputs():
    async def work(mailbox, first_reader, second_reader, *outputs):
        mailbox.post([(first_reader, token(0))])
        await settled()
        for number in (1, 2, 3):
            mailbox.post([(first_reader, token(number))])
        await settled()

    outputs, _ = read(work, seconds=BUSY)
    assert outputs == ([[0], [1, 2, 3]], [])


def test_an_error_comes_at_once_behind_what_came_before_it():
    async def work(mailbox, first_reader, second_reader, *outputs):
        for news in (token(0), token(1), RuntimeError("it fell")):
            mailbox.post([(first_reader, news)])
            await settled()

    outputs, errors = read(work, seconds=BUSY)
    assert outputs == ([[0], [1]], [])
    assert errors == [RequestError]
