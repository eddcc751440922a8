"""Conversations become the text that transformers makes of them."""

import asyncio
import json
import types

import jinja2
import pytest
import tokenizers

from jattn.serving.server.chat_completions import chat_tokens
from jattn.serving.server.chat_template import ChatTemplate, load_chat_template
from jattn.serving.server.protocol import ChatTemplateBody
from tests.conftest import GOLDEN
from tests.serving.tiny import BYTES, byte_tokenizer

FOLDER = GOLDEN / "chat_templates"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.jinja")), ids=lambda path: path.stem)
def test_a_template_makes_the_text_that_transformers_makes(path):
    template = ChatTemplate(path.read_text(), EXPECTED["special_tokens"])
    cases = [case for case in EXPECTED["cases"] if case["template"] == path.name]
    assert len(cases) == 18
    for case in cases:
        if "text" in case:
            assert template.render(case["messages"], **case["others"]) == case["text"]
        else:
            with pytest.raises(jinja2.TemplateError) as raised:
                template.render(case["messages"], **case["others"])
            assert case["error"] in str(raised.value)


class TestSandbox:
    @pytest.mark.parametrize(
        "source",
        [
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ messages.append(1) }}",
            "{{ raise_exception.__globals__.json }}",
            "{{ messages[0].content.x.y }}",
        ],
    )
    def test_nothing_can_be_reached_or_changed(self, source):
        with pytest.raises(jinja2.TemplateError):
            ChatTemplate(source).render([{"role": "user", "content": "a"}])

    def test_what_fails_over_a_message_is_an_error_of_the_template(self):
        with pytest.raises(jinja2.TemplateRuntimeError, match="TypeError: can only concatenate str"):
            ChatTemplate("{{ 'a' + messages[0].content }}").render([{"role": "user", "content": None}])


def test_there_is_no_second_bos(types_unchecked):
    tokenizer = byte_tokenizer()
    bos = tokenizers.processors.TemplateProcessing(single="a $A", special_tokens=[("a", 64)])
    tokenizer.post_processor = bos
    service = types.SimpleNamespace(tokenizer=tokenizer, chat_template=ChatTemplate("{{ 'a' }}b"))
    body = ChatTemplateBody(messages=[{"role": "user", "content": "x"}])
    assert tokenizer.encode("b").ids == [64, 65]
    assert asyncio.run(chat_tokens(service, body)) == [64, 65]


class TestParts:
    """Templates that look for texts in parts, as Llama Guard's, and those that take both or refuse most."""

    PARTS = (
        "{% for m in messages %}{% for c in m.content | selectattr('type', 'equalto', 'text') %}"
        "[{{ m.role }}]{{ c.text }};{% endfor %}{% endfor %}"
    )
    BOTH = "{% for m in messages %}{{ m.content if m.content is string else 'no' }};{% endfor %}"

    def test_a_text_that_stands_alone_is_not_left_out(self):
        template = ChatTemplate(self.PARTS)
        told = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ["a", "b"]}]
        assert template.render(told) == "[user]hi;[assistant]a;[assistant]b;"
        assert (template.wants_parts, ChatTemplate(self.BOTH).wants_parts) == (True, False)
        assert ChatTemplate(self.BOTH).render(told) == "hi;a\nb;"

    def test_nothing_is_changed_where_nothing_is_known(self):
        refusing = "{{ raise_exception('no') if messages | length < 2 }}{{ messages[0].content }}"
        template = ChatTemplate(refusing)
        assert (template.wants_parts, ChatTemplate("bare").wants_parts) == (False, False)
        assert template.render([{"content": "hi"}, {"content": None}]) == "hi"

    def test_a_conversation_s_parts_stay_apart_and_the_last_goes_on(self, types_unchecked):
        service = types.SimpleNamespace(chat_template=ChatTemplate(self.PARTS), tokenizer=BYTES)
        parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
        told = [{"role": "user", "content": parts}, {"role": "assistant", "content": parts}]
        asked = {"messages": told, "add_generation_prompt": False, "continue_final_message": True}
        ids = asyncio.run(chat_tokens(service, ChatTemplateBody.model_validate(asked)))
        assert BYTES.decode(ids) == "[user]a;[user]b;[assistant]a;[assistant]b"


