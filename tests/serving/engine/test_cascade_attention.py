"""Requests with a shared prefix read it once and generate the same tokens as without cascade attention."""

import dataclasses

import numpy as np
import pytest

from jattn.batch.bucket import Bucket
from jattn.serving import Engine, SamplingParams
from jattn.serving.engine.cascade_attention import CascadeAttention, num_common_prefix_blocks
from jattn.serving.engine.sampler import next_tokens
from jattn.serving.engine.scheduled_step import Step
from jattn.spec import AttentionSpec
from tests.assertions import record_compilations
from tests.serving.tiny import one_layer_model

MODEL = one_layer_model()
PREFIX = [*range(50, 83)]  # four blocks and a token
PROMPTS = [[*PREFIX, i] for i in range(3)]


def engine_of(cascade_attention, **options):
    bucket = Bucket(max_decodes=4, max_prefills=4, max_prefill_tokens=64, max_blocks=64)
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "buckets": [bucket], "num_blocks": 65}
    sizes |= {"block_size": 8, "check_batches": True, "cascade_attention": cascade_attention}
    return Engine(MODEL, **sizes | options)


@pytest.fixture(scope="module")
def plain():
    return engine_of(False)


@pytest.fixture(scope="module")
def engine():
    return engine_of(True)


def alike(results, expected):
    for actual, expected_completion in zip(results, expected, strict=True):
        assert actual.token_ids == expected_completion.token_ids
        for actual_position, expected_position in zip(
            actual.logprobs or (), expected_completion.logprobs or (), strict=True
        ):
            assert list(actual_position) == list(expected_position)
            logprobs = [[x.logprob for x in table.values()] for table in (actual_position, expected_position)]
            np.testing.assert_allclose(*logprobs, rtol=1e-4, atol=1e-5)


@pytest.mark.kernels
def test_requests_with_a_shared_prefix_read_it_once(plain, engine):
    lengths_and_seeds = ((9, 0), (12, 1), (7, 0))
    params = [SamplingParams(max_tokens=n, logprobs=3, temperature=t, seed=1) for n, t in lengths_and_seeds]
    expected = plain.generate(PROMPTS, params)
    engine.generate(PROMPTS[:1], max_tokens=1)  # leaves its blocks in the prefix cache
    before = engine.stats
    alike(engine.generate(PROMPTS, params), expected)
    after = engine.stats
    assert after.num_cascade_steps - before.num_cascade_steps >= 6
    assert after.num_steps - before.num_steps > after.num_cascade_steps - before.num_cascade_steps
    assert plain.stats.num_cascade_steps == 0


@pytest.mark.kernels
def test_completions_of_one_prompt_share_the_prefix(plain, engine):
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=5, n=3)
    (expected,), (actual,) = (result.generate([[7] * 20], params) for result in (plain, engine))
    before = engine.stats.num_cascade_steps
    (repeated,) = engine.generate([[7] * 20], params)
    assert engine.stats.num_cascade_steps > before
    for result in (actual, repeated):
        assert [completion.token_ids for completion in result.outputs] == [
            completion.token_ids for completion in expected.outputs
        ]


def test_requests_without_a_shared_prefix_do_not_cascade(plain, engine):
    prompts = [[i] * 20 for i in (1, 2, 3)]
    before = engine.stats.num_cascade_steps
    alike(engine.generate(prompts, max_tokens=5), plain.generate(prompts, max_tokens=5))
    alike(engine.generate(PROMPTS[:1], max_tokens=5), plain.generate(PROMPTS[:1], max_tokens=5))
    assert engine.stats.num_cascade_steps == before


def test_another_prefix_length_does_not_retrace(engine):
    engine.generate([[9] * 17], max_tokens=1)
    engine.generate([[9] * 16 + [i, i] for i in range(3)], max_tokens=6)
    engine.generate([[*PREFIX, i, i] for i in range(3)], max_tokens=6)
    compiles, samplers, steps = engine.stats.num_compiles, next_tokens._cache_size(), engine.stats
    for shared in (8, 24, 32):
        engine.generate([[shared] * shared + [9]], max_tokens=1)
        engine.generate([[shared] * shared + [i, 9] for i in range(3)], max_tokens=6)
    assert engine.stats.num_cascade_steps >= steps.num_cascade_steps + 9
    assert (engine.stats.num_compiles, next_tokens._cache_size()) == (compiles, samplers)


