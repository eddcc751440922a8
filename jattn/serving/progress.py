"""How far a request is."""

import dataclasses
from typing import Optional

from jattn.serving.prefix_cache import BlockHashes


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
        num_shared: Tokens of its prompt that completions need not compute: not the last, whose logits are
            each one's own.
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
    num_shared: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.num_shared = self.num_tokens - 1

    @property
    def num_new(self) -> int:
        """Tokens that are to be computed."""
        return self.num_tokens - self.num_computed

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
