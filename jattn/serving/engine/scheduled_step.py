"""What the scheduler hands to the runner."""

import dataclasses
from typing import Optional

import numpy as np

from jattn.serving.engine.prefix_cache import BlockHashes
from pallas_kernels.checks import require


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """What runs next: one row per request, decode rows before prefill rows, each in order of arrival.

    Attributes:
        request_ids: The request of each row.
        query_lens: New tokens of each row.
        seq_lens: Tokens of each row once it has run, the new ones included.
        block_tables: Blocks of each row, enough for seq_lens, and null blocks behind; and where the tokens of
            one will not be read again. int32 [rows, blocks of the longest]; the step's own.
        block_copies: (source, target) blocks to copy before the step runs (`jattn.copy_blocks`): rows that
            would write into a block that others share have one of their own now.
        samples: Whether the row's last token is the last one that its request has: its logits make the next.
        num_decodes: Leading rows with exactly one new token (and its drafts) and context before it.
        preempted: Requests that lost their blocks to make room; they wait to be computed again.
        num_draft_tokens: Drafts of each row behind its new token; `query_lens` and `seq_lens` count them.
        near_tables: As block_tables, of layers that look back less and have blocks of their own; None where
            there are none.
        near_copies: Of these, as block_copies.
    """

    request_ids: tuple[int, ...]
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_tables: np.ndarray
    block_copies: tuple[tuple[int, int], ...]
    samples: tuple[bool, ...]
    num_decodes: int
    preempted: tuple[int, ...]
    num_draft_tokens: int = 0
    near_tables: np.ndarray | None = None
    near_copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_prefills(self) -> int:
        """Rows behind the decode rows."""
        return len(self.request_ids) - self.num_decodes

    @property
    def num_prefill_tokens(self) -> int:
        """New tokens of the prefill rows."""
        return sum(self.query_lens[self.num_decodes :])

    @property
    def num_tokens(self) -> int:
        """New tokens of all rows."""
        return sum(self.query_lens)


@dataclasses.dataclass(eq=False, slots=True)
class Progress:
    """A request of the scheduler.

    Its first num_published blocks others can find; none more where its keys are those of old weights.

    Attributes:
        request_id: Whose.
        arrival: Grows with each request.
        num_tokens: Tokens that it has, prompt and generated.
        hashes: Of them, as far as the host knows them; None = it shares nothing.
        num_computed: How many of them are cached.
        room: How many its blocks hold, none of which it shares from num_computed on; 0 = to be asked.
        num_published: Full blocks of them that others can find.
        is_stale: Some are of old weights.
        completions: Requests of the same prompt that wait for this one to compute it.
        parent: The request that it waits for itself.
        num_prompt_tokens: Those of its tokens that it came with.
    """

    request_id: int
    arrival: int
    num_tokens: int
    hashes: BlockHashes | None
    num_computed: int = 0
    room: int = 0
    num_published: int = 0
    is_stale: bool = False
    completions: list["Progress"] = dataclasses.field(default_factory=list)
    parent: Optional["Progress"] = None
    num_prompt_tokens: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_tokens

    @property
    def num_shared(self) -> int:
        """Tokens of its prompt that completions need not compute: not the last, whose logits each needs."""
        return self.num_prompt_tokens - 1

    @property
    def is_in_prompt(self) -> bool:
        """Whether a token of its prompt comes next."""
        return self.num_computed < self.num_prompt_tokens

    @property
    def num_alike(self) -> int:
        """Tokens of one kind that come next: the rest of its prompt, or one that was generated."""
        return self.num_prompt_tokens - self.num_computed if self.is_in_prompt else 1

    @property
    def num_new(self) -> int:
        """Tokens that are to be computed."""
        return self.num_tokens - self.num_computed

    def wait_for(self, parent: "Progress", *, is_begun: bool) -> None:
        """Has it wait for another one's prompt, which is its own.

        Args:
            parent: The other one.
            is_begun: Some of its prompt is computed.

        Raises:
            ValueError: It has begun, waits for a third, or is of another length. Nothing has changed then.
        """
        is_early = not is_begun and parent.num_computed == 0 and parent.parent is None
        rule = "name a request whose prompt is not computed yet"
        require(is_early, "parent_id", rule, parent.request_id)
        is_same, rule = self.num_tokens == parent.num_tokens, f"be its parent's ({parent.num_tokens})"
        require(is_same, "num_prompt_tokens", rule, self.num_tokens)
        self.parent = parent
        parent.completions.append(self)

    def heir(self) -> "Progress":
        """The first completion that waits for this one, which others wait for from now on."""
        heir, *others = self.completions
        heir.parent, heir.completions, self.completions = None, others, []
        for request in others:
            request.parent = heir
        return heir

    def forget(self) -> None:
        """It has no blocks any more."""
        self.num_computed, self.room, self.is_stale = 0, 0, False


def by_arrival(request: Progress) -> int:
    """What queues are ordered by."""
    return request.arrival
