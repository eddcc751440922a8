"""What drafting remembers of one request: whether its drafts are worth the time."""

import dataclasses
from collections.abc import Sequence

from jattn.serving.engine.token_buffer import TokenBuffer

# Tokens. To wait for the last step, draft, and begin anew without the drafts took an 8B-wide model on an H200
# 14 ms, three steps (rows `drafts`): 5 times in 512 tokens cost 3 %, 12 times, as with 64 here, cost 7.
MAX_SLEEP = 256
LEAST_HOPE = 1.0  # drafts accepted that a request is credited with when it tries again


@dataclasses.dataclass(eq=False)
class Drafting:
    """Of one generation.

    Attributes:
        num_drafted: Drafts that it has now and can use; what pads its row does not count.
        drafts: These, where the host knows them; of one that sleeps, what it would have had.
        hope: How many of its drafts are accepted of late; None = it has had none.
        num_misses: How often none was, since one was.
        sleeps_until: It is not drafted for before it has so many tokens.
        watched_from: Tokens known when `drafts` were looked up for one that sleeps.
        tokens: Its tokens, for who looks at them all.
        num_read: Its tokens that a draft model has keys and values of.
    """

    num_drafted: int = 0
    drafts: list[int] = dataclasses.field(default_factory=list)
    hope: float | None = None
    num_misses: int = 0
    sleeps_until: int = 0
    watched_from: int = 0
    tokens: TokenBuffer = dataclasses.field(default_factory=TokenBuffer)
    num_read: int = 0

    def expected(self, num_drafts: int) -> float:
        """How many of so many drafts will be accepted, half of them where nothing is known."""
        hope = num_drafts / 2 if self.hope is None else max(self.hope, LEAST_HOPE)
        return float(min(hope, num_drafts))

    def note(self, num_accepted: int, num_tokens: int) -> None:
        """Takes in how many drafts were accepted, the request having so many tokens now.

        One whose drafts are all rejected sleeps for 4 tokens, then 16, 64, ... up to MAX_SLEEP.
        """
        self.hope = float(num_accepted) if self.hope is None else (self.hope + num_accepted) / 2
        self.num_misses = 0 if num_accepted else self.num_misses + 1
        if self.num_misses:
            self.sleeps_until = num_tokens + min(4**self.num_misses, MAX_SLEEP)
            self.drafts = []  # what is watched begins anew

    def watched(self, token_ids: Sequence[int]) -> tuple[int, bool]:
        """How many of the watched drafts came, and whether that is known of all that matter."""
        end = self.watched_from + len(self.drafts)
        came = token_ids[self.watched_from : end]
        hits = next((i for i, token in enumerate(came) if token != self.drafts[i]), len(came))
        return hits, hits < len(came) or len(came) == len(self.drafts)

    def wake(self, num_hits: int) -> None:
        """Has the request drafted for again: so many drafts would have been accepted."""
        self.hope, self.num_misses, self.sleeps_until = float(num_hits), 0, 0
