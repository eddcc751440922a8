"""Batch invariance: bits that depend neither on other requests of a batch nor on cached prefixes.

The rounding of a matrix product depends on its sizes and is the same for all of its rows. So prompt tokens
always run in one executable and generated tokens in another, whatever their step holds, and cached keys are
reused or recomputed by the executable that made them (`Scheduler`). Attention computes each row independently
(`AttentionSpec.batch_invariant`).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from flax import nnx

from jattn.batch.bucket import Bucket
from jattn.implementations.selection import requested_implementations
from jattn.nn import PagedAttention
from jattn.serving.engine.scheduled_step import Step
from pallas_kernels.checks import unsupported


class InvariantBuckets(NamedTuple):
    """The two buckets of a batch-invariant engine: generated tokens only, and prompts only."""

    decodes: Bucket
    prefills: Bucket

    @classmethod
    def from_buckets(cls, buckets: Sequence[Bucket]) -> "InvariantBuckets":
        """Return the buckets in order, given in any order."""
        decodes, prefills = sorted(buckets, key=lambda bucket: bucket.max_prefills)
        return cls(decodes, prefills)

    def bucket_of(self, step: Step) -> Bucket:
        """Return the bucket of a step."""
        return self.decodes if step.num_decodes else self.prefills


def invariant_buckets(max_num_seqs: int, max_num_batched_tokens: int, max_blocks: int) -> InvariantBuckets:
    """Return buckets that fit the largest steps.

    A single row would round differently, so there are two at least.
    """
    prefills = {"max_prefills": min(max_num_seqs, max_num_batched_tokens)}
    return InvariantBuckets(
        Bucket(max_decodes=max(max_num_seqs, 2), max_blocks=max_blocks),
        Bucket(max_prefill_tokens=max_num_batched_tokens, max_blocks=max_blocks, **prefills),
    )


def check_batch_invariant_options(
    speculative: Any, cascade_attention: bool | None, buckets: Sequence[Bucket] | None
) -> None:
    """Check the engine's other arguments for batch_invariant=True.

    Raises:
        ValueError: If buckets are given.
        NotImplementedError: If speculative decoding or cascade attention is requested.
    """
    if buckets is not None:
        raise ValueError(
            "buckets cannot be combined with batch_invariant=True, which sets them. Omit buckets."
        )
    name = "batch_invariant=True with"
    if speculative is not None:
        reason = "steps with drafts round differently from steps without"
        description = repr(speculative) if isinstance(speculative, str) else f"a {type(speculative).__name__}"
        raise unsupported(f"{name} speculative={description}", reason, "Pass speculative=None")
    if cascade_attention:
        reason = "combining two partial results rounds differently from a single pass"
        raise unsupported(f"{name} cascade_attention=True", reason, "Pass cascade_attention=None")


def make_invariant(model: Any) -> Any:
    """Return the model with batch-invariant attention. The arrays are shared, the given model unchanged.

    Raises:
        NotImplementedError: If the model has no PagedAttention layers, uses peer memory, or a layer only
            allows the reference implementation.
    """
    if getattr(model, "peers", None) is not None:
        reason = "small steps reduce in peer memory and round once, unlike XLA's all-reduce of larger steps"
        raise unsupported(
            "batch_invariant=True with peer memory",
            reason,
            "Pass a model on which use_peer_memory was not called",
        )
    model = nnx.merge(*nnx.split(model))
    layers = [module for _, module in nnx.iter_modules(model) if isinstance(module, PagedAttention)]
    if not layers:
        reason = f"a {type(model).__name__} has no PagedAttention layers"
        raise unsupported(
            "batch_invariant=True",
            reason,
            "Pass a model with PagedAttention layers, or batch_invariant=False",
        )
    for layer in layers:
        if set(requested_implementations(layer.implementation)) == {"reference"}:
            reason = "its rounding depends on the bucket size"
            raise unsupported(
                'batch_invariant=True with implementation="reference"',
                reason,
                "Load the model with implementation=None",
            )
        layer.spec = dataclasses.replace(layer.spec, batch_invariant=True)
    return model
