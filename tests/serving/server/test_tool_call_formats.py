"""Detection of the tool-call format."""

import pytest

from jattn.serving.server.options import ServerOptions
from jattn.serving.server.tool_call_formats import HERMES, LLAMA3_JSON, find_tool_call_format

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }} as <tool_call>{% endfor %}"
    "{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.celsius }}{% endfor %}{% endfor %}"
)


class TestFindToolCallFormat:
    def test_format_is_detected_from_the_chat_template(self):
        llama = 'Respond in the format {"name": function name, "parameters": dictionary of argument name'
        assert find_tool_call_format(None, TEMPLATE) is HERMES
        assert find_tool_call_format(None, llama) is LLAMA3_JSON
        assert find_tool_call_format(None, "<tool_call>\n<function=f>") is None  # The format of Qwen3-Coder.
        assert find_tool_call_format(None, "{{ messages }}") is find_tool_call_format(None, None) is None
        assert find_tool_call_format("llama3_json", TEMPLATE) is LLAMA3_JSON
        with pytest.raises(ValueError, match=r"tool_call_parser must be one of 'hermes', .*, got 'other'"):
            ServerOptions(tool_call_parser="other")
