"""Static description of a layer's paged cache: sizes, layout and quantization."""

import dataclasses
import difflib
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pallas_kernels.checks import (
    require,
    require_int,
    require_number,
    require_one_of,
    require_positive,
    set_ints,
)

LAYOUTS = ("NHD", "HND", "packed")


class StorageFormat(NamedTuple):
    """Storage dtype and kind of scale of keys or values.

    Attributes:
        dtype: Dtype of the array; None uses the CacheSpec's dtype.
        scale: Kind of scale: "static" (a scalar or one per KV head), "channel" (static, [kv_heads,
            head_dim]), "token_head" (one per token and head, computed when written), or None.
    """

    dtype: DTypeLike | None
    scale: str | None

    def scale_shapes(self, spec: "CacheSpec") -> tuple[tuple[int, ...], ...]:
        """Return the allowed shapes of a scale as an argument of `PagedCache`, the default first."""
        heads = spec.num_kv_heads
        return {
            None: (),
            "static": ((), (heads,)),
            "channel": ((heads, spec.head_dim),),
            "token_head": ((spec.num_blocks, spec.block_size, heads),),
        }[self.scale]


UNQUANTIZED = StorageFormat(None, None)
INT8_TOKEN_HEAD = StorageFormat(jnp.int8, "token_head")
# Storage formats of keys and of values for each CacheSpec.quantization.
QUANTIZATIONS = {
    None: (UNQUANTIZED, UNQUANTIZED),
    "fp8_e4m3": (StorageFormat(jnp.float8_e4m3fn, "static"),) * 2,
    "fp8_e5m2": (StorageFormat(jnp.float8_e5m2, "static"),) * 2,
    "fp8_e4m3_token_head": (StorageFormat(jnp.float8_e4m3fn, "token_head"),) * 2,
    "int8_token_head": (INT8_TOKEN_HEAD, INT8_TOKEN_HEAD),
    "int8_static_v": (INT8_TOKEN_HEAD, StorageFormat(jnp.int8, "channel")),
    "int8_k_only": (INT8_TOKEN_HEAD, UNQUANTIZED),
}


# Names of vLLM's kv_cache_dtype that are equivalent to a quantization.
QUANTIZATION_ALIASES = {
    "auto": None,
    "fp8": "fp8_e4m3",
    "fp8_per_token_head": "fp8_e4m3_token_head",
    "int8": "int8_token_head",
    "int8_per_token_head": "int8_token_head",
}


def resolve_quantization(name: str | None) -> str | None:
    """Return the canonical name of a quantization; accepts vLLM's kv_cache_dtype names, too.

    Raises:
        ValueError: If the name is unknown; the message suggests the nearest one.
    """
    if isinstance(name, str) and name in QUANTIZATION_ALIASES:
        return QUANTIZATION_ALIASES[name]
    if name is not None and (not isinstance(name, str) or name not in QUANTIZATIONS):
        known_names = [choice for choice in QUANTIZATIONS if choice is not None]
        nearest = difflib.get_close_matches(str(name), known_names, n=1, cutoff=0.0)[0]
        names = ", ".join(map(repr, [None, *QUANTIZATION_ALIASES, *known_names]))
        raise ValueError(
            f"quantization={name!r} is unknown. Did you mean {nearest!r}? It must be one of {names}."
        )
    return name


def resolve_kv_cache_dtype(kv_cache_dtype: Any) -> tuple[DTypeLike | None, str | None]:
    """Return the dtype (None: the model's) and the quantization of the caches for vLLM's kv_cache_dtype.

    Raises:
        ValueError: If it is neither a float dtype nor the name of a quantization.
    """
    if isinstance(kv_cache_dtype, str) and kv_cache_dtype in (*QUANTIZATION_ALIASES, *QUANTIZATIONS):
        return None, resolve_quantization(kv_cache_dtype)
    names = ", ".join(map(repr, [*QUANTIZATION_ALIASES, *filter(None, QUANTIZATIONS)]))
    rule = f"be a float dtype such as 'bfloat16', or one of {names}"
    try:
        dtype = jnp.dtype(kv_cache_dtype)
    except TypeError:
        require(False, "kv_cache_dtype", rule, repr(kv_cache_dtype))
        raise
    is_float = kv_cache_dtype is not None and jnp.issubdtype(dtype, jnp.floating)
    require(is_float, "kv_cache_dtype", rule, repr(kv_cache_dtype))
    return dtype, None


def require_float_dtype(name: str, dtype: Any, hint: str = "") -> np.dtype:
    """Return a floating-point dtype; `hint` is appended to the error message."""
    try:
        np_dtype = jnp.dtype(dtype)
    except TypeError:
        require(False, name, "be a dtype", repr(dtype))
        raise
    require(jnp.issubdtype(np_dtype, jnp.floating), name, f"be a float type{hint}", np_dtype)
    return np_dtype