class TestFolders:
    def rendered(self, folder, **others):
        template = load_chat_template(folder, **others)
        return template and template.render([{"role": "user", "content": "x"}], add_generation_prompt=False)

    def test_without_a_template_there_is_none(self, tmp_path):
        assert load_chat_template(tmp_path) is None
        assert load_chat_template(None) is None

    def test_it_stands_in_the_tokenizer_s_config_or_in_a_file_which_goes_first(self, tmp_path):
        config = {
            "bos_token": {"content": "<s>", "lstrip": False},
            "eos_token": "</s>",
            "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
        }
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        assert self.rendered(tmp_path) == "<s>x</s>"
        (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }}")
        assert self.rendered(tmp_path) == "file <s>"
        (tmp_path / "given").write_text("given {{ eos_token }}")
        assert self.rendered(tmp_path, file=tmp_path / "given") == "given </s>"

    def named(self, folder, **templates):
        told = [{"name": name, "template": text} for name, text in templates.items()]
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": told}))

    def test_of_several_it_is_the_default_and_with_tools_the_one_for_tools(self, tmp_path):
        self.named(tmp_path, tool_use="t{{ tools[0] }}", default="d", rag="r")
        template = load_chat_template(tmp_path)
        assert template.render([]) == "d"
        assert template.render([], tools=["x"]) == "tx"
        assert {"tools"} <= template.variables
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file")
        assert load_chat_template(tmp_path).render([], tools=[]) == "file"

    def test_several_without_a_default_are_refused_by_name(self, tmp_path):
        self.named(tmp_path, tool_use="t", rag="r")
        message = r"^chat_template must be one, or .* --chat-template FILE\), got \['rag', 'tool_use'\]\.$"
        with pytest.raises(ValueError, match=message):
            load_chat_template(tmp_path)
        (tmp_path / "given").write_text("given")
        assert self.rendered(tmp_path, file=tmp_path / "given") == "given"

    def test_an_older_processor_s_file_goes_last(self, tmp_path):
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "processor"}))
        assert self.rendered(tmp_path) == "processor"
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "tokenizer"}))
        assert self.rendered(tmp_path) == "tokenizer"

    @pytest.mark.parametrize(("listed", "text"), [({}, "[map]"), ({"added_tokens_decoder": {}}, "[own]")])
    def test_special_tokens_of_older_folders_are_in_a_file_of_their_own(self, tmp_path, listed, text):
        config = {"bos_token": "[own]", "chat_template": "{{ bos_token }}"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | listed))
        (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "[map]"}}))
        assert self.rendered(tmp_path) == text

    def test_what_is_no_template_is_refused(self, tmp_path):
        (tmp_path / "chat_template.jinja").write_text("a\n{% if %}")
        with pytest.raises(ValueError, match=r"^chat_template must be a Jinja2 template, got in line 2: "):
            load_chat_template(tmp_path)

    @pytest.mark.parametrize(
        "told", [5, {"a": "b"}, ["x"], [{"name": "default"}], [{"name": 1, "template": "x"}]]
    )
    def test_what_a_config_calls_one_and_is_none_is_named(self, tmp_path, told):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": told}))
        rule = "tokenizer_config.json: chat_template must be a text, or names and templates, got"
        with pytest.raises(ValueError, match=rule):
            load_chat_template(tmp_path)

    def test_files_are_named_that_are_no_text(self, tmp_path):
        file = tmp_path / "chat_template.jinja"
        file.write_bytes(b"a\xff")
        for told in ((tmp_path, None), (None, file)):
            with pytest.raises(ValueError, match=r"chat_template.jinja must be UTF-8, got 'utf-8' codec"):
                load_chat_template(*told)
        with pytest.raises(ValueError, match="chat_template must be a file, got "):
            load_chat_template(None, tmp_path)
