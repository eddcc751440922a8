"""Conversion of conversations to prompts."""

import pytest

from tests.serving.server.live_server import run_server
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
    with run_server(engine, chat_template=file, tool_call_parser="hermes") as server:
        yield server


def render_prompt(server, **body):
    """Return the text of a conversation's prompt."""
    tokens = server.post("/tokenize", **{"messages": [USER]} | body)["tokens"]
    return server.post("/detokenize", tokens=tokens)["prompt"]


class TestConversations:
    def test_null_fields_of_a_message_are_omitted(self, server):
        template = server.server.service.chat_template
        render, rendered = template.render, []
        template.render = lambda messages, **variables: (
            rendered.append((messages, variables)) or render(messages, **variables)
        )
        try:
            nulls = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls"))
            last = {"role": "assistant", "content": "Hello"}
            messages = [USER, last | nulls, {"role": "user", "content": None}]
            server.post(CHAT, messages=messages, tools=[], max_tokens=1)
        finally:
            del template.render
        messages, variables = rendered[0]
        assert messages == [USER, last, {"role": "user", "content": ""}]
        assert "tools" not in variables

    def test_text_parts_are_joined(self, server):
        parts = [{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c"}]
        parts.append({"type": "refusal", "refusal": "d"})
        assert render_prompt(server, messages=[{"role": "user", "content": parts}]) == "[user]a\nb\nc\nd;>"

    def test_developer_role_becomes_system_if_the_template_lacks_it(self, server):
        conversation = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": None}]
        assert render_prompt(server, messages=conversation) == "[system]Be brief.;[user];>"
        template = server.server.service.chat_template
        previous, template.source = template.source, template.source + "{# developer #}"
        try:
            assert render_prompt(server, messages=conversation) == "[developer]Be brief.;[user];>"
        finally:
            template.source = previous

    def test_last_message_is_continued(self, server):
        conversation = [USER, {"role": "assistant", "content": "Well, "}]
        request_body = {"add_generation_prompt": False, "continue_final_message": True}
        assert render_prompt(server, messages=conversation, **request_body) == "[user]hi;[assistant]Well, "
        status, error = server.error(CHAT, messages=conversation, continue_final_message=True)
        assert (status, error["param"]) == (400, "continue_final_message")
        assert "continue_final_message requires add_generation_prompt=false" in error["message"]
        empty = {"role": "assistant", "content": ""}
        status, error = server.error(CHAT, messages=[USER, empty], **request_body)
        assert (status, error["param"]) == (400, "continue_final_message")
        assert "requires a last message that is not empty" in error["message"]

    @pytest.mark.parametrize("content", ["d", "end", "<|", "a", "a\n"])
    def test_continued_message_excludes_the_text_after_it(self, server, monkeypatch, content):
        template = server.server.service.chat_template
        monkeypatch.setattr(template, "_template", "<|a|>{{ messages[-1].content }}<|im_end|>\n")
        request_body = {"add_generation_prompt": False, "continue_final_message": True}
        messages = [USER | {"content": content}]
        assert render_prompt(server, messages=messages, **request_body) == f"<|a|>{content}"
        monkeypatch.setattr(template, "_template", "<|a|>{# content #}")
        status, error = server.error(CHAT, messages=[USER], **request_body)
        assert (status, error["param"]) == (400, "continue_final_message")
        assert "does not render the last message unchanged" in error["message"]

    def test_continued_message_may_be_stripped(self, server, monkeypatch):
        template = server.server.service.chat_template
        monkeypatch.setattr(template, "_template", "<{{ messages[-1].content | trim }}>")
        request_body = {"add_generation_prompt": False, "continue_final_message": True}
        assert render_prompt(server, messages=[USER | {"content": " a b "}], **request_body) == "<a b"

    def test_template_variables_are_not_arguments_of_its_renderer(self, server):
        for name in ("chat_template", "return_assistant_tokens_mask", "continue_final_message"):
            status, error = server.error(CHAT, messages=[USER], chat_template_kwargs={name: "x"})
            assert (status, error["param"]) == (400, "chat_template_kwargs")

    def test_template_receives_its_variables(self, server):
        tools = [{"type": "function", "function": {"name": "f"}}]
        assert render_prompt(server, documents=[{"text": "d"}], tools=tools) == "[user]hi;(d)f>"
        assert render_prompt(server, chat_template_kwargs={"reasoning_effort": "low"}) == "[user]hi;<low>>"
        response = server.post(
            CHAT, messages=[USER], reasoning_effort="low", max_tokens=1, return_token_ids=True
        )
        assert BYTES.decode(response["prompt_token_ids"]) == "[user]hi;<low>>"
        template = server.server.service.chat_template
        previous, template.source = template.source, "{{ messages }}"
        try:
            status, error = server.error(CHAT, messages=[USER], reasoning_effort="low")
        finally:
            template.source = previous
        assert (status, error["param"]) == (400, "reasoning_effort")
        assert "reasoning_effort is not supported by this model's chat template" in error["message"]
