"""Prompt-lookup drafting: propose the tokens that followed an earlier occurrence of the last n-gram."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, Int32

from jattn.batch.bucket import Bucket
from jattn.serving.engine.proposer import Proposer
from jattn.serving.engine.sampler import SamplingMetadata
from jattn.serving.engine.scheduled_step import Step
from jattn.serving.engine.sequence import SequenceState
from pallas_kernels.checks import require, require_int, require_positive


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
            ValueError: If a length is not a positive int, or the minimum exceeds the maximum.
        """
        sizes = {"prompt_lookup_min": prompt_lookup_min, "prompt_lookup_max": prompt_lookup_max}
        require_int(**sizes)
        require_positive(**sizes)
        rule = f"be at most prompt_lookup_max ({prompt_lookup_max})"
        require(prompt_lookup_min <= prompt_lookup_max, "prompt_lookup_min", rule, prompt_lookup_min)
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
