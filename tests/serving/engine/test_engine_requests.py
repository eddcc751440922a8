"""The request interface: SamplingParams, steps, aborts, and prompts with shared prefixes."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from jattn.batch.bucket import Bucket
from jattn.serving import Engine, SamplingParams
from jattn.serving.engine.detokenizer import StopFilter
from tests.serving.tiny import one_layer_model

MODEL = one_layer_model()


def engine_of(num_blocks=65, budget=64, max_num_seqs=4, model=MODEL, max_blocks=None, **options):
    bucket = Bucket(
        max_decodes=max_num_seqs,
        max_prefills=max_num_seqs,
        max_prefill_tokens=budget,
        max_blocks=num_blocks - 1 if max_blocks is None else max_blocks,
    )
    sizes = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget, "buckets": [bucket]}
    return Engine(model, num_blocks=num_blocks, block_size=8, check_batches=True, **sizes, **options)


@pytest.fixture(scope="module")
def engine():
    return engine_of()


@pytest.fixture(scope="module")
def forward():
    """Return the log-probabilities after each token of a text, by one step without a cache."""

    @jax.jit
    def run(ids, metadata):
        hidden, _ = MODEL(ids, None, metadata)
        return jax.nn.log_softmax(MODEL.logits(hidden))

    return lambda ids: np.asarray(
        run(jnp.asarray(ids), jattn.build_batch_metadata([len(ids)], [len(ids)], None))
    )


def drained(engine):
    """Run all steps and return the joined outputs of each request."""
    ids, texts, reasons = {}, {}, {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            key = output.request_id, output.index
            assert key not in reasons
            ids.setdefault(key, []).extend(output.new_token_ids)
            texts[key] = texts.get(key, "") + output.new_text
            if output.finish_reason:
                reasons[key] = output.finish_reason
    return ids, texts, reasons


class TestSteps:
    def test_requests_return_the_same_as_generate(self, engine):
        prompts = ["one", [5, 6, 7], "another text"]
        expected = engine.generate(prompts, max_tokens=[3, 9, 5])
        first = engine.add_request(prompts[0], SamplingParams(max_tokens=3))
        assert engine.add_request(prompts[1], SamplingParams(max_tokens=9), request_id="mine") == "mine"
        engine.step()
        late = engine.add_request(prompts[2], SamplingParams(max_tokens=5))
        ids, texts, reasons = drained(engine)
        names = [(first, 0), ("mine", 0), (late, 0)]
        assert [ids[name] for name in names] == [result.token_ids for result in expected]
        assert [texts[name] for name in names] == [result.text for result in expected]
        assert set(reasons.values()) == {"length"}
        assert (engine.step(), engine.stats.num_used_blocks) == ([], 0)

    def test_parameters_are_validated_once_for_all_prompts_and_completions(self, engine, monkeypatch):
        params = SamplingParams(max_tokens=2, temperature=1.0, n=3, allowed_token_ids=[5, 6])
        monkeypatch.setattr(SamplingParams, "__post_init__", lambda self: pytest.fail("looked at again"))
        results = engine.generate([[1, 2], [3]], params)
        assert [len(result.outputs) for result in results] == [3, 3]
        completion_params = params.with_seed(5).of_completion(2)
        assert (
            completion_params.n,
            completion_params.seed is None,
            completion_params.allowed_token_ids,
            params.n,
        ) == (1, False, (5, 6), 3)

    def test_an_abort_frees_the_blocks_and_ends_the_outputs(self, engine):
        running, aborted = (engine.add_request("abcdefghi", SamplingParams(max_tokens=20)) for _ in range(2))
        for _ in range(4):
            engine.step()
        used = engine.stats.num_used_blocks
        engine.abort(aborted)
        assert engine.stats.num_used_blocks < used
        ids, _, _ = drained(engine)
        assert list(ids) == [(running, 0)]
        with pytest.raises(ValueError, match=f"Request {aborted} is unknown or has finished"):
            engine.abort(aborted)

    def test_streams_and_requests_run_concurrently(self, engine):
        expected = engine.generate(["x", "yz"], max_tokens=12)
        stream = engine.stream(["x"], max_tokens=12)
        actual = [next(stream).token_id]
        name = engine.add_request("yz", SamplingParams(max_tokens=12))
        ids, _, _ = drained(engine)
        actual += [token.token_id for token in stream]
        assert (actual, ids[name, 0]) == (expected[0].token_ids, expected[1].token_ids)

    def test_default_request_ids_skip_used_ones(self, engine):
        first = engine.add_request("a")
        engine.add_request("a", request_id=first + 2)
        assert engine.add_request("a") not in (first, first + 2)
        drained(engine)

    def test_stats_count_requests_and_tokens(self):
        engine = engine_of()
        engine.add_request("abc", SamplingParams(max_tokens=5))
        engine.step()
        now = engine.stats
        assert (now.num_running, now.num_waiting, now.num_used_blocks) == (1, 0, 1)
        assert now.cache_usage == 1 / 64
        drained(engine)
        done = engine.stats
        assert (done.num_generated_tokens, done.num_running) == (5, 0)
        assert (done.time_to_first_token.count, done.inter_token_latency.count) == (1, 4)
        assert sum(done.inter_token_latency.counts) == 4
        assert done.inter_token_latency.sum > 0
        assert (done.queue_time.count, done.prefill_time.count) == (1, 1)
        assert 0 < done.queue_time.sum < done.time_to_first_token.sum
        queue_and_prefill = done.queue_time.sum + done.prefill_time.sum
        assert abs(queue_and_prefill - done.time_to_first_token.sum) < 1e-9
        assert (done.step_tokens.count, done.step_tokens.sum) == (5, 3 + 4)


class TestStops:
    def test_a_stop_string_is_excluded_or_included(self, engine):
        (whole,) = engine.generate(["seed"], SamplingParams(temperature=1.0, seed=3, max_tokens=24))
        stop = whole.text[7:10]
        first = whole.text.index(stop)
        for include_stop in (False, True):
            params = SamplingParams(
                temperature=1.0, seed=3, max_tokens=24, stop=stop, include_stop_str_in_output=include_stop
            )
            (result,) = engine.generate(["seed"], params)
            assert result.text == whole.text[: first + 3 * include_stop]
            assert (result.finish_reason, result.stop_reason) == ("stop", stop)
            assert result.token_ids == whole.token_ids[: len(result.token_ids)]

    @pytest.mark.parametrize("pieces", [["ab", "cab", "cd!"], [*"abcabcd!"]])
    def test_only_a_possible_stop_string_is_held_back(self, pieces):
        stop_filter, stop, texts = StopFilter(["abcd", "x"]), None, []
        while stop is None:
            text, stop = stop_filter.feed(pieces.pop(0))
            texts.append(text)
        assert ("".join(texts), stop_filter.text, stop) == ("abc", "abc", "abcd")
        calm = StopFilter(["xyz"])
        assert calm.feed("hello") == ("hello", None)
        assert calm.feed("x") == ("", None)
        assert calm.feed("!") == ("x!", None)
        assert (calm.feed("xy")[0], calm.flush()) == ("", "xy")

    def test_min_tokens_ban_stop_tokens(self, engine):
        (plain,) = engine.generate(["q"], max_tokens=8)
        stop = plain.token_ids[1]
        ends = {"stop_token_ids": [stop], "max_tokens": 8}
        (ended,) = engine.generate(["q"], SamplingParams(**ends))
        assert (len(ended.token_ids), ended.stop_reason) == (plain.token_ids.index(stop) + 1, stop)
        (longer,) = engine.generate(["q"], SamplingParams(min_tokens=5, **ends))
        assert stop not in longer.token_ids[:5]
        assert len(longer.token_ids) >= 5

    def test_later_changes_of_a_logit_bias_mapping_have_no_effect(self, engine):
        biases = {5: 100.0}
        name = engine.add_request("ab", SamplingParams(max_tokens=3, logit_bias=biases))
        biases |= {5: -100.0, 9: 100.0}
        assert drained(engine)[0][name, 0] == [5] * 3

    @pytest.mark.kernels
    def test_numpy_ints_are_accepted(self, types_unchecked, engine):
        def results(kind):
            counts = {"max_tokens": kind(100), "min_tokens": kind(3), "top_k": kind(9), "seed": kind(5)}
            more = {"n": kind(2), "logprobs": kind(1), "prompt_logprobs": kind(1)}
            (result,) = engine.generate([[7] * 100], SamplingParams(temperature=1.0, **counts, **more))
            return [(one.token_ids, one.logprobs, one.prompt_logprobs) for one in result.outputs]

        assert results(np.int8) == results(np.int64) == results(int)

    def test_min_tokens_beyond_int32_last_until_the_end(self, engine):
        (plain,) = engine.generate(["q"], max_tokens=8)
        ends = {"stop_token_ids": [plain.token_ids[1]], "max_tokens": 2**41}
        (longest,) = engine_of(max_model_len=20).generate(["q"], SamplingParams(min_tokens=2**40, **ends))
        assert (len(longest.token_ids), longest.finish_reason) == (20, "length")

    def test_max_tokens_none_means_to_the_end_of_the_context_or_cache(self):
        short = engine_of(max_model_len=20)
        (result,) = short.generate(["abc"], SamplingParams(max_tokens=None))
        assert (len(result.token_ids), result.finish_reason) == (20 - 3 + 1, "length")
        small = engine_of(num_blocks=4)
        (result,) = small.generate(["abc"], SamplingParams(max_tokens=None))
        assert len(result.token_ids) == 24 - 3 + 1


class TestLogprobs:
    def test_logprobs_come_from_the_models_logits_regardless_of_sampling(self, engine, forward):
        params = [
            SamplingParams(max_tokens=6, logprobs=3, temperature=2.0, seed=1, logit_bias={5: 9.0}),
            SamplingParams(max_tokens=6, logprobs=0, presence_penalty=1.0),
            SamplingParams(max_tokens=6),
        ]
        prompts = [[1, 2, 3], [4] * 9, [7]]
        results = engine.generate(prompts, params)
        assert results[2].logprobs is None
        for prompt, result, num in zip(prompts, results, (3, 0), strict=False):
            table = forward(prompt + result.token_ids)
            assert len(result.logprobs) == 6
            for i, (token, actual) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
                expected = table[len(prompt) - 1 + i]
                assert next(iter(actual)) == token
                likeliest = np.argsort(-expected, kind="stable")[:num].tolist()
                assert set(actual) == {token, *likeliest}
                for candidate, (logprob, rank) in actual.items():
                    assert abs(logprob - expected[candidate]) < 1e-4
                    assert rank == (expected > expected[candidate]).sum() + 1

    def test_prompt_logprobs_0_returns_only_the_prompt_tokens(self, engine, forward):
        (result,) = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=1, prompt_logprobs=0))
        first, *later_tables = result.prompt_logprobs
        assert first is None
        for token, table, expected in zip([2, 3], later_tables, forward([1, 2, 3]), strict=False):
            assert list(table) == [token]
            assert abs(table[token].logprob - expected[token]) < 1e-4

    @pytest.mark.kernels
    @pytest.mark.parametrize(("num_blocks", "budget"), [(65, 64), (8, 7)])
    def test_prompt_logprobs_are_correct_in_chunks_and_after_preemption(self, forward, num_blocks, budget):
        engine = engine_of(num_blocks, budget)
        prompts = [random.Random(i).choices(range(320), k=18 + i) for i in range(4)]
        params = SamplingParams(max_tokens=25, prompt_logprobs=2)
        for _ in range(2):  # a prompt that is cached is computed again
            results = engine.generate(prompts, [params, SamplingParams(max_tokens=12), params, params])
            assert results[1].prompt_logprobs is None
            for prompt, result in zip(prompts, results, strict=True):
                if result.prompt_logprobs is None:
                    continue
                table = forward(prompt)
                assert [result.prompt_logprobs[0], len(result.prompt_logprobs)] == [None, len(prompt)]
                for i, actual in enumerate(result.prompt_logprobs[1:]):
                    likeliest = np.argsort(-table[i], kind="stable")[:2].tolist()
                    assert set(actual) == {prompt[i + 1], *likeliest}
                    assert all(
                        abs(logprob.logprob - table[i][token]) < 1e-4 for token, logprob in actual.items()
                    )
        assert (engine.stats.num_preemptions > 0) == (num_blocks == 8)

    def test_prompt_logprobs_of_a_preempted_prompt_are_complete(self, engine):
        small = engine_of(num_blocks=14, budget=7, enable_prefix_caching=False)
        prompts = [random.Random(i).choices(range(256), k=k) for i, k in enumerate((15, 8, 49))]
        params = [SamplingParams(max_tokens=40), SamplingParams(max_tokens=20)]
        params += [SamplingParams(max_tokens=5, prompt_logprobs=1)]
        actual, expected = (
            actual_table.generate(prompts, params)[2].prompt_logprobs for actual_table in (small, engine)
        )
        assert small.stats.num_preemptions > 0
        assert [table and next(iter(table)) for table in actual] == [None, *prompts[2][1:]]
        for actual_table, expected_table in zip(actual[1:], expected[1:], strict=True):
            token = next(iter(actual_table))
            assert abs(actual_table[token].logprob - expected_table[token].logprob) < 1e-3

    def test_logprobs_are_limited_by_the_vocabulary(self):
        model = one_layer_model(vocab_size=24)
        model.tokenizer = None
        params = SamplingParams(max_tokens=2, logprobs=20, prompt_logprobs=17)  # looked for are 32
        (result,) = engine_of(model=model).generate([[1, 2, 3]], params)
        assert [len(table) in (20, 21) for table in result.logprobs] == [True, True]
        assert [len(table) in (17, 18) for table in result.prompt_logprobs[1:]] == [True, True]
        ranks = sorted(logprob.rank for logprob in result.logprobs[0].values())
        assert ranks[:20] == [*range(1, 21)]


class TestCompletions:
    def test_each_of_n_completions_contains_the_prompt(self, engine):
        params = SamplingParams(seed=1, n=3, temperature=1.0, max_tokens=2, prompt_logprobs=1)
        (result,) = engine.generate(["abc"], params)
        first, *other_logprobs = (completion.prompt_logprobs for completion in result.outputs)
        assert other_logprobs == [first, first]
        assert len(first) == 3
        name = engine.add_request("abc", params)
        prompt_logprobs = []
        while engine.has_unfinished_requests():
            prompt_logprobs += [
                (completion.index, completion.prompt_logprobs)
                for completion in engine.step()
                if completion.prompt_logprobs
            ]
        assert sorted(index for index, _ in prompt_logprobs) == [0, 1, 2], name
        assert all(logprobs == first for _, logprobs in prompt_logprobs)

    def test_n_completions_use_consecutive_seeds(self, engine):
        hot = {"temperature": 1.5, "max_tokens": 7}
        (result,) = engine.generate(["abc"], SamplingParams(seed=10, n=3, **hot))
        alone = [engine.generate(["abc"], SamplingParams(seed=10 + i, **hot))[0] for i in range(3)]
        assert [completion.token_ids for completion in result.outputs] == [
            completion.token_ids for completion in alone
        ]
        assert result.token_ids == result.outputs[0].token_ids
        name = engine.add_request("abc", SamplingParams(seed=10, n=3, **hot))
        ids, _, _ = drained(engine)
        assert [ids[name, i] for i in range(3)] == [completion.token_ids for completion in alone]


class TestPrefixes:
    def test_greedy_text_is_the_same_with_and_without_prefix_caching(self):
        with_cache, without = engine_of(), engine_of(enable_prefix_caching=False)
        rng = random.Random(0)
        shared = rng.choices(range(320), k=30)
        prompts = [shared[: rng.randint(0, 30)] + rng.choices(range(320), k=5) for _ in range(12)]
        texts = [
            [result.token_ids for result in engine.generate(prompts, max_tokens=9)]
            for engine in (with_cache, without, with_cache)
        ]
        assert texts[0] == texts[1] == texts[2]
        assert without.stats.num_prefix_hit_tokens == 0
        hits = with_cache.stats.num_prefix_hit_tokens
        assert hits > 12 * 8
        assert hits <= with_cache.stats.num_prefix_tokens
        assert with_cache.stats.num_steps < without.stats.num_steps * 2

    @pytest.mark.parametrize("update_method", ["update_weights", "nnx.update"])
    def test_prefixes_computed_with_old_weights_are_not_reused(self, update_method):
        model = one_layer_model()
        engine, prompt = engine_of(model=model), list(range(40))
        engine.generate([prompt], max_tokens=4)
        new = nnx.state(one_layer_model(seed=1))
        (
            engine.update_weights
            if update_method == "update_weights"
            else lambda state: nnx.update(model, state)
        )(new)
        (actual,) = engine.generate([prompt], max_tokens=4)
        assert engine.stats.num_prefix_hit_tokens == 0
        assert (
            actual.token_ids
            == engine_of(model=one_layer_model(seed=1)).generate([prompt], max_tokens=4)[0].token_ids
        )


def test_executables_are_stored_in_cache_dir(tmp_path, jax_cache):
    with pytest.raises(NotADirectoryError, match="cache_dir must be a folder, got the file"):
        engine_of(cache_dir=__file__)
    engine_of(cache_dir=tmp_path / "kept").generate(["a"], max_tokens=1)
    assert any((tmp_path / "kept").iterdir())
    assert not any(jax_cache.iterdir())


def test_results_contain_their_prompt(engine):
    params = SamplingParams(temperature=1.0, seed=0, n=2, max_tokens=3)
    text, ids = engine.generate(["ab", [99, 100]], params)
    assert (text.prompt, text.prompt_token_ids) == ("ab", engine.tokenizer.encode("ab").ids)
    assert (ids.prompt, ids.prompt_token_ids) == (None, [99, 100])
    assert [completion.index for completion in text.outputs] == [0, 1]
    assert text.outputs[1].prompt == "ab"


@pytest.mark.kernels
def test_the_engines_seed_decides_the_samples_of_requests_without_a_seed():
    params = SamplingParams(max_tokens=4, temperature=1.0)

    def samples(seed):
        engine = Engine(one_layer_model(), num_blocks=9, max_num_seqs=2, seed=seed)
        return [result.token_ids for result in engine.generate([[1, 2], [1, 2]], params)]

    first, second = samples(3)
    assert samples(3) == [first, second]
    assert first != second
    assert samples(4) != [first, second]
