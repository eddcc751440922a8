"""Speculative decoding: when the engine drafts, for whom, and what came of it."""

import math
from collections.abc import Sequence

from jattn.batch.bucket import Bucket
from jattn.serving.engine.generation import Generation
from jattn.serving.engine.proposer import Proposer

# Tokens of a step from which its matrix products take longer than reading the weights: 16-bit operations over
# bytes a second of an H200, 990e12 / 4.8e12, and less than all of the former.
BALANCE_TOKENS = 256
WAKING_HITS = 3  # drafts: a first step with some takes as long as so many without (MAX_SLEEP's rows)
OVERHEAD = 1.1  # of a step with drafts over one without: the next is not prepared while it runs


class Speculation:
    """Decides before each step whether it has drafts, by what the requests' drafts have brought so far.

    A step with drafts has no prompts, and all its rows have equally many: rows that lack some are padded.
    """

    def __init__(
        self, proposer: Proposer, num_tokens: int, *, max_model_len: int, draft_cost: float = 0.0
    ) -> None:
        """Starts without counts.

        Args:
            proposer: Who drafts.
            num_tokens: Drafts of a row.
            max_model_len: Positions that a request can have.
            draft_cost: Time of drafting one token over that of a step.
        """
        self.proposer, self.num_tokens = proposer, num_tokens
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self._max_model_len, self._draft_cost = max_model_len, draft_cost

    def proposes(self, generations: Sequence[Generation]) -> bool:
        """Whether a step of these should have drafts; notes how many each of them has.

        Called with the last tokens still on their way, the answer is a guess, by which to wait for them.
        """
        if any(self._length(one) + self.num_tokens > self._max_model_len for one in generations):
            return False
        # What may follow a draft in a text of a given form, nobody has told the sampler.
        free = [one for one in generations if one.mask is None]
        awake = [one for one in free if self._is_awake(one)]
        best = math.fsum(one.drafting.expected(self._most(one)) for one in awake)
        if not self._pays(len(generations), best):
            return False  # not even if all of them had as many drafts as can be
        for one in generations:
            one.drafting.num_drafted = 0
        expected = 0.0
        for one in awake:
            one.drafting.num_drafted = self.proposer.look(one, self._most(one))
            expected += one.drafting.expected(one.drafting.num_drafted)
        return self._pays(len(generations), expected)

    def _is_awake(self, generation: Generation) -> bool:
        """Whether to draft for a request. Of lookups that were wrong the next ones are watched, not run.

        A draft stays where the model picks it, and what it picks no draft changes: the tokens that come say
        what would have been accepted.

        Source: after the ghost entries of ARC (Megiddo and Modha, 2003), which tell what a cache would have
        hit; the sleep that grows is exponential back-off.
        """
        drafting = generation.drafting
        if not (drafting.num_misses and self.proposer.is_lookup):
            return drafting.sleeps_until <= self._length(generation)
        hits, is_over = drafting.watched(generation.token_ids)
        if hits >= min(WAKING_HITS, self.num_tokens):
            drafting.wake(hits)
            return True
        if is_over:
            drafting.watched_from = len(generation.token_ids)
            self.proposer.look(generation, self.num_tokens)
        return False

    def can_pay(self, num_rows: int) -> bool:
        """Whether so many rows could gain, were all drafts accepted."""
        return num_rows > 0 and self._pays(num_rows, float(num_rows * self.num_tokens))

    def note(self, generation: Generation, num_accepted: int) -> None:
        """Takes in how many drafts of a row stay, before its tokens are handed out."""
        drafted = generation.drafting.num_drafted
        if not drafted:
            return
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += num_accepted
        generation.drafting.num_read += min(num_accepted, self.num_tokens - 1)  # the last draft was not read
        generation.drafting.note(num_accepted, self._length(generation))

    def note_none(self, generations: Sequence[Generation]) -> None:
        """Notes that these were waited for in vain."""
        for one in generations:
            one.drafting.note(0, self._length(one))

    def _length(self, generation: Generation) -> int:
        return generation.num_prompt_tokens + generation.num_asked_for

    def _most(self, generation: Generation) -> int:
        """How many drafts a request can use: the token behind the last of them is its last at the latest."""
        return max(min(self.num_tokens, generation.max_tokens - generation.num_asked_for - 1), 0)

    def _pays(self, num_rows: int, num_accepted: float) -> bool:
        """Whether so many rows come along faster with drafts, of which so many are accepted in all."""
        tokens = num_rows * (1 + self.num_tokens)
        cost = max(BALANCE_TOKENS, tokens) / max(BALANCE_TOKENS, num_rows)
        cost += self._draft_cost * self.num_tokens
        return num_rows + num_accepted > num_rows * cost * OVERHEAD


def draft_buckets(max_num_seqs: int, num_tokens: int, max_blocks: int) -> tuple[Bucket, ...]:
    """The buckets of steps with drafts: powers of two rows, as many as drafts can pay for at most."""
    most = min(max_num_seqs, BALANCE_TOKENS)
    rows = [1 << i for i in range((most - 1).bit_length() + 1)]
    return tuple(Bucket(max_decodes=n, decode_query_len=1 + num_tokens, max_blocks=max_blocks) for n in rows)
