"""What layers that see everything are given, and what those that look back a little are."""

from typing import Any, NamedTuple

from jattn.spec import AttentionSpec


class ByReach(NamedTuple):
    """Two of a thing, where layers with a window or chunks have blocks of their own: metadata, or plans.

    Attributes:
        far: Of layers that see everything.
        near: Of layers with a left window or chunks.
    """

    far: Any
    near: Any


def is_near(spec: AttentionSpec) -> bool:
    """Whether a layer looks back a limited way."""
    return (spec.window is not None and spec.window[0] is not None) or spec.chunk_size is not None


def of_layer(value: Any, spec: AttentionSpec) -> Any:
    """A layer's, or the one that all layers share."""
    if not isinstance(value, ByReach):
        return value
    return value.near if is_near(spec) else value.far
