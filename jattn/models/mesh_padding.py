"""Parameters as a mesh has them: kv heads repeated and a vocabulary padded until they fall into equal parts.

What is repeated computes what it did: each device has its kv head whole, and the query heads that read it.
"""

from typing import Any

import numpy as np

from jattn.models.config import DecoderConfig

type Path = tuple[Any, ...]

# And the axis that it is.
_OF_VOCABULARY = {("embed_tokens", "embedding"): 0, ("lm_head", "kernel"): 1, ("lm_head", "bias"): 0}


def whole_shape(config: DecoderConfig, path: Path, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a parameter has on one device.

    Args:
        config: The decoder's, spread.
        path: Of the parameter.
        shape: That it has spread.
    """
    if path[-2] == "qkv_proj":
        *inputs, kv_heads, width, head_dim = shape
        replicas = config.num_kv_head_replicas
        return *inputs, kv_heads // replicas, (width - 2) * replicas + 2, head_dim
    if _is_by_kv_heads(path, len(shape)):
        return shape[0] // config.num_kv_head_replicas, *shape[1:]
    if path[-2:] in _OF_VOCABULARY:
        axis = _OF_VOCABULARY[path[-2:]]
        return *shape[:axis], config.vocab_size, *shape[axis + 1 :]
    return tuple(shape)


def spread(config: DecoderConfig, path: Path, array: Any) -> Any:
    """A parameter of one device as the mesh has it. On the host; arguments as of `whole_shape`."""
    if path[-2] == "qkv_proj" and config.num_kv_head_replicas > 1:
        replicas = config.num_kv_head_replicas
        *inputs, kv_heads, width, head_dim = array.shape
        queries = array[..., :-2, :].reshape(*inputs, kv_heads * replicas, (width - 2) // replicas, head_dim)
        return np.concatenate([queries, np.repeat(array[..., -2:, :], replicas, axis=-3)], axis=-2)
    if _is_by_kv_heads(path, array.ndim):
        return np.repeat(array, config.num_kv_head_replicas, axis=0)
    if path[-2:] in _OF_VOCABULARY and config.padded_vocab_size > config.vocab_size:
        ends = [(0, 0)] * array.ndim
        ends[_OF_VOCABULARY[path[-2:]]] = (0, config.padded_vocab_size - config.vocab_size)
        return np.pad(array, ends)
    return array


def gathered(config: DecoderConfig, path: Path, array: Any) -> Any:
    """What `spread` was given. On the host; arguments as of `whole_shape`."""
    if path[-2] == "qkv_proj" and config.num_kv_head_replicas > 1:
        replicas = config.num_kv_head_replicas
        *inputs, kv_heads, _, head_dim = array.shape
        queries = array[..., :-2, :].reshape(*inputs, kv_heads // replicas, -1, head_dim)
        return np.concatenate([queries, array[..., ::replicas, -2:, :]], axis=-2)
    if _is_by_kv_heads(path, array.ndim):
        return array[:: config.num_kv_head_replicas]
    if path[-2:] in _OF_VOCABULARY:
        axis = _OF_VOCABULARY[path[-2:]]
        return array[(slice(None),) * axis + (slice(config.vocab_size),)]
    return array


def num_copied_rows(path: Path, shape: tuple[int, ...]) -> int:
    """Rows of a parameter's last axis but one that are copied with a kv head: the last ones.

    Args:
        path: Of the parameter.
        shape: Of one device's part.
    """
    if path[-2] == "qkv_proj":
        return 2  # key and value, behind the queries
    return shape[-2] if _is_by_kv_heads(path, len(shape)) else 0


def _is_by_kv_heads(path: Path, num_axes: int) -> bool:
    """Whether a parameter has a row for each kv head, as norms of each head's own."""
    return path[-2:] == ("k_norm", "weight") and num_axes == 2
