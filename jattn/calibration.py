"""Calibration of the static scales of 8-bit caches on sample prompts."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jattn.batch.bucket import Bucket
from jattn.batch.metadata import BatchMetadata, build_batch_metadata
from jattn.cache.quantization import MIN_SCALE, largest
from jattn.cache.spec import QUANTIZATION_ALIASES, QUANTIZATIONS, StorageFormat
from jattn.models.kv_scales import KVScales, LayerScales
from jattn.parallel import num_ranks, replicated_sharding
from jattn.serving.engine.input_processor import Prompt, prompt_token_ids_of
from pallas_kernels.checks import (
    require,
    require_bool,
    require_number,
    require_one_of,
    require_positive,
    require_type,
)

MIN_BLOCK_SIZE = 16
STATIC = tuple(
    name
    for name, sides in QUANTIZATIONS.items()
    if name is not None and any(side.scale in ("static", "channel") for side in sides)
)


def calibrate(
    model: Any,
    prompts: Sequence[Prompt],
    *,
    quantization: str = "fp8_e4m3",
    per_head: bool = False,
    headroom: float = 1.0,
) -> KVScales:
    """Compute the static scales with which the largest key and value of the prompts just fit.

    Assign the result to `model.kv_scales`, or save it beside the checkpoint. Compiles once per power of two
    of prompt length.

    Args:
        model: A `jattn.models.Decoder`, or an nnx.Module with `create_caches(num_blocks, block_size=)`,
            `__call__(token_ids, caches, metadata)`, `tokenizer` (None if the prompts are token ids),
            `config.vocab_size` and `config.max_position_embeddings`.
        prompts: Text or lists of token ids, as the engine takes them.
        quantization: Quantization of the cache that has static scales; see CacheSpec.
        per_head: Compute one static scale per KV head instead of one per layer.
        headroom: Factor on every scale, to leave room for larger keys and values than the prompts'.

    Returns:
        Static scales per layer; None for keys or values that the quantization stores without static scales.

    Raises:
        ValueError: If the quantization has no static scales, there is no prompt, or a prompt is invalid or
            too long for the model.
    """
    require_type("quantization", quantization, str, "a quantization of CacheSpec")
    quantization = QUANTIZATION_ALIASES.get(quantization) or quantization
    require_one_of("quantization", quantization, STATIC)
    are_prompts = isinstance(prompts, Sequence | np.ndarray) and not isinstance(prompts, str | bytes)
    require(are_prompts and len(prompts) > 0, "prompts", "be a list of prompts", repr(prompts))
    require_bool(per_head=per_head)
    require_number(headroom=headroom)
    require_positive(headroom=headroom)
    require(bool(np.isfinite(headroom)), "headroom", "be finite", headroom)
    require_type("model", model, nnx.Module, "jattn.models.load reads one from a folder")
    config = model.config
    graphdef, params = nnx.split(model)
    block_size = _block_size(model)

    def peaks_of_prompt(params: Any, token_ids: Array, metadata: BatchMetadata) -> Any:
        return _peaks(nnx.merge(graphdef, params), token_ids, metadata)

    # Replicated on all devices, so that every process can read the result.
    peaks_of = jax.jit(peaks_of_prompt, out_shardings=replicated_sharding(model))

    peaks: Any = None
    for index, prompt in enumerate(prompts):
        name = f"prompts[{index}]"
        ids = prompt_token_ids_of(name, prompt, tokenizer=model.tokenizer, vocab_size=config.vocab_size)
        longest = config.max_position_embeddings
        if len(ids) > longest:
            raise ValueError(
                f"{name} has {len(ids)} tokens, but the model has {longest} positions. Shorten the prompt."
            )
        prompt_peaks = jax.device_get(peaks_of(params, *_prefill(ids, block_size)))
        peaks = prompt_peaks if peaks is None else jax.tree.map(np.maximum, peaks, prompt_peaks)
    keys, values = QUANTIZATIONS[quantization]
    scale = functools.partial(_scale, per_head=per_head, headroom=headroom)
    step = getattr(config, "num_kv_head_replicas", 1)
    return KVScales(tuple(LayerScales(scale(k[::step], keys), scale(v[::step], values)) for k, v in peaks))


def _block_size(model: Any) -> int:
    """Return the block size: a multiple of the context parallel ranks times the interleave size."""
    round_size = num_ranks(model) * getattr(model, "cp_kv_cache_interleave_size", 1)
    return -(-MIN_BLOCK_SIZE // round_size) * round_size


def _prefill(ids: list[int], block_size: int) -> tuple[Int[Array, " tokens"], BatchMetadata]:
    """Build a prefill step of one prompt, padded to a power of two of tokens."""
    size = max(1 << (len(ids) - 1).bit_length(), MIN_BLOCK_SIZE)
    num_blocks = -(-size // block_size)
    bucket = Bucket(max_prefills=1, max_prefill_tokens=size, max_blocks=num_blocks)
    blocks = [list(range(1, num_blocks + 1))]
    metadata = build_batch_metadata([len(ids)], [len(ids)], blocks, block_size=block_size, bucket=bucket)
    return jnp.asarray(np.pad(ids, (0, size - len(ids))), jnp.int32), metadata


def _peaks(
    model: Any, token_ids: Int[Array, " tokens"], metadata: BatchMetadata
) -> list[tuple[Float[Array, "kv_heads head_dim"], Float[Array, "kv_heads head_dim"]]]:
    """Return the largest magnitudes of each layer's keys and values."""
    caches = model.create_caches(metadata.block_table.shape[1] + 1, block_size=metadata.block_size)
    _, caches = model(token_ids, caches, metadata)
    return [(_peak(cache.k), _peak(cache.v)) for cache in caches]


def _peak(x: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(x.astype(jnp.float32)), axis=(0, 1))


def _scale(peak: np.ndarray, stored: StorageFormat, *, per_head: bool, headroom: float) -> np.ndarray | None:
    if stored.scale not in ("static", "channel"):
        return None
    if stored.scale == "static":
        peak = peak.max(axis=1) if per_head else peak.max()
    assert stored.dtype is not None
    return np.asarray(np.maximum(headroom * peak / largest(stored.dtype), MIN_SCALE), np.float32)
