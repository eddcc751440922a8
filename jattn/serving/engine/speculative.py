"""Speculative decoding: decide in each step whether to draft."""

import math
from collections.abc import Sequence

import jax
from flax import nnx

from jattn.serving.engine.config import ResolvedConfig
from jattn.serving.engine.draft_model import DraftModel
from jattn.serving.engine.proposer import NgramProposer, Proposer
from jattn.serving.engine.sequence import SequenceState
from jattn.serving.engine.served_model import ServedModel
from jattn.serving.engine.step import BALANCE_TOKENS

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
        return sequence.num_prompt_tokens + sequence.num_sampled

    def _max_drafts(self, sequence: SequenceState) -> int:
        """Return how many drafts a sequence can use before it reaches max_tokens."""
        return max(min(self.num_tokens, sequence.max_tokens - sequence.num_sampled - 1), 0)

    def _is_faster_with_drafts(self, num_rows: int, num_accepted: float) -> bool:
        """Return whether rows progress faster with drafts if `num_accepted` drafts are accepted in all."""
        tokens = num_rows * (1 + self.num_tokens)
        cost = max(BALANCE_TOKENS, tokens) / max(BALANCE_TOKENS, num_rows)
        cost += self._draft_cost * self.num_tokens
        return num_rows + num_accepted > num_rows * cost * OVERHEAD


def make_speculation(model: ServedModel, config: ResolvedConfig) -> Speculation:
    """Create the Speculation of an engine with a draft method.

    Args:
        model: Model that verifies the drafts.
        config: Configuration of the engine.
    """
    draft, num_tokens = config.speculative, config.num_speculative_tokens
    assert draft is not None
    if isinstance(draft, NgramProposer):
        return Speculation(draft, num_tokens, max_model_len=config.max_model_len)
    cost = _num_bytes(draft) / max(_num_bytes(model), 1)
    return Speculation(
        DraftModel(draft, config), num_tokens, max_model_len=config.max_model_len, draft_cost=cost
    )


def _num_bytes(model: ServedModel) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(nnx.state(model)))
