"""Speculative decoding generates the same tokens in fewer steps, and pauses if it does not pay off."""

import jax
import numpy as np
import pytest

from jattn.batch.bucket import Bucket
from jattn.serving import Engine, NgramProposer, SamplingParams, StructuredOutputsParams
from jattn.serving.engine.sequence import MAX_PAUSE, DraftState
from jattn.serving.engine.speculative import Speculation
from jattn.serving.engine.step import BALANCE_TOKENS, draft_buckets
from tests.assertions import record_compilations
from tests.serving.tiny import one_layer_model

MODEL = one_layer_model()
K = 4


def engine_of(num_blocks=65, budget=64, max_num_seqs=4, draft_cost=0.0, **options):
    bucket = Bucket(
        max_decodes=max_num_seqs,
        max_prefills=max_num_seqs,
        max_prefill_tokens=budget,
        max_blocks=num_blocks - 1,
    )
    sizes = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget, "buckets": [bucket]}
    sizes |= {"num_blocks": num_blocks, "block_size": 8, "check_batches": True}
    engine = Engine(MODEL, **sizes | options)
    if engine._speculation is not None:
        engine._speculation._draft_cost = draft_cost  # here a draft model is as large as the model
    return engine


class Oracle(NgramProposer):
    """A proposer that knows the future tokens and is wrong with a given frequency."""

    def __init__(self, wrong=0.0):
        super().__init__()
        self.texts, self.wrong, self.rng = [], wrong, np.random.default_rng(0)

    def propose(self, token_ids, num_tokens):
        ids = token_ids.tolist()
        text = next((text for text in self.texts if text[: len(ids)] == ids), [])
        drafts = text[len(ids) : len(ids) + num_tokens]
        return [token if self.rng.random() >= self.wrong else (token + 1) % 320 for token in drafts]

    def learn(self, prompts, results):
        self.texts = [[*p, *r.token_ids] for p, r in zip(prompts, results, strict=True)]


@pytest.fixture(scope="module")
def plain():
    return engine_of()


@pytest.fixture(scope="module")
def oracle():
    return Oracle()


@pytest.fixture(scope="module")
def engine(oracle):
    return engine_of(speculative=oracle)


def drawn_requests(rng, count=6):
    prompts = [rng.integers(0, 256, rng.integers(1, 30)).tolist() for _ in range(count)]
    params = [
        SamplingParams(
            max_tokens=int(rng.integers(1, 40)),
            temperature=float(rng.choice([0, 0, 1, 2])),
            top_k=int(rng.choice([0, 5])),
            min_p=float(rng.choice([0, 0.05])),
            seed=int(rng.integers(99)),
            stop_token_ids=rng.integers(0, 320, 4).tolist(),
            stop=["q"] if rng.random() < 0.3 else [],
            min_tokens=0,
            presence_penalty=float(rng.choice([0, 0.5])),
            repetition_penalty=float(rng.choice([1, 1.2])),
            logprobs=2 if rng.random() < 0.5 else None,
        )
        for _ in range(count)
    ]
    return prompts, params


def drain(engine):
    while engine.has_unfinished_requests():
        engine.step()


def same(results, expected_accepted):
    for actual, expected in zip(results, expected_accepted, strict=True):
        assert actual.token_ids == expected.token_ids
        assert (actual.text, actual.finish_reason, actual.stop_reason) == (
            expected.text,
            expected.finish_reason,
            expected.stop_reason,
        )
        assert (actual.logprobs is None) == (expected.logprobs is None)
        for actual_table, expected_table in zip(actual.logprobs or (), expected.logprobs or (), strict=True):
            assert list(actual_table) == list(expected_table)
            np.testing.assert_allclose(
                [x.logprob for x in actual_table.values()],
                [x.logprob for x in expected_table.values()],
                rtol=1e-3,
                atol=1e-4,
            )


def counts_of_a_text(plain, engine, oracle, max_tokens, wrong):
    """Return the engine's counters before and after a text, which must equal the text without drafts."""
    prompts, params = [[1, 2, 3]], SamplingParams(max_tokens=max_tokens)
    expected = plain.generate(prompts, params)
    oracle.learn(prompts, expected)
    oracle.wrong = wrong
    before = engine.stats
    same(engine.generate(prompts, params), expected)
    return before, engine.stats


