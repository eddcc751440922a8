"""AsyncEngine: many tasks share one engine without affecting each other."""

import asyncio
import gc
import threading
import time
import weakref

import pytest
from flax import nnx

from jattn.serving import AsyncEngine, RequestError, SamplingParams
from jattn.serving.engine.engine_thread import EngineThread, OutputListener
from tests.serving.engine.faults import device_fails, reading_fails
from tests.serving.engine.test_engine_requests import MODEL, engine_of

LONG = SamplingParams(max_tokens=200)


@pytest.fixture(scope="module")
def engine():
    return engine_of(num_blocks=129)


@pytest.fixture(autouse=True)
def nothing_is_left(engine):
    yield
    assert not [thread for thread in threading.enumerate() if thread.name == "jattn engine"]
    assert (engine.stats.num_running, engine.stats.num_waiting, engine.stats.num_used_blocks) == (0, 0, 0)
    assert not engine.has_unfinished_requests()


def short(num_tokens):
    return SamplingParams(max_tokens=num_tokens)


async def completed(async_engine, prompt, params, **options):
    """Return the token ids, text and finish reason of a request with one completion."""
    ids, text, reason = [], "", None
    async for output in async_engine.generate(prompt, params, **options):
        assert reason is None
        ids, text, reason = ids + output.new_token_ids, text + output.new_text, output.finish_reason
    return ids, text, reason


async def until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.002)


def run(engine, main):
    """Run a coroutine function with an AsyncEngine and return its result."""

    async def all_of_it():
        async with AsyncEngine(engine) as async_engine:
            return await main(async_engine)

    return asyncio.run(asyncio.wait_for(all_of_it(), 120))


