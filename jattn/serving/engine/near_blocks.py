"""Layers that look back a little have blocks of their own: how many, and which of them a step is given."""

from typing import Any, NamedTuple

from jaxtyping import Array, Int32

from jattn.batch.check import check_batch
from jattn.batch.metadata import BatchMetadata, build_batch_metadata
from jattn.cache import CacheSpec
from jattn.models.by_reach import ByReach
from jattn.pytree import replace
from jattn.serving.engine.scheduled_step import Step


class NearTables(NamedTuple):
    """Where a step's keys are in layers that have blocks of their own; the rest they share with the others.

    Attributes:
        block_table: As `BatchMetadata` has it.
        slot_mapping: Likewise.
    """

    block_table: Int32[Array, "reqs max_blocks"]
    slot_mapping: Int32[Array, " tokens"]

    def beside(self, metadata: BatchMetadata) -> ByReach:
        """The metadata of both kinds of layers."""
        return ByReach(metadata, replace(metadata, **self._asdict()))


def near_tables(
    step: Step, metadata: BatchMetadata, cache_spec: CacheSpec | None, *, checks: bool
) -> NearTables | None:
    """The tables of a step, as numpy's arrays; None where all layers share theirs.

    Args:
        step: The step.
        metadata: Of the other layers.
        cache_spec: Of these layers.
        checks: The batch goes through `check_batch`.
    """
    if step.near_tables is None:
        return None
    sizes: dict[str, Any] = {"block_size": metadata.block_size, "bucket": metadata.bucket}
    lens = step.query_lens, step.seq_lens
    near = build_batch_metadata(*lens, step.near_tables, to_device=False, **sizes)
    if checks and cache_spec is not None:
        check_batch(near, cache_spec)
    return NearTables(near.block_table, near.slot_mapping)
