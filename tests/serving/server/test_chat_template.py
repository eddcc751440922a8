"""Chat templates render the same text as transformers."""

import asyncio
import json
import types

import jinja2
import pytest
import tokenizers

from jattn.serving.server.chat_prompts import encode_chat
from jattn.serving.server.chat_template import ChatTemplate, load_chat_template
from jattn.serving.server.protocol import ChatTemplateBody
from tests.conftest import GOLDEN
from tests.serving.tiny import BYTES, byte_tokenizer

FOLDER = GOLDEN / "chat_templates"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.jinja")), ids=lambda path: path.stem)
def test_template_renders_the_text_of_transformers(path):
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
    def test_template_cannot_access_internals_or_change_arguments(self, source):
        with pytest.raises(jinja2.TemplateError):
            ChatTemplate(source).render([{"role": "user", "content": "a"}])

    def test_failure_while_rendering_is_a_template_error(self):
        with pytest.raises(jinja2.TemplateRuntimeError, match="TypeError: can only concatenate str"):
            ChatTemplate("{{ 'a' + messages[0].content }}").render([{"role": "user", "content": None}])


def test_encode_chat_adds_no_second_bos(types_unchecked):
    tokenizer = byte_tokenizer()
    bos = tokenizers.processors.TemplateProcessing(single="a $A", special_tokens=[("a", 64)])
    tokenizer.post_processor = bos
    service = types.SimpleNamespace(tokenizer=tokenizer, chat_template=ChatTemplate("{{ 'a' }}b"))
    body = ChatTemplateBody(messages=[{"role": "user", "content": "x"}])
    assert tokenizer.encode("b").ids == [64, 65]
    assert asyncio.run(encode_chat(service, body)) == [64, 65]


class TestParts:
    """Templates that expect content as parts, as Llama Guard's does, and templates that accept both."""

    PARTS = (
        "{% for m in messages %}{% for c in m.content | selectattr('type', 'equalto', 'text') %}"
        "[{{ m.role }}]{{ c.text }};{% endfor %}{% endfor %}"
    )
    BOTH = "{% for m in messages %}{{ m.content if m.content is string else 'no' }};{% endfor %}"

    def test_plain_text_is_passed_as_parts_to_a_template_that_expects_parts(self):
        template = ChatTemplate(self.PARTS)
        value = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ["a", "b"]}]
        assert template.render(value) == "[user]hi;[assistant]a;[assistant]b;"
        assert (template.expects_parts, ChatTemplate(self.BOTH).expects_parts) == (True, False)
        assert ChatTemplate(self.BOTH).render(value) == "hi;a\nb;"

    def test_content_is_unchanged_if_the_template_rejects_the_probe(self):
        refusing = "{{ raise_exception('no') if messages | length < 2 }}{{ messages[0].content }}"
        template = ChatTemplate(refusing)
        assert (template.expects_parts, ChatTemplate("bare").expects_parts) == (False, False)
        assert template.render([{"content": "hi"}, {"content": None}]) == "hi"

    def test_parts_stay_separate_and_the_last_message_is_continued(self, types_unchecked):
        service = types.SimpleNamespace(chat_template=ChatTemplate(self.PARTS), tokenizer=BYTES)
        parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
        value = [{"role": "user", "content": parts}, {"role": "assistant", "content": parts}]
        request_body = {"messages": value, "add_generation_prompt": False, "continue_final_message": True}
        ids = asyncio.run(encode_chat(service, ChatTemplateBody.model_validate(request_body)))
        assert BYTES.decode(ids) == "[user]a;[user]b;[assistant]a;[assistant]b"


@pytest.fixture
def folder(tmp_path):
    BYTES.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


class TestFolders:
    def rendered(self, folder, **options):
        template = load_chat_template(folder, **options)
        return template and template.render([{"role": "user", "content": "x"}], add_generation_prompt=False)

    def test_folder_without_a_template_has_none(self, folder):
        assert load_chat_template(folder) is None
        assert load_chat_template(None) is None

    def test_template_file_takes_precedence_over_the_tokenizer_config(self, folder):
        config = {
            "bos_token": {"__type": "AddedToken", "content": "<s>", "lstrip": False},
            "eos_token": "</s>",
            "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        assert self.rendered(folder) == "<s>x</s>"
        (folder / "chat_template.jinja").write_text("file {{ bos_token }}")
        assert self.rendered(folder) == "file <s>"
        (folder / "given").write_text("given {{ eos_token }}")
        assert self.rendered(folder, file=folder / "given") == "given </s>"

    def named(self, folder, **templates):
        value = [{"name": name, "template": text} for name, text in templates.items()]
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))

    def test_tool_use_template_is_used_if_there_are_tools(self, folder):
        self.named(folder, tool_use="t{{ tools[0] }}", default="d", rag="r")
        template = load_chat_template(folder)
        assert template.render([]) == "d"
        assert template.render([], tools=[{"x": 1}]) == "t{'x': 1}"
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text("file")
        (folder / "chat_template.jinja").write_text("default")
        assert load_chat_template(folder).render([], tools=[]) == "file"

    def test_several_templates_without_a_default_are_rejected(self, folder):
        self.named(folder, tool_use="t", rag="r")
        message = r"^chat_template is ambiguous: .* \['rag', 'tool_use'\] .* --chat-template FILE\.$"
        with pytest.raises(ValueError, match=message):
            load_chat_template(folder)
        (folder / "given").write_text("given")
        assert self.rendered(folder, file=folder / "given") == "given"

    def test_chat_template_json_has_the_lowest_precedence(self, folder):
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": "processor"}))
        assert self.rendered(folder) == "processor"
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "tokenizer"}))
        assert self.rendered(folder) == "tokenizer"

    @pytest.mark.parametrize(("listed", "text"), [({}, "[map]"), ({"added_tokens_decoder": {}}, "[own]")])
    def test_special_tokens_map_is_read_for_older_folders(self, folder, listed, text):
        config = {"bos_token": "[own]", "chat_template": "{{ bos_token }}"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config | listed))
        (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "[map]"}}))
        assert self.rendered(folder) == text

    def test_invalid_template_is_rejected(self, folder):
        (folder / "chat_template.jinja").write_text("a\n{% if %}")
        with pytest.raises(ValueError, match=r"^chat_template is not a valid Jinja template: line 2: "):
            load_chat_template(folder)

    @pytest.mark.parametrize("value", [5, {"default": 5}, ["x"], [{"name": "default"}]])
    def test_invalid_chat_template_entry_names_its_file(self, folder, value):
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
        rule = r"tokenizer_config\.json(: chat_template must be a text or a list of named templates)?, got"
        with pytest.raises(ValueError, match=rule):
            load_chat_template(folder)

    def test_unreadable_template_file_is_named(self, folder):
        file = folder / "chat_template.jinja"
        file.write_bytes(b"a\xff")
        with pytest.raises(ValueError, match=r"chat_template.jinja is not valid UTF-8: 'utf-8' codec"):
            load_chat_template(None, file)
        with pytest.raises(ValueError, match=rf"{folder}/.* got UnicodeDecodeError: 'utf-8' codec"):
            load_chat_template(folder)
        with pytest.raises(ValueError, match=r"chat_template .* is not a file"):
            load_chat_template(None, folder)
