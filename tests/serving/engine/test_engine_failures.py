"""A failure ends only the affected requests, and the engine continues."""

import gc
import unittest.mock

import jax
import jax.numpy as jnp
import pytest

from jattn.runtime.decode_graphs import DecodeGraphs
from jattn.serving import Engine, RequestError, SamplingParams
from jattn.serving.engine.block_manager import BlockManager
from jattn.serving.engine.engine_core import EngineCore
from jattn.serving.engine.scheduler import Scheduler
from jattn.serving.engine.sequence import SequenceState
from tests.serving.engine.faults import PoisonedTokenizer, device_fails, reading_fails
from tests.serving.engine.test_engine_requests import engine_of
from tests.serving.tiny import BYTES, one_layer_model

LONG = SamplingParams(max_tokens=12)
FELL = "INTERNAL: the device fell over"


@pytest.fixture(scope="module")
def engine():
    return engine_of()


@pytest.fixture(params=[device_fails, reading_fails], ids=["after donation", "when read"])
def failure(request):
    return request.param


def finished(engine):
    """Run all steps and return the token ids and finish reason of each request."""
    ids, ends = {}, {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            ids.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.finish_reason:
                assert output.request_id not in ends
                ends[output.request_id] = output.finish_reason, output.error
    return ids, ends


def is_as_new(engine):
    stats = engine.stats
    return (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


class TestFailedStep:
    def test_failed_step_ends_open_requests_and_later_ones_are_served(self, engine, failure):
        prompts = ["abcdefghijkl", "xyz", "the third, which waits", "q", "r"]
        expected = engine.generate(prompts, max_tokens=12)
        before = engine.stats.num_failed_steps
        names = [engine.add_request(prompt, LONG) for prompt in prompts]
        with failure(engine, call_number=3):
            _, ends = finished(engine)
        assert {reason for reason, _ in ends.values()} == {"error"}
        assert set(ends) == set(names)
        assert all(FELL in str(error) for _, error in ends.values())
        assert is_as_new(engine)
        assert engine.stats.num_failed_steps == before + 1
        later_results = engine.generate(prompts, max_tokens=12)
        assert [result.token_ids for result in later_results] == [result.token_ids for result in expected]

    def test_failed_step_is_raised_by_generate_and_by_concurrent_streams(self, engine, failure):
        expected = engine.generate(["abc", "other"], max_tokens=12)
        stream = engine.stream(["other"], max_tokens=12)
        actual = [next(stream).token_id]
        with failure(engine, call_number=2), pytest.raises(jax.errors.JaxRuntimeError, match=FELL):
            engine.generate(["abc"], max_tokens=12)
        with pytest.raises(RequestError, match=FELL):
            actual += [token.token_id for token in stream]
        assert actual == expected[1].token_ids[: len(actual)]
        assert is_as_new(engine)
        assert engine.generate(["abc"], max_tokens=12)[0].token_ids == expected[0].token_ids

    def test_failed_step_clears_the_prefix_cache(self, engine, failure):
        prompt = list(range(3, 43))
        (expected,) = engine.generate([prompt], max_tokens=4)
        hits = engine.stats.num_prefix_hit_tokens
        with failure(engine), pytest.raises(jax.errors.JaxRuntimeError, match=FELL):
            engine.generate(["abc"], max_tokens=4)
        (result,) = engine.generate([prompt], max_tokens=4)
        assert result.token_ids == expected.token_ids
        assert engine.stats.num_prefix_hit_tokens == hits

    @pytest.mark.parametrize("drafts", [False, True])
    def test_failed_step_frees_its_caches_before_creating_new_ones(self, monkeypatch, drafts):
        model = one_layer_model()
        engine = Engine(model, num_blocks=999, speculative=one_layer_model(seed=1) if drafts else None)
        owners = [engine._runner, engine._runner._proposer] if drafts else [engine._runner]
        num_bytes = lambda: sum(array.nbytes for array in jax.live_arrays())
        most, seen = num_bytes(), []
        for owner in owners:
            new = owner._new_caches
            monkeypatch.setattr(owner, "_new_caches", lambda new=new: (new(), seen.append(num_bytes()))[0])
        not_compiled = unittest.mock.Mock(side_effect=RuntimeError("no memory to compile"))
        monkeypatch.setattr(engine.graphs._executables, "get", not_compiled)
        with pytest.raises(RuntimeError, match="no memory to compile"):
            engine.generate(["abc"], max_tokens=4)
        assert max(seen) < 1.1 * most
        assert len(seen) == len(owners)

    def test_failed_step_does_not_recompile(self, engine, failure):
        engine.generate(["abc"], max_tokens=4)
        compiles = engine.graphs.num_compiles
        with failure(engine), pytest.raises(jax.errors.JaxRuntimeError, match=FELL):
            engine.generate(["abc"], max_tokens=4)
        engine.generate(["abc"], max_tokens=4)
        assert engine.graphs.num_compiles == compiles


class TestCtrlCDuringAStep:
    @pytest.mark.parametrize(
        ("owner", "method"),
        [(BlockManager, "_take"), (DecodeGraphs, "__call__"), (EngineCore, "_append")],
        ids=["blocks taken", "caches donated", "a token handed out"],
    )
    def test_ctrl_c_ends_open_requests_and_later_ones_are_served(self, engine, monkeypatch, owner, method):
        (expected,) = engine.generate(["abcdefghi"], max_tokens=12)
        whole = getattr(owner, method)

        def interrupted(*arguments):
            whole(*arguments)
            monkeypatch.setattr(owner, method, whole)
            raise KeyboardInterrupt

        second_request = engine.add_request("other", LONG)
        monkeypatch.setattr(owner, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(["abcdefghi"], max_tokens=12)
        assert is_as_new(engine)
        _, ends = finished(engine)
        assert (ends[second_request][0], str(ends[second_request][1])) == ("error", "a step was interrupted")
        assert engine.generate(["abcdefghi"], max_tokens=12)[0].token_ids == expected.token_ids


class TestCtrlCBetweenSteps:
    @pytest.mark.parametrize(
        ("owner", "method"), [(Scheduler, "add"), (Scheduler, "abort")], ids=["admitted", "dropped"]
    )
    def test_ctrl_c_leaves_no_partial_request(self, engine, monkeypatch, owner, method):
        second_request, failed = engine.add_request("other", LONG), engine.stats.num_failed_steps

        def interrupted(*_, **__):
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(owner, method, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.abort(second_request) if method == "abort" else engine.add_request("abc", LONG)
        assert is_as_new(engine)
        assert not engine._core.has_work()
        _, ends = finished(engine)
        assert [str(error) for _, error in ends.values()] == ["the engine was interrupted"] * (
            method == "add"
        )
        assert engine.stats.num_failed_steps == failed
        assert len(engine.generate(["abc"], max_tokens=2)[0].token_ids) == 2

    def test_ctrl_c_ends_requests_whose_outputs_are_lost(self, engine, monkeypatch):
        """Two requests with outputs, one of them finished, and a waiting request."""
        names = [engine.add_request("abc", SamplingParams(max_tokens=count)) for count in (1, 9, 9)]
        whole, emitted = SequenceState.output, []

        def interrupted(sequence, request_id, index):
            emitted.append(whole(sequence, request_id, index))
            if len(emitted) == 2:
                monkeypatch.undo()
                raise KeyboardInterrupt
            return emitted[-1]

        monkeypatch.setattr(SequenceState, "output", interrupted)
        with pytest.raises(KeyboardInterrupt):
            finished(engine)
        assert [output.finish_reason for output in emitted] == ["length", None]
        assert is_as_new(engine)
        _, ends = finished(engine)
        assert [ends[name][0] for name in names] == ["error"] * 3
        assert not engine.has_unfinished_requests()


@pytest.fixture(scope="module")
def poisoned():
    """Return an engine that cannot decode a token of one prompt's completion, and that prompt."""
    model = one_layer_model()
    (result,) = Engine(model, num_blocks=33).generate(["abc"], max_tokens=12)
    model.tokenizer = PoisonedTokenizer(BYTES, result.token_ids[5])
    return engine_of(model=model)


class TestFailedRequest:
    @pytest.mark.kernels
    def test_failed_request_does_not_affect_others(self, poisoned):
        (expected,) = poisoned.generate([[7, 8]], max_tokens=5)
        bad = poisoned.add_request("abc", LONG)
        good = poisoned.add_request([7, 8], SamplingParams(max_tokens=5))
        ids, ends = finished(poisoned)
        assert (ids[good], ends[good]) == (expected.token_ids, ("length", None))
        assert ends[bad][0] == "error"
        assert "is poisoned" in str(ends[bad][1])
        assert is_as_new(poisoned)
        assert poisoned.stats.num_failed_steps == 0

    def test_failed_request_is_raised_by_generate_and_frees_all_its_requests(self, poisoned):
        with pytest.raises(RequestError, match="is poisoned"):
            poisoned.generate(["zz", "abc"], max_tokens=12)
        assert is_as_new(poisoned)


def test_a_deleted_engine_waits_for_its_step():
    """Otherwise JAX's transfer thread would abort the process at exit."""
    engine = engine_of()
    engine.add_request("abc", LONG)
    while not engine._core._in_flight:
        engine.step()
    slow = jax.jit(lambda x: jnp.linalg.matrix_power(x, 2**40)[0, :2].astype(jnp.int32))
    tokens = slow(jnp.eye(800))
    ((step, inputs, outputs),) = engine._core._in_flight
    engine._core._in_flight[0] = step, inputs, outputs._replace(token_ids=tokens)
    del outputs
    assert not tokens.is_ready()
    del engine
    gc.collect()
    assert tokens.is_ready()
