"""What the scheduler hands to the runner."""

import dataclasses

import numpy as np


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