class TestTexts:
    @pytest.mark.kernels
    @pytest.mark.parametrize("wrong", [0.0, 0.15, 0.6])
    def test_texts_equal_those_without_drafts_for_any_acceptance_rate(self, plain, engine, oracle, wrong):
        rng = np.random.default_rng(int(10 * wrong))
        for _ in range(2):
            prompts, params = drawn_requests(rng)
            expected = plain.generate(prompts, params)
            oracle.learn(prompts, expected)
            oracle.wrong = wrong
            before = engine.stats
            same(engine.generate(prompts, params), expected)
            after = engine.stats
            assert after.num_used_blocks == 0
            assert after.num_draft_tokens > before.num_draft_tokens

    @pytest.mark.kernels
    def test_texts_of_three_requests_equal_those_without_drafts(self, plain, engine, oracle):
        prompts = [[1, 2, 3], [4], [5, 6]]
        params = [SamplingParams(max_tokens=n, temperature=t, seed=n) for n, t in ((20, 0), (13, 1), (17, 0))]
        expected = plain.generate(prompts, params)
        oracle.learn(prompts, expected)
        oracle.wrong = 0.3
        same(engine.generate(prompts, params), expected)
        assert 0 < engine.stats.num_accepted_tokens < engine.stats.num_draft_tokens

    @pytest.mark.kernels
    def test_correct_drafts_reduce_the_number_of_steps(self, plain, engine, oracle):
        before, after = counts_of_a_text(plain, engine, oracle, max_tokens=41, wrong=0.0)
        assert after.num_steps - before.num_steps == 1 + 8  # the prompt, and 8 of 5 tokens
        assert after.num_drafts - before.num_drafts == 8
        assert after.num_accepted_tokens - before.num_accepted_tokens == 40 - 8

    @pytest.mark.kernels
    def test_texts_are_unchanged_with_few_blocks(self, plain):
        oracle = Oracle(0.3)
        tight = engine_of(num_blocks=12, budget=23, speculative=oracle, num_speculative_tokens=3)
        rng = np.random.default_rng(5)
        for _ in range(3):
            prompts, params = drawn_requests(rng)
            expected = plain.generate(prompts, params)
            oracle.learn(prompts, expected)
            same(tight.generate(prompts, params), expected)
            assert tight.stats.num_used_blocks == 0
        assert tight.stats.num_preemptions > 0
        assert tight.stats.num_accepted_tokens > 0

    @pytest.mark.kernels
    def test_texts_reach_the_models_last_position(self, plain, engine, oracle):
        prompts = [[5] * 500]
        expected = plain.generate(prompts, max_tokens=100)
        oracle.learn(prompts, expected)
        same(engine.generate(prompts, max_tokens=100), expected)
        assert len(expected[0].token_ids) == 13

    def test_repeated_texts_are_drafted_by_lookup(self, plain):
        engine = engine_of(speculative="ngram")
        prompts = [[*range(40, 60)] * 2]
        bias = SamplingParams(max_tokens=30, logit_bias={41: 100.0})  # 41, 41, 41, ...
        expected = plain.generate(prompts, bias)
        before = engine.stats.num_steps
        same(engine.generate(prompts, bias), expected)
        assert engine.stats.acceptance_rate > 0.7
        assert engine.stats.num_steps - before < 20

    def test_prompt_as_long_as_a_row_with_drafts_is_a_prefill(self, plain, engine):
        prompts = [[3, 1, 4, 1, 5]]
        assert len(prompts[0]) == 1 + K
        same(engine.generate(prompts, max_tokens=3), plain.generate(prompts, max_tokens=3))

    @pytest.mark.kernels
    def test_constrained_texts_satisfy_their_constraint_in_a_batch_with_drafts(self, plain, engine, oracle):
        form = StructuredOutputsParams(regex="(!a!b!c!d){3}")  # "!" is token 0, as padding is
        prompts = [[1, 2, 3], [4, 5]]
        params = [SamplingParams(max_tokens=30), SamplingParams(max_tokens=30, structured_outputs=form)]
        expected = plain.generate(prompts, params)
        oracle.learn(prompts[:1], expected[:1])
        oracle.wrong = 0.0
        before = engine.stats.num_accepted_tokens
        same(engine.generate(prompts, params), expected)
        assert expected[1].text == "!a!b!c!d" * 3
        assert engine.stats.num_accepted_tokens > before

    def test_aborted_texts_leave_no_blocks(self, plain, engine, oracle):
        prompts, params = [[7, 7, 7], [8, 9]], SamplingParams(max_tokens=30)
        expected = plain.generate(prompts, params)
        oracle.learn(prompts, expected)
        running, aborted = (engine.add_request(prompt, params) for prompt in prompts)
        ids = []
        for turn in range(40):
            ids += [
                i for output in engine.step() if output.request_id == running for i in output.new_token_ids
            ]
            if turn == 4:
                engine.abort(aborted)
        assert ids == expected[0].token_ids
        assert (engine.stats.num_used_blocks, engine.has_unfinished_requests()) == (0, False)

    @pytest.mark.kernels
    def test_cached_blocks_contain_accepted_tokens_only(self, plain, oracle):
        engine = engine_of(speculative=(wrong := Oracle(0.5)))
        prompts, params = [[3, 1, 4, 1, 5]], SamplingParams(max_tokens=40)
        expected = plain.generate(prompts, params)
        wrong.learn(prompts, expected)
        same(engine.generate(prompts, params), expected)
        longer = [[*prompts[0], *expected[0].token_ids[:-1], 9]]
        hits = engine.stats.num_prefix_hit_tokens
        same(engine.generate(longer, params), plain.generate(longer, params))
        assert engine.stats.num_prefix_hit_tokens - hits == 40


