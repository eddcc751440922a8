"""What is fixed for a layer, a cache or a bucket: hashable values, so a change of them recompiles."""

import dataclasses
import difflib
import math
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jattn.masks import Mask, Sizes, check_ahead
from pallas_kernels.checks import (
    require,
    require_bool,
    require_int,
    require_number,
    require_one_of,
    require_positive,
)

LAYOUTS = ("NHD", "HND", "packed")
# What each AttentionSpec.query_quantization rounds queries to.
QUERY_DTYPES = {None: None, "int8": jnp.int8, "fp8_e4m3": jnp.float8_e4m3fn}


class Stored(NamedTuple):
    """What keys or values are stored as.

    Attributes:
        dtype: Of the array; None = the CacheSpec's.
        scale: "static" (one number, or one a kv head), "channel" (static, [kv_heads, head_dim]), "token_head"
            (made when written), or None.
    """

    dtype: DTypeLike | None
    scale: str | None

    def scale_shapes(self, spec: "CacheSpec") -> tuple[tuple[int, ...], ...]:
        """The shapes that a scale may have, the default first; in the order of `PagedCache`'s arguments."""
        heads = spec.num_kv_heads
        return {
            None: (),
            "static": ((), (heads,)),
            "channel": ((heads, spec.head_dim),),
            "token_head": ((spec.num_blocks, spec.block_size, heads),),
        }[self.scale]


AS_IT_IS = Stored(None, None)
INT8_TOKEN_HEAD = Stored(jnp.int8, "token_head")
# What each CacheSpec.quantization stores keys as, and values.
QUANTIZATIONS = {
    None: (AS_IT_IS, AS_IT_IS),
    "fp8_e4m3": (Stored(jnp.float8_e4m3fn, "static"),) * 2,
    "fp8_e5m2": (Stored(jnp.float8_e5m2, "static"),) * 2,
    "fp8_e4m3_token_head": (Stored(jnp.float8_e4m3fn, "token_head"),) * 2,
    "int8_token_head": (INT8_TOKEN_HEAD, INT8_TOKEN_HEAD),
    "int8_static_v": (INT8_TOKEN_HEAD, Stored(jnp.int8, "channel")),
    "int8_k_only": (INT8_TOKEN_HEAD, AS_IT_IS),
}


# VLLM's kv_cache_dtype, where it says exactly what one of ours says.
QUANTIZATION_ALIASES = {
    "auto": None,
    "fp8": "fp8_e4m3",
    "fp8_per_token_head": "fp8_e4m3_token_head",
    "int8_per_token_head": "int8_token_head",
}


def quantization_of(name: str | None) -> str | None:
    """The quantisation that a name means: ours, or vLLM's kv_cache_dtype.

    Raises:
        ValueError: There is none of that name; the message has the nearest.
    """
    if isinstance(name, str) and name in QUANTIZATION_ALIASES:
        return QUANTIZATION_ALIASES[name]
    if name is not None and (not isinstance(name, str) or name not in QUANTIZATIONS):
        ours = [choice for choice in QUANTIZATIONS if choice is not None]
        nearest = difflib.get_close_matches(str(name), ours, n=1, cutoff=0.0)[0]
        listed = ", ".join(map(repr, [None, *QUANTIZATION_ALIASES, *ours]))
        rule = f"be one of {listed}"
        require(False, "quantization", rule, f"{name!r}; the nearest is {nearest!r}")
    return name


def _set_ints(spec: Any, *names: str) -> None:
    """Checks fields that are ints, and makes numpy's Python's."""
    for name in names:
        require_int(**{name: getattr(spec, name)})
        object.__setattr__(spec, name, int(getattr(spec, name)))


def _set_bools(spec: Any, *names: str) -> None:
    for name in names:
        require_bool(**{name: getattr(spec, name)})
        object.__setattr__(spec, name, bool(getattr(spec, name)))


def _set_floats(spec: Any, *names: str) -> None:
    """Likewise numbers; None stays."""
    for name in names:
        if getattr(spec, name) is not None:
            require_number(**{name: getattr(spec, name)})
            object.__setattr__(spec, name, float(getattr(spec, name)))


