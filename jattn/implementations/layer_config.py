"""Layer configurations: the static facts that the choice of an implementation depends on."""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jattn.batch.bucket import Bucket
from jattn.batch.metadata import REGIONS, BatchMetadata
from jattn.cache import CacheSpec, PackedKV, PagedCache, has_token_axis
from jattn.pytree import replace
from jattn.score_mod import ScoreMod
from jattn.spec import AttentionSpec
from pallas_kernels.score_mod import ScoreModType

type CacheOrSpec = CacheSpec | PagedCache | PackedKV


class CacheFormat(NamedTuple):
    """Storage format of a paged cache.

    Attributes:
        layout: "NHD", "HND" or "packed".
        dtypes: Dtypes of keys and of values.
        scales: Kind of scale of keys and of values: None, "static" or "token_head" (computed when written).
    """

    layout: str
    dtypes: tuple[np.dtype, np.dtype]
    scales: tuple[str | None, str | None]

    @property
    def has_token_scales(self) -> tuple[bool, bool]:
        """Whether keys and values have a scale per token and head."""
        return self.scales[0] == "token_head", self.scales[1] == "token_head"

    def is_plain(self, dtype: DTypeLike) -> bool:
        """Return whether keys and values are stored in this dtype without scales."""
        return self.scales == (None, None) and set(self.dtypes) == {jnp.dtype(dtype)}

    def __str__(self) -> str:
        kinds = dict.fromkeys(
            dtype.name + {None: "", "static": " x scale", "token_head": " x scale a token and head"}[scale]
            for dtype, scale in zip(self.dtypes, self.scales, strict=True)
        )
        return f"{self.layout} {' and '.join(kinds)}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Static configuration of a layer; layers with equal configurations share a plan.

    Attributes:
        spec: Attention of the layer.
        query_dtype: Dtype of the queries.
        cache: Format of the paged cache; None for keys outside a cache.
        has_aligned_keys: Whether the keys of each request start at a multiple of 8 keys, as in a paged cache
            and in a PackedKV with `is_aligned`.
        score_function: Score function of the layer and the types of its arrays; None without one.
    """

    spec: AttentionSpec
    query_dtype: np.dtype
    cache: CacheFormat | None
    has_aligned_keys: bool
    score_function: ScoreModType | None = None

    def __str__(self) -> str:
        aligned = "aligned " if self.has_aligned_keys else ""
        where = f"{aligned}keys outside a cache" if self.cache is None else str(self.cache)
        score_mod = "" if self.score_function is None else f", score_mod={self.score_function}"
        return f"{_describe_spec(self.spec)}{score_mod}; {self.query_dtype.name} queries, {where}"


class RegionSizes(NamedTuple):
    """Static sizes of a region of a step.

    Attributes:
        name: Name of the region, one of REGIONS.
        bucket: Bucket of the region as a separate step.
        max_blocks: Number of block table columns; 0 without a paged cache.
        block_size: Number of tokens per block.
    """

    name: str
    bucket: Bucket
    max_blocks: int
    block_size: int


def region_sizes(metadata: BatchMetadata) -> tuple[RegionSizes, ...]:
    """Return the sizes of the step's regions that have room for tokens, from shapes alone."""
    bucket, block_size = metadata.bucket, metadata.block_size
    decode, prefill = replace(bucket, max_prefills=0, max_prefill_tokens=0), replace(bucket, max_decodes=0)
    regions, max_blocks = [], metadata.block_table.shape[1]
    for name, part in zip(REGIONS, (decode, prefill), strict=True):
        if part.max_tokens:
            regions.append(RegionSizes(name, part, max_blocks, block_size))
    return tuple(regions)


def layer_config(
    spec: AttentionSpec,
    cache: CacheOrSpec | None,
    query_dtype: DTypeLike | None = None,
    score_mod: ScoreMod | None = None,
) -> LayerConfig:
    """Return the configuration of a layer.

    Args:
        spec: Attention of the layer.
        cache: Cache or CacheSpec of the layer; None for keys outside a cache.
        query_dtype: Dtype of the queries; None uses the cache's compute dtype.
        score_mod: Score function of the layer; None without one.
    """
    dtype = jnp.dtype(_compute_dtype(cache) if query_dtype is None else query_dtype)
    function = None if score_mod is None else score_mod.static_part
    is_aligned = cache.is_aligned if isinstance(cache, PackedKV) else cache is not None
    return LayerConfig(
        spec=spec,
        query_dtype=dtype,
        cache=cache_format(cache),
        has_aligned_keys=is_aligned,
        score_function=function,
    )


def cache_format(cache: CacheOrSpec | None) -> CacheFormat | None:
    """Return the storage format of a cache; None without a paged cache."""
    if cache is None or isinstance(cache, PackedKV):
        return None
    if isinstance(cache, CacheSpec):
        kinds = {None: None, "static": "static", "channel": "static", "token_head": "token_head"}
        scales = (kinds[cache.storage_formats[0].scale], kinds[cache.storage_formats[1].scale])
        return CacheFormat(cache.layout, (cache.key_dtype, cache.value_dtype), scales)
    k_scale, v_scale = [
        None if scale is None else "token_head" if has_token_axis(scale) else "static"
        for scale in (cache.stored_k_scale, cache.stored_v_scale)
    ]
    dtypes = jnp.dtype(cache.k.dtype), jnp.dtype(cache.v.dtype)
    return CacheFormat(cache.layout, dtypes, (k_scale, v_scale))


def _compute_dtype(cache: CacheOrSpec | None) -> DTypeLike:
    """Return the compute dtype of the layer that a cache belongs to, as far as the cache determines it."""
    if isinstance(cache, CacheSpec):
        return cache.dtype
    if cache is not None and jnp.dtype(cache.v.dtype).itemsize > 1:
        return cache.v.dtype
    return jnp.bfloat16


def _describe_spec(spec: AttentionSpec) -> str:
    """Describe a spec briefly; defaults are omitted."""
    parts = [f"{spec.num_q_heads}/{spec.num_kv_heads} heads of {spec.head_dim}"]
    parts += [] if spec.causal else ["not causal"]
    for name in ("window", "soft_cap", "chunk_size", "sparsity", "query_quantization"):
        value = getattr(spec, name)
        parts += [] if value is None else [f"{name}={value}"]
    parts += [name for name in ("sqrt_alibi", "batch_invariant", "deterministic") if getattr(spec, name)]
    return ", ".join(parts)