def require_query_dtype(name: str, dtype: DTypeLike) -> None:
    """Require a dtype that queries can have in every implementation: a float dtype of at least 16 bits."""
    is_float = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize > 1
    require(is_float, name, "have a floating-point dtype of at least 16 bits", jnp.dtype(dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """Paged KV cache of one layer.

    Attributes:
        num_blocks: Number of blocks in the pool. By convention block 0 is the null block, to which padding
            points.
        block_size: Number of tokens per block.
        num_kv_heads: Number of KV heads on this device.
        head_dim: Width of a head.
        dtype: Dtype of keys and values, unless `quantization` overrides it.
        layout: "NHD" [blocks, block_size, kv_heads, head_dim], "HND" [blocks, kv_heads, block_size,
            head_dim], or "packed", vLLM's paged_attention layout: keys [blocks, kv_heads, head_dim / x,
            block_size, x] with x elements in 16 bytes, values [blocks, kv_heads, head_dim, block_size].
        quantization: None; "fp8_e4m3" or "fp8_e5m2" (static scales, one in all or one per KV head);
            "fp8_e4m3_token_head" or "int8_token_head" (one scale per token and head, computed when written);
            "int8_static_v" (keys as int8_token_head, int8 values with a static scale per channel);
            "int8_k_only" (keys as int8_token_head, values not quantized). vLLM's names "auto", "fp8", "int8",
            "fp8_per_token_head" and "int8_per_token_head" are accepted, too.
    """

    num_blocks: int
    block_size: int = 16
    num_kv_heads: int
    head_dim: int
    dtype: DTypeLike = jnp.bfloat16
    layout: str = "NHD"
    quantization: str | None = None

    def __post_init__(self) -> None:
        set_ints(self, "num_blocks", "block_size", "num_kv_heads", "head_dim")
        require_positive(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )
        require_one_of("layout", self.layout, LAYOUTS)
        object.__setattr__(self, "quantization", resolve_quantization(self.quantization))
        hint = " (for an int8 cache pass quantization='int8_token_head')"
        object.__setattr__(self, "dtype", require_float_dtype("dtype", self.dtype, hint))
        if self.layout == "packed":
            require(
                self.head_dim % self.pack_width == 0,
                "head_dim",
                f"be a multiple of {self.pack_width} ({self.key_dtype} in 16 bytes) in the packed layout",
                self.head_dim,
            )

    @property
    def storage_formats(self) -> tuple[StorageFormat, StorageFormat]:
        """Storage formats of keys and of values."""
        return QUANTIZATIONS[self.quantization]

    @property
    def key_dtype(self) -> np.dtype:
        """The dtype of the key array."""
        return jnp.dtype(self.storage_formats[0].dtype or self.dtype)

    @property
    def value_dtype(self) -> np.dtype:
        """The dtype of the value array."""
        return jnp.dtype(self.storage_formats[1].dtype or self.dtype)

    @property
    def pack_width(self) -> int:
        """Number of key elements in 16 bytes: x of vLLM's layout."""
        return 16 // self.key_dtype.itemsize

    @property
    def key_shape(self) -> tuple[int, ...]:
        """Shape of the key array."""
        blocks, size, heads, dim = self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim
        if self.layout == "packed":
            return (blocks, heads, dim // self.pack_width, size, self.pack_width)
        return (blocks, size, heads, dim) if self.layout == "NHD" else (blocks, heads, size, dim)

    @property
    def value_shape(self) -> tuple[int, ...]:
        """Shape of the value array."""
        if self.layout == "packed":
            return (self.num_blocks, self.num_kv_heads, self.head_dim, self.block_size)
        return self.key_shape

    @property
    def bytes_per_block(self) -> int:
        """Number of bytes per block: keys, values and per-token scales."""
        heads = self.block_size * self.num_kv_heads
        num_scales = sum([side.scale == "token_head" for side in self.storage_formats])
        return heads * (
            self.head_dim * (self.key_dtype.itemsize + self.value_dtype.itemsize) + 4 * num_scales
        )

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the entire pool."""
        return self.num_blocks * self.bytes_per_block

    def num_blocks_in(self, memory_bytes: int, num_layers: int = 1) -> int:
        """Return how many blocks fit in `memory_bytes` if each of `num_layers` layers has its own cache.

        Raises:
            ValueError: If not even one block fits, or an argument is not a number.
        """
        require_number(memory_bytes=memory_bytes)
        require(math.isfinite(memory_bytes), "memory_bytes", "be finite", memory_bytes)
        require_int(num_layers=num_layers)
        require_positive(num_layers=num_layers)
        size = self.bytes_per_block * int(num_layers)  # a small numpy int would overflow
        blocks = int(memory_bytes) // size
        require(blocks > 0, "memory_bytes", f"be at least {size}, the size of one block", memory_bytes)
        return blocks
