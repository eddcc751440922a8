"""Structured outputs: restrict the next tokens by a JSON schema, regular expression, choice or grammar."""

import dataclasses
import functools
import importlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from pallas_kernels.checks import require

# Whitespace in JSON is bounded, so that generation cannot continue with blanks forever.
JSON_OPTIONS = {"whitespace_pattern": r"[ \t\n]{0,40}"}
MAX_COMPILED = 64  # maximum number of cached grammars
LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"|/(?:[^/\\\n]|\\.)*/')  # string and regex literals in Lark syntax
NO_FORCING = '%llguidance {"no_forcing": true}\n'


@runtime_checkable
class TokenMask(Protocol):
    """A mask of the tokens that may follow in one sequence, computed on the host once per generated token."""

    @property
    def is_fixed(self) -> bool:
        """True if the mask never changes, so that it can be used before the last token is known."""

    @property
    def is_done(self) -> bool:
        """True if the sequence is complete, so that no token may follow."""

    def allowed_bitmask(self) -> np.ndarray:
        """Return the bit mask of the allowed tokens, as uint32 words.

        Bit `i % 32` of word `i // 32` is set if token i is allowed.
        """

    def accept(self, token_id: int) -> None:
        """Advance the mask by one generated token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """A constraint on the generated text. Exactly one attribute besides `prefix` must be set.

    Attributes:
        json: JSON schema, as text or as a mapping.
        regex: Regular expression that the full text matches (Rust syntax).
        choice: Texts, one of which is generated.
        grammar: Context-free grammar (Lark syntax, as supported by llguidance).
        json_object: Whether the text is any JSON object.
        prefix: Grammar (Lark syntax) of the whole output, which refers to the constrained text as `@answer`:
            it describes what precedes that text, such as a model's reasoning.

    Source: vLLM `StructuredOutputsParams`.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    prefix: str | None = None

    def __post_init__(self) -> None:
        fields = vars(self).items()
        specified = {name for name, value in fields if name != "prefix" and value not in (None, False)}
        require(
            len(specified) == 1,
            "structured_outputs",
            "set exactly one of json, regex, choice, grammar and json_object",
            sorted(specified),
        )
        if isinstance(self.json, Mapping):
            object.__setattr__(self, "json", json.dumps(self.json))
        if self.choice is not None:
            is_list = not isinstance(self.choice, str) and len(self.choice) > 0
            require(is_list, "choice", "be a list of strings", repr(self.choice))
            object.__setattr__(self, "choice", tuple(self.choice))

    def as_llguidance(self, matcher: Any) -> str:
        """Return the constraint as a grammar for llguidance.LLMatcher.

        Raises:
            ValueError: If the schema is not valid JSON.
        """
        grammar = self._answer_as_llguidance(matcher)
        if self.prefix is None:
            return grammar
        is_lark = not grammar.lstrip().startswith("{")
        answer = {"lark_grammar": grammar} if is_lark else json.loads(grammar)["grammars"][0]
        return json.dumps({"grammars": [{"lark_grammar": self.prefix}, {**answer, "name": "answer"}]})

    def _answer_as_llguidance(self, matcher: Any) -> str:
        if self.regex is not None:
            return matcher.grammar_from_regex(self.regex)
        if self.grammar is not None:
            return matcher.grammar_from_lark(self.grammar)
        if self.choice is not None:
            texts = [json.dumps(text, ensure_ascii=False) for text in self.choice]
            texts = [
                text.replace("\x7f", "\\u007f") for text in texts
            ]  # llguidance rejects the raw character.
            return matcher.grammar_from_lark("start: " + " | ".join(texts))
        schema = self.json if isinstance(self.json, str) else '{"type": "object"}'
        return matcher.grammar_from_json_schema(schema, defaults=JSON_OPTIONS)


