"""Which layers may attend to a common prefix once."""

from collections.abc import Sequence
from typing import Any

from jattn.bucket import Bucket
from jattn.implementations.mosaic_gpu import PrefillKernel
from jattn.planning.layer_plans import LayerPlan
from jattn.spec import AttentionSpec


def why_no_cascade(spec: AttentionSpec) -> tuple[str, str] | None:
    """What in a spec forbids to attend to a shared prefix once, and why; None = nothing does."""
    if spec.batch_invariant:
        reason = "whether a prefix is shared, and so how it is summed, depends on the batch"
        return "spec.batch_invariant=True", reason
    for name in ("window", "chunk_size", "sparsity"):
        if getattr(spec, name) is not None:
            return f"spec.{name}={getattr(spec, name)}", "cascade attention needs masks that ignore distance"
    return None


def can_cascade(spec: AttentionSpec, alibi_slopes: Any = None) -> bool:
    """Whether a layer attends to the common prefix of a plan once; ALiBi depends on distance, too."""
    return why_no_cascade(spec) is None and alibi_slopes is None


def prefix_pieces(layers: Sequence[LayerPlan], bucket: Bucket) -> int:
    """Pieces of a prefix with which each layer's kernel has an item for as many thread blocks as it can.

    64 tokens of 32 heads are 32 items, each over the whole prefix: 8,192 keys kept 32 of an H200's 132
    multiprocessors busy, and a layer took about 70 us longer than without a prefix (rows `cascades`).

    Args:
        layers: What serves the uncut prefix.
        bucket: Of it.
    """
    pieces = []
    for one in layers:
        kernel = None if one.prefill is None else one.prefill.kernel
        if not isinstance(kernel, PrefillKernel):
            return 1
        items = -(-bucket.max_tokens // kernel.sizes.tile_q) * one.layer.spec.num_q_heads
        pieces.append(kernel.sizes.workers // items)
    return max(min([*pieces, bucket.max_blocks or 1]), 1)
