"""Texts of a given form: which tokens may come next, by a grammar."""

import dataclasses
import functools
import importlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from pallas_kernels.checks import require

# Between the parts of a JSON text; bounded, so that none is lost in blanks.
JSON_OPTIONS = {"whitespace_pattern": r"[ \t\n]{0,40}"}
MAX_COMPILED = 64  # grammars kept
LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"|/(?:[^/\\\n]|\\.)*/')  # of Lark's syntax, JSON's in it among them
NOT_FORCED = '%llguidance {"no_forcing": true}\n'


@runtime_checkable
class TokenMask(Protocol):
    """Which tokens may come next in one text. Host side; asked once a token, when all before are known."""

    @property
    def is_fixed(self) -> bool:
        """It allows the same whatever comes, so that nobody need wait for a token to know the next mask."""

    @property
    def is_done(self) -> bool:
        """Nothing may come any more: the text is whole."""

    def allowed(self) -> np.ndarray:
        """One bit a token, bit `i % 32` of word `i // 32`; uint32, words for the whole vocabulary."""

    def accept(self, token_id: int) -> None:
        """Takes the next token."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What form a text has; exactly one of them.

    Attributes:
        json: A JSON schema, as text or as a mapping.
        regex: A regular expression that the whole text matches (Rust's syntax).
        choice: Texts, one of which it is.
        grammar: A context-free grammar (Lark's syntax, as llguidance takes it).
        json_object: Any JSON object.

    Source: vLLM `StructuredOutputsParams`.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool = False

    def __post_init__(self) -> None:
        named = {name: value for name, value in vars(self).items() if value not in (None, False)}
        require(len(named) == 1, "structured_outputs", "have exactly one form", sorted(named))
        for name, kinds in (("json", str | Mapping), ("regex", str), ("grammar", str)):
            value, rule = getattr(self, name), "be a text or a mapping" if name == "json" else "be a text"
            require(value is None or isinstance(value, kinds), name, rule, repr(value))
        if isinstance(self.json, Mapping):
            object.__setattr__(self, "json", json.dumps(self.json))
        if self.choice is not None:
            are_many = isinstance(self.choice, Collection) and not isinstance(self.choice, str)
            are_texts = are_many and all(isinstance(one, str) for one in self.choice)
            require(are_texts and len(self.choice) > 0, "choice", "be a list of texts", repr(self.choice))
            object.__setattr__(self, "choice", tuple(self.choice))

    def as_llguidance(self, matcher: Any) -> str:
        """As `matcher`, llguidance.LLMatcher, reads it.

        Raises:
            ValueError: The schema is no JSON.
        """
        if self.regex is not None:
            return matcher.grammar_from_regex(self.regex)
        if self.grammar is not None:
            return matcher.grammar_from_lark(self.grammar)
        if self.choice is not None:
            texts = [json.dumps(text, ensure_ascii=False) for text in self.choice]
            texts = [text.replace("\x7f", "\\u007f") for text in texts]  # raw, llguidance has no such letter
            return matcher.grammar_from_lark("start: " + " | ".join(texts))
        schema = self.json if isinstance(self.json, str) else '{"type": "object"}'
        return matcher.grammar_from_json_schema(schema, defaults=JSON_OPTIONS)


class Grammars:
    """The grammars that requests come with, for one vocabulary. For several threads at once."""

    def __init__(self, tokenizer: Any | None, vocab_size: int, end_ids: Collection[int]) -> None:
        """Does nothing yet.

        Args:
            tokenizer: A `tokenizers.Tokenizer`; None = there is none, and nothing to go by.
            vocab_size: The model's.
            end_ids: Tokens that end a text.
        """
        self._tokenizer, self._num_words = tokenizer, -(-vocab_size // 32)
        self._end_ids = sorted(end_ids)
        self._matcher = functools.lru_cache(MAX_COMPILED)(self._compile)
        self._vocabulary = functools.lru_cache(1)(self._read_vocabulary)

    def mask(self, params: StructuredOutputsParams) -> TokenMask:
        """What may come next in a text that is empty so far; compiled once, 1 ms to 1 s.

        Raises:
            ValueError: It is no grammar, or there is no tokenizer.
            ImportError: llguidance is missing.
        """
        require(self._tokenizer is not None, "structured_outputs", "be None (no tokenizer.json)", params)
        is_end, _ = self._vocabulary()
        return GrammarMask(self._matcher(params).deep_copy(), self._num_words, has_end=is_end)

    def _compile(self, params: StructuredOutputsParams) -> Any:
        llguidance = _llguidance()
        matcher = llguidance.LLMatcher
        _, vocabulary = self._vocabulary()
        assert self._tokenizer is not None
        rule = "be what llguidance can follow"
        try:
            grammar = params.as_llguidance(matcher)
        except ValueError as error:  # of a schema that is no JSON
            require(False, "structured_outputs", rule, error)
        added = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
        made = matcher(vocabulary, _not_forced(grammar, added), log_level=0)
        require(not made.is_error(), "structured_outputs", rule, _told(made))
        return made

    def _read_vocabulary(self) -> tuple[bool, Any]:
        """Llguidance's tokenizer, and whether it knows a token that ends a text."""
        assert self._tokenizer is not None
        known = [i for i in self._end_ids if i < self._tokenizer.get_vocab_size()]
        vocabulary = _llguidance().LLTokenizer(self._tokenizer.to_str(), eos_token=known or None)
        return bool(known), vocabulary


