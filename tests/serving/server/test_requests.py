"""Parameters as users of vLLM and OpenAI type them: each does what it says, or is refused by its name."""

import re

import openai
import pytest

from jattn.serving.server.protocol import ChatCompletionBody, CompletionBody
from tests.serving.server.live_server import running
from tests.serving.tiny import BYTES

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
    "{% for d in documents or [] %}({{ d.text }}){% endfor %}"
    "{% if reasoning_effort %}<{{ reasoning_effort }}>{% endif %}"
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture(scope="module")
def server(engine, tmp_path_factory):
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(TEMPLATE)
    with running(engine, chat_template=file, tool_call_parser="hermes") as server:
        yield server


def said(server, path=TEXT, **body):
    """The text of an answer, drawn from a seed."""
    start = {"prompt": "abc"} if path == TEXT else {"messages": [USER]}
    (choice,) = server.post(path, **{"seed": 1, "max_tokens": 12} | start | body)["choices"]
    return choice["text"] if path == TEXT else choice["message"]["content"]


def prompt_of(server, **body):
    """What a conversation becomes."""
    tokens = server.post("/tokenize", **{"messages": [USER]} | body)["tokens"]
    return server.post("/detokenize", tokens=tokens)["prompt"]


@pytest.mark.parametrize("path", [TEXT, CHAT])
class TestSampling:
    def test_tokens_and_words_are_ruled_out(self, server, path):
        ids = BYTES.encode("xyz").ids
        text = said(server, path, allowed_token_ids=ids)
        assert set(text) <= set("xyz")
        other = said(server, path, allowed_token_ids=ids, bad_words=[text[:2]])
        assert text[:2] not in other

    def test_special_tokens_are_told_to_who_wants_them(self, server, path):
        """The tiny model has none, so that all is said with both."""
        plain = said(server, path)
        assert said(server, path, skip_special_tokens=False) == plain
        assert said(server, path, spaces_between_special_tokens=False) == plain

    def test_what_asks_for_nothing_changes_nothing(self, server, path):
        nothing = {"priority": 0, "use_beam_search": False, "length_penalty": 1.0, "logits_processors": None}
        nothing |= {
            "cache_salt": None,
            "user": "me",
            "metadata": {"a": "b"},
            "store": True,
            "truncate_prompt_tokens": 500,
        }
        nothing |= {"service_tier": "auto", "stream_options": None, "bad_words": [], "top_k": -1, "min_p": 0}
        assert said(server, path, **nothing) == said(server, path)

    def test_a_name_of_the_client_s_is_the_answer_s(self, server, path):
        start = {"prompt": "abc"} if path == TEXT else {"messages": [USER]}
        answer = server.post(path, **start, max_tokens=1, request_id="mine")
        assert answer["id"] in ("cmpl-mine", "chatcmpl-mine")

    def test_prompts_are_cut_from_the_front(self, server, path):
        long = {"prompt": "0123456789"} if path == TEXT else {"messages": [USER | {"content": "0123456789"}]}
        answer = server.post(path, **long, truncate_prompt_tokens=4, max_tokens=1, return_token_ids=True)
        ids = (answer if path == CHAT else answer["choices"][0])["prompt_token_ids"]
        assert ids == BYTES.encode("6789" if path == TEXT else "89;>").ids
        assert (
            server.post(path, **long, truncate_prompt_tokens=-1, max_tokens=1)["usage"]["prompt_tokens"] > 4
        )

    def test_token_ids_are_told_at_once_and_streamed(self, server, path):
        start = {"prompt": "abc"} if path == TEXT else {"messages": [USER]}
        asked = start | {"max_tokens": 6, "seed": 3, "return_token_ids": True}
        (choice,) = server.post(path, **asked, logprobs=1 if path == TEXT else True)["choices"]
        assert len(choice["token_ids"]) == 6
        events = server.events(path, **asked)
        pieces = [event["choices"][0] for event in events]
        assert [i for piece in pieces for i in piece.get("token_ids", ())] == choice["token_ids"]
        prompts = [
            (event if path == CHAT else event["choices"][0]).get("prompt_token_ids") for event in events
        ]
        assert prompts[0] is not None
        assert not any(prompts[1:])

    def test_tokens_are_called_by_their_ids(self, server, path):
        start = {"prompt": "abc", "logprobs": 2} if path == TEXT else {"messages": [USER], "logprobs": True}
        asked = start | {
            "max_tokens": 3,
            "seed": 3,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        (choice,) = server.post(path, **asked)["choices"]
        told = choice["logprobs"]
        names = told["tokens"] if path == TEXT else [place["token"] for place in told["content"]]
        assert names == [f"token_id:{i}" for i in choice["token_ids"]]

    def test_what_is_likely_in_a_prompt_is_told(self, server, path):
        start = {"prompt": "abc"} if path == TEXT else {"messages": [USER]}
        answer = server.post(path, **start, max_tokens=1, prompt_logprobs=2)
        first, *places = (answer["choices"][0] if path == TEXT else answer)["prompt_logprobs"]
        assert first is None
        assert len(places) == answer["usage"]["prompt_tokens"] - 1
        for place in places:
            assert {1, 2} <= {one["rank"] for one in place.values()}
            for token, one in place.items():
                assert (one["logprob"] < 0, one["decoded_token"]) == (True, BYTES.decode([int(token)]))

    def test_usage_is_told_all_along_to_who_wants_it(self, server, path):
        start = {"prompt": "abc"} if path == TEXT else {"messages": [USER]}
        options = {"include_usage": True, "continuous_usage_stats": True}
        *events, last = server.events(path, **start, max_tokens=5, stream_options=options)
        counts = [event["usage"]["completion_tokens"] for event in events]
        assert (counts, counts[-1], last["choices"]) == (sorted(counts), 5, [])
        assert last["usage"] == events[-1]["usage"]

    def test_a_seed_of_minus_one_is_none(self, server, path):
        assert len({said(server, path, seed=-1) for _ in range(3)}) > 1


class TestConversations:
    def test_nulls_of_a_message_are_not_there(self, server):
        template = server.server.service.chat_template
        render, seen = template.render, []
        template.render = lambda messages, **told: seen.append((messages, told)) or render(messages, **told)
        try:
            nulls = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls"))
            last = {"role": "assistant", "content": "Hello"}
            said = [USER, last | nulls, {"role": "user", "content": None}]
            server.post(CHAT, messages=said, tools=[], max_tokens=1)
        finally:
            del template.render
        messages, told = seen[0]
        assert messages == [USER, last, {"role": "user", "content": ""}]
        assert "tools" not in told

    def test_parts_are_joined_whatever_kind_of_text_they_are(self, server):
        parts = [{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c"}]
        parts.append({"type": "refusal", "refusal": "d"})
        assert prompt_of(server, messages=[{"role": "user", "content": parts}]) == "[user]a\nb\nc\nd;>"

    def test_developers_are_systems_where_the_template_knows_none(self, server):
        told = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": None}]
        assert prompt_of(server, messages=told) == "[system]Be brief.;[user];>"
        template = server.server.service.chat_template
        before, template.source = template.source, template.source + "{# developer #}"
        try:
            assert prompt_of(server, messages=told) == "[developer]Be brief.;[user];>"
        finally:
            template.source = before

    def test_a_last_message_goes_on(self, server):
        told = [USER, {"role": "assistant", "content": "Well, "}]
        asked = {"add_generation_prompt": False, "continue_final_message": True}
        assert prompt_of(server, messages=told, **asked) == "[user]hi;[assistant]Well, "
        status, error = server.error(CHAT, messages=told, continue_final_message=True)
        assert (status, error["param"]) == (400, "continue_final_message")
        assert "must come with add_generation_prompt=false, got True" in error["message"]
        empty = {"role": "assistant", "content": ""}
        status, error = server.error(CHAT, messages=[USER, empty], **asked)
        assert (status, error["param"]) == (400, "continue_final_message")
        assert "a last message that says something, got ''" in error["message"]

    @pytest.mark.parametrize("said", ["d", "end", "<|", "a", "a\n"])
    def test_what_goes_on_is_the_message_not_what_ends_it(self, server, said):
        template = server.server.service.chat_template
        template.render = lambda messages, **others: f"<|a|>{messages[-1]['content']}<|im_end|>\n"
        try:
            asked = {"add_generation_prompt": False, "continue_final_message": True}
            assert prompt_of(server, messages=[USER | {"content": said}], **asked) == f"<|a|>{said}"
            template.render = lambda messages, **others: "<|a|>"
            status, error = server.error(CHAT, messages=[USER], **asked)
            assert (status, error["param"]) == (400, "continue_final_message")
            assert "a last message that the template writes, got '<|a|>'" in error["message"]
        finally:
            del template.render

    def test_a_template_that_strips_is_followed(self, server):
        template = server.server.service.chat_template
        template.render = lambda messages, **others: f"<{messages[-1]['content'].strip()}>"
        try:
            asked = {"add_generation_prompt": False, "continue_final_message": True}
            assert prompt_of(server, messages=[USER | {"content": " a b "}], **asked) == "<a b"
        finally:
            del template.render

    def test_templates_are_told_what_they_know(self, server):
        tools = [{"type": "function", "function": {"name": "f"}}]
        assert prompt_of(server, documents=[{"text": "d"}], tools=tools) == "[user]hi;(d)f>"
        assert prompt_of(server, chat_template_kwargs={"reasoning_effort": "low"}) == "[user]hi;<low>>"
        answer = server.post(
            CHAT, messages=[USER], reasoning_effort="low", max_tokens=1, return_token_ids=True
        )
        assert BYTES.decode(answer["prompt_token_ids"]) == "[user]hi;<low>>"
        template = server.server.service.chat_template
        before, template.variables = template.variables, {"messages"}
        try:
            status, error = server.error(CHAT, messages=[USER], reasoning_effort="low")
        finally:
            template.variables = before
        assert (status, error["param"]) == (400, "reasoning_effort")
        assert "null (the chat template does not know it), got 'low'" in error["message"]


REFUSED = {
    **{
        "priority": 1,
        "use_beam_search": True,
        "length_penalty": 0.5,
        "logits_processors": ["a"],
        "cache_salt": "a",
    },
    **{"kv_transfer_params": {}, "vllm_xargs": {}, "guided_whitespace_pattern": "a", "no_such": 1},
    **{"prompt_logprobs": 21, "allowed_token_ids": [], "bad_words": [""], "truncate_prompt_tokens": -2},
    "stream_options": {"include_usage": True},
}
REFUSED_CHAT = {
    **{"echo": True, "include_reasoning": False, "modalities": ["text", "audio"], "audio": {"voice": "a"}},
    **{
        "prediction": {},
        "functions": [],
        "function_call": "auto",
        "verbosity": "low",
        "chat_template": "a",
        "moderation": {},
    },
    **{"web_search_options": {}, "mm_processor_kwargs": {}, "suffix": "a", "best_of": 2},
}
REFUSED_TEXT = {
    "suffix": "a",
    "messages": [USER],
    "tools": [],
    "max_completion_tokens": 5,
    "prompt_embeds": "a",
}


SAID = {TEXT: {"prompt": "abc", "max_tokens": 3}, CHAT: {"messages": [USER], "max_tokens": 3}}
KINDS = {TEXT: CompletionBody, CHAT: ChatCompletionBody}


class TestWhatAsksForNothing:
    @pytest.mark.parametrize("path", [TEXT, CHAT])
    def test_null_is_as_if_it_was_not_there(self, server, path):
        """Clients that write all of their fields write so what they don't want."""
        nulls = dict.fromkeys(KINDS[path].model_fields)
        want = server.post(path, **SAID[path] | {"seed": 3})["choices"]
        assert server.post(path, **nulls | SAID[path] | {"seed": 3})["choices"] == want
        options = {"include_usage": None, "continuous_usage_stats": True}
        (*_, last) = server.events(path, **SAID[path], stream_options=options)
        assert last["usage"]["completion_tokens"] == 3
        assert last["choices"]

    def test_what_must_be_there_is_not_null(self, server):
        status, error = server.error(TEXT, prompt=None)
        assert (status, error["param"], error["message"]) == (400, "prompt", "prompt: Field required")

    @pytest.mark.parametrize(
        "asked",
        [
            {"prompt_cache_retention": "24h", "prompt_cache_key": "a", "prompt_cache_options": {"a": 1}},
            {"verbosity": "medium", "modalities": ["text"], "service_tier": "auto"},
            {"logprobs": False, "top_logprobs": 0},
            {"documents": [], "tools": []},
        ],
    )
    def test_defaults_and_hints_change_nothing(self, server, asked):
        want = server.post(CHAT, **SAID[CHAT], seed=3)["choices"]
        assert server.post(CHAT, **SAID[CHAT], seed=3, **asked)["choices"] == want


class TestRefusals:
    @pytest.mark.parametrize(
        ("path", "name", "value"),
        [
            *((TEXT, *item) for item in (REFUSED | REFUSED_TEXT).items()),
            *((CHAT, *item) for item in (REFUSED | REFUSED_CHAT).items()),
        ],
    )
    def test_what_is_not_served_is_named(self, server, path, name, value):
        start = {"prompt": "abc"} if path == TEXT else {"messages": [USER]}
        status, error = server.error(path, **start, **{name: value})
        assert (status, error["param"]) == (400, name), error
        assert name in error["message"]

    def test_some_go_with_no_stream_and_some_with_none_but_others(self, server):
        status, error = server.error(TEXT, prompt="a", stream=True, prompt_logprobs=1)
        assert (status, error["param"]) == (400, "prompt_logprobs")
        assert "prompt_logprobs must be null with stream, got 1" in error["message"]
        spaces = {"skip_special_tokens": False, "spaces_between_special_tokens": False}
        status, error = server.error(TEXT, prompt="a", **spaces)
        assert (status, error["param"]) == (400, "spaces_between_special_tokens")


class TestPaths:
    def test_ping_load_and_a_cache_that_is_forgotten(self, server):
        assert server.ask("GET", "/ping")[0] == server.ask("POST", "/ping")[0] == 200
        assert server.ask("GET", "/load")[2] == {"server_load": 0}
        long, stats = "0123456789" * 5, server.engine.stats
        hits = lambda: server.engine.stats.num_prefix_hit_tokens
        server.post(TEXT, prompt=long, max_tokens=1)
        before = hits()
        server.post(TEXT, prompt=long, max_tokens=1)
        assert hits() > before
        assert server.ask("POST", "/reset_prefix_cache")[0] == 200
        before = hits()
        server.post(TEXT, prompt=long, max_tokens=1)
        assert hits() == before, stats

    def test_a_slash_behind_the_models_is_none_of_their_names(self, server):
        assert server.ask("GET", "/v1/models/")[2] == server.ask("GET", "/v1/models")[2]

    def test_others_are_not_found_as_openai_has_it(self, server):
        status, _, answer = server.ask("POST", "/v1/responses", {"input": "hi"})
        assert (status, answer["error"]["type"]) == (404, "not_found_error")
        assert re.search(r"Invalid URL \(POST /v1/responses\)", answer["error"]["message"])
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.NotFoundError, match="Invalid URL"):
                client.responses.create(model="tiny", input="hi")
            assert client.models.retrieve(client.models.list().data[0].id).object == "model"


@pytest.mark.parametrize(("path", "param"), [(TEXT, "prompt"), (CHAT, "messages")])
class TestContexts:
    def test_one_that_is_just_full_is_served(self, server, path, param):
        start = {"prompt": "a" * 509} if path == TEXT else {"messages": [USER | {"content": "a" * 501}]}
        answer = server.post(path, **start, max_tokens=3, seed=1, ignore_eos=True)
        assert answer["usage"]["total_tokens"] == 512

    @pytest.mark.parametrize("num_tokens", [3, 12])
    def test_one_that_is_too_short_is_told_as_openai_does(self, server, path, param, num_tokens):
        length = 513 - num_tokens
        text = "a" * (length if path == TEXT else length - 8)
        start = {"prompt": text} if path == TEXT else {"messages": [USER | {"content": text}]}
        status, error = server.error(path, **start, max_tokens=num_tokens)
        told = f"maximum context length is 512 tokens. However, you requested 513 ({length} in the {param}, "
        assert told + f"{num_tokens} in the completion)" in error["message"]
        assert (status, error["param"], error["code"]) == (400, param, "context_length_exceeded")


def test_a_prompt_that_leaves_no_place_for_a_token_is_refused(server):
    status, error = server.error(CHAT, messages=[USER | {"content": "a" * 504}])
    assert (status, error["code"]) == (400, "context_length_exceeded")


def test_too_many_likely_tokens_are_called_as_the_request_does(server):
    status, error = server.error(CHAT, messages=[USER], logprobs=True, top_logprobs=21)
    assert (status, error["param"]) == (400, "top_logprobs")
    assert "top_logprobs must be in [0, 20], got 21" in error["message"]


class TestOrigins:
    """Pages of other origins, whose browsers ask before they send."""

    ASK = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}  # noqa: RUF012

    def test_are_refused_unless_named(self, server):
        status, headers, _ = server.ask("OPTIONS", CHAT, headers=self.ASK)
        assert (status, headers["access-control-allow-origin"]) == (405, None)

    @pytest.mark.parametrize("allowed", ["https://a.example", "*"])
    def test_may_ask_where_they_are_named_and_need_their_key_to_send(self, engine, allowed):
        with running(engine, allowed_origins=(allowed,), api_keys=("k",)) as server:
            how = self.ASK | {"Access-Control-Request-Headers": "authorization,content-type"}
            status, headers, _ = server.ask("OPTIONS", CHAT, headers=how)
            assert (status, headers["access-control-allow-origin"]) == (200, allowed)
            status, headers, _ = server.ask("GET", "/v1/models", headers=self.ASK)
            assert (status, headers["access-control-allow-origin"]) == (401, allowed)
            key = {"Authorization": "Bearer k"}
            assert server.ask("GET", "/v1/models", headers=self.ASK | key)[0] == 200
