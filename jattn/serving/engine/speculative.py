"""Speculative decoding: validate the draft method, and decide in each step whether to draft."""

import math
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from flax import nnx

from jattn.serving.engine.config import StepLimits
from jattn.serving.engine.draft_model import DraftModel
from jattn.serving.engine.ngram_proposer import NgramProposer
from jattn.serving.engine.proposer import BALANCE_TOKENS, Proposer
from jattn.serving.engine.sequence import SequenceState
from jattn.serving.engine.served_model import MEMBERS, ServedModel, resolve_model
from pallas_kernels.checks import require, require_int, require_positive, unsupported

RESUME_HITS = 3  # drafts: a first step with drafts costs as much as 3 steps (see MAX_PAUSE)


OVERHEAD = 1.1  # relative cost of a step with drafts: it cannot overlap the next one's preparation


class Speculation:
    """Decides before each step whether it has drafts, from the acceptance of earlier drafts.

    A step with drafts has no prompts, and all rows have the same number of drafts; missing ones are padded.
    """

    def __init__(
        self, proposer: Proposer, num_tokens: int, *, max_model_len: int, draft_cost: float = 0.0
    ) -> None:
        """Start without counts.

        Args:
            proposer: The draft method.
            num_tokens: Number of drafts per row.
            max_model_len: Maximum context length in tokens.
            draft_cost: Time to draft one token, relative to the time of a step.
        """
        self.proposer, self.num_tokens = proposer, num_tokens
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self._max_model_len, self._draft_cost = max_model_len, draft_cost

    def proposes(self, sequences: Sequence[SequenceState]) -> bool:
        """Return whether a step of these sequences should have drafts, and store how many each has.

        While the last tokens are in flight, the result is an estimate that decides whether to wait for them.
        """
        if any(self._length(sequence) + self.num_tokens > self._max_model_len for sequence in sequences):
            return False
        # The sampler has no masks for positions after a draft, so sequences with a mask are excluded.
        unmasked = [sequence for sequence in sequences if sequence.mask is None]
        candidates = [sequence for sequence in unmasked if self._should_draft(sequence)]
        max_expected = math.fsum(
            sequence.draft_state.expected_accepted(self._max_drafts(sequence)) for sequence in candidates
        )
        if not self._is_faster_with_drafts(len(sequences), max_expected):
            return False  # Not even the maximum number of drafts pays off.
        for sequence in sequences:
            sequence.draft_state.num_drafted = 0
        expected = 0.0
        for sequence in candidates:
            sequence.draft_state.num_drafted = self.proposer.find_drafts(sequence, self._max_drafts(sequence))
            expected += sequence.draft_state.expected_accepted(sequence.draft_state.num_drafted)
        return self._is_faster_with_drafts(len(sequences), expected)

    def _should_draft(self, sequence: SequenceState) -> bool:
        """Return whether to draft for a sequence.

        After rejected lookup drafts, later drafts are only compared with the generated tokens, not verified.

        A draft is accepted if the model samples it, and drafts do not change what the model samples. So the
        later tokens show which drafts would have been accepted.

        Source: after the ghost entries of ARC (Megiddo and Modha, 2003), which tell which entries a cache
        would have hit; the growing pause is exponential back-off.
        """
        draft_state = sequence.draft_state
        if not (draft_state.num_rejections and self.proposer.is_lookup):
            return draft_state.paused_until <= self._length(sequence)
        num_matching, is_final = draft_state.count_matching_drafts(sequence.token_ids)
        if num_matching >= min(RESUME_HITS, self.num_tokens):
            draft_state.resume(num_matching)
            return True
        if is_final:
            draft_state.paused_drafts_start = len(sequence.token_ids)
            self.proposer.find_drafts(sequence, self.num_tokens)
        return False

    def can_pay(self, num_rows: int) -> bool:
        """Return whether drafting for `num_rows` rows would be faster if all drafts were accepted."""
        return num_rows > 0 and self._is_faster_with_drafts(num_rows, float(num_rows * self.num_tokens))

    def record(self, sequence: SequenceState, num_accepted: int) -> None:
        """Record how many drafts of a row are accepted, before its tokens are appended."""
        num_drafted = sequence.draft_state.num_drafted
        if not num_drafted:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
        self.num_accepted_tokens += num_accepted
        # The draft model did not process the last draft.
        sequence.draft_state.num_read += min(num_accepted, self.num_tokens - 1)
        sequence.draft_state.record(num_accepted, self._length(sequence))

    def record_unused(self, sequences: Sequence[SequenceState]) -> None:
        """Record that the engine waited for the tokens of `sequences`, but no drafts were found."""
        for sequence in sequences:
            sequence.draft_state.record(0, self._length(sequence))

    def _length(self, sequence: SequenceState) -> int:
        return sequence.num_prompt_tokens + sequence.num_requested

    def _max_drafts(self, sequence: SequenceState) -> int:
        """Return how many drafts a sequence can use before it reaches max_tokens."""
        return max(min(self.num_tokens, sequence.max_tokens - sequence.num_requested - 1), 0)

    def _is_faster_with_drafts(self, num_rows: int, num_accepted: float) -> bool:
        """Return whether rows progress faster with drafts if `num_accepted` drafts are accepted in all."""
        tokens = num_rows * (1 + self.num_tokens)
        cost = max(BALANCE_TOKENS, tokens) / max(BALANCE_TOKENS, num_rows)
        cost += self._draft_cost * self.num_tokens
        return num_rows + num_accepted > num_rows * cost * OVERHEAD


