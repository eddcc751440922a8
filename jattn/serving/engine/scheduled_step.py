"""What the scheduler hands to the runner."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jattn.serving.engine.allocator import Allocator
from jattn.serving.engine.progress import Progress


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


def build_step(
    chunks: list[tuple[Progress, int]],
    blocks: Allocator,
    preempted: Sequence[int],
    *,
    num_draft_tokens: int,
    are_apart: bool,
) -> Step:
    """A step of some requests.

    Args:
        chunks: Each with the number of its new tokens; at least one.
        blocks: Whose, allocated.
        preempted: As in Step.
        num_draft_tokens: Likewise; in each of the numbers.
        are_apart: Decode rows are those with a generated token, be they alone in the step.
    """
    if are_apart:
        is_decode = [not request.is_in_prompt for request, _ in chunks]
    else:
        is_decode = [count == 1 + num_draft_tokens and one.num_computed > 0 for one, count in chunks]
    if not all(is_decode):
        order = sorted(range(len(chunks)), key=lambda i: (not is_decode[i], chunks[i][0].arrival))
        chunks = [chunks[i] for i in order]
    request_ids = tuple([request.request_id for request, _ in chunks])
    tables, *near_tables = blocks.block_tables(request_ids)
    copies, *near_copies = blocks.copies_of(request_ids)
    return Step(
        request_ids=request_ids,
        query_lens=tuple([count for _, count in chunks]),
        seq_lens=tuple([request.num_computed + count for request, count in chunks]),
        block_tables=tables,
        block_copies=copies,
        samples=tuple([request.num_new + num_draft_tokens == count for request, count in chunks]),
        num_decodes=sum(is_decode),
        preempted=tuple(preempted),
        num_draft_tokens=num_draft_tokens,
        near_tables=near_tables[0] if near_tables else None,
        near_copies=near_copies[0] if near_copies else (),
    )
