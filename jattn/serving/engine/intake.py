"""Where prompts come in: checked against what the engine can serve, and made into requests."""

import functools
from collections.abc import Sequence
from typing import Any

from jattn.serving.engine.processes import Processes, must_lead
from jattn.serving.engine.prompts import Prompt, PromptLimits, Request, build_request, build_requests
from jattn.serving.engine.sampling_params import SamplingParams
from jattn.serving.engine.served_model import ServedModel
from jattn.serving.engine.structured_outputs import Grammars
from jattn.serving.engine.weights import Weights
from pallas_kernels.checks import require_type


class Intake:
    """Makes requests for one engine.

    Attributes:
        limits: What a prompt must fit.
    """

    def __init__(
        self, model: ServedModel, limits: PromptLimits, weights: Weights, processes: Processes | None
    ) -> None:
        """Prepares nothing.

        Args:
            model: Whose tokens these are.
            limits: What a prompt must fit.
            weights: The model's, looked at before each prompt that comes in.
            processes: Of which this must be the one that leads; None = it is alone.
        """
        self._model, self.limits, self._weights, self._processes = model, limits, weights, processes
        self.tokenizer = model.tokenizer

    @property
    def tokenizer(self) -> Any:
        """Of texts, in and out; None = there are only token ids."""
        return self._tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.__dict__.pop("grammars", None)  # those were of the one before

    @functools.cached_property
    def grammars(self) -> Grammars:
        """As `Engine.grammars`."""
        config = self._model.config
        return Grammars(self.tokenizer, config.vocab_size, config.eos_token_ids)

    def request(self, prompt: Prompt, params: SamplingParams) -> Request:
        """As `Engine.add_request` takes them.

        Raises:
            ValueError: It cannot be served.
        """
        require_type("params", params, SamplingParams, "how many tokens is its max_tokens")
        self._look()
        return build_request(
            "prompt",
            prompt,
            params,
            eos_ids=frozenset(self._model.config.eos_token_ids),
            tokenizer=self.tokenizer,
            limits=self.limits,
            grammars=self.grammars,
        )

    def requests(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        max_tokens: int | Sequence[int] | None,
        *,
        stop_ids: Sequence[int],
        ignore_eos: bool,
    ) -> list[Request]:
        """As `Engine.generate` takes them.

        Raises:
            ValueError: One cannot be served.
        """
        self._look()
        return build_requests(
            prompts,
            max_tokens,
            sampling_params,
            stop_ids=stop_ids,
            ignore_eos=ignore_eos,
            eos_ids=frozenset(self._model.config.eos_token_ids),
            tokenizer=self.tokenizer,
            limits=self.limits,
            grammars=self.grammars,
        )

    def _look(self) -> None:
        must_lead(self._processes)
        self._weights.refresh()