NGRAM = "ngram"


# vLLM's other methods, which are not folder names.
_UNSUPPORTED_METHODS = (
    "eagle",
    "eagle3",
    "medusa",
    "mlp_speculator",
    "mtp",
    "deepseek_mtp",
    "suffix",
    "draft_model",
)


class DraftConfig(NamedTuple):
    """A validated draft method: a lookup, a model, or neither.

    Attributes:
        num_tokens: Number of drafts per row.
        lookup: Proposer on the host.
        model: Draft model on the device.
    """

    num_tokens: int
    lookup: NgramProposer | None = None
    model: ServedModel | None = None

    @property
    def description(self) -> str:
        """Description of the values that must be equal in all processes."""
        return f"{self.num_tokens} drafts{'' if self.model is None else ' of a model'}"


def make_draft_config(
    speculative: Any, num_tokens: int, model: ServedModel, limits: StepLimits
) -> DraftConfig:
    """Validate the draft method, and load the draft model if it is a folder.

    Args:
        speculative: Draft method; see `Engine`.
        num_tokens: Number of drafts per row.
        model: Model that verifies the drafts.
        limits: Limits of the model's steps.

    Raises:
        ValueError: If num_tokens is not positive or does not fit a step, or the draft model has another
            vocabulary, a shorter context or another mesh than the model.
        NotImplementedError: If the method is one of vLLM's that jattn does not support.
        FileNotFoundError: If the folder or one of its files does not exist.
    """
    if speculative is None:
        return DraftConfig(0)
    require_int(num_speculative_tokens=num_tokens)
    require_positive(num_speculative_tokens=num_tokens)
    max_tokens_per_step = limits.max_num_batched_tokens
    rule = f"be less than max_num_batched_tokens ({max_tokens_per_step})"
    require(num_tokens < max_tokens_per_step, "num_speculative_tokens", rule, num_tokens)
    if isinstance(speculative, NgramProposer):
        return DraftConfig(num_tokens, lookup=speculative)
    if isinstance(speculative, str) and speculative == NGRAM:
        return DraftConfig(num_tokens, lookup=NgramProposer())
    if (
        isinstance(speculative, str)
        and speculative in _UNSUPPORTED_METHODS
        and not os.path.isdir(speculative)
    ):
        supported = 'Pass "ngram", an NgramProposer, a model or the folder of one'
        raise unsupported(f"speculative={speculative!r}", "this draft method is not supported", supported)
    is_model = isinstance(speculative, str | os.PathLike) or any(hasattr(speculative, n) for n in MEMBERS)
    rule = 'be None, "ngram", an NgramProposer, a model or the folder of one'
    require(is_model, "speculative", rule, repr(speculative))
    mesh = getattr(model, "mesh", None)
    draft = resolve_model(speculative, mesh)
    draft_mesh = getattr(draft, "mesh", None)
    if draft_mesh != mesh:
        raise ValueError(
            f"The draft model is on the mesh {draft_mesh}, but the model is on {mesh}. "
            "Load the draft model on the model's mesh."
        )
    vocab, max_context_len = model.config.vocab_size, limits.max_context_len(model)
    if draft.config.vocab_size != vocab:
        raise ValueError(
            f"The draft model has a vocabulary of {draft.config.vocab_size} tokens, but the model has "
            f"{vocab}. Pass a draft model with the model's vocabulary."
        )
    draft_max_len = draft.config.max_position_embeddings
    if draft_max_len < max_context_len:
        raise ValueError(
            f"The draft model has {draft_max_len} positions, but the engine has {max_context_len}. "
            "Reduce max_model_len."
        )
    return DraftConfig(num_tokens, model=draft)


def make_speculation(
    draft_config: DraftConfig,
    model: ServedModel,
    limits: StepLimits,
    *,
    num_blocks: int,
    implementation: str | Sequence[str] | None,
) -> Speculation | None:
    """Create the engine's Speculation; None without a draft method.

    Args:
        draft_config: Result of make_draft_config.
        model: Model that verifies the drafts.
        limits: Limits of the model's steps.
        num_blocks: Number of blocks of each layer's cache.
        implementation: Attention implementation of a draft model; see `attend`.
    """
    num_tokens, lookup, draft = draft_config
    max_context_len = limits.max_context_len(model)
    if lookup is not None:
        return Speculation(lookup, num_tokens, max_model_len=max_context_len)
    if draft is None:
        return None
    proposer = DraftModel(
        draft,
        num_tokens,
        limits.draft_buckets(model, num_blocks, num_tokens),
        limits.draft_prefill_buckets(model, num_blocks),
        num_blocks=num_blocks,
        block_size=limits.block_size,
        implementation=implementation,
    )
    cost = _num_bytes(draft) / max(_num_bytes(model), 1)
    return Speculation(proposer, num_tokens, max_model_len=max_context_len, draft_cost=cost)


def _num_bytes(model: ServedModel) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(nnx.state(model)))
