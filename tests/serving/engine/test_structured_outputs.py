"""Structured outputs: the text satisfies its constraint for any logits."""

import dataclasses
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest

from jattn.serving import Engine, SamplingParams, StructuredOutputsParams
from jattn.serving.engine.logits_processors import RequestAdjustments, adjust_logits, build_logits_adjustments
from jattn.serving.engine.structured_outputs import Grammars
from tests.serving.engine.test_engine_requests import engine_of
from tests.serving.tiny import BYTES, byte_tokenizer, one_layer_model

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ann", "Bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine():
    return engine_of(num_blocks=129)


def asks(seed=0, max_tokens=400, **form):
    structured = StructuredOutputsParams(**form)
    return SamplingParams(temperature=1.5, seed=seed, max_tokens=max_tokens, structured_outputs=structured)


class TestEngine:
    def test_constrained_texts_match_and_other_texts_are_unchanged(self, engine):
        plain = SamplingParams(temperature=1.0, seed=9, max_tokens=30)
        (expected,) = engine.generate(["plain"], plain)
        params = [
            asks(json=SCHEMA),
            asks(regex=r"[0-9]{3}-[a-f]+x"),
            plain,
            asks(choice=["yes", "no, never"]),
            asks(grammar='start: ("ab" | "cd") "!"'),
        ]
        results = engine.generate(["a", "b", "plain", "c", "d"], params)
        person = json.loads(results[0].text)
        assert person["name"] in ("Ann", "Bob")
        assert 0 <= person["age"] <= 99
        assert re.fullmatch(r"[0-9]{3}-[a-f]+x", results[1].text)
        assert results[2].token_ids == expected.token_ids
        assert results[3].text in ("yes", "no, never")
        assert results[4].text in ("ab!", "cd!")
        reasons = [result.finish_reason for result in results]
        assert reasons == ["stop", "stop", "length", "stop", "stop"]
        assert engine.stats.num_used_blocks == 0

    def test_a_constrained_text_does_not_depend_on_the_batch(self, engine):
        params = [asks(seed, regex=r"[a-z]{5,20}[0-9]") for seed in range(6)]
        alone = [engine.generate(["p"], request_params)[0].token_ids for request_params in params]
        assert [result.token_ids for result in engine.generate(["p"] * 6, params)] == alone
        assert len(set(map(tuple, alone))) > 1

    @pytest.mark.kernels
    def test_constrained_text_is_unchanged_by_preemption(self, engine):
        params = [asks(seed, max_tokens=60, regex=r"[a-z]{50}") for seed in range(4)]
        expected = [result.token_ids for result in engine.generate(["p"] * 4, params)]
        small = engine_of(num_blocks=20)
        assert [result.token_ids for result in small.generate(["p"] * 4, params)] == expected
        assert small.stats.num_preemptions > 0

    def test_each_of_n_completions_is_constrained_independently(self, engine):
        form = StructuredOutputsParams(regex="[a-z]{3}[0-9]{2,9}x")
        params = SamplingParams(temperature=2.0, seed=1, n=4, max_tokens=50, structured_outputs=form)
        (result,) = engine.generate(["p"], params)
        texts = [completion.text for completion in result.outputs]
        assert all(re.fullmatch("[a-z]{3}[0-9]{2,9}x", text) for text in texts)
        assert len(set(texts)) > 1

    def test_greedy_rows_are_constrained_and_limited_by_max_tokens(self, engine):
        params = SamplingParams(max_tokens=5, structured_outputs=StructuredOutputsParams(regex="[a-c]+d"))
        (result,) = engine.generate(["p"], params)
        assert re.fullmatch("[a-c]{5}|[a-c]{0,4}d", result.text)

    def test_penalties_and_biases_do_not_break_it(self, engine):
        form = StructuredOutputsParams(regex="[a-c]{8}")
        banned = {i: 100.0 for i in range(200, 256)}
        params = SamplingParams(
            max_tokens=9, structured_outputs=form, logit_bias=banned, repetition_penalty=2.0
        )
        assert re.fullmatch("[a-c]{8}", engine.generate(["p"], params)[0].text)

    def test_constraints_use_the_engines_current_tokenizer(self):
        engine = engine_of()
        engine.tokenizer = None
        engine.generate([[1]], max_tokens=1)  # looks for grammars, whatever it asks for
        engine.tokenizer = BYTES
        assert engine.generate(["a"], asks(choice=["yes"]))[0].text == "yes"

    def test_constraint_takes_precedence_over_min_tokens(self, engine):
        (y,) = BYTES.encode("y").ids
        ends = {"min_tokens": 2, "stop_token_ids": [y]}
        (result,) = engine.generate(["a"], dataclasses.replace(asks(choice=["yes"]), **ends))
        assert (result.text, result.finish_reason, result.stop_reason) == ("yes", "stop", None)
        (result,) = engine.generate(["a"], SamplingParams(allowed_token_ids=[y], **ends))
        assert result.token_ids == [y, y]

    @pytest.mark.kernels
    def test_eos_is_allowed_where_the_constraint_is_complete(self):
        model = engine_of().model
        old, model.config = model.config, _with_eos(model.config, (255,))
        try:
            engine = engine_of(model=model)
            params = [asks(seed, regex="[a-z]*") for seed in range(8)]
            results = engine.generate(["p"] * 8, params)
        finally:
            model.config = old
        assert all(re.fullmatch("[a-z]*", result.text) for result in results)
        assert {result.finish_reason for result in results} == {"stop"}


