"""What a request may ask of its tokens: vLLM's SamplingParams."""

import copy
import dataclasses
import functools
import math
import numbers
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jattn.models.loading.generation_config import FILE, GenerationConfig
from jattn.serving.engine.structured_outputs import StructuredOutputsParams
from pallas_kernels.checks import require, require_int, require_positive

GREEDY_BELOW = 1e-5  # vLLM's _SAMPLING_EPS
NUM_SEEDS = 2**32
MAX_LOGPROBS = 20  # vLLM's max_logprobs
MAX_BIAS = 100.0
MAX_N = 16384  # vLLM's VLLM_MAX_N_SEQUENCES: each has a copy of the prompt before any of them runs
MAX_TEMPERATURE = 1e30  # float32 holds it, and what is divided by it
MAX_PENALTY = 1e30  # repetition_penalty, and one over it: likewise


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request picks its tokens, and where it ends.

    Attributes:
        max_tokens: Most new tokens. None = as many as the model's context and the cache leave.
        min_tokens: What would end the text (the model's eos, stop_token_ids, stop) does not before so many.
        temperature: Logits are divided by it; 0 (or less than 1e-5) = greedy, whatever the filters say. At
            most 1e30.
        top_p: Only the likeliest tokens whose probabilities together reach top_p, after top_k. 1 = off.
        top_k: Only the k likeliest tokens, and those as likely as the k-th. None, 0 or -1 = off.
        min_p: Only tokens at least min_p times as likely as the likeliest. 0 = off.
        n: Completions of the prompt, each drawn with a seed of its own: seed, seed + 1, ... The prompt is
            computed once; they share its blocks. At most 16384.
        seed: The same seed draws the same tokens, whoever shares the batch. None or -1 = see `with_seed`.
        stop: Texts that end the completion; it is cut before them. One string or several; None = ().
        stop_token_ids: Tokens that end the completion, besides the model's eos. None = ().
        ignore_eos: The model's eos does not end the completion.
        include_stop_str_in_output: The text keeps the stop string, or the token, that ended it.
        presence_penalty: Taken off the logits of tokens that were generated. In [-2, 2].
        frequency_penalty: The same, times how often. In [-2, 2].
        repetition_penalty: Logits of tokens of the prompt or generated are divided by it where positive,
            multiplied where negative. 1 = off. In [1e-30, 1e30].
        logit_bias: Token id -> what is added to its logit, in [-100, 100].
        logprobs: Each new token comes with its log-probability and that of so many likeliest tokens, by the
            model's own logits, before penalties and temperature. None = without; at most 20.
        prompt_logprobs: The same for each token of the prompt but the first.
        skip_special_tokens: Tokens that the tokenizer calls special are not in the text.
        allowed_token_ids: No other tokens may come. None = any may.
        bad_words: Texts that may not come: the last token of one is banned behind the others. None = ().
        structured_outputs: The form that the text has: a JSON schema, a regular expression, a grammar. It
            ends where that does.

    Source: vLLM `SamplingParams`; greedy by default.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float | int = 0.0
    top_p: float | int = 1.0
    top_k: int | None = None
    min_p: float | int = 0.0
    n: int = 1
    seed: int | None = None
    stop: str | Sequence[str] | None = ()
    stop_token_ids: Sequence[int] | None = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    presence_penalty: float | int = 0.0
    frequency_penalty: float | int = 0.0
    repetition_penalty: float | int = 1.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = ()
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        self._check_kinds()
        require(self.temperature >= 0, "temperature", "be at least 0", self.temperature)
        require(self.temperature <= MAX_TEMPERATURE, "temperature", "be at most 1e30", self.temperature)
        require(self.top_k is None or self.top_k >= -1, "top_k", "be at least 0 (None = off)", self.top_k)
        require(0 < self.top_p <= 1, "top_p", "be in (0, 1] (1 = off)", self.top_p)
        require(0 <= self.min_p <= 1, "min_p", "be in [0, 1] (0 = off)", self.min_p)
        require(self.seed is None or 0 <= self.seed < NUM_SEEDS, "seed", "be in [0, 2**32)", self.seed)
        require_positive(n=self.n)
        require(self.n <= MAX_N, "n", f"be at most {MAX_N}", self.n)
        if self.max_tokens is not None:
            require_positive(max_tokens=self.max_tokens)
            rule = f"be in [0, max_tokens ({self.max_tokens})]"
            require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", rule, self.min_tokens)
        require(self.min_tokens >= 0, "min_tokens", "be at least 0", self.min_tokens)
        for name in ("presence_penalty", "frequency_penalty"):
            require(-2 <= getattr(self, name) <= 2, name, "be in [-2, 2] (0 = off)", getattr(self, name))
        is_positive = 0 < self.repetition_penalty < math.inf
        require(is_positive, "repetition_penalty", "be above 0 (1 = off)", self.repetition_penalty)
        is_held = 1 / MAX_PENALTY <= self.repetition_penalty <= MAX_PENALTY
        require(is_held, "repetition_penalty", "be in [1e-30, 1e30] (1 = off)", self.repetition_penalty)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            require(value is None or 0 <= value <= MAX_LOGPROBS, name, f"be in [0, {MAX_LOGPROBS}]", value)
        is_drawn = self.n == 1 or not self.is_greedy
        require(is_drawn, "n", "be 1 with temperature 0, where all completions are the same", self.n)

    def _check_kinds(self) -> None:
        """Types; sequences become tuples."""
        penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")
        for name in ("temperature", "top_p", "min_p", *penalties):
            require(_is_number(getattr(self, name)), name, "be a number", repr(getattr(self, name)))
        optional = ("max_tokens", "top_k", "seed", "logprobs", "prompt_logprobs")
        given = {name: getattr(self, name) for name in optional if getattr(self, name) is not None}
        counts = {"min_tokens": self.min_tokens, "n": self.n, **given}
        require_int(**counts)
        for name, value in counts.items():  # numpy's have bounds of their own, beyond which sums wrap
            object.__setattr__(self, name, int(value))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            require(isinstance(getattr(self, name), bool), name, "be a bool", repr(getattr(self, name)))
        stop = (self.stop,) if isinstance(self.stop, str) else () if self.stop is None else self.stop
        are_texts = isinstance(stop, Sequence) and all(isinstance(text, str) for text in stop)
        require(are_texts, "stop", "be a string or a list of strings", repr(self.stop))
        require(all(stop), "stop", "hold no empty string", repr(self.stop))
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        are_ids = isinstance(ids, Sequence) and not isinstance(ids, str) and all(map(_is_int, ids))
        require(are_ids, "stop_token_ids", "be a list of ints", repr(ids))
        bias = self.logit_bias
        is_map = bias is None or (isinstance(bias, Mapping) and all(map(_is_int, bias)))
        require(is_map, "logit_bias", "map token ids to numbers", repr(bias))
        for token, value in (bias or {}).items():
            is_one = _is_number(value) and -MAX_BIAS <= value <= MAX_BIAS
            require(is_one, f"logit_bias[{token}]", "be in [-100, 100]", repr(value))
        if bias is not None:  # of its own: the caller may go on to change theirs
            object.__setattr__(self, "logit_bias", {int(token): value for token, value in bias.items()})
        form = self.structured_outputs
        is_form = form is None or isinstance(form, StructuredOutputsParams)
        require(is_form, "structured_outputs", "be StructuredOutputsParams", repr(form))
        self._check_filters()
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(map(int, ids)))

    def _check_filters(self) -> None:
        """What may not come, by tokens or words."""
        words, ids = () if self.bad_words is None else self.bad_words, self.allowed_token_ids
        are_many = isinstance(words, Collection) and not isinstance(words, str)  # read twice: no generator
        are_texts = are_many and all(isinstance(one, str) and one.strip() for one in words)
        require(are_texts, "bad_words", "be a list of words", repr(words))
        object.__setattr__(self, "bad_words", tuple(words))
        if ids is not None:
            are_ids = isinstance(ids, Sequence) and not isinstance(ids, str) and all(map(_is_int, ids))
            require(are_ids and len(ids) > 0, "allowed_token_ids", "be a list of ints", repr(ids))
            object.__setattr__(self, "allowed_token_ids", tuple(map(int, ids)))
        if self.structured_outputs is not None:
            rule = "be empty with structured_outputs"
            require(not words, "bad_words", rule, repr(words))
            require(ids is None, "allowed_token_ids", rule.replace("empty", "None"), repr(ids))

    @property
    def is_greedy(self) -> bool:
        """True if the likeliest token is taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def is_cut(self) -> bool:
        """True if the likeliest tokens alone may be drawn: finding them takes a sort."""
        return (self.top_k or 0) > 0 or self.top_p < 1

    @property
    def has_penalties(self) -> bool:
        """True if logits depend on the tokens before."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @functools.cached_property
    def biases(self) -> tuple[np.ndarray, np.ndarray]:
        """logit_bias as arrays, which each step is given: int32 token ids, and float32 what is added."""
        bias = self.logit_bias or {}
        return np.asarray([*bias], np.int32), np.asarray([*bias.values()], np.float32)

    @property
    def is_adjusted(self) -> bool:
        """True if a request may want other logits than the model's."""
        return bool(self.has_penalties or self.logit_bias or self.min_tokens)

    def with_seed(self) -> "SamplingParams":
        """These values with a random seed where there was none. Call it once a request, not once a step."""
        return self if self.seed is not None else self._with(seed=secrets.randbits(32))

    def of_completion(self, index: int) -> "SamplingParams":
        """Those of completion number `index` of n, whose seed is as many higher."""
        assert self.seed is not None
        return self._with(n=1, seed=(self.seed + index) % NUM_SEEDS)

    def _with(self, **right: int) -> "SamplingParams":
        """A copy with values that are right: to look at all again takes a second where a bias has many."""
        other = copy.copy(self)
        for name, value in right.items():
            object.__setattr__(other, name, value)
        return other