def _window(window: Any) -> tuple[int | None, int | None] | None:
    """A checked window, as a tuple of ints."""
    if window is None:
        return None
    is_int = isinstance(window, numbers.Integral) and not isinstance(window, bool)
    way_out = f" (vLLM's sliding_window={window} is ({window - 1}, 0))" if is_int else ""
    is_pair = isinstance(window, Sequence) and not isinstance(window, str) and len(window) == 2
    require(is_pair, "window", f"be (left, right){way_out}", repr(window))
    for side, width in zip(("left", "right"), window, strict=True):
        is_int = isinstance(width, numbers.Integral) and not isinstance(width, bool)
        require(width is None or is_int, f"window's {side} side", "be None or an int", repr(width))
        require(width is None or width >= 0, f"window's {side} side", "be None or at least 0", width)
    left, right = (None if width is None else int(width) for width in window)
    return left, right


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """One layer's attention: what the score of a query and a key is, and which keys a query sees.

    A score is `scale * q.k`, then soft-capped, masked, ALiBi-biased; softmax in f32.

    Attributes:
        num_q_heads: Query heads of this device.
        num_kv_heads: Key/value heads; divides num_q_heads. Query head h reads kv head
            `h // (num_q_heads // num_kv_heads)`.
        head_dim: Width of a head.
        scale: Multiplies q.k. `head_dim ** -0.5` when None.
        causal: Query i of a request sees keys up to `seq_len - query_len + i` (bottom-right aligned).
        window: `(left, right)`: how many neighbours a query sees besides itself on each side; None for
            either or for both = unlimited. vLLM's sliding_window w is `(w - 1, 0)`.
        soft_cap: Scores become `soft_cap * tanh(score / soft_cap)`.
        chunk_size: Chunked-local attention: a query sees keys of its own chunk of this many positions.
        sqrt_alibi: With alibi_slopes, the bias is `-slope * sqrt(distance)` to the past and 0 to the future,
            not `-slope * distance`.
        sparsity: A mask without arrays, on top of the above; None = none. One with arrays: `attend(mask=)`.
            Where it lets queries see later keys, as a prefix LM does, causal must be False.
        batch_invariant: A request's output has the same bits whatever shares its step, in any bucket that
            gives it the same region.
        query_quantization: "int8" or "fp8_e4m3": queries are rounded to it, with a scale per token and head,
            before they meet keys that the cache holds in the same type. None = they stay as they are. It
            changes what is computed, not how fast: the kernels widen both to 16 bits.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float | None = None
    causal: bool = True
    window: tuple[int | None, int | None] | None = None
    soft_cap: float | None = None
    chunk_size: int | None = None
    sqrt_alibi: bool = False
    sparsity: Mask | None = None
    batch_invariant: bool = False
    query_quantization: str | None = None

    def __post_init__(self) -> None:
        _set_ints(self, "num_q_heads", "num_kv_heads", "head_dim")
        _set_bools(self, "causal", "sqrt_alibi", "batch_invariant")
        _set_floats(self, "scale", "soft_cap")
        object.__setattr__(self, "window", _window(self.window))
        if self.chunk_size is not None:
            _set_ints(self, "chunk_size")
        require_positive(num_q_heads=self.num_q_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim)
        require(
            self.num_q_heads % self.num_kv_heads == 0,
            "num_q_heads",
            f"be a multiple of num_kv_heads ({self.num_kv_heads})",
            self.num_q_heads,
        )
        require(
            self.soft_cap is None or self.soft_cap > 0,
            "soft_cap",
            "be positive (None switches it off)",
            self.soft_cap,
        )
        require(
            self.chunk_size is None or self.chunk_size > 0,
            "chunk_size",
            "be positive (None switches it off)",
            self.chunk_size,
        )
        for name in ("scale", "soft_cap"):
            number = getattr(self, name)
            require(number is None or math.isfinite(number), name, "be finite or None", number)
        if self.sparsity is not None:
            check_ahead("sparsity", self.sparsity, causal=self.causal)
            self.sparsity.check(Sizes(num_q_heads=self.num_q_heads))
        require(
            self.sparsity is None or self.sparsity.is_static,
            "sparsity",
            "hold no arrays (attend(mask=) takes those)",
            type(self.sparsity).__name__,
        )
        require_one_of("query_quantization", self.query_quantization, QUERY_DTYPES)

    @property
    def q_heads_per_kv_head(self) -> int:
        """Query heads that read one kv head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def softmax_scale(self) -> float:
        """`scale`, or `head_dim ** -0.5` where it is None."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def mask_with(self, mask: Mask | None) -> Mask | None:
        """What a query sees beyond the numbers above: `sparsity` and another mask."""
        if self.sparsity is None or mask is None:
            return self.sparsity if mask is None else mask
        return self.sparsity & mask


def _stored_dtype(dtype: Any) -> np.dtype:
    """What is stored as it is: floats."""
    try:
        stored = jnp.dtype(dtype)
    except TypeError:
        require(False, "dtype", "be a dtype", repr(dtype))
        raise
    rule = "be a float type (quantization='int8_token_head' and the like make integers)"
    require(jnp.issubdtype(stored, jnp.floating), "dtype", rule, stored)
    return stored


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """One layer's paged KV cache.

    Attributes:
        num_blocks: Blocks of the pool. Block 0 is by custom the null block that padding points to.
        block_size: Tokens of a block.
        num_kv_heads: Key/value heads of this device.
        head_dim: Width of a head.
        dtype: What keys and values are stored as, unless `quantization` says otherwise.
        layout: "NHD" [blocks, block_size, kv_heads, head_dim], "HND" [blocks, kv_heads, block_size,
            head_dim], or "packed", vLLM's paged_attention layout: keys [blocks, kv_heads, head_dim / x,
            block_size, x] with x elements in 16 bytes, values [blocks, kv_heads, head_dim, block_size].
        quantization: None; "fp8_e4m3" or "fp8_e5m2" (a static scale, or one a kv head); "fp8_e4m3_token_head"
            or "int8_token_head" (a scale per token and head, made when written); "int8_static_v" (keys as
            int8_token_head, int8 values with a static scale per channel); "int8_k_only" (values as they are).
            VLLM's names are taken, too: "auto", "fp8", "fp8_per_token_head", "int8_per_token_head".
    """

    num_blocks: int
    block_size: int = 16
    num_kv_heads: int
    head_dim: int
    dtype: DTypeLike = jnp.bfloat16
    layout: str = "NHD"
    quantization: str | None = None

    def __post_init__(self) -> None:
        _set_ints(self, "num_blocks", "block_size", "num_kv_heads", "head_dim")
        require_positive(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )
        require_one_of("layout", self.layout, LAYOUTS)
        object.__setattr__(self, "quantization", quantization_of(self.quantization))
        object.__setattr__(self, "dtype", _stored_dtype(self.dtype))
        if self.layout == "packed":
            require(
                self.head_dim % self.pack_width == 0,
                "head_dim",
                f"be a multiple of {self.pack_width} ({self.key_dtype} in 16 bytes) in the packed layout",
                self.head_dim,
            )

    @property
    def stored(self) -> tuple[Stored, Stored]:
        """What keys are stored as, and values."""
        return QUANTIZATIONS[self.quantization]

    @property
    def key_dtype(self) -> np.dtype:
        """The dtype of the key array."""
        return jnp.dtype(self.stored[0].dtype or self.dtype)

    @property
    def value_dtype(self) -> np.dtype:
        """The dtype of the value array."""
        return jnp.dtype(self.stored[1].dtype or self.dtype)

    @property
    def pack_width(self) -> int:
        """VLLM's x: elements of a key in 16 bytes."""
        return 16 // self.key_dtype.itemsize

    @property
    def key_shape(self) -> tuple[int, ...]:
        """Shape of the key array."""
        blocks, size, heads, dim = self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim
        return {
            "NHD": (blocks, size, heads, dim),
            "HND": (blocks, heads, size, dim),
            "packed": (blocks, heads, dim // self.pack_width, size, self.pack_width),
        }[self.layout]

    @property
    def value_shape(self) -> tuple[int, ...]:
        """Shape of the value array."""
        if self.layout == "packed":
            return (self.num_blocks, self.num_kv_heads, self.head_dim, self.block_size)
        return self.key_shape

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one more block costs: its keys, values and per-token scales."""
        heads = self.block_size * self.num_kv_heads
        num_scales = sum(stored.scale == "token_head" for stored in self.stored)
        return heads * (
            self.head_dim * (self.key_dtype.itemsize + self.value_dtype.itemsize) + 4 * num_scales
        )

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_blocks * self.bytes_per_block

    def num_blocks_in(self, memory_bytes: int, num_layers: int = 1) -> int:
        """How many blocks fit `memory_bytes` when each of `num_layers` layers has its own cache.

        Raises:
            ValueError: Not even one block fits.
        """
        require_positive(num_layers=num_layers)
        blocks = int(memory_bytes // (self.bytes_per_block * num_layers))
        require(
            blocks > 0,
            "memory_bytes",
            f"hold a block ({self.bytes_per_block * num_layers} bytes)",
            memory_bytes,
        )
        return blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bucket:
    """The static sizes of a step's two regions, `[decode tokens | prefill tokens]`.

    Attributes:
        max_decodes: Rows of the decode region; each owns `decode_query_len` tokens.
        max_prefills: Rows of the prefill region.
        max_prefill_tokens: Tokens of the prefill region, all rows together.
        decode_query_len: Tokens of a decode row: 1, or 1 + k with k speculative tokens.
        max_blocks: Columns of the block table; None = as many as the longest request of the batch needs.
    """

    max_decodes: int = 0
    max_prefills: int = 0
    max_prefill_tokens: int = 0
    decode_query_len: int = 1
    max_blocks: int | None = None

    def __post_init__(self) -> None:
        _set_ints(self, "max_decodes", "max_prefills", "max_prefill_tokens", "decode_query_len")
        if self.max_blocks is not None:
            _set_ints(self, "max_blocks")
        for name in ("max_decodes", "max_prefills", "max_prefill_tokens"):
            require(getattr(self, name) >= 0, name, "be at least 0", getattr(self, name))
        if self.max_prefill_tokens:
            require(
                self.max_prefills > 0,
                "max_prefills",
                f"be positive with {self.max_prefill_tokens} prefill tokens",
                0,
            )
        require_positive(decode_query_len=self.decode_query_len)
        require(
            self.max_blocks is None or self.max_blocks >= 0, "max_blocks", "be at least 0", self.max_blocks
        )

    @property
    def max_reqs(self) -> int:
        """Rows of both regions."""
        return self.max_decodes + self.max_prefills

    @property
    def max_decode_tokens(self) -> int:
        """Tokens of the decode region: where the prefill region starts."""
        return self.max_decodes * self.decode_query_len

    @property
    def max_tokens(self) -> int:
        """Tokens of both regions."""
        return self.max_decode_tokens + self.max_prefill_tokens
