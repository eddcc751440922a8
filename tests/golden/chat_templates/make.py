"""Render the templates in this folder with transformers: run `python make.py` where it is installed."""

import json
import pathlib

import jinja2
import transformers
from transformers.utils.chat_template_utils import _compile_jinja_template

HERE = pathlib.Path(__file__).parent
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
USER, AGAIN = {"role": "user", "content": " Hi, ünï & <b>'x'</b> "}, {"role": "user", "content": "more\n"}
SAID, SYSTEM = {"role": "assistant", "content": " Hello "}, {"role": "system", "content": "Be kind."}
CALL = {"function": {"name": "f", "arguments": {"z": 1, "a": "é<"}}}
CONVERSATIONS = [
    [USER],
    [SYSTEM, USER],
    [USER, SAID, AGAIN],
    [SYSTEM, USER, SAID, AGAIN],
    [USER, USER],
    [{"role": "narrator", "content": "once"}],
    [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": {"b": [1, "ß"]}}],
    [USER, {"role": "skip", "content": "x"}, SAID, {"role": "stop", "content": "y"}, AGAIN],
    [{"role": "user", "content": None}],
]
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {"z": 1, "a": 2}}}
]


def render(template, conversation, **options):
    try:
        return {"text": template.render(messages=conversation, documents=None, **SPECIAL, **options)}
    except jinja2.TemplateError as error:
        return {"error": str(error)}
    except TypeError:
        return {"error": ""}


if __name__ == "__main__":
    cases = []
    for path in sorted(HERE.glob("*.jinja")):
        template = _compile_jinja_template(path.read_text())
        for conversation in CONVERSATIONS:
            for options in (
                {"add_generation_prompt": False},
                {"add_generation_prompt": True, "tools": TOOLS},
            ):
                case = {"template": path.name, "messages": conversation, "others": options}
                tools = {"tools": None} | options
                cases.append(case | render(template, conversation, **tools))
    result = {"transformers": transformers.__version__, "special_tokens": SPECIAL, "cases": cases}
    (HERE / "expected.json").write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