def _with_eos(config, ids):
    return dataclasses.replace(config, eos_token_ids=ids)


class TestMasks:
    def test_all_mask_words_reach_the_logits(self):
        params, vocab = SamplingParams(), 70
        allowed = np.zeros(3, np.uint32)
        for token in (0, 31, 32, 69):
            allowed[token // 32] |= np.uint32(1 << (token % 32))
        row = lambda mask: RequestAdjustments(params, [], [], [], 0, -1, mask)
        sizes = {"num_rows": 3, "vocab_size": vocab}
        adjustment_arrays = build_logits_adjustments(
            [row(allowed), row(None)], jnp.zeros(4, jnp.int32), **sizes
        )
        logits = np.asarray(adjust_logits(jnp.ones((3, vocab)), adjustment_arrays, jnp.zeros(3, jnp.int32)))
        assert np.flatnonzero(np.isfinite(logits[0])).tolist() == [0, 31, 32, 69]
        assert np.isfinite(logits[1:]).all()

    def test_no_mask_is_transferred_without_constraints(self):
        sizes = {"num_rows": 2, "vocab_size": 9}
        row = RequestAdjustments(SamplingParams(logit_bias={1: 2.0}), [], [], [], 0, -1)
        assert build_logits_adjustments([row], jnp.zeros(4, jnp.int32), **sizes).allowed is None

    def test_a_grammar_is_compiled_once(self):
        grammars = Grammars(BYTES, 320, ())
        first, second = (grammars.mask(StructuredOutputsParams(json=SCHEMA)) for _ in range(2))
        first.accept(BYTES.encode("{").ids[0])
        assert grammars._matcher.cache_info().misses == 1
        assert first.allowed_bitmask().tolist() != second.allowed_bitmask().tolist()
        with pytest.raises(ValueError, match=r"Token 5 is not allowed by the grammar: Parser Error: .*\."):
            second.accept(5)

    @pytest.mark.parametrize(
        "form",
        [
            {"choice": ["<think>é</s>"]},
            {"regex": "<think>é<\\/s>"},
            {"grammar": 'start: "<think>" /é<\\/s>/'},
            {"json": {"const": "<think>é</s>"}},
        ],
    )
    def test_text_of_an_added_token_is_generated_by_characters(self, form):
        tokenizer = byte_tokenizer()
        tokenizer.add_tokens(["<think>"])
        tokenizer.add_special_tokens(["</s>"])
        mask = Grammars(tokenizer, 320, (257,)).mask(StructuredOutputsParams(**form))
        stop_texts = []
        while not mask.is_done:
            (token, *other_tokens) = np.flatnonzero(
                np.unpackbits(mask.allowed_bitmask().view(np.uint8), bitorder="little")
            ).tolist()
            if token == 257:
                break
            assert not other_tokens
            mask.accept(token)
            stop_texts.append(token)
        assert tokenizer.decode(stop_texts).strip('"') == "<think>é</s>"

    def test_a_choice_may_hold_any_character(self):
        text = "".join(map(chr, range(256))) + "\\\x7f\u2028\ufeff\U0010ffff"
        mask = Grammars(BYTES, 320, ()).mask(StructuredOutputsParams(choice=[text]))
        for token in BYTES.encode(text).ids:
            mask.accept(token)
        assert mask.is_done

    def test_a_grammar_beyond_llguidances_limits_reports_why(self):
        schema = {"type": "object", "properties": {str(i): {"type": "string"} for i in range(800)}}
        mask = Grammars(BYTES, 320, ()).mask(StructuredOutputsParams(json=schema))
        with pytest.raises(
            ValueError, match=r"by the grammar: Parser Error: Current row has \d+ items; max is 2000"
        ):
            mask.accept(BYTES.encode("{").ids[0])


class TestErrors:
    @pytest.mark.parametrize(
        ("form", "message"),
        [
            ({}, r"structured_outputs must set exactly one of .*, got \[\]"),
            ({"regex": "a", "json": "{}"}, r"must set exactly one of .*, got \['json', 'regex'\]"),
            ({"choice": []}, r"choice must be a list of strings, got \[\]"),
        ],
    )
    def test_constraints_must_be_exactly_one(self, types_unchecked, form, message):
        with pytest.raises(ValueError, match=message):
            StructuredOutputsParams(**form)

    @pytest.mark.parametrize(
        ("form", "message"),
        [
            (
                {"regex": "(("},
                r"structured_outputs is not supported by llguidance: .*unclosed group",
            ),
            (
                {"json": '{"type": "nothing"}'},
                r"is not supported by llguidance: Invalid type: nothing",
            ),
            ({"json": "{"}, r"structured_outputs is not supported by llguidance: EOF"),
            (
                {"grammar": "start: nothing_there"},
                r"is not supported by llguidance: .*nothing_there",
            ),
        ],
    )
    def test_invalid_grammars_are_reported_before_anything_starts(self, engine, form, message):
        steps = engine.stats.num_steps
        with pytest.raises(ValueError, match=f"(?s){message}"):
            engine.generate(["a"], asks(**form))
        assert engine.stats.num_steps == steps

    def test_structured_outputs_require_a_tokenizer(self):
        with pytest.raises(
            ValueError,
            match=r"structured_outputs requires a tokenizer, but the model has no tokenizer.json",
        ):
            Grammars(None, 320, ()).mask(StructuredOutputsParams(regex="a"))


@pytest.mark.kernels
def test_constrained_texts_match_with_speculative_decoding():
    engine = Engine(one_layer_model(), num_blocks=65, max_num_seqs=2, speculative="ngram")
    plain = SamplingParams(max_tokens=30)
    (expected,) = engine.generate([[1, 2, 3] * 6], plain)
    form = StructuredOutputsParams(regex="(abc){4,9}d")
    params = [SamplingParams(max_tokens=40, structured_outputs=form), plain]
    formed, unconstrained = engine.generate(["abcabcabcabc", [1, 2, 3] * 6], params)
    assert re.fullmatch("(abc){4,9}d", formed.text) or len(formed.token_ids) == 40
    assert unconstrained.token_ids == expected.token_ids
