"""vLLM's SamplingParams: how a request's tokens are sampled and where it ends."""

import copy
import dataclasses
import functools
import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jattn.serving.engine.structured_outputs import StructuredOutputsParams
from pallas_kernels.checks import require, require_positive

GREEDY_BELOW = 1e-5  # vLLM's _SAMPLING_EPS
NUM_SEEDS = 2**32
MAX_LOGPROBS = 20  # vLLM's max_logprobs
MAX_BIAS = 100.0
MAX_N = 16384  # vLLM's VLLM_MAX_N_SEQUENCES; each completion copies the prompt
MAX_TEMPERATURE = 1e30  # representable in float32, like the divided logits
MAX_PENALTY = 1e30  # limit of repetition_penalty and of its inverse


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request.

    Attributes:
        max_tokens: Maximum number of new tokens. None: as many as the context length and the KV cache allow.
        min_tokens: Minimum number of new tokens before the model's EOS token, stop_token_ids or stop may end
            the completion.
        temperature: Divisor of the logits, in [0, 1e30]. 0, or less than 1e-5: greedy sampling, regardless of
            the filters.
        top_p: Keep the most likely tokens whose probabilities sum to top_p, after top_k. In (0, 1]; 1:
            disabled.
        top_k: Keep the k most likely tokens and those tied with the k-th. None, 0 or -1: disabled.
        min_p: Keep the tokens that are at least min_p times as likely as the most likely one. In [0, 1]; 0:
            disabled.
        n: Number of completions, at most 16384; completion i uses seed + i. The prompt is computed once, and
            the completions share its blocks.
        seed: Random seed. The same seed gives the same tokens in any batch. None or -1: a random seed.
        stop: A stop string or several; the text is truncated before the first one found. None: no stop
            strings.
        stop_token_ids: Token ids that end the completion, in addition to the model's EOS tokens. None: no
            other tokens.
        ignore_eos: Whether generation continues after the model's EOS token.
        include_stop_str_in_output: Whether the text includes the stop string or the stop token.
        presence_penalty: Value subtracted from the logits of generated tokens, in [-2, 2].
        frequency_penalty: Value subtracted from the logits of generated tokens once per occurrence, in [-2,
            2].
        repetition_penalty: Divisor of positive logits, and factor of negative logits, of tokens in the prompt
            or generated text. In [1e-30, 1e30]; 1: disabled.
        logit_bias: Values in [-100, 100] added to logits, by token id.
        logprobs: Number of most likely tokens, at most 20, whose log-probabilities are returned for each new
            token, together with the token's own. They come from the model's logits before penalties and
            temperature. None: no log-probabilities.
        prompt_logprobs: As logprobs, for each prompt token except the first.
        skip_special_tokens: Whether special tokens are omitted from the text.
        allowed_token_ids: Token ids that may be generated. None: all.
        bad_words: Words that may not be generated: the last token of a word is banned after its other tokens.
            None: no words.
        structured_outputs: Constraint on the text: a JSON schema, regular expression, choice or grammar. The
            completion ends where the constrained text ends.

    Source: vLLM `SamplingParams`, but greedy by default.
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
        self._normalize()
        require(0 <= self.temperature <= MAX_TEMPERATURE, "temperature", "be in [0, 1e30]", self.temperature)
        require(self.top_k is None or self.top_k >= -1, "top_k", "be at least 0 (None = off)", self.top_k)
        require(0 < self.top_p <= 1, "top_p", "be in (0, 1] (1 = off)", self.top_p)
        require(0 <= self.min_p <= 1, "min_p", "be in [0, 1] (0 = off)", self.min_p)
        require(self.seed is None or 0 <= self.seed < NUM_SEEDS, "seed", "be in [0, 2**32)", self.seed)
        require(0 < self.n <= MAX_N, "n", f"be in [1, {MAX_N}]", self.n)
        if self.max_tokens is not None:
            require_positive(max_tokens=self.max_tokens)
            rule = f"be in [0, max_tokens ({self.max_tokens})]"
            require(self.min_tokens <= self.max_tokens, "min_tokens", rule, self.min_tokens)
        require(self.min_tokens >= 0, "min_tokens", "be at least 0", self.min_tokens)
        for name in ("presence_penalty", "frequency_penalty"):
            require(-2 <= getattr(self, name) <= 2, name, "be in [-2, 2] (0 = off)", getattr(self, name))
        is_in_range = 1 / MAX_PENALTY <= self.repetition_penalty <= MAX_PENALTY
        require(is_in_range, "repetition_penalty", "be in [1e-30, 1e30] (1 = off)", self.repetition_penalty)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            require(value is None or 0 <= value <= MAX_LOGPROBS, name, f"be in [0, {MAX_LOGPROBS}]", value)
        for token, value in (self.logit_bias or {}).items():
            require(-MAX_BIAS <= value <= MAX_BIAS, f"logit_bias[{token}]", "be in [-100, 100]", value)
        require(all(self.stop or ()), "stop", "hold no empty string", self.stop)
        require(self.allowed_token_ids != (), "allowed_token_ids", "hold at least one token id", ())
        require(
            self.n == 1 or not self.is_greedy,
            "n",
            "be 1 with temperature 0, where all completions are the same",
            self.n,
        )
        if self.structured_outputs is not None:
            for name in ("bad_words", "allowed_token_ids"):
                if getattr(self, name):
                    raise ValueError(f"{name} cannot be combined with structured_outputs. Omit one of them.")

    def _normalize(self) -> None:
        """Convert numpy ints to Python's, which do not overflow, and copy sequences and mappings."""

        def assign(name: str, value: Any) -> None:
            object.__setattr__(self, name, value)

        for name in ("max_tokens", "min_tokens", "top_k", "n", "seed", "logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                assign(name, operator.index(value))
        if self.seed == -1:
            assign("seed", None)
        for name in ("stop", "bad_words"):
            texts = getattr(self, name)
            assign(name, (texts,) if isinstance(texts, str) else tuple(texts or ()))
        assign("stop_token_ids", tuple(map(operator.index, self.stop_token_ids or ())))
        if self.allowed_token_ids is not None:
            assign("allowed_token_ids", tuple(map(operator.index, self.allowed_token_ids)))
        if self.logit_bias is not None:
            assign("logit_bias", {operator.index(token): value for token, value in self.logit_bias.items()})

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always chosen."""
        return self.temperature < GREEDY_BELOW

    @property
    def is_cut(self) -> bool:
        """True if top_k or top_p is enabled, which requires sorting the logits."""
        return (self.top_k or 0) > 0 or self.top_p < 1

    @property
    def has_penalties(self) -> bool:
        """True if the logits depend on the previous tokens."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @functools.cached_property
    def biases(self) -> tuple[np.ndarray, np.ndarray]:
        """The token ids (int32) and values (float32) of logit_bias as arrays."""
        bias = self.logit_bias or {}
        return np.asarray([*bias], np.int32), np.asarray([*bias.values()], np.float32)

    @property
    def needs_logits_adjustment(self) -> bool:
        """True if penalties, biases or min_tokens may change the logits."""
        return bool(self.has_penalties or self.logit_bias or self.min_tokens)

    def with_seed(self, seed: int) -> "SamplingParams":
        """Return a copy with this seed if there is none. Call it once per request, not per step."""
        return self if self.seed is not None else self._with(seed=seed)

    def of_completion(self, index: int) -> "SamplingParams":
        """Return the parameters of one of the n completions, with its own seed."""
        assert self.seed is not None
        return self._with(n=1, seed=(self.seed + index) % NUM_SEEDS)

    def _with(self, **changes: int) -> "SamplingParams":
        """Return a copy with valid new values, without checking a large logit_bias again."""
        changed = copy.copy(self)
        for name, value in changes.items():
            object.__setattr__(changed, name, value)
        return changed


def default_sampling_params_of(model: Any) -> SamplingParams:
    """Return the sampling parameters of a model's generation_config.json; greedy without do_sample.

    As in transformers, temperature and filters only count with do_sample; repetition_penalty always counts.
    Other values are the defaults of SamplingParams, except for a temperature of 1 with do_sample.

    Raises:
        ValueError: If a value is out of range. The message names the file.

    Source: vLLM `ModelConfig.get_diff_sampling_param`, which ignores do_sample.
    """
    config: dict[str, Any] = json.loads(getattr(model, "generation_config", "{}"))
    do_sample = config.get("do_sample") or False
    names = ("temperature", "top_p", "top_k", "min_p") if do_sample else ()
    names = (*names, "repetition_penalty")
    values = {name: config[name] for name in names if config.get(name) is not None}
    try:
        return SamplingParams(**({"temperature": 1.0} if do_sample else {}) | values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"generation_config.json: {error}") from error


def describe_params(params: SamplingParams) -> str:
    """Return the values that differ from the defaults as text; empty if there are none."""
    defaults = SamplingParams()
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    values = ((name, getattr(params, name)) for name in names)
    return ", ".join(f"{name} {value:g}" for name, value in values if value != getattr(defaults, name))
