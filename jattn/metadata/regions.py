"""The two regions of a step, each as a step of its own."""

from typing import NamedTuple

from jattn.metadata.batch import BatchMetadata

REGIONS = ("decode", "prefill")


class Part(NamedTuple):
    """A region as a step of its own.

    Attributes:
        metadata: Its rows and tokens alone.
        first_row: Where they begin among the whole step's rows.
        first_token: Where they begin among its tokens.
    """

    metadata: BatchMetadata
    first_row: int
    first_token: int


def part_of(metadata: BatchMetadata, region: str) -> Part:
    """One of REGIONS of a step. Traced."""
    if region == "decode":
        return Part(metadata.decode_part, 0, 0)
    return Part(metadata.prefill_part, metadata.bucket.max_decodes, metadata.bucket.max_decode_tokens)