class TestGenerate:
    def test_many_tasks_get_the_same_tokens_as_generate(self, engine):
        prompts = ["one", [5, 6, 7], "another text", *(f"prompt {i}" for i in range(9))]
        counts = [3, 9, 5, *range(1, 10)]
        expected = engine.generate(prompts, max_tokens=counts)

        async def main(async_engine):
            tasks = zip(prompts, map(short, counts), strict=True)
            return await asyncio.gather(*(completed(async_engine, *task) for task in tasks))

        assert run(engine, main) == [
            (completion.token_ids, completion.text, "length") for completion in expected
        ]

    def test_tokens_are_yielded_after_each_step(self, engine):
        async def main(async_engine):
            return [len(output.new_token_ids) async for output in async_engine.generate("abc", short(12))]

        counts = run(engine, main)
        assert (len(counts) > 6, sum(counts)) == (True, 12)

    def test_n_completions_finish_independently(self, engine):
        params = SamplingParams(max_tokens=6, n=3, temperature=1.0, seed=5, prompt_logprobs=1)
        (expected,) = engine.generate(["abc"], params)

        async def main(async_engine):
            outputs = [output async for output in async_engine.generate("abc", params, request_id="mine")]
            assert {output.request_id for output in outputs} == {"mine"}
            prompt_logprobs = [
                output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None
            ]
            assert prompt_logprobs == [expected.prompt_logprobs] * 3  # each with its first token
            return [
                [i for output in outputs if output.index == index for i in output.new_token_ids]
                for index in range(3)
            ]

        assert run(engine, main) == [completion.token_ids for completion in expected.outputs]

    def test_long_texts_are_tokenized_outside_the_event_loop(self, engine):
        text = "x" * 5000

        async def main(async_engine):
            with pytest.raises(ValueError, match=r"prompt has 5000 tokens, but max_model_len is 512"):
                await completed(async_engine, text, LONG)

        run(engine, main)

    def test_several_event_loops_share_an_engine(self, engine):
        (expected,) = engine.generate(["abc"], max_tokens=30)
        async_engine, results = AsyncEngine(engine), []
        loop = lambda: results.append(asyncio.run(completed(async_engine, "abc", short(30))))
        threads = [threading.Thread(target=loop) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        asyncio.run(async_engine.aclose())
        assert results == [(expected.token_ids, expected.text, "length")] * 3


class TestReaders:
    def test_a_slow_reader_does_not_delay_others(self, engine):
        async def main(async_engine):
            slow = async_engine.generate("slow", LONG)
            first = await anext(slow)
            for _ in range(3):
                await completed(async_engine, "quick", short(20))
            await until(lambda: not engine.has_unfinished_requests())  # its steps went on without it
            rest = [i async for output in slow for i in output.new_token_ids]
            assert len(first.new_token_ids) + len(rest) == 200

        run(engine, main)

    def test_a_slow_reader_gets_one_merged_output_per_completion(self, engine):
        params = SamplingParams(temperature=1.0, seed=0, n=2, logprobs=1, max_tokens=30)
        (expected,) = engine.generate(["late"], params)

        async def main(async_engine):
            late = async_engine.generate("late", params)
            early = [await anext(late)]
            await until(lambda: not engine.has_unfinished_requests())
            return early, [output async for output in late]

        early, rest = run(engine, main)
        assert len(rest) <= 3  # first tokens of the other completion may have arrived earlier
        for index, completion in enumerate(expected.outputs):
            pieces = [output for output in early + rest if output.index == index]
            assert [i for piece in pieces for i in piece.new_token_ids] == completion.token_ids
            assert "".join(piece.new_text for piece in pieces) == completion.text
            assert [table for piece in pieces for table in piece.logprobs] == completion.logprobs
            assert [piece.finish_reason for piece in pieces][-1] == completion.finish_reason

    def test_a_cancelled_reader_frees_its_blocks_within_a_step(self, engine):
        async def main(async_engine):
            tasks = [asyncio.create_task(completed(async_engine, f"task {i}", LONG)) for i in range(6)]
            await until(lambda: engine.stats.num_running == 4)  # two wait
            waiting_task = tasks.pop()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            steps = engine.stats.num_steps
            await until(lambda: len(engine._open) == 1)
            assert engine.stats.num_steps <= steps + 2
            return await waiting_task

        assert len(run(engine, main)[0]) == 200

    def test_a_reader_cancelled_before_its_start_leaves_no_request(self, engine):
        async def main(async_engine):
            task = asyncio.create_task(completed(async_engine, "abc", LONG))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert (await completed(async_engine, "d", short(3)))[2] == "length"
            assert not engine.has_unfinished_requests()

        run(engine, main)

    def test_a_reader_that_stops_iterating_is_dropped(self, engine):
        async def main(async_engine):
            async for output in async_engine.generate("abc", LONG):
                assert output.finish_reason is None
                break
            await until(lambda: not engine.has_unfinished_requests())

        run(engine, main)

    def test_a_reader_of_a_closed_event_loop_is_dropped(self, engine):
        async_engine, loop = AsyncEngine(engine), asyncio.new_event_loop()
        outputs = async_engine.generate("abc", LONG)
        loop.run_until_complete(anext(outputs))
        loop.close()
        asyncio.run(until(lambda: not engine.has_unfinished_requests()))
        asyncio.run(async_engine.aclose())
        assert outputs.ag_frame is not None  # it was never closed


class Mailbox:
    """Record of the outputs that each step posted."""

    def __init__(self):
        self.steps = []

    def post(self, pieces):
        self.steps.append([reader for reader, _ in pieces])


def test_first_tokens_are_delivered_before_later_ones(engine):
    thread, mailbox = EngineThread(engine), Mailbox()
    early, late = [OutputListener(mailbox, 1) for _ in range(3)], OutputListener(mailbox, 1)
    for reader in early:
        thread.add(reader, "early", LONG, None)
    while len(mailbox.steps) < 4:
        time.sleep(0.001)
    thread.add(late, "late", short(3), None)
    while engine.has_unfinished_requests():
        time.sleep(0.001)
    thread.close()
    steps = [step for step in mailbox.steps if late in step]
    assert len(steps) == 3
    assert steps[0] == [late, *early]
    assert [step[:3] for step in steps[1:]] == [early] * 2


class TestErrors:
    @pytest.mark.parametrize(
        ("prompt", "params", "message"),
        [
            ("", LONG, r"prompt is empty\."),
            ("a\udcff", LONG, r"prompt must be valid Unicode text, got 'a\\udcff'\."),
            ("\udcff" * 5000, LONG, r"prompt must be valid Unicode text"),
            ([1, 999], LONG, r"prompt\[1\] must be in the vocabulary, \[0, 320\), got 999\."),
            ("a", SamplingParams(stop_token_ids=[999]), r"stop_token_ids must be in .*, got \[999\]\."),
        ],
    )
    def test_an_invalid_request_does_not_affect_others(self, engine, prompt, params, message):
        async def main(async_engine):
            unaffected_task = asyncio.create_task(completed(async_engine, "abc", short(40)))
            with pytest.raises(ValueError, match=message):
                await completed(async_engine, prompt, params)
            assert (await unaffected_task)[2] == "length"

        run(engine, main)

    def test_a_duplicate_request_id_does_not_affect_its_owner(self, engine):
        async def main(async_engine):
            first = async_engine.generate("abc", short(40), request_id="a")
            begun = await anext(first)
            with pytest.raises(ValueError, match="request_id 'a' is already in use"):
                await completed(async_engine, "abc", LONG, request_id="a")
            left = [len(output.new_token_ids) async for output in first]
            assert len(begun.new_token_ids) + sum(left) == 40

        run(engine, main)

    @pytest.mark.parametrize("failure", [device_fails, reading_fails])
    def test_a_failed_step_ends_all_requests_and_later_ones_are_served(self, engine, failure):
        (expected,) = engine.generate(["abc"], max_tokens=8)

        async def main(async_engine):
            with failure(engine, call_number=5):
                tasks = [completed(async_engine, f"task {i}", LONG) for i in range(6)]
                results = await asyncio.gather(*tasks, return_exceptions=True)
            assert {type(result) for result in results} == {RequestError}
            assert all("the device fell over" in str(result) for result in results)
            return await completed(async_engine, "abc", short(8))

        assert run(engine, main)[0] == expected.token_ids

    def test_an_exception_in_the_engine_ends_open_requests_and_later_ones_are_served(self, engine):
        step = engine.step

        def broken():
            engine.step = step
            raise KeyError("out of order")

        async def main(async_engine):
            task = asyncio.create_task(completed(async_engine, "abc", LONG))
            await until(engine.has_unfinished_requests)
            engine.step = broken
            with pytest.raises(RequestError, match="could not be finished: KeyError: 'out of order'"):
                await task
            assert (await completed(async_engine, "abc", short(8)))[2] == "length"

        run(engine, main)

    def test_only_an_engine_can_be_shared(self, types_unchecked):
        with pytest.raises(
            ValueError, match=r"engine must be a Engine \(jattn.serving.Engine.*, got Decoder"
        ):
            AsyncEngine(MODEL)

    def test_params_must_not_be_a_number(self, engine, types_unchecked):
        with pytest.raises(ValueError, match=r"params must be a SamplingParams \(.*, got int: 8"):
            run(engine, lambda async_engine: completed(async_engine, "a", 8))


class TestCalls:
    def test_an_abort_ends_all_completions(self, engine):
        async def main(async_engine):
            params = SamplingParams(max_tokens=200, n=2, temperature=1.0)
            outputs = async_engine.generate("abc", params, request_id=7)
            await anext(outputs)
            await async_engine.abort(7)
            assert not engine.has_unfinished_requests()
            reasons = [o.finish_reason async for o in outputs if o.finish_reason is not None]
            assert reasons == ["abort", "abort"]
            with pytest.raises(ValueError, match="Request 7 is unknown or has finished"):
                await async_engine.abort(7)

        run(engine, main)

    def test_weights_are_updated_between_steps(self, engine):
        state = nnx.state(MODEL)

        async def main(async_engine):
            task = asyncio.create_task(completed(async_engine, "abc", short(30)))
            await until(engine.has_unfinished_requests)
            await async_engine.update_weights(state)
            with pytest.raises(ValueError, match="state contains wrong, which is not a weight of the model"):
                await async_engine.update_weights({"wrong": 1})
            assert len((await task)[0]) == 30
            return async_engine.stats.num_generated_tokens

        before = engine.stats.num_generated_tokens
        assert run(engine, main) == before + 30


class TestClose:
    def test_open_requests_end_and_new_ones_are_refused(self, engine):
        async def main():
            async_engine = AsyncEngine(engine)
            task = asyncio.create_task(completed(async_engine, "abc", LONG))
            await until(engine.has_unfinished_requests)
            await async_engine.aclose()
            await async_engine.aclose()
            with pytest.raises(RequestError, match="could not be finished: AsyncEngine was closed"):
                await task
            with pytest.raises(ValueError, match=r"AsyncEngine is closed\."):
                await completed(async_engine, "abc", LONG)

        asyncio.run(main())
        engine.generate(["the engine is free again"], max_tokens=2)

    def test_an_unused_engine_starts_no_thread(self, engine):
        asyncio.run(AsyncEngine(engine).aclose())

    def test_the_thread_ends_when_the_engine_is_garbage_collected(self, engine):
        async_engine = AsyncEngine(engine)
        asyncio.run(completed(async_engine, "abc", short(3)))
        gone = weakref.ref(async_engine)
        del async_engine
        gc.collect()
        assert gone() is None
