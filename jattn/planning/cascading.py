"""Which layers may attend to a common prefix once."""

from typing import Any

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
