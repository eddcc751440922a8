"""Grammars of tool calls."""

import pytest
import tokenizers

from jattn.serving.engine.structured_outputs import Grammars, StructuredOutputsParams
from jattn.serving.server.protocol import Tool
from jattn.serving.server.tool_call_formats import HERMES, LLAMA3_JSON
from jattn.serving.server.tool_call_grammar import required_calls_grammar, strict_calls_grammar
from tests.serving.server.tool_cases import HERMES_CALL, LLAMA_CALL, OTHER, TOOL
from tests.serving.tiny import BYTES, byte_tokenizer

TOOLS = [Tool.model_validate(single) for single in (TOOL, OTHER)]


STRICT_TOOLS = [Tool.model_validate(TOOL | {"function": TOOL["function"] | {"strict": True}}), TOOLS[1]]


INVALID_CALL = '{"name": "weather", "arguments": {"celsius": 7}}'


OTHER_CALL = '{"name": "other", "arguments": {"a": 7}}'


def accepts(grammar, text, tokenizer=BYTES):
    """Return whether the grammar accepts the text: each of its tokens, and then the end."""
    mask = Grammars(tokenizer, 320, ()).mask(StructuredOutputsParams(grammar=grammar))
    for token in tokenizer.encode(text).ids:
        if not mask.allowed_bitmask()[token // 32] >> (token % 32) & 1:
            return False
        mask.accept(token)
    return mask._matcher.is_accepting()


def tagged_tokenizer(*, is_special):
    tokenizer = byte_tokenizer()
    tags = [HERMES.start_tag, HERMES.end_tag]
    tokenizer.add_tokens([tokenizers.AddedToken(tag, special=is_special) for tag in tags])
    return tokenizer


class TestGrammars:
    @pytest.mark.parametrize("tokenizer", [BYTES, tagged_tokenizer(is_special=False)])
    def test_required_calls_grammar_accepts_calls_only(self, tokenizer):
        special_tokens = [HERMES.start_tag, HERMES.end_tag] if tokenizer is not BYTES else []
        several = required_calls_grammar(HERMES, TOOLS, special_tokens, max_calls=None)
        single = required_calls_grammar(HERMES, TOOLS, special_tokens, max_calls=1)
        accepts_text = lambda grammar, text: accepts(grammar, text, tokenizer)
        other_call = f"<tool_call>\n{OTHER_CALL}\n</tool_call>"
        assert [accepts_text(g, t) for g in (several, single) for t in (HERMES_CALL, other_call)] == [
            True
        ] * 4
        assert (
            accepts_text(several, f"{HERMES_CALL}\n{other_call}"),
            accepts_text(single, f"{HERMES_CALL}\n{other_call}"),
        ) == (True, False)
        for text in (
            "",
            "Well.",
            HERMES_CALL[:-1],
            f"<tool_call>\n{INVALID_CALL}\n</tool_call>",
            f"{HERMES_CALL} yes",
        ):
            assert not accepts_text(several, text), text

    def test_llama_calls_are_separated_by_semicolons(self):
        several = required_calls_grammar(LLAMA3_JSON, TOOLS, (), max_calls=None)
        assert accepts(several, f"{LLAMA_CALL}; {LLAMA_CALL}")
        assert not accepts(several, f"{LLAMA_CALL} yes")
        strict = strict_calls_grammar(LLAMA3_JSON, STRICT_TOOLS, (), max_calls=1)
        assert [
            accepts(strict, text)
            for text in ("", "Well {", LLAMA_CALL, OTHER_CALL.replace("arguments", "parameters"))
        ] == [True] * 4
        assert not accepts(strict, LLAMA_CALL.replace("true", "7"))

    @pytest.mark.parametrize("tokenizer", [BYTES, tagged_tokenizer(is_special=True)])
    def test_strict_calls_grammar_checks_the_arguments_of_strict_tools_only(self, tokenizer):
        special_tokens = [HERMES.start_tag, HERMES.end_tag] if tokenizer is not BYTES else []
        grammar = strict_calls_grammar(HERMES, STRICT_TOOLS, special_tokens, max_calls=None)
        other_call = f"<tool_call>\n{OTHER_CALL}\n</tool_call>"
        for text in (
            "",
            "Well <tool.\n",
            HERMES_CALL,
            f"So: {HERMES_CALL}\n{other_call} and",
            f"{other_call}{HERMES_CALL}",
        ):
            assert accepts(grammar, text, tokenizer), text
        for text in (f"So: <tool_call>\n{INVALID_CALL}\n</tool_call>", HERMES_CALL[:-1]):
            assert not accepts(grammar, text, tokenizer), text
