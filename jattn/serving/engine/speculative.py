"""From what Engine was told of speculative decoding to what does it: everything wrong is found here."""

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
from jattn.serving.engine.sequence import Generation
from jattn.serving.engine.served_model import MEMBERS, ServedModel, as_served
from pallas_kernels.checks import require, require_int, require_positive, unsupported

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


NGRAM = "ngram"


# vLLM's other methods, which are no names of folders.
_OTHERS = ("eagle", "eagle3", "medusa", "mlp_speculator", "mtp", "deepseek_mtp", "suffix", "draft_model")


class Drafter(NamedTuple):
    """Who drafts, checked: a lookup, a model, or neither.

    Attributes:
        num_tokens: Drafts of a row.
        lookup: Drafts on the host.
        model: Drafts on the device.
    """

    num_tokens: int
    lookup: NgramProposer | None = None
    model: ServedModel | None = None

    @property
    def told(self) -> str:
        """What must be the same in all processes, in words."""
        return f"{self.num_tokens} drafts{'' if self.model is None else ' of a model'}"


def as_drafter(speculative: Any, num_tokens: int, model: ServedModel, limits: StepLimits) -> Drafter:
    """Who drafts, loaded where it is a folder.

    Args:
        speculative: As `Engine` has it.
        num_tokens: Drafts of a row.
        model: Whose tokens are drafted.
        limits: Of its steps.

    Raises:
        ValueError: The number is not positive or leaves no room in a step, or the draft model has another
            vocabulary than the model, shorter contexts, or lies on other devices.
        NotImplementedError: It names another of vLLM's methods.
        FileNotFoundError: There is no such folder, or a file of it is missing.
    """
    if speculative is None:
        return Drafter(0)
    require_int(num_speculative_tokens=num_tokens)
    require_positive(num_speculative_tokens=num_tokens)
    most = limits.max_num_batched_tokens
    rule = f"be less than max_num_batched_tokens ({most})"
    require(num_tokens < most, "num_speculative_tokens", rule, num_tokens)
    if isinstance(speculative, NgramProposer):
        return Drafter(num_tokens, lookup=speculative)
    if isinstance(speculative, str) and speculative == NGRAM:
        return Drafter(num_tokens, lookup=NgramProposer())
    if isinstance(speculative, str) and speculative in _OTHERS and not os.path.isdir(speculative):
        way_out = 'Supported: "ngram", an NgramProposer, a model or the folder of one'
        raise unsupported(f"speculative {speculative!r}", "nobody here drafts that way", way_out)
    is_one = isinstance(speculative, str | os.PathLike) or any(hasattr(speculative, n) for n in MEMBERS)
    rule = 'be None, "ngram", an NgramProposer, a model or the folder of one'
    require(is_one, "speculative", rule, repr(speculative))
    mesh = getattr(model, "mesh", None)
    draft = as_served(speculative, mesh)
    is_beside = getattr(draft, "mesh", None) == mesh
    require(is_beside, "speculative", f"lie on the model's mesh ({mesh})", getattr(draft, "mesh", None))
    vocab, longest = model.config.vocab_size, limits.longest(model)
    rule = f"have the model's vocabulary ({vocab} tokens)"
    require(draft.config.vocab_size == vocab, "speculative", rule, f"{draft.config.vocab_size} tokens")
    reach = draft.config.max_position_embeddings
    rule = f"have the engine's {longest} positions (lower max_model_len)"
    require(reach >= longest, "speculative", rule, f"{reach} positions")
    return Drafter(num_tokens, model=draft)


def speculation_of(
    drafter: Drafter,
    model: ServedModel,
    limits: StepLimits,
    *,
    num_blocks: int,
    implementation: str | Sequence[str] | None,
) -> Speculation | None:
    """What an engine asks before each step; None where nobody drafts.

    Args:
        drafter: From as_drafter.
        model: Whose tokens are drafted.
        limits: Of its steps.
        num_blocks: Blocks of each layer's cache.
        implementation: Of a draft model's attention, as in `attend`.
    """
    num_tokens, lookup, draft = drafter
    longest = limits.longest(model)
    if lookup is not None:
        return Speculation(lookup, num_tokens, max_model_len=longest)
    if draft is None:
        return None
    proposer = DraftModel(
        draft,
        num_tokens,
        limits.draft_buckets(model, num_blocks, num_tokens),
        limits.reading_buckets(model, num_blocks),
        num_blocks=num_blocks,
        block_size=limits.block_size,
        implementation=implementation,
    )
    cost = _num_bytes(draft) / max(_num_bytes(model), 1)
    return Speculation(proposer, num_tokens, max_model_len=longest, draft_cost=cost)


def _num_bytes(model: ServedModel) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(nnx.state(model)))