class Grammars:
    """The compiled grammars of requests, for one vocabulary. Thread-safe."""

    def __init__(self, tokenizer: Any | None, vocab_size: int, end_ids: Collection[int]) -> None:
        """Store the tokenizer. Nothing is compiled yet.

        Args:
            tokenizer: A `tokenizers.Tokenizer`; None if there is none.
            vocab_size: Size of the vocabulary.
            end_ids: Tokens that end a sequence.
        """
        self._tokenizer, self._num_words = tokenizer, -(-vocab_size // 32)
        self._end_ids = sorted(end_ids)
        self._matcher = functools.lru_cache(MAX_COMPILED)(self._compile)
        self._vocabulary = functools.lru_cache(1)(self._read_vocabulary)

    def mask(self, params: StructuredOutputsParams) -> TokenMask:
        """Return the mask of an empty sequence. Each grammar is compiled once, in 1 ms to 1 s.

        Raises:
            ValueError: If the grammar is invalid, or there is no tokenizer.
            ImportError: If llguidance is not installed.
        """
        if self._tokenizer is None:
            raise ValueError(
                "structured_outputs requires a tokenizer, but the model has no tokenizer.json. "
                "Omit structured_outputs."
            )
        is_end, _ = self._vocabulary()
        return GrammarMask(self._matcher(params).deep_copy(), self._num_words, has_end=is_end)

    def _compile(self, params: StructuredOutputsParams) -> Any:
        llguidance = _llguidance()
        matcher = llguidance.LLMatcher
        _, vocabulary = self._vocabulary()
        assert self._tokenizer is not None
        try:
            grammar = params.as_llguidance(matcher)
        except ValueError as error:  # The schema is not valid JSON.
            raise ValueError(
                f"structured_outputs is not supported by llguidance: {error}. Correct the grammar."
            ) from error
        added_tokens = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
        compiled = matcher(vocabulary, _without_forced_tokens(grammar, added_tokens), log_level=0)
        if compiled.is_error():
            raise ValueError(
                f"structured_outputs is not supported by llguidance: {_matcher_error(compiled)}. "
                "Correct the grammar."
            )
        return compiled

    def _read_vocabulary(self) -> tuple[bool, Any]:
        """Return whether the vocabulary has a token that ends a sequence, and llguidance's tokenizer."""
        assert self._tokenizer is not None
        end_ids = [i for i in self._end_ids if i < self._tokenizer.get_vocab_size()]
        vocabulary = _llguidance().LLTokenizer(self._tokenizer.to_str(), eos_token=end_ids or None)
        return bool(end_ids), vocabulary


class GrammarMask:
    """A TokenMask computed by llguidance."""

    is_fixed = False

    def __init__(self, matcher: Any, num_words: int, *, has_end: bool) -> None:
        """Wrap a matcher. Without has_end, the vocabulary has no end token, and llguidance uses token 0."""
        self._matcher, self._num_words, self._has_end = matcher, num_words, has_end

    @property
    def is_done(self) -> bool:
        """True if no token except the end token may follow."""
        return self._matcher.is_stopped()

    def allowed_bitmask(self) -> np.ndarray:
        """Return the bit mask of the allowed tokens, as uint32 words."""
        words = np.zeros(self._num_words, np.uint32)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._num_words]
        words[: len(bits)] = bits
        if not self._has_end and self._matcher.is_accepting():
            words[0] &= ~np.uint32(1)
        return words

    def accept(self, token_id: int) -> None:
        """Advance the mask by one generated token.

        Raises:
            ValueError: If the token is not allowed, or the grammar exceeds a limit of llguidance, which
                llguidance may report only after some tokens.
        """
        if not self._matcher.consume_token(token_id):
            raise ValueError(
                f"Token {token_id} is not allowed by the grammar: {_matcher_error(self._matcher)}."
            )


def _without_forced_tokens(grammar: str, added_tokens: Collection[str]) -> str:
    """Return a grammar that llguidance can follow if a forced text contains an added token.

    If only one text can follow, llguidance tokenizes it and waits for its first token. If that text is an
    added token, it does not accept the token, which has no characters for it. So any tokens may form the
    text.
    """
    lark = _as_lark(grammar)
    texts = [] if lark is None else LITERAL.findall(lark)
    needs_literal_tokens = any(
        token in text or token in text.replace("\\", "") for token in added_tokens for text in texts
    )
    return f"{NO_FORCING}{lark}" if needs_literal_tokens else grammar


def _as_lark(grammar: str) -> str | None:
    """Return an llguidance grammar in Lark syntax; None if it has several parts or is invalid."""
    if not grammar.lstrip().startswith("{"):
        return grammar
    try:
        (part,) = json.loads(grammar)["grammars"]
        schema = json.dumps(part["json_schema"], ensure_ascii=False)
        return part["lark_grammar"] or f"start: %json {schema}"
    except (ValueError, KeyError, TypeError):
        return None


def _matcher_error(matcher: Any) -> str:
    """Return llguidance's error message without its internal state."""
    return matcher.get_error().partition("<state>")[0].partition("<backtrace>")[0].strip()


def _llguidance() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ModuleNotFoundError as error:
        hint = "Install the extra 'serve': pip install '.[serve]' in a checkout"
        raise ImportError(f"structured_outputs requires llguidance. {hint}.") from error
