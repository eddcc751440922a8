"""KV-cache groups: full-attention layers and sliding-window layers may have separate block tables."""

from typing import Any, NamedTuple

from jattn.spec import AttentionSpec


class PerKVCacheGroup(NamedTuple):
    """A value per KV-cache group, such as metadata or a plan.

    Attributes:
        full: Value for full-attention layers.
        sliding: Value for layers with a sliding window or attention chunks.
    """

    full: Any
    sliding: Any


def uses_sliding_window(spec: AttentionSpec) -> bool:
    """Return whether a layer's queries attend to a limited number of preceding tokens."""
    return (spec.window is not None and spec.window[0] is not None) or spec.chunk_size is not None


def for_layer(value: Any, spec: AttentionSpec) -> Any:
    """Return the value for a layer: its KV-cache group's, or the one that all layers share."""
    if not isinstance(value, PerKVCacheGroup):
        return value
    return value.sliding if uses_sliding_window(spec) else value.full
