"""Executables run on empty batches before they serve requests, without side effects."""

import asyncio

import jax
import numpy as np
import pytest
from flax import nnx

from jattn.batch.bucket import Bucket
from jattn.serving import AsyncEngine, Engine, SamplingParams
from tests.serving.engine.faults import device_fails
from tests.serving.tiny import one_layer_model

BUCKETS = [
    Bucket(max_decodes=2, max_blocks=16),
    Bucket(max_decodes=4, max_blocks=16),
    Bucket(max_decodes=4, max_prefills=4, max_prefill_tokens=32, max_blocks=16),
]
PROMPTS = ["abcdefghijkl", "xyz", "q"]


def engine_of(**options):
    sizes = {"num_blocks": 33, "block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    return Engine(one_layer_model(), **({"buckets": BUCKETS, "max_model_len": 128} | sizes | options))


def bits(engine):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(engine._runner._caches)]


def runs_of(engine, monkeypatch):
    """Return the list of buckets that run from now on, in order."""
    graphs, ran = type(engine.graphs), []
    call = graphs.__call__

    def counted(self, params, caches, metadata, *inputs):
        ran.append((metadata.bucket, int(metadata.num_decodes), (metadata.slot_mapping == -1).all()))
        return call(self, params, caches, metadata, *inputs)

    monkeypatch.setattr(graphs, "__call__", counted)
    return ran


@pytest.fixture(scope="module")
def engine():
    small_engine = engine_of()
    small_engine.precompile(progress=False)
    return small_engine


class TestPrecompile:
    @pytest.mark.kernels
    def test_precompile_runs_each_executable_twice_on_empty_batches(self, monkeypatch):
        engine = engine_of(buckets=BUCKETS[1:])
        ran = runs_of(engine, monkeypatch)
        engine.precompile(progress=False)
        assert ran == [(bucket, 0, True) for bucket in BUCKETS[1:] for _ in range(2)]
        assert (engine.stats.num_compiles, engine.stats.num_steps) == (2, 0)
        engine.precompile(progress=False)
        assert engine.warm_up() == 0
        assert len(ran) == 4  # none is new any more

    @pytest.mark.kernels
    def test_precompile_runs_models_with_kv_cache_groups(self):
        from tests.serving.engine.test_kv_cache_manager import gemma3

        sizes = {"num_blocks": 33, "block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 32}
        engine = Engine(gemma3(), buckets=BUCKETS[2:], max_model_len=128, **sizes)
        before = bits(engine)
        engine.precompile(progress=False)
        assert bits(engine) == before
        assert engine.stats.num_compiles == 1


class TestWarmUp:
    @pytest.mark.kernels
    def test_warm_up_uses_the_current_weights_after_training_donated_the_old_ones(self, engine):
        texts = [engine.generate(["abcdefghijkl"], max_tokens=12)[0].token_ids]
        train = lambda model: nnx.update(model, jax.tree.map(lambda x: -x, nnx.state(model)))
        for _ in range(2):
            nnx.jit(train, donate_argnums=0)(engine.model)
            engine._runner._runs[0].num_runs.clear()
            assert engine.warm_up() == 0
            texts.append(engine.generate(["abcdefghijkl"], max_tokens=12)[0].token_ids)
        assert texts[0] == texts[2] != texts[1]
        assert engine.stats.num_failed_steps == 0

    @pytest.mark.kernels
    def test_warm_up_does_not_change_caches_or_texts(self, engine):
        (expected,) = engine.generate(["abcdefghijkl"], max_tokens=12)
        names = [engine.add_request("abcdefghijkl", SamplingParams(max_tokens=12))]
        for _ in range(4):
            engine.step()  # one is in flight
        before, compiled = bits(engine), engine.stats.num_compiles
        engine._runner._runs[0].num_runs.clear()  # as if all were new
        assert engine.warm_up() == 0
        assert bits(engine) == before
        actual = []
        while engine.has_unfinished_requests():
            actual += [token for output in engine.step() for token in output.new_token_ids]
        assert (len(names), expected.token_ids[-len(actual) :]) == (1, actual)
        assert engine.stats.num_compiles == compiled

    def test_warm_up_runs_the_smallest_first_and_returns_the_number_left(self, engine, monkeypatch):
        ran = runs_of(engine, monkeypatch)
        engine._runner._runs[0].num_runs.clear()
        assert engine.warm_up(1) == 2
        assert engine.warm_up(max_tokens=4) == 0
        assert engine.warm_up(0) == 1
        assert [bucket for bucket, *_ in ran] == [BUCKETS[0]] * 2 + [BUCKETS[1]] * 2
        engine.generate(["ab"], max_tokens=2)
        assert engine.warm_up(0) == 1  # it has run once
        engine.generate(["cd"], max_tokens=2)
        assert engine.warm_up(0) == 0

    def test_a_failed_warm_up_ends_open_requests_and_the_engine_continues(self, engine):
        expected = engine.generate(PROMPTS, max_tokens=4)
        name = engine.add_request("abc", SamplingParams(max_tokens=4))
        engine._runner._runs[0].num_runs.clear()
        failed = engine.stats.num_failed_steps
        with (
            device_fails(engine, call_number=2),
            pytest.raises(jax.errors.JaxRuntimeError, match="the device fell over"),
        ):
            engine.warm_up()
        ((output,),) = [engine.step()]
        assert (output.request_id, output.finish_reason) == (name, "error")
        assert engine.stats.num_failed_steps == failed + 1
        later_results = engine.generate(PROMPTS, max_tokens=4)
        assert [result.token_ids for result in later_results] == [result.token_ids for result in expected]


def test_idle_engine_warms_up_decode_buckets(engine):
    """Warming up prompt buckets would delay a request that arrives meanwhile by as many tokens."""

    async def served():
        async with AsyncEngine(engine) as served:
            await served.call(lambda engine: engine._runner._runs[0].num_runs.clear())
            while await served.call(lambda engine: len(engine._runner.cold_executables())) > 1:
                await asyncio.sleep(0.2)
            return await served.call(
                lambda engine: [step.bucket for step in engine._runner.cold_executables()]
            )

    assert asyncio.run(asyncio.wait_for(served(), 30)) == BUCKETS[2:]
