"""Who drafts tokens for the model to verify."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Array, Int32

from jattn.batch.bucket import Bucket
from jattn.serving.engine.sampler import SamplingMetadata
from jattn.serving.engine.scheduled_step import Step
from jattn.serving.engine.sequence import Generation
from jattn.serving.engine.warmup import Runs

# Tokens of a step from which its matrix products take longer than reading the weights: 16-bit operations over
# bytes a second of an H200, 990e12 / 4.8e12, and less than all of the former.
BALANCE_TOKENS = 256


class Proposer:
    """Drafts tokens of requests; what it keeps of one is in its `Generation.drafting`.

    Attributes:
        is_lookup: `look` leaves the drafts in `Drafting.drafts`, and the device has no part in them: they can
            be compared with the tokens that come without ever being run.
        runs: Of its executables.
    """

    is_lookup = False
    runs: Sequence[Runs] = ()

    @property
    def num_compiles(self) -> int:
        """Executables compiled so far."""
        return 0

    def look(self, generation: Generation, num_tokens: int) -> int:
        """How many drafts it has for a request now, `num_tokens` at most. Host only, and asked often."""
        raise NotImplementedError

    def prepare(
        self,
        step: Step,
        generations: Sequence[Generation],
        bucket: Bucket,
        sampling: SamplingMetadata,
        num_generated: Any,
    ) -> Any:
        """What `start` is given for a step: a pytree, which other processes can be sent.

        Args:
            step: All rows with k drafts.
            generations: Of its rows; those with num_drafted 0 want none.
            bucket: Its bucket.
            sampling: Of the bucket's rows.
            num_generated: Of the bucket's rows, as in `sample`.
        """
        raise NotImplementedError

    def start(self, prepared: Any) -> Int32[Array, " tokens"]:
        """A step's tokens, `1 + k` a row of its bucket: its last one and its drafts. Waits for nothing.

        Args:
            prepared: From `prepare`, in the order of the steps.
        """
        raise NotImplementedError

    def copy_blocks(self, pairs: Any) -> None:
        """Copies cache blocks, `(source, target)` pairs, as the engine does in its own caches."""

    def reset(self) -> None:
        """Makes new caches, where a failed call may have been given the old ones."""

    def warm_up(self, place: int, bucket: Bucket) -> None:
        """Runs an executable of `runs[place]` on no requests; waits for it."""

    def precompile(self, *, progress: bool, wait: bool) -> None:
        """Compiles all that drafting runs; as `DecodeGraphs.precompile`."""


def draft_buckets(max_num_seqs: int, num_tokens: int, max_blocks: int) -> tuple[Bucket, ...]:
    """The buckets of steps with drafts: powers of two rows, as many as drafts can pay for at most."""
    most = min(max_num_seqs, BALANCE_TOKENS)
    rows = [1 << i for i in range((most - 1).bit_length() + 1)]
    return tuple(Bucket(max_decodes=n, decode_query_len=1 + num_tokens, max_blocks=max_blocks) for n in rows)
