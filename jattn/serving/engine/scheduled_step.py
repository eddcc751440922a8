"""The scheduler's output (`Step`) and its record of a request."""

import dataclasses
from typing import Optional

import numpy as np

from jattn.serving.engine.block_manager import BlockHashes
from pallas_kernels.checks import require


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """The requests of one step: one row per request, decode rows first, each group in order of arrival.

    Attributes:
        request_ids: Request of each row.
        query_lens: Number of new tokens of each row.
        seq_lens: Length of each row after the step, including its new tokens.
        block_tables: Block ids of each row, int32 [rows, max blocks per row]; enough for seq_lens. Unused
            entries and blocks that are not read any more are the null block. The step owns the array.
        block_copies: (source, target) blocks to copy before the step runs (`jattn.copy_blocks`), for rows
            that would otherwise write into a shared block.
        samples: Whether the logits of a row's last token give its request's next token.
        num_decodes: Number of leading rows with one new token (plus draft tokens) and earlier context.
        preempted: Requests that lost their blocks and wait to be recomputed.
        num_draft_tokens: Number of draft tokens per row, included in query_lens and seq_lens.
        sliding_window_tables: Block tables of the sliding-window layers' own blocks, like block_tables; None
            if all layers share block_tables.
        sliding_window_copies: Blocks to copy in the sliding-window layers, like block_copies.
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
    sliding_window_tables: np.ndarray | None = None
    sliding_window_copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_prefills(self) -> int:
        """Number of rows after the decode rows."""
        return len(self.request_ids) - self.num_decodes

    @property
    def num_prefill_tokens(self) -> int:
        """Number of new tokens of the prefill rows."""
        return sum(self.query_lens[self.num_decodes :])

    @property
    def num_tokens(self) -> int:
        """Number of new tokens of all rows."""
        return sum(self.query_lens)


@dataclasses.dataclass(eq=False, slots=True)
class ScheduledRequest:
    """The scheduler's record of a request.

    Attributes:
        request_id: Identifier of the request.
        arrival: Arrival number, increasing with each request.
        num_tokens: Number of prompt and generated tokens.
        hashes: Hashes of the full blocks whose tokens the host knows. None: no blocks are shared.
        num_computed: Number of tokens in the KV cache.
        token_capacity: Number of tokens that the request's blocks hold without a copy of a shared block; 0 if
            this must be recomputed.
        num_cached_blocks: Number of leading full blocks that are cached for other requests.
        is_stale: Whether some keys were computed with old weights, so that no further block is cached.
        completions: Requests with the same prompt that wait for this one to compute it.
        parent: Request whose prompt this one waits for; None if it does not wait.
        num_prompt_tokens: Number of prompt tokens.
    """

    request_id: int
    arrival: int
    num_tokens: int
    hashes: BlockHashes | None
    num_computed: int = 0
    token_capacity: int = 0
    num_cached_blocks: int = 0
    is_stale: bool = False
    completions: list["ScheduledRequest"] = dataclasses.field(default_factory=list)
    parent: Optional["ScheduledRequest"] = None
    num_prompt_tokens: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_tokens

    @property
    def num_shared_prompt_tokens(self) -> int:
        """Number of prompt tokens that parallel completions share.

        Each completion computes the last prompt token itself, because it samples from that token's logits.
        """
        return self.num_prompt_tokens - 1

    @property
    def is_in_prompt(self) -> bool:
        """True if the next token is a prompt token."""
        return self.num_computed < self.num_prompt_tokens

    @property
    def num_next_same_type(self) -> int:
        """Number of next tokens of the same type: the remaining prompt tokens, or one generated token."""
        return self.num_prompt_tokens - self.num_computed if self.is_in_prompt else 1

    @property
    def num_new(self) -> int:
        """Number of tokens that are not computed yet."""
        return self.num_tokens - self.num_computed

    def wait_for(self, parent: "ScheduledRequest", *, is_begun: bool) -> None:
        """Wait until `parent` has computed the prompt, which both requests share.

        Args:
            parent: Request with the same prompt.
            is_begun: Whether some of the parent's prompt is computed.

        Raises:
            ValueError: If the parent has started, waits for another request itself, or has another prompt
                length. Nothing is changed then.
        """
        if is_begun or parent.num_computed > 0 or parent.parent is not None:
            raise ValueError(
                f"Request {parent.request_id} cannot be a parent: its prompt is already computed in part, or "
                "it has a parent itself. Add the completions of a prompt together."
            )
        has_parent_length = self.num_tokens == parent.num_tokens
        rule = f"equal the parent's ({parent.num_tokens})"
        require(has_parent_length, "num_prompt_tokens", rule, self.num_tokens)
        self.parent = parent
        parent.completions.append(self)

    def promote_completion(self) -> "ScheduledRequest":
        """Return the first waiting completion, and make it the parent of the others."""
        first, *others = self.completions
        first.parent, first.completions, self.completions = None, others, []
        for request in others:
            request.parent = first
        return first

    def forget(self) -> None:
        """Reset the progress, because the request has no blocks any more."""
        self.num_computed, self.token_capacity, self.is_stale = 0, 0, False


def by_arrival(request: ScheduledRequest) -> int:
    """Return the sort key of the queues."""
    return request.arrival
