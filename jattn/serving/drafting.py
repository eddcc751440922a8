"""What drafting remembers of one request: whether its drafts are worth the time."""

import dataclasses

from jattn.serving.token_buffer import TokenBuffer

MAX_SLEEP = 64  # tokens: 1.6 % of them drafted for in vain where nothing is ever accepted
LEAST_HOPE = 1.0  # drafts accepted that a request is credited with when it tries again


@dataclasses.dataclass(eq=False)
class Drafting:
    """Of one generation.

    Attributes:
        num_drafted: Drafts that it has now and can use; what pads its row does not count.
        drafts: These, where the host knows them.
        hope: How many of its drafts are accepted of late; None = it has had none.
        num_misses: How often none was, since one was.
        sleeps_until: It is not drafted for before it has so many tokens.
        tokens: Its tokens, for who looks at them all.
        num_read: Its tokens that a draft model has keys and values of.
    """

    num_drafted: int = 0
    drafts: list[int] = dataclasses.field(default_factory=list)
    hope: float | None = None
    num_misses: int = 0
    sleeps_until: int = 0
    tokens: TokenBuffer = dataclasses.field(default_factory=TokenBuffer)
    num_read: int = 0

    def expected(self, num_drafts: int) -> float:
        """How many of so many drafts will be accepted, half of them where nothing is known."""
        hope = num_drafts / 2 if self.hope is None else max(self.hope, LEAST_HOPE)
        return float(min(hope, num_drafts))

    def note(self, num_accepted: int, num_tokens: int) -> None:
        """Takes in how many drafts were accepted, the request having so many tokens now.

        One whose drafts are all rejected sleeps for 2 tokens, then 4, 8, ... up to MAX_SLEEP.
        """
        self.hope = float(num_accepted) if self.hope is None else (self.hope + num_accepted) / 2
        self.num_misses = 0 if num_accepted else self.num_misses + 1
        if self.num_misses:
            self.sleeps_until = num_tokens + min(2**self.num_misses, MAX_SLEEP)
