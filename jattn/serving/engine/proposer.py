"""The interface of draft methods, and the buckets of steps with drafts."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Int32

from jattn.batch.bucket import Bucket
from jattn.serving.engine.sampler import SamplingMetadata
from jattn.serving.engine.scheduled_step import Step
from jattn.serving.engine.sequence import SequenceState
from jattn.serving.engine.warmup import WarmupRuns

# Number of tokens from which a step's matrix products take longer than reading the weights: the ratio of
# 16-bit operations to bytes per second of an H200, 990e12 / 4.8e12, at less than the full rate.
BALANCE_TOKENS = 256


class Proposer:
    """A draft method. It stores its state of a sequence in `SequenceState.draft_state`.

    Attributes:
        is_lookup: Whether drafts are computed on the host and stored in `DraftState.drafts`, so that they can
            be compared with later tokens without being verified.
        runs: Warm-up records of its executables.
    """

    is_lookup = False
    runs: Sequence[WarmupRuns] = ()

    @property
    def num_compiles(self) -> int:
        """Number of compiled executables."""
        return 0

    def find_drafts(self, sequence: SequenceState, num_tokens: int) -> int:
        """Return how many drafts are available for a sequence, at most `num_tokens`.

        Called often; host only.
        """
        raise NotImplementedError

    def prepare(
        self,
        step: Step,
        sequences: Sequence[SequenceState],
        bucket: Bucket,
        sampling: SamplingMetadata,
        num_generated: Any,
    ) -> Any:
        """Return the argument of `start` for a step: a pytree that can be sent to other processes.

        Args:
            step: The step; all rows have the same number of drafts.
            sequences: Sequence of each row. Those with num_drafted 0 need no drafts.
            bucket: Bucket of the step.
            sampling: Sampling parameters of the bucket's rows.
            num_generated: Number of generated tokens of the bucket's rows; see `sample`.
        """
        raise NotImplementedError

    def start(self, prepared: Any) -> Int32[Array, " tokens"]:
        """Return the tokens of a step, `1 + k` per row: its last token and its drafts. Does not wait.

        Args:
            prepared: Result of `prepare`, in the order of the steps.
        """
        raise NotImplementedError

    def copy_blocks(self, pairs: Any) -> None:
        """Copy cache blocks, given as (source, target) pairs, as the engine does in its own caches."""

    def reset(self) -> None:
        """Create new KV caches, because a failed call may have consumed the old ones."""

    def warm_up(self, graph_index: int, bucket: Bucket) -> None:
        """Run an executable of `runs[graph_index]` on an empty batch, and wait for it."""

    def precompile(self, *, progress: bool, wait: bool) -> None:
        """Compile all executables of the proposer; see `DecodeGraphs.precompile`."""


def draft_buckets(max_num_seqs: int, num_tokens: int, max_blocks: int) -> tuple[Bucket, ...]:
    """Return the buckets of steps with drafts: powers of two rows, as long as drafts can pay off."""
    max_rows = min(max_num_seqs, BALANCE_TOKENS)
    rows = [1 << i for i in range((max_rows - 1).bit_length() + 1)]
    return tuple(Bucket(max_decodes=n, decode_query_len=1 + num_tokens, max_blocks=max_blocks) for n in rows)
