"""The engine on golden checkpoints: results depend neither on the batch nor on the cache."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

import jattn.models
from jattn.batch.bucket import Bucket
from jattn.models.loading.pretrained import load_shapes
from jattn.parallel import make_mesh
from jattn.serving.engine.config import device_memory_bytes
from jattn.serving.engine.engine import Engine
from jattn.serving.engine.input_processor import prompt_token_ids_of
from jattn.serving.engine.sampler import StepOutputs
from jattn.serving.engine.sampling_params import SamplingParams
from tests.assertions import record_compilations
from tests.conftest import GOLDEN
from tests.serving.tiny import BYTES, one_layer_model

NUM_PROMPTS, NUM_TOKENS = 4, 24


class Golden:
    def __init__(self, name):
        self.model = jattn.models.load(GOLDEN / "hf" / name, progress=False)
        expected = np.load(GOLDEN / "hf" / name / "expected.npz")
        self.prompts = [expected[f"prompt{i}"].tolist() for i in range(NUM_PROMPTS)]
        margins = [expected[f"margin{i}"] for i in range(NUM_PROMPTS)]
        # After a near tie rounding decides, so only what comes before it is certain.
        self.certain = [int(np.append(margin <= 1e-3, True).argmax()) for margin in margins]
        self.greedy = [expected[f"greedy{i}"].tolist() for i in range(NUM_PROMPTS)]

    def agrees(self, results, order=range(NUM_PROMPTS)):
        for result, i in zip(results, order, strict=True):
            assert len(result.token_ids) == NUM_TOKENS
            assert result.token_ids[: self.certain[i]] == self.greedy[i][: self.certain[i]]


@pytest.fixture(scope="module")
def golden():
    """The checkpoint that most tests use."""
    golden = Golden("llama")
    golden.model.tokenizer = BYTES
    return golden


def one_bucket(max_num_seqs, budget, num_blocks):
    bucket = Bucket(
        max_decodes=max_num_seqs,
        max_prefills=max_num_seqs,
        max_prefill_tokens=budget,
        max_blocks=num_blocks - 1,
    )
    return {
        "num_blocks": num_blocks,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": budget,
        "buckets": [bucket],
        "check_batches": True,
    }


@pytest.fixture(scope="module")
def engine(golden):
    return Engine(golden.model, **one_bucket(4, 160, 65))


@pytest.fixture(autouse=True)
def nothing_is_left_running(request):
    yield
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        assert (engine.scheduler.num_unfinished, engine.scheduler.block_manager.num_used) == (0, 0)


class TestGreedy:
    @pytest.mark.kernels
    @pytest.mark.parametrize("name", ["llama", "gemma2"])
    def test_greedy_tokens_match_transformers_in_batches_chunks_and_after_preemption(self, name):
        golden = Golden(name)
        roomy = Engine(golden.model, **one_bucket(4, 160, 65))
        golden.agrees(roomy.generate(golden.prompts, max_tokens=NUM_TOKENS, ignore_eos=True))
        for i, prompt in enumerate(golden.prompts):
            golden.agrees(roomy.generate([prompt], max_tokens=NUM_TOKENS, ignore_eos=True), [i])
        assert roomy.stats.num_preemptions == 0

        order = (3, 1, 0, 2)
        tiny = Engine(golden.model, block_size=4, **one_bucket(4, 13, 33))
        results = tiny.generate([golden.prompts[i] for i in order], max_tokens=NUM_TOKENS, ignore_eos=True)
        golden.agrees(results, order)
        assert tiny.stats.num_preemptions > 0
        assert tiny.stats.peak_blocks == tiny.stats.num_blocks == 32
        assert tiny.stats.num_compiles == roomy.stats.num_compiles == 1

        warm = [SamplingParams(temperature=1.0, seed=seed) for seed in order]
        expected = roomy.generate([golden.prompts[i] for i in order], max_tokens=12, sampling_params=warm)
        preempted = tiny.generate([golden.prompts[i] for i in order], max_tokens=12, sampling_params=warm)
        assert [result.token_ids for result in preempted] == [result.token_ids for result in expected]

    @pytest.mark.kernels
    def test_the_reference_implementation_agrees_and_the_model_is_unchanged(self, golden):
        engine = Engine(golden.model, implementation="reference", **one_bucket(4, 160, 65))
        golden.agrees(engine.generate(golden.prompts, max_tokens=NUM_TOKENS, ignore_eos=True))
        assert golden.model.layers[0].self_attn.implementation is None


class TestStopping:
    def test_text_ends_at_the_models_eos_token(self, golden, engine, monkeypatch):
        eos = golden.greedy[2][5]
        config = dataclasses.replace(golden.model.config, eos_token_ids=(eos,))
        monkeypatch.setattr(golden.model, "config", config)
        (result,) = engine.generate([golden.prompts[2]], max_tokens=NUM_TOKENS)
        assert (result.token_ids, result.finish_reason) == (golden.greedy[2][:6], "stop")
        (result,) = engine.generate([golden.prompts[2]], max_tokens=NUM_TOKENS, ignore_eos=True)
        assert (len(result.token_ids), result.finish_reason) == (NUM_TOKENS, "length")

    def test_text_ends_before_a_stop_id(self, golden, engine):
        stop = golden.greedy[1][5]
        first = golden.greedy[1].index(stop)
        assert first > 0
        (result,) = engine.generate([golden.prompts[1]], max_tokens=NUM_TOKENS, stop_ids=[stop])
        assert result.token_ids == golden.greedy[1][: first + 1]
        assert result.text == BYTES.decode(golden.greedy[1][:first])

    def test_text_ends_after_the_prompts_max_tokens(self, golden, engine):
        results = engine.generate(golden.prompts[1:], max_tokens=[3, 1, 7])
        assert [result.token_ids for result in results] == [
            golden.greedy[i][:n] for i, n in ((1, 3), (2, 1), (3, 7))
        ]
        assert {result.finish_reason for result in results} == {"length"}

    def test_text_ends_at_the_end_of_the_context(self, engine):
        (result,) = engine.generate([[5] * 510], max_tokens=100, ignore_eos=True)
        assert (len(result.token_ids), result.finish_reason) == (
            3,
            "length",
        )  # positions 510 and 511, and one


class TestStreams:
    def test_text_and_token_ids_mix_and_the_pieces_are_the_text(self, golden, engine):
        prompts = ["caf\u00e9", golden.prompts[2]]
        pieces = ["", ""]
        tokens = [[], []]
        for index, token_id, text in engine.stream(prompts, max_tokens=NUM_TOKENS, ignore_eos=True):
            pieces[index] += text
            tokens[index].append(token_id)
        results = engine.generate(prompts, max_tokens=NUM_TOKENS, ignore_eos=True)
        assert [result.token_ids for result in results] == tokens
        assert [result.text for result in results] == pieces == [BYTES.decode(ids) for ids in tokens]
        as_ids = engine.generate([BYTES.encode("caf\u00e9").ids], max_tokens=NUM_TOKENS, ignore_eos=True)
        assert as_ids[0].token_ids == tokens[0]

    def test_on_token_sees_every_token_once_and_in_order(self, golden, engine):
        seen = []
        results = engine.generate(
            golden.prompts, max_tokens=5, ignore_eos=True, on_token=lambda *token: seen.append(token)
        )
        for index, result in enumerate(results):
            assert [token_id for i, token_id, _ in seen if i == index] == result.token_ids
            assert "".join(text for i, _, text in seen if i == index) == result.text

    def test_two_open_streams_do_not_disturb_each_other(self, golden, engine):
        streams = [engine.stream([golden.prompts[i]], max_tokens=NUM_TOKENS, ignore_eos=True) for i in (1, 2)]
        pairs = list(zip(*streams, strict=True))
        assert [first.token_id for first, _ in pairs] == golden.greedy[1]
        assert [second.token_id for _, second in pairs] == golden.greedy[2]

    def test_closing_a_stream_drops_its_requests(self, golden, engine):
        stream = engine.stream(golden.prompts, max_tokens=NUM_TOKENS, ignore_eos=True)
        next(stream)
        assert engine.scheduler.num_unfinished == 4
        stream.close()
        assert engine.scheduler.num_unfinished == 0

    def test_an_unread_stream_starts_nothing(self, golden, engine):
        engine.stream(golden.prompts)
        assert engine.scheduler.num_unfinished == 0

    def test_an_error_in_on_token_leaves_the_engine_usable(self, golden, engine):
        def fail(*token):
            raise KeyError(token)

        with pytest.raises(KeyError):
            engine.generate(golden.prompts, max_tokens=5, on_token=fail)
        golden.agrees(engine.generate(golden.prompts, max_tokens=NUM_TOKENS, ignore_eos=True))


class TestSampling:
    def test_a_seed_draws_the_same_tokens_alone_and_in_a_batch(self, golden, engine):
        hot = [SamplingParams(temperature=2.0, seed=seed) for seed in (1, 2)]
        prompt = golden.prompts[1]
        together = engine.generate(
            [prompt, prompt, prompt], max_tokens=12, sampling_params=[*hot, SamplingParams()], ignore_eos=True
        )
        alone = [
            engine.generate([prompt], max_tokens=12, sampling_params=params, ignore_eos=True)
            for params in hot
        ]
        assert [result.token_ids for result in together[:2]] == [result[0].token_ids for result in alone]
        assert together[2].token_ids == golden.greedy[1][:12]
        assert len({tuple(result.token_ids) for result in together}) == 3

    def test_each_token_is_sampled_with_new_noise(self, engine):
        hottest = SamplingParams(temperature=1e6, seed=0)  # all tokens are equally likely
        (result,) = engine.generate([[7]], max_tokens=12, sampling_params=hottest, ignore_eos=True)
        assert len(set(result.token_ids)) > 8

    def test_calls_without_a_seed_differ(self, golden, engine):
        hot = SamplingParams(temperature=5.0)
        drawn = [
            engine.generate([[7]], max_tokens=12, sampling_params=hot, ignore_eos=True) for _ in range(2)
        ]
        assert drawn[0][0].token_ids != drawn[1][0].token_ids


@pytest.fixture
def events(engine, monkeypatch):
    """Record the order in which the engine starts steps and reads their tokens."""
    events, run, device_get = [], engine._runner.run, jax.device_get
    monkeypatch.setattr(engine._runner, "run", lambda inputs: (events.append("start"), run(inputs))[1])

    def get(x):
        if isinstance(x, StepOutputs):  # check_batch asks for metadata
            events.append("read")
        return device_get(x)

    monkeypatch.setattr(jax, "device_get", get)
    return events


class TestSteps:
    def test_a_step_is_read_once_and_after_the_next_one_was_started(self, golden, engine, events):
        engine.generate(golden.prompts, max_tokens=NUM_TOKENS, ignore_eos=True)
        assert events == ["start", *["start", "read"] * (NUM_TOKENS - 1), "read"]

    def test_a_stop_token_ends_a_request_one_step_later_and_what_came_after_is_dropped(
        self, golden, engine, events
    ):
        stop = golden.greedy[1][5]
        (result,) = engine.generate([golden.prompts[1]], max_tokens=NUM_TOKENS, stop_ids=[stop])
        num_tokens = golden.greedy[1].index(stop) + 1
        assert result.token_ids == golden.greedy[1][:num_tokens]
        assert events.count("start") == num_tokens + 1
        # The step in flight belongs to no request and does not affect the next ones.
        golden.agrees(engine.generate(golden.prompts, max_tokens=NUM_TOKENS, ignore_eos=True))

    def test_an_interrupted_read_loses_no_token(self, golden, engine, monkeypatch):
        stream = engine.stream([golden.prompts[1]], max_tokens=NUM_TOKENS, ignore_eos=True)
        second_stream = engine.stream([golden.prompts[2]], max_tokens=NUM_TOKENS, ignore_eos=True)
        first, device_get = [next(stream).token_id for _ in range(3)], jax.device_get

        def interrupted(x):
            if not isinstance(x, StepOutputs):
                return device_get(x)
            monkeypatch.setattr(jax, "device_get", device_get)
            raise KeyboardInterrupt

        monkeypatch.setattr(jax, "device_get", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(second_stream)
        assert first + [token.token_id for token in stream] == golden.greedy[1]

    def test_no_step_branches_on_device_data(self, engine, golden):
        engine.generate(golden.prompts[:1], max_tokens=1)
        for executable in engine.graphs.executables.values():
            assert " conditional(" not in executable.as_text()

    def test_step_receives_one_host_array(self, engine, golden):
        """Other inputs of a step are on the device: weights, caches and the tokens of the previous step."""
        engine.generate(golden.prompts[:1], max_tokens=1)
        weights = len(jax.tree.leaves(nnx.state(engine.model)))
        for executable in engine.graphs.executables.values():
            *before, joined, last = jax.tree.leaves(executable.args_info)
            assert (joined.dtype, last.shape) == (jnp.int32, (engine._runner._max_rows,))
            assert len(before) == weights + len(jax.tree.leaves(engine._runner._caches))

    @pytest.mark.kernels
    @pytest.mark.parametrize("max_num_seqs", [1, 3])
    def test_no_step_has_a_single_row(self, golden, max_num_seqs):
        engine = Engine(golden.model, num_blocks=8, max_num_seqs=max_num_seqs)
        assert min(bucket.max_tokens for bucket in engine.graphs.buckets) > 1
        golden_ids = engine.generate(golden.prompts[:1], max_tokens=NUM_TOKENS, ignore_eos=True)
        golden.agrees(golden_ids, order=[0])

    def test_nothing_compiles_after_precompile(self):
        buckets = [
            Bucket(max_decodes=2, max_blocks=4),
            Bucket(max_decodes=2, max_prefills=2, max_prefill_tokens=32, max_blocks=4),
        ]
        engine = Engine(
            one_layer_model(), num_blocks=5, max_num_seqs=2, max_num_batched_tokens=32, buckets=buckets
        )
        engine.precompile(progress=False)
        assert engine.stats.num_compiles == 2
        with record_compilations() as compiled:
            engine.generate([[3, 1, 4], [1] * 33], max_tokens=8)
            assert (engine.stats.num_compiles, engine.stats.num_steps) == (2, 9)
            for hot in ({}, {"top_k": 3}, {"top_p": 0.5, "min_p": 0.1}, {"min_p": 0.1}):
                params = [SamplingParams(temperature=0.7, **hot), SamplingParams()]
                engine.generate([[3, 1, 4], [5]], max_tokens=3, sampling_params=params)
        assert compiled == []

    def test_metrics_count_from_the_call(self, golden, engine):
        results = engine.generate(golden.prompts, max_tokens=[1, 2, 3, 4], ignore_eos=True)
        for count, result in enumerate(results, 1):
            metrics = result.metrics
            assert metrics.num_tokens == count
            assert 0 < metrics.time_to_first_token <= metrics.time_total
            assert metrics.tokens_per_second == count / metrics.time_total

    def test_no_prompts_give_no_results(self, engine):
        assert engine.generate([]) == []


@pytest.mark.kernels
def test_streams_that_stop_close_and_preempt_each_other_match_single_runs():
    model, rng = one_layer_model(), np.random.default_rng(0)
    roomy, tight = (
        Engine(model, block_size=size, **one_bucket(4, budget, num_blocks))
        for size, budget, num_blocks in ((8, 64, 65), (4, 9, 12))
    )
    for _ in range(3):
        prompts = [rng.integers(256, size=rng.integers(1, 21)).tolist() for _ in range(6)]
        stop_ids = rng.integers(320, size=25).tolist()
        params = [SamplingParams(temperature=i % 3, top_k=i % 2 * 5, seed=i) for i in range(6)]
        options = [
            {"max_tokens": int(rng.integers(1, 21)), "sampling_params": p, "stop_ids": stop_ids}
            for p in params
        ]
        alone = [
            roomy.generate([prompt], **parameters)[0].token_ids
            for prompt, parameters in zip(prompts, options, strict=True)
        ]
        streams = {i: tight.stream([prompts[i]], **options[i]) for i in range(6)}
        actual = {i: [] for i in streams}
        while streams:
            i = int(rng.choice(list(streams)))
            if i == 5 and rng.random() < 0.1:
                streams.pop(i).close()
            elif (token := next(streams[i], None)) is not None:
                actual[i].append(token.token_id)
            else:
                del streams[i]
        assert [actual[i] for i in range(5)] == alone[:5]
        assert actual[5] == alone[5][: len(actual[5])]
        assert (tight.scheduler.num_unfinished, tight.scheduler.block_manager.num_used) == (0, 0)
    assert tight.stats.num_preemptions > 0


class TestCheckedBatches:
    """Effects of a defective scheduler on the cache."""

    def engine_whose_steps_are(self, golden, change, **options):
        engine = Engine(golden.model, **one_bucket(4, 160, 65) | options)
        schedule = engine.scheduler.schedule

        def changed(*drafts):
            step = schedule(*drafts)
            return step and dataclasses.replace(step, **change(step))

        engine.scheduler.schedule = changed
        return engine

    @pytest.mark.parametrize(
        ("table", "message"),
        [
            (lambda tables: tables[:, :1] + 0 * tables, r"slot_mapping has slot \d+ twice, for rows 4 and 4"),
            (lambda tables: 0 * tables, r"slot_mapping\[4\]=0 is in block 0, the null block"),
            (lambda tables: 65 + 0 * tables, r"block_table\[4\] contains ids outside \[0, 65\)"),
        ],
        ids=["repeated", "null", "out of range"],
    )
    def test_invalid_blocks_are_reported_before_anything_is_written(self, golden, table, message):
        change = lambda step: {"block_tables": table(step.block_tables)}
        engine = self.engine_whose_steps_are(golden, change)
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                engine.generate(golden.prompts[3:], max_tokens=1)
        assert engine.stats.num_steps == 0
        assert not any(layer.k.is_deleted() or layer.k.any() for layer in engine._runner._caches)
        assert engine.scheduler.num_unfinished == 0

    def test_batches_are_not_validated_by_default(self, golden):
        change = lambda step: {"block_tables": 9 + 0 * step.block_tables}
        engine = self.engine_whose_steps_are(golden, change, check_batches=False)
        engine.generate(golden.prompts[3:], max_tokens=1)
        assert engine.stats.num_steps == 1


class TestFolders:
    """Engine("DIR"), as in vLLM."""

    @pytest.mark.parametrize("kind", [str, pathlib.Path])
    def test_folder_is_loaded(self, golden, kind):
        engine = Engine(kind(GOLDEN / "hf" / "llama"), **one_bucket(4, 160, 65))
        golden.agrees(engine.generate(golden.prompts[:1], max_tokens=NUM_TOKENS, ignore_eos=True), [0])

    def test_missing_folder_is_reported(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"Llama-3 is not a folder, and the Hub has no such"):
            Engine("meta-llama/Llama-3")


class TestForks:
    def test_repeated_forks_of_a_requests_blocks_do_not_change_its_tokens(self, golden):
        engine = Engine(golden.model, **one_bucket(4, 160, 65))
        manager = engine.scheduler.block_manager
        streams = [engine.stream([golden.prompts[i]], max_tokens=NUM_TOKENS, ignore_eos=True) for i in (1, 2)]
        actual = [[], []]
        for n in range(NUM_TOKENS):
            for ids, stream in zip(actual, streams, strict=True):
                ids.append(next(stream).token_id)
            if n in (3, 4, 9):
                for request_id in (0, 1):
                    manager.fork(request_id, 100 * n + request_id + 1000)
        assert actual == [golden.greedy[1], golden.greedy[2]]
        assert manager.num_used > 0


@pytest.fixture(scope="module")
def expected_after_update():
    """Return the outputs of an engine with the new weights from the start, per implementation."""
    ask = lambda name: Engine(one_layer_model(seed=1), **one_bucket(2, 16, 9), implementation=name)
    return {name: ask(name).generate([[3, 1, 4]], max_tokens=6)[0] for name in (None, "reference")}


class TestWeights:
    """Updates of the model's weights by any means reach the engine."""

    @pytest.mark.kernels
    @pytest.mark.parametrize(
        ("update_method", "implementation"),
        [
            ("a Variable's value", None),
            ("nnx.update", "reference"),
            ("a new Variable", None),
            ("a new Variable", "reference"),
            ("update_weights", None),
        ],
    )
    def test_weights_changed_after_construction_are_used(
        self, expected_after_update, update_method, implementation
    ):
        model, new_model = one_layer_model(), one_layer_model(seed=1)
        expected = expected_after_update[implementation]
        engine = Engine(model, **one_bucket(2, 16, 9), implementation=implementation)
        (before,) = engine.generate([[3, 1, 4]], max_tokens=6)
        assert before.token_ids != expected.token_ids
        if update_method == "a Variable's value":
            pairs = zip(*(nnx.to_flat_state(nnx.state(m)) for m in (model, new_model)), strict=True)
            for (_, variable), (_, new_variable) in pairs:
                variable.set_value(new_variable.get_value())
        elif update_method == "nnx.update":
            nnx.update(model, nnx.state(new_model))
        elif update_method == "a new Variable":
            model.layers = new_model.layers
            model.norm, model.lm_head = new_model.norm, new_model.lm_head
            model.embed_tokens.embedding = nnx.Param(new_model.embed_tokens.embedding[...])
        else:
            engine.update_weights(nnx.state(new_model))
        (after,) = engine.generate([[3, 1, 4]], max_tokens=6)
        assert after.token_ids == expected.token_ids
        assert engine.stats.num_compiles == 1

    def test_a_subset_of_weights_can_be_updated_with_plain_arrays(self):
        model, new_model = one_layer_model(), one_layer_model(seed=1)
        engine = Engine(model, **one_bucket(2, 16, 9))
        engine.update_weights(
            {"embed_tokens": {"embedding": np.asarray(new_model.embed_tokens.embedding[...])}}
        )
        np.testing.assert_array_equal(
            model.embed_tokens.embedding[...], new_model.embed_tokens.embedding[...]
        )
        kernel = engine.update_weights(
            {"layers": {0: {"mlp": {"gate_up_proj": {"kernel": jnp.zeros((96, 2, 192))}}}}}
        )
        assert kernel is None
        assert not model.layers[0].mlp.gate_up_proj.kernel[...].any()

    def test_weights_do_not_alias_the_callers_memory(self):
        model = one_layer_model()
        device = jax.devices()[0]
        nnx.update(model, jax.device_put(nnx.state(model), device))  # on a device that is named, or a mesh
        bytes_ = np.zeros(320 * 96 * 4 + 64, np.uint8)
        first = -bytes_.ctypes.data % 64  # XLA takes memory that begins there as it is
        new = bytes_[first : first + 320 * 96 * 4].view(np.float32).reshape(320, 96)
        new[...] = 1.0
        Engine(model, **one_bucket(2, 16, 9)).update_weights({"embed_tokens": {"embedding": new}})
        new[...] = 2.0
        assert np.asarray(model.embed_tokens.embedding[...]).max() == 1.0

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                {"norm": {"bias": np.ones(96)}},
                r"state contains norm.bias, which is not a weight of the model\.",
            ),
            (
                {"norm": {"weight": np.ones(95, np.float32)}},
                r"norm.weight must have shape \(96,\) .*, got \(95,\)",
            ),
            (
                {"norm": {"weight": np.ones(96, np.float16)}},
                r"norm.weight must have the model's dtype float32, got float16\.",
            ),
            ({"norm": {"weight": "x"}}, r"norm.weight must be an array, got 'x'\."),
            (jnp.ones(3), r"state must be a tree of the model's weights \(nnx.state\(model\)\), got \["),
        ],
    )
    def test_invalid_updates_are_reported_and_change_nothing(self, change, message):
        model = one_layer_model()
        engine = Engine(model, **one_bucket(2, 16, 9))
        before = np.asarray(model.embed_tokens.embedding[...])
        if isinstance(change, dict):
            change = {"embed_tokens": {"embedding": jnp.zeros((320, 96))}} | change
        with pytest.raises(ValueError, match=message):
            engine.update_weights(change)
        np.testing.assert_array_equal(model.embed_tokens.embedding[...], before)

    def test_another_model_structure_is_an_error(self):
        model = one_layer_model()
        engine = Engine(model, **one_bucket(2, 16, 9))
        engine.generate([[3]], max_tokens=1)
        model.norm.bias = nnx.Param(jnp.zeros(96))
        with pytest.raises(ValueError, match="structure of params has changed"):
            engine.generate([[3]], max_tokens=1)


