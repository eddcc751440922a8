"""Padding of parameters for a mesh: kv heads are replicated and the vocabulary is padded to equal shards.

Replication does not change the result: each device has a complete kv head and the query heads that use it.
"""

from typing import Any

import numpy as np

from jattn.models.config import DecoderConfig

type Path = tuple[Any, ...]

# Parameters with a vocabulary axis, and this axis.
_VOCAB_AXES = {("embed_tokens", "embedding"): 0, ("lm_head", "kernel"): 1, ("lm_head", "bias"): 0}


def unpadded_shape(config: DecoderConfig, path: Path, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a parameter before padding, as on a single device.

    Args:
        config: Configuration of the decoder on the mesh.
        path: Path of the parameter in the decoder's state.
        shape: Shape of the padded parameter.
    """
    if path[-2] == "qkv_proj":
        *inputs, kv_heads, width, head_dim = shape
        replicas = config.num_kv_head_replicas
        return *inputs, kv_heads // replicas, (width - 2) * replicas + 2, head_dim
    if _has_kv_head_rows(path, len(shape)):
        return shape[0] // config.num_kv_head_replicas, *shape[1:]
    if path[-2:] in _VOCAB_AXES:
        axis = _VOCAB_AXES[path[-2:]]
        return *shape[:axis], config.vocab_size, *shape[axis + 1 :]
    return tuple(shape)


def pad_to_mesh(config: DecoderConfig, path: Path, array: Any) -> Any:
    """Pad a parameter of a single-device decoder for the mesh, on the host; see `unpadded_shape`."""
    if path[-2] == "qkv_proj" and config.num_kv_head_replicas > 1:
        replicas = config.num_kv_head_replicas
        *inputs, kv_heads, width, head_dim = array.shape
        queries = array[..., :-2, :].reshape(*inputs, kv_heads * replicas, (width - 2) // replicas, head_dim)
        return np.concatenate([queries, np.repeat(array[..., -2:, :], replicas, axis=-3)], axis=-2)
    if _has_kv_head_rows(path, array.ndim):
        return np.repeat(array, config.num_kv_head_replicas, axis=0)
    if path[-2:] in _VOCAB_AXES and config.padded_vocab_size > config.vocab_size:
        padding = [(0, 0)] * array.ndim
        padding[_VOCAB_AXES[path[-2:]]] = (0, config.padded_vocab_size - config.vocab_size)
        return np.pad(array, padding)
    return array


def unpad_from_mesh(config: DecoderConfig, path: Path, array: Any) -> Any:
    """Undo `pad_to_mesh`, on the host; see `unpadded_shape`."""
    if path[-2] == "qkv_proj" and config.num_kv_head_replicas > 1:
        replicas = config.num_kv_head_replicas
        *inputs, kv_heads, _, head_dim = array.shape
        queries = array[..., :-2, :].reshape(*inputs, kv_heads // replicas, -1, head_dim)
        return np.concatenate([queries, array[..., ::replicas, -2:, :]], axis=-2)
    if _has_kv_head_rows(path, array.ndim):
        return array[:: config.num_kv_head_replicas]
    if path[-2:] in _VOCAB_AXES:
        axis = _VOCAB_AXES[path[-2:]]
        return array[(slice(None),) * axis + (slice(config.vocab_size),)]
    return array


def num_replicated_rows(path: Path, shape: tuple[int, ...]) -> int:
    """Return how many rows of a parameter are replicated with a kv head: the last of its second-to-last axis.

    Args:
        path: Path of the parameter in the decoder's state.
        shape: Shape of one device's shard.
    """
    if path[-2] == "qkv_proj":
        return 2  # key and value, which follow the queries
    return shape[-2] if _has_kv_head_rows(path, len(shape)) else 0


def _has_kv_head_rows(path: Path, num_axes: int) -> bool:
    """Return whether a parameter has a row per kv head, as norms with weights per head have."""
    return path[-2:] == ("k_norm", "weight") and num_axes == 2