class GrammarMask:
    """A TokenMask by llguidance."""

    is_fixed = False

    def __init__(self, matcher: Any, num_words: int, *, has_end: bool) -> None:
        """Of a matcher of its own. Without has_end, the token that llguidance takes for the end is none."""
        self._matcher, self._num_words, self._has_end = matcher, num_words, has_end

    @property
    def is_done(self) -> bool:
        """Nothing may come but the end."""
        return self._matcher.is_stopped()

    def allowed(self) -> np.ndarray:
        """As TokenMask."""
        words = np.zeros(self._num_words, np.uint32)
        told = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[: self._num_words]
        words[: len(told)] = told
        if not self._has_end and self._matcher.is_accepting():
            words[0] &= ~np.uint32(1)
        return words

    def accept(self, token_id: int) -> None:
        """As TokenMask.

        Raises:
            ValueError: The token may not come next, or llguidance has given up: a grammar may be larger than
                it follows, which shows on the way.
        """
        is_one = self._matcher.consume_token(token_id)
        told = "" if is_one else _told(self._matcher)
        require(is_one, "token_id", f"follow the grammar ({told})", token_id)


def _not_forced(grammar: str, added: Collection[str]) -> str:
    """A grammar that llguidance can follow where a text that must come is one of the added tokens.

    Where only one text can come llguidance makes tokens of it, and waits for the first. Of such a text that
    is the added token, which it does not take then: to it that has no letters. So any tokens may make it up.
    """
    lark = _as_lark(grammar)
    texts = [] if lark is None else LITERAL.findall(lark)
    says = any(token in text or token in text.replace("\\", "") for token in added for text in texts)
    return f"{NOT_FORCED}{lark}" if says else grammar


def _as_lark(grammar: str) -> str | None:
    """In Lark's syntax what llguidance reads as JSON, too; None = it has several parts, or is wrong."""
    if not grammar.lstrip().startswith("{"):
        return grammar
    try:
        (told,) = json.loads(grammar)["grammars"]
        schema = json.dumps(told["json_schema"], ensure_ascii=False)
        return told["lark_grammar"] or f"start: %json {schema}"
    except (ValueError, KeyError, TypeError):
        return None


def _told(matcher: Any) -> str:
    """What llguidance says is wrong, without what it knows of its own insides."""
    return matcher.get_error().partition("<state>")[0].partition("<backtrace>")[0].strip()


def _llguidance() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ModuleNotFoundError as error:
        told = "of the extra 'serve': pip install '.[serve]' in a checkout"
        raise ImportError(f"structured_outputs needs llguidance, {told}") from error