class TestInterruptions:
    def test_interrupted_read_is_repeated(self, plain, engine, oracle, monkeypatch):
        prompts, params = [[2, 7, 1, 8]], SamplingParams(max_tokens=30)
        expected = plain.generate(prompts, params)
        oracle.learn(prompts, expected)
        oracle.wrong = 0.2
        stream = engine.stream(prompts, [params])
        ids, read = [next(stream).token_id for _ in range(4)], engine._runner.read

        def interrupted(outputs):
            monkeypatch.setattr(engine._runner, "read", read)
            raise KeyboardInterrupt

        engine.add_request([1, 2], SamplingParams(max_tokens=2))
        monkeypatch.setattr(engine._runner, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            drain(engine)
        assert ids + [token.token_id for token in stream] == expected[0].token_ids
        drain(engine)


class TestPolicy:
    def test_rejected_drafts_pause_drafting_four_times_longer_each_time(self):
        draft_state, waits = DraftState(), []
        for _ in range(6):
            draft_state.record(0, 100)
            waits.append(draft_state.paused_until - 100)
        assert waits == [4, 16, 64, MAX_PAUSE, MAX_PAUSE, MAX_PAUSE]
        draft_state.record(2, 500)
        draft_state.record(0, 500)
        assert draft_state.paused_until == 504

    def test_a_wrong_lookup_is_verified_once_and_then_only_compared(self, plain, engine, oracle):
        before, after = counts_of_a_text(plain, engine, oracle, max_tokens=60, wrong=1.0)
        assert after.num_accepted_tokens == before.num_accepted_tokens
        assert after.num_drafts - before.num_drafts == 1
        assert after.num_steps - before.num_steps == 60

    @pytest.mark.kernels
    def test_drafting_resumes_three_tokens_after_a_lookup_becomes_right(self, plain, engine, oracle):
        prompts, params, right_from = [[1, 2, 3]], SamplingParams(max_tokens=63), 30
        expected = plain.generate(prompts, params)
        text = [*prompts[0], *expected[0].token_ids]
        wrong = lambda ids: [[*ids, *((token + 1) % 320 for token in text[len(ids) :])]]
        looks = lambda ids: wrong(ids) if len(ids) < right_from else [text]

        class Late(Oracle):
            def propose(self, token_ids, num_tokens):
                self.texts = looks(token_ids.tolist())
                return super().propose(token_ids, num_tokens)

        late = engine_of(speculative=Late())
        same(late.generate(prompts, params), expected)
        first_right = right_from + 3 - len(prompts[0])  # tokens made by then
        assert late.stats.num_accepted_tokens >= 20
        assert late.stats.num_steps <= first_right + 2 + -(-(63 - first_right) // (1 + K)) + 2

    @pytest.mark.parametrize(
        ("drafts", "came", "hits", "is_over"),
        [
            ([], [], 0, True),  # no lookup
            ([5, 6, 7], [], 0, False),
            ([5, 6, 7], [5, 6], 2, False),
            ([5, 6, 7], [5, 6, 7, 9], 3, True),
            ([5, 6, 7], [4], 0, True),
            ([5, 6, 7], [5, 4, 7], 1, True),
        ],
    )
    def test_later_tokens_show_which_drafts_would_have_been_accepted(self, drafts, came, hits, is_over):
        draft_state = DraftState(drafts=drafts, paused_drafts_start=2)
        assert draft_state.count_matching_drafts([0, 0, *came]) == (hits, is_over)

    def test_sequences_without_lookups_do_not_wait(self, monkeypatch):
        engine, events = engine_of(speculative="ngram"), []
        run, read = engine._runner.run, engine._runner.read
        monkeypatch.setattr(engine._runner, "run", lambda inputs: (events.append("start"), run(inputs))[1])
        monkeypatch.setattr(engine._runner, "read", lambda out: (events.append("read"), read(out))[1])
        engine.generate([[1, 2, 3]], SamplingParams(max_tokens=12, temperature=50.0, seed=1))
        assert events == ["start", *["start", "read"] * 11, "read"]

    @pytest.mark.parametrize(
        ("rows", "accepted", "draft_cost", "pays"),
        [
            (1, 0.2, 0.0, True),
            (1, 0.05, 0.0, False),  # the host waits
            (1, 0.6, 0.2, False),  # drafting takes longer
            (BALANCE_TOKENS // 5, BALANCE_TOKENS // 5, 0.0, True),
            (128, 128 * 1.5, 0.0, False),  # 640 tokens take as long as 2.5 steps of 256
            (128, 128 * 2, 0.0, True),
            (BALANCE_TOKENS, BALANCE_TOKENS * K, 0.0, False),  # all right, and yet not faster
        ],
    )
    def test_drafts_pay_if_they_gain_more_tokens_than_time(self, rows, accepted, draft_cost, pays):
        speculation = Speculation(NgramProposer(), K, max_model_len=512, draft_cost=draft_cost)
        assert speculation._is_faster_with_drafts(rows, float(accepted)) is pays

    def test_no_drafts_are_looked_up_for_many_rows(self):
        speculation = Speculation(NgramProposer(), K, max_model_len=512)
        assert [speculation.can_pay(rows) for rows in (0, 1, 200, BALANCE_TOKENS)] == [
            False,
            True,
            True,
            False,
        ]

    def test_buckets_are_powers_of_two_up_to_what_can_pay(self):
        rows = lambda most: [bucket.max_decodes for bucket in draft_buckets(most, K, 8)]
        assert (rows(1), rows(5), rows(1000)[-1]) == ([1], [1, 2, 4, 8], BALANCE_TOKENS)
        assert {bucket.decode_query_len for bucket in draft_buckets(5, K, 8)} == {1 + K}


class TestDraftModels:
    @pytest.mark.kernels
    def test_draft_model_with_the_same_weights_is_always_right(self, plain):
        engine = engine_of(speculative=MODEL)
        prompts = [[1, 2, 3], [5], list(range(100, 200))]
        params = [SamplingParams(max_tokens=30, temperature=t, seed=1) for t in (0, 0, 1.5)]
        same(engine.generate(prompts, params), plain.generate(prompts, params))
        assert engine.stats.num_accepted_tokens > 50
        assert engine.stats.acceptance_rate == 1

    @pytest.mark.kernels
    def test_draft_model_with_other_weights_changes_no_text(self, plain):
        engine = engine_of(num_blocks=16, speculative=one_layer_model(seed=1), num_speculative_tokens=2)
        rng = np.random.default_rng(2)
        for _ in range(2):
            prompts, params = drawn_requests(rng)
            same(engine.generate(prompts, params), plain.generate(prompts, params))
        assert engine.stats.num_draft_tokens > 20
        assert engine.stats.acceptance_rate < 0.5
        assert engine.stats.num_used_blocks == 0

    @pytest.mark.kernels
    def test_draft_model_as_large_as_the_model_never_pays(self):
        engine = Engine(MODEL, num_blocks=9, max_num_seqs=2, speculative=MODEL)
        engine.generate([[1, 2, 3]], max_tokens=8)
        assert engine.stats.num_drafts == 0

    def test_draft_model_shares_the_cache_memory(self):
        sizes = [
            Engine(MODEL, cache_bytes=10**6, speculative=speculative).stats.num_blocks
            for speculative in (None, MODEL)
        ]
        assert sizes[1] == (sizes[0] + 1) // 2 - 1

    @pytest.mark.kernels
    def test_draft_models_are_warmed_up_on_empty_batches(self):
        engine = engine_of(num_blocks=9, max_num_seqs=2, budget=32, speculative=one_layer_model(seed=1))
        engine.precompile(progress=False)
        cached = jax.tree.leaves(engine._runner._proposer._caches)
        assert not any(array.any() for array in cached)
        for runs in (*engine._runner._runs, *engine._runner._proposer.runs):
            runs.num_runs.clear()
        assert engine.warm_up(0) == engine.stats.num_compiles
        assert engine.warm_up(1) == engine.stats.num_compiles - 1

    @pytest.mark.kernels
    def test_nothing_compiles_after_precompile(self):
        options = {"num_blocks": 9, "max_num_seqs": 2, "budget": 32, "num_speculative_tokens": 2}
        engine = engine_of(speculative=one_layer_model(seed=1), **options)
        engine.precompile(progress=False)
        compiles = engine.stats.num_compiles
        params = [
            SamplingParams(max_tokens=12),
            SamplingParams(max_tokens=9, temperature=1.0, top_k=3, seed=0),
        ]
        assert engine.warm_up(0) == 0
        with record_compilations() as compiled:
            engine.generate([[3, 1, 4], [1] * 20], params)
            engine.generate([[3, 1, 4], [1] * 20], max_tokens=9)
        assert compiled == []
        assert engine.stats.num_drafts > 0
        assert engine.stats.num_compiles == compiles == 1 + 2 + 2 + 1


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"speculative": 3}, r"speculative must be None, \"ngram\", an NgramProposer, .*, got 3\."),
            ({"num_speculative_tokens": 0}, r"num_speculative_tokens must be positive, got 0\."),
            (
                {"num_speculative_tokens": 64},
                r"num_speculative_tokens must be less than max_num_batched_tokens \(64\), got 64\.",
            ),
        ],
    )
    def test_invalid_draft_methods_are_rejected(self, types_unchecked, options, message):
        with pytest.raises(ValueError, match=message):
            engine_of(**{"speculative": "ngram"} | options)

    def test_missing_folder_is_reported(self):
        with pytest.raises(FileNotFoundError, match=r"nowhere is not a folder, nor a name on the Hub"):
            engine_of(speculative="nowhere")

    def test_draft_models_of_another_vocabulary_or_shorter_contexts_are_rejected(self):
        import dataclasses

        draft_model = one_layer_model()
        draft_model.config = dataclasses.replace(draft_model.config, vocab_size=256)
        message = r"The draft model has a vocabulary of 256 tokens, but the model has 320\."
        with pytest.raises(ValueError, match=message):
            engine_of(speculative=draft_model)
        draft_model.config = dataclasses.replace(
            draft_model.config, vocab_size=320, max_position_embeddings=256
        )
        message = r"The draft model has 256 positions, but the engine has 512\. Reduce max_model_len\."
        with pytest.raises(ValueError, match=message):
            engine_of(speculative=draft_model)
        engine_of(speculative=draft_model, max_model_len=256)


def test_vllm_s_other_methods_are_refused_by_name():
    with pytest.raises(NotImplementedError, match=r"speculative='eagle': .*Pass \"ngram\", an Ngram"):
        engine_of(speculative="eagle")
