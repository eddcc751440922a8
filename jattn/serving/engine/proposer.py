"""Draft methods: their interface, and prompt lookup, which proposes what followed the last n-gram before."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Int, Int32

from jattn.batch.bucket import Bucket
from jattn.serving.engine.sampler import SamplingMetadata
from jattn.serving.engine.scheduled_step import Step
from jattn.serving.engine.sequence import SequenceState
from jattn.serving.engine.step import WarmupRuns
from pallas_kernels.checks import require


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


class NgramProposer(Proposer):
    """Drafts the tokens after the first occurrence of the longest n-gram that ends a request's tokens.

    Source: vLLM V1 `NgramProposer`.
    """

    is_lookup = True

    def __init__(self, *, prompt_lookup_min: int = 3, prompt_lookup_max: int = 5) -> None:
        """Set the n-gram lengths. No state of requests is stored.

        Args:
            prompt_lookup_min: Minimum length of an n-gram. Short n-grams match by chance, and rejected drafts
                cost time.
            prompt_lookup_max: Maximum length of an n-gram.

        Raises:
            ValueError: If the minimum is not positive or exceeds the maximum.
        """
        rule = f"be in [1, prompt_lookup_max ({prompt_lookup_max})]"
        require(0 < prompt_lookup_min <= prompt_lookup_max, "prompt_lookup_min", rule, prompt_lookup_min)
        self.prompt_lookup_min, self.prompt_lookup_max = prompt_lookup_min, prompt_lookup_max

    def propose(self, token_ids: Int[np.ndarray, " tokens"], num_tokens: int) -> list[int]:
        """Return at most `num_tokens` draft tokens; empty if no n-gram matches.

        All tokens are compared with the last one; earlier tokens are only compared where that matches.

        Args:
            token_ids: Prompt and generated tokens of the request.
            num_tokens: Maximum number of drafts.
        """
        last_index = len(token_ids) - 1
        ends = (
            np.flatnonzero(token_ids[: max(last_index, 0)] == token_ids[-1])
            if last_index > 0
            else np.zeros(0, np.intp)
        )
        ngram_len, longer = 1, ends  # ends of matching n-grams, and of longer ones
        while longer.size and ngram_len < self.prompt_lookup_max:
            longer = longer[longer >= ngram_len]
            longer = longer[token_ids[longer - ngram_len] == token_ids[last_index - ngram_len]]
            if longer.size:
                ends, ngram_len = longer, ngram_len + 1
        if not ends.size or ngram_len < self.prompt_lookup_min:
            return []
        first = int(ends[0]) + 1
        return token_ids[first : first + num_tokens].tolist()

    def find_drafts(self, sequence: SequenceState, num_tokens: int) -> int:
        """Look up drafts, store them in the sequence's draft state, and return their number."""
        draft_state = sequence.draft_state
        draft_state.drafts = self.propose(draft_state.tokens.sync(sequence.token_ids), num_tokens)
        return len(draft_state.drafts)

    def prepare(
        self,
        step: Step,
        sequences: Sequence[SequenceState],
        bucket: Bucket,
        sampling: SamplingMetadata,
        num_generated: Any,
    ) -> Int32[np.ndarray, " tokens"]:
        """Return the tokens of the step: the last token and the drafts of each row."""
        ids = np.zeros((bucket.max_decodes, bucket.decode_query_len), np.int32)
        for row, sequence in enumerate(sequences):
            drafts = sequence.draft_state.drafts[: sequence.draft_state.num_drafted]
            ids[row, : 1 + len(drafts)] = [sequence.token_ids[-1], *drafts]
        return ids.reshape(-1)

    def start(self, prepared: Any) -> Any:
        """Return the prepared tokens."""
        return prepared