@pytest.mark.kernels
def test_precompile_compiles_cascade_executables():
    engine = engine_of(True, num_blocks=17, buckets=[
        Bucket(max_decodes=4, max_prefills=4, max_prefill_tokens=64, max_blocks=16)
    ])  # fmt: skip
    engine.precompile(progress=False)
    assert engine.stats.num_compiles == 1 + 2
    assert engine.warm_up(0) == 0  # those of cascades have run, too
    assert [sum(runs.num_runs.values()) for runs in engine._runner._runs] == [2, 4]
    with record_compilations() as compiled:
        engine.generate(PROMPTS[:1], max_tokens=1)
        engine.generate(PROMPTS, max_tokens=4)
    assert compiled == []
    assert engine.stats.num_cascade_steps > 0
    assert engine.stats.num_compiles == 3


@pytest.mark.parametrize(
    ("tables", "num_tokens", "blocks"),
    [
        ([[1, 2, 3], [1, 2, 4]], 12, 2),
        ([[1, 2, 3], [1, 2, 4]], 7, 1),  # the second block is not full in all
        ([[1, 2, 3], [1, 2, 3]], 12, 3),
        ([[1, 2, 3], [5, 2, 3]], 12, 0),
        ([[1, 2, 3], [1, 5, 3], [1, 2, 3]], 12, 1),
        ([[1, 2, 3], [1, 2, 3]], 3, 0),
    ],
)
def test_common_blocks_are_the_leading_full_blocks_of_all_rows(tables, num_tokens, blocks):
    assert num_common_prefix_blocks(np.array(tables), num_tokens, 4) == blocks


def step_of(rows, shared, **changes):
    tables = np.concatenate([np.ones((rows, shared), np.int32), np.arange(rows)[:, None] + 2], axis=1)
    fields = {
        "request_ids": tuple(range(rows)),
        "query_lens": (1,) * rows,
        "seq_lens": (16 * shared + 3,) * rows,
        "block_tables": tables,
        "block_copies": (),
        "samples": (True,) * rows,
        "num_decodes": rows,
        "preempted": (),
    }
    return Step(**fields | changes)


class TestPays:
    @pytest.fixture
    def steps(self):
        spec = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
        buckets = [Bucket(max_decodes=256, max_blocks=1024)]
        return CascadeAttention(lambda: None, buckets, spec, block_size=16, num_sms=132)  # as on an H200

    def test_cascade_pays_for_many_requests_with_a_long_prefix(self, steps):
        assert steps.prefix_len(step_of(64, 512)) == 8192
        assert steps.prefix_len(step_of(256, 512)) == 8192

    def test_cascade_depends_on_the_heads_and_keys_per_device(self):
        spec, buckets = (
            AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128),
            [Bucket(max_decodes=256, max_blocks=1024)],
        )
        cascade_for = lambda **devices: CascadeAttention(
            lambda: None, buckets, spec, block_size=16, num_sms=132, **devices
        ).prefix_len(step_of(64, 31))
        assert cascade_for() == cascade_for(cp=1) == 31 * 16
        assert cascade_for(cp=2) == 0  # 248 keys on each are too few
        assert cascade_for(tp=8) == 0  # of one kv head each, rows are fewer waves than a prefix of four tiles

    def test_cascade_does_not_pay_for_short_prefixes_few_requests_or_many_rows(self, steps):
        assert steps.prefix_len(step_of(64, 15)) == 0
        assert steps.prefix_len(step_of(7, 512)) == 0
        assert steps.prefix_len(step_of(257, 512)) == 0

    def test_cascade_waits_for_its_executable(self, steps, monkeypatch):
        monkeypatch.setattr(type(steps.graphs), "is_compiling", True)
        assert steps.prefix_len(step_of(64, 512)) == 0
        bucket = steps.graphs.buckets[0]
        monkeypatch.setattr(type(steps.graphs), "executables", {bucket: None})
        assert steps.prefix_len(step_of(64, 512)) == 8192

    def test_steps_with_prompts_or_drafts_do_not_cascade(self, steps):
        assert steps.prefix_len(step_of(64, 512, num_decodes=63)) == 0
        assert steps.prefix_len(step_of(64, 512, num_draft_tokens=2)) == 0


def test_an_unsupported_model_is_refused_if_cascades_are_requested():
    model = one_layer_model()
    layer = model.layers[0].self_attn
    layer.spec = dataclasses.replace(layer.spec, window=(7, 0))
    message = (
        r"cascade_attention=True: spec.window=\(7, 0\): cascade attention needs masks that ignore distance"
    )
    with pytest.raises(NotImplementedError, match=message):
        Engine(model, num_blocks=9, cascade_attention=True)
    Engine(model, num_blocks=9)
    model.plan = lambda metadata, caches: None
    with pytest.raises(NotImplementedError, match="the model's plan takes no common_prefix_len"):
        Engine(model, num_blocks=9, cascade_attention=True)