class TestCacheSize:
    def test_default_cache_holds_max_num_seqs_contexts(self, golden):
        stats = Engine(golden.model, max_num_seqs=3).stats
        assert (stats.num_blocks, stats.peak_blocks) == (3 * 512 // 16, 0)

    def test_cache_bytes_hold_twice_the_blocks_at_half_the_dtype_size(self, golden):
        per_block = 3 * 2 * 16 * 2 * 32 * 4  # layers, k and v, tokens, heads, head_dim, f32
        sizes = [
            Engine(golden.model, cache_bytes=10 * per_block + 1, kv_cache_dtype=dtype).stats.num_blocks
            for dtype in ("auto", jnp.bfloat16, "bfloat16")
        ]
        assert sizes == [10 - 1, 20 - 1, 20 - 1]

    def test_the_devices_free_memory_limits_the_default(self, golden, monkeypatch):
        per_block = 3 * 2 * 16 * 2 * 32 * 4
        members = {"platform": "cpu", "memory_stats": lambda self: self.stats}
        device = type("Device", (), members)()
        device.stats = {"bytes_limit": 30 * per_block, "bytes_in_use": 10 * per_block}
        monkeypatch.setattr(jax, "local_devices", lambda: [device])
        assert Engine(golden.model).stats.num_blocks == 16 - 1

    @pytest.mark.parametrize("mesh", [None, make_mesh()], ids=["one device", "a mesh"])
    @pytest.mark.parametrize(
        ("sizes", "actual"),
        [
            ({"num_blocks": 2**40}, f"num_blocks={2**40} needs .* bytes for the KV caches, but a device has"),
            ({"cache_bytes": 2**60}, f"cache_bytes={2**60} needs .* bytes for the KV caches"),
            ({"block_size": 2**40}, r"num_blocks=2 needs .* bytes for the KV caches"),
        ],
    )
    def test_caches_larger_than_the_memory_are_refused(self, sizes, actual, mesh):
        """Host lists of that many blocks would exhaust the host's memory."""
        with pytest.raises(ValueError, match=actual):
            Engine(load_shapes(GOLDEN / "hf" / "llama", mesh=mesh), **sizes)

    def test_devices_of_a_cpu_share_the_host_s_memory(self):
        mesh = Mesh(np.array([jax.devices()[0]] * 4).reshape(2, 2), ("tp", "cp"))
        shapes = load_shapes(GOLDEN / "hf" / "llama", mesh=mesh)
        assert device_memory_bytes(shapes) == device_memory_bytes(None) // 4


GOOD = [1, 2, 3]


class TestRefusals:
    @pytest.mark.parametrize(
        ("prompts", "options", "message"),
        [
            ([GOOD, []], {}, r"prompts\[1\] is empty\."),
            ([GOOD, ""], {}, r"prompts\[1\] is empty\."),
            ([GOOD, [4, 320]], {}, r"prompts\[1\]\[1\] must be in the vocabulary, \[0, 320\), got 320\."),
            ([GOOD, [-1]], {}, r"prompts\[1\]\[0\] must be in the vocabulary, \[0, 320\), got -1\."),
            ([GOOD, np.ones(2)], {}, r"prompts\[1\] must be text or a list of token ids, got array\(\[1"),
            ([GOOD, [1] * 513], {}, r"prompts\[1\] has 513 tokens, but max_model_len is 512\."),
            ("text", {}, r"prompts must be a list of prompts, got 'text'\."),
            ([GOOD], {"max_tokens": 0}, r"max_tokens must be positive, got 0\."),
            ([GOOD], {"max_tokens": [1, 2]}, r"max_tokens must have one entry per prompt \(1\), got 2\."),
            (
                [GOOD],
                {"sampling_params": [SamplingParams()] * 3},
                r"sampling_params must have one entry per prompt \(1\), got 3\.",
            ),
        ],
    )
    def test_invalid_prompts_are_rejected_before_any_of_them_starts(self, engine, prompts, options, message):
        steps = engine.stats.num_steps
        for call in (engine.generate, engine.stream):
            with pytest.raises(ValueError, match=message):
                call(prompts, **options)
        assert engine.stats.num_steps == steps

    def test_prompt_that_does_not_fit_the_cache_is_rejected(self, golden):
        engine = Engine(golden.model, **one_bucket(4, 160, 5))
        message = r"prompts\[1\] has 60 tokens and max_tokens=6, but the KV cache holds only 64"
        with pytest.raises(ValueError, match=message):
            engine.generate([GOOD, [1] * 60], max_tokens=6)

    def test_text_without_a_tokenizer_is_rejected(self):
        message = r"prompts\[0\] is text, but the model has no tokenizer\.json\. Pass token ids\."
        with pytest.raises(ValueError, match=message):
            prompt_token_ids_of("prompts[0]", "text", tokenizer=None, vocab_size=9)

    def test_token_instead_of_a_prompt_is_rejected(self):
        with pytest.raises(ValueError, match=r"prompts\[0\] must be text or a list of token ids, got 7\."):
            prompt_token_ids_of("prompts[0]", 7, tokenizer=None, vocab_size=9)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"block_size": 0}, r"block_size must be positive, got 0\."),
            ({"max_num_seqs": 0}, r"max_num_seqs must be positive, got 0\."),
            ({"max_num_batched_tokens": 0}, r"max_num_batched_tokens must be positive, got 0\."),
            (
                {"num_blocks": 9, "cache_bytes": 5},
                r"cache_bytes must be None with num_blocks=9, got 5\.",
            ),
            ({"num_blocks": 1}, r"num_blocks must be at least 2 .*, got 1\."),
            ({"cache_bytes": 9}, r"cache_bytes must be at least 49152, the size of two blocks, got 9\."),
            (
                {"cache_bytes": 49151},
                r"cache_bytes must be at least 49152, the size of two blocks, got 49151\.",
            ),
            (
                {"buckets": [Bucket(max_decodes=4, max_blocks=32)], "max_num_seqs": 4},
                r"The batch 4\+4/512x32 does not fit any of the buckets",
            ),
        ],
    )
    def test_invalid_settings_are_rejected(self, golden, options, message):
        with pytest.raises(ValueError, match=message):
            Engine(golden.model, **options)

    @pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU has it")
    def test_unavailable_implementation_is_rejected(self, golden):
        with pytest.raises(NotImplementedError, match=r"mosaic_gpu: .*cpu"):
            Engine(golden.model, implementation="mosaic_gpu")


def test_engine_reports_its_implementations():
    engine = Engine(one_layer_model(), max_num_seqs=4, max_num_batched_tokens=64)
    text = engine.explain()
    assert engine.stats.num_compiles == 0
    for bucket in engine.graphs.buckets:
        rows = f"{bucket.max_decodes}+{bucket.max_prefills}/{bucket.max_prefill_tokens}x{bucket.max_blocks}"
        (part,) = [part for part in text.split("\n\nbuckets ") if f"{rows}," in part or f"{rows}:" in part]
        assert ("  decode  " in part) == (bucket.max_decodes > 0)
        assert ("  prefill  " in part) == (bucket.max_prefills > 0)
        assert "6/2 heads of 32; float32 queries, NHD float32" in part
