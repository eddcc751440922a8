"""What a step brings its requests."""

from collections.abc import Sequence
from typing import NamedTuple

from jattn.serving.outputs import Logprobs


class NewTokens(NamedTuple):
    """What a step brought one of its requests.

    Attributes:
        request_id: Whose.
        token_ids: Its next tokens: none where the row made none, several where drafts of it stay.
        logprobs: Of each of them, None where not asked for; None = nobody asked.
        prompt_logprobs: Of the tokens of the prompt from position prompt_start on, where asked for.
        prompt_start: Position of the first of them.
        is_verified: The step had drafts.
    """

    request_id: int
    token_ids: Sequence[int]
    logprobs: Sequence[Logprobs | None] | None = None
    prompt_logprobs: Sequence[Logprobs] = ()
    prompt_start: int = 0
    is_verified: bool = False
