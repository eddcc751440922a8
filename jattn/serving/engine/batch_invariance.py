"""`batch_invariant`: a request's bits depend neither on what runs beside it nor on what is cached.

A product of two matrices rounds as its sizes have it rounded, and each of its rows alike. So a token of a
prompt always goes through one executable, a generated one through another, whatever their step holds; and
keys are shared, or made again, by the executable that made them (`Scheduler`). What attends to them does so
row by row (`AttentionSpec.batch_invariant`).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from flax import nnx

from jattn.batch.bucket import Bucket
from jattn.implementations.selection import requested_implementations
from jattn.nn import PagedAttention
from jattn.serving.engine.scheduled_step import Step
from pallas_kernels.checks import require, unsupported


class InvariantBuckets(NamedTuple):
    """The two sizes of an engine's steps: generated tokens alone, prompts alone."""

    decodes: Bucket
    prefills: Bucket

    @classmethod
    def among(cls, buckets: Sequence[Bucket]) -> "InvariantBuckets":
        """Of these two, which is which."""
        decodes, prefills = sorted(buckets, key=lambda bucket: bucket.max_prefills)
        return cls(decodes, prefills)

    def of(self, step: Step) -> Bucket:
        """A step's."""
        return self.decodes if step.num_decodes else self.prefills


def invariant_buckets(max_num_seqs: int, max_num_batched_tokens: int, max_blocks: int) -> InvariantBuckets:
    """Those that the largest steps fit; one of one row would be computed otherwise than its neighbours."""
    prefills = {"max_prefills": min(max_num_seqs, max_num_batched_tokens)}
    return InvariantBuckets(
        Bucket(max_decodes=max(max_num_seqs, 2), max_blocks=max_blocks),
        Bucket(max_prefill_tokens=max_num_batched_tokens, max_blocks=max_blocks, **prefills),
    )


def check_goes_with_invariance(
    speculative: Any, cascade_attention: bool | None, buckets: Sequence[Bucket] | None
) -> None:
    """Checks the engine's other arguments where it is to be batch invariant.

    Raises:
        ValueError: Buckets are given.
        NotImplementedError: Drafts or cascades are wanted.
    """
    require(
        buckets is None, "buckets", "be None with batch_invariant=True, which has two of its own", buckets
    )
    name = "batch_invariant=True with"
    if speculative is not None:
        reason = "a step with drafts rounds otherwise than one without"
        who = repr(speculative) if isinstance(speculative, str) else f"a {type(speculative).__name__}"
        raise unsupported(f"{name} speculative={who}", reason, "Leave speculative=None")
    if cascade_attention:
        reason = "a merge of two parts rounds otherwise than one walk"
        raise unsupported(f"{name} cascade_attention=True", reason, "Leave cascade_attention=None")


def make_invariant(model: Any) -> Any:
    """The model over the same arrays, its attention batch invariant; the given one is left as it is.

    Raises:
        NotImplementedError: It has no PagedAttention layers, the reference alone is to run one of them, or it
            has peer memory.
    """
    if getattr(model, "peers", None) is not None:
        reason = "small steps sum there, and round once, where larger ones sum by XLA"
        raise unsupported("batch_invariant=True over peer memory", reason, "Leave use_peer_memory out")
    model = nnx.merge(*nnx.split(model))
    layers = [module for _, module in nnx.iter_modules(model) if isinstance(module, PagedAttention)]
    if not layers:
        reason = f"a {type(model).__name__} has no PagedAttention layers"
        raise unsupported("batch_invariant=True", reason, "The engine cannot speak for other attention")
    for layer in layers:
        if set(requested_implementations(layer.implementation)) == {"reference"}:
            reason = "its sums depend on the sizes of the bucket"
            raise unsupported("batch_invariant=True by the reference", reason, "Leave implementation=None")
        layer.spec = dataclasses.replace(layer.spec, batch_invariant=True)
    return model