def _is_number(value: Any) -> bool:
    return type(value) in (float, int) or (isinstance(value, numbers.Real) and not isinstance(value, bool))


def _is_int(value: Any) -> bool:  # the types first: to ask whether it is an Integral takes ten times as long
    return type(value) is int or (isinstance(value, numbers.Integral) and not isinstance(value, bool))


def default_params(model: Any) -> SamplingParams:
    """The sampling parameters that a model's checkpoint asks for; greedy where it does not ask for sampling.

    As in transformers, temperature and filters count only with do_sample; repetition_penalty always does.
    What the file does not state is as SamplingParams has it, but for a temperature of 1.

    Raises:
        ValueError: A value is out of its range; the message names the file.

    Source: vLLM `ModelConfig.get_diff_sampling_param`; there do_sample is not looked at.
    """
    config = getattr(model, "generation_config", None) or GenerationConfig()
    told = config.told()
    if config.do_sample:
        told = {"temperature": 1.0} | told
    else:
        told = {name: value for name, value in told.items() if name == "repetition_penalty"}
    try:
        return SamplingParams(**told)
    except ValueError as error:
        raise ValueError(f"{FILE}: {error}") from error


def as_told(params: SamplingParams) -> str:
    """The values that differ from SamplingParams' own, in words; empty where none does."""
    own = SamplingParams()
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    values = ((name, getattr(params, name)) for name in names)
    return ", ".join(f"{name} {value:g}" for name, value in values if value != getattr(own, name))
