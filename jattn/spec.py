"""Static description of a layer's attention: a hashable value, so changing it recompiles."""

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from jattn.masks import BatchSizes, Causal, Chunked, Mask, Window, check_causal_mask
from pallas_kernels.checks import (
    require,
    require_one_of,
    require_positive,
    require_shape,
    set_bools,
    set_floats,
    set_ints,
)
from pallas_kernels.shared import MAX_CHUNK_SIZE, normalize_window_side

# Dtype that each AttentionSpec.query_quantization rounds queries to.
QUERY_DTYPES = {None: None, "int8": jnp.int8, "fp8_e4m3": jnp.float8_e4m3fn}


def _window(window: Any) -> tuple[int | None, int | None] | None:
    """Return a validated window as a tuple of ints; None if it masks nothing."""
    if window is None:
        return None
    is_int = isinstance(window, numbers.Integral) and not isinstance(window, bool)
    hint = f" (vLLM's sliding_window={window} is ({window - 1}, 0))" if is_int else ""
    is_pair = isinstance(window, Sequence) and not isinstance(window, str) and len(window) == 2
    require(is_pair, "window", f"be (left, right){hint}", repr(window))
    for side, width in zip(("left", "right"), window, strict=True):
        is_int = isinstance(width, numbers.Integral) and not isinstance(width, bool)
        require(width is None or is_int, f"window's {side} side", "be None or an int", repr(width))
        require(width is None or width >= 0, f"window's {side} side", "be None or at least 0", width)
    left, right = (normalize_window_side(None if width is None else int(width)) for width in window)
    return None if left is None and right is None else (left, right)


def _as_array(name: str, values: Any) -> Array:
    """Return real numbers as an array; raise ValueError for bools and complex numbers."""
    try:
        array = jnp.asarray(values)
    except (TypeError, ValueError):  # strings, None, lists of different lengths
        require(False, name, "be numbers [q_heads]", repr(values)[:80])
        raise
    is_real = jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)
    require(is_real, name, "be real numbers [q_heads]", array.dtype)
    return array


# Names of other libraries (FlashAttention, FlashInfer, FlexAttention, vLLM, Flax) -> the spelling here.
OTHER_NAMES = {
    **dict.fromkeys(("sm_scale", "softmax_scale", "scaling"), "scale="),
    **dict.fromkeys(("softcap", "logits_soft_cap", "attn_logit_softcapping"), "soft_cap="),
    **dict.fromkeys(("window_size", "local_window_size"), "window=(left, right)"),
    "sliding_window": "window=(sliding_window - 1, 0)",
    "is_causal": "causal=",
}
OTHER_FIELD_NAMES = OTHER_NAMES | {
    **dict.fromkeys(("num_heads", "num_attention_heads", "num_query_heads"), "num_q_heads="),
    **dict.fromkeys(("num_key_value_heads", "kv_heads"), "num_kv_heads="),
    "head_size": "head_dim=",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Attention of one layer: how scores are computed and which keys a query attends to.

    A score is `scale * q.k`, then soft-capped, masked and ALiBi-biased. The softmax is computed in f32.

    Attributes:
        num_q_heads: Number of query heads on this device.
        num_kv_heads: Number of KV heads on this device; divides num_q_heads. Query head h reads KV head
            `h // (num_q_heads // num_kv_heads)`.
        head_dim: Width of a head.
        scale: Factor on q.k; None uses `head_dim ** -0.5`.
        causal: Causal attention: query i of a request attends to keys up to `seq_len - query_len + i`
            (bottom-right aligned).
        window: Sliding window `(left, right)`: number of neighbours that a query attends to on each side,
            not counting itself. None on a side, or 2**30 and more, is unlimited; None for both means no
            window. vLLM's sliding_window w is `(w - 1, 0)`.
        soft_cap: Soft cap of the scores, `soft_cap * tanh(score / soft_cap)`; None disables it.
        chunk_size: Chunk size of chunked local attention in tokens: a query attends to keys of its own chunk.
            None disables it.
        sqrt_alibi: With alibi_slopes, use the bias `-slope * sqrt(distance)` for past keys and 0 for future
            keys instead of `-slope * distance`.
        sparsity: Mask without arrays in addition to the fields above; None adds none. Pass a mask with arrays
            to `attend(mask=)`. If it allows future keys, as a prefix LM does, causal must be False.
        batch_invariant: Guarantee that the bits of a request's output do not depend on the other requests of
            the step, nor on the bucket as long as the request is in the same region.
        deterministic: Guarantee that gradients are bit-identical between runs. Query gradients are then
            computed by a separate kernel, which takes seven matrix products in all instead of five.
        query_quantization: "int8" or "fp8_e4m3": round queries to this type, with a scale per token and head;
            the cache must store keys in the same type. None keeps queries as they are. This changes the
            result, not the speed: the kernels dequantize both to 16 bits.
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
    deterministic: bool = False
    query_quantization: str | None = None
    # Whether the constructor got `causal`. attention_fn requires it, because Flax's default is not causal.
    states_causality: bool = dataclasses.field(default=False, init=False, repr=False, compare=False)

    def __new__(cls, **fields: Any) -> "AttentionSpec":
        """Record whether `causal` is stated; suggest names for those of other libraries."""
        for name in fields.keys() & OTHER_FIELD_NAMES.keys():
            raise TypeError(
                f"AttentionSpec got an unexpected argument {name!r}. Use {OTHER_FIELD_NAMES[name]}."
            )
        spec = super().__new__(cls)
        object.__setattr__(spec, "states_causality", "causal" in fields)
        return spec

    def __post_init__(self) -> None:
        set_ints(self, "num_q_heads", "num_kv_heads", "head_dim")
        set_bools(self, "causal", "sqrt_alibi", "batch_invariant", "deterministic")
        set_floats(self, "scale", "soft_cap")
        object.__setattr__(self, "window", _window(self.window))
        if self.chunk_size is not None:
            set_ints(self, "chunk_size")
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
            "be positive (None disables it)",
            self.soft_cap,
        )
        require(
            self.chunk_size is None or self.chunk_size > 0,
            "chunk_size",
            "be positive (None disables it)",
            self.chunk_size,
        )
        is_in_range = self.chunk_size is None or self.chunk_size <= MAX_CHUNK_SIZE
        rule = f"be at most {MAX_CHUNK_SIZE} (None disables it)"
        require(is_in_range, "chunk_size", rule, self.chunk_size)
        for name in ("scale", "soft_cap"):
            number = getattr(self, name)
            require(number is None or math.isfinite(number), name, "be finite or None", number)
        if self.sparsity is not None:
            check_causal_mask("sparsity", self.sparsity, causal=self.causal)
            self.sparsity.check(BatchSizes(num_q_heads=self.num_q_heads))
        require(
            self.sparsity is None or self.sparsity.is_static,
            "sparsity",
            "hold no arrays (pass a mask with arrays to attend(mask=))",
            type(self.sparsity).__name__,
        )
        require_one_of("query_quantization", self.query_quantization, QUERY_DTYPES)

    @property
    def q_heads_per_kv_head(self) -> int:
        """Number of query heads per KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def softmax_scale(self) -> float:
        """Scale of the scores: `scale`, or `head_dim ** -0.5` if that is None."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def mask_of_numbers(self) -> Mask:
        """Mask of `window`, `causal` and `chunk_size`."""
        mask: Mask = Window(*(self.window or (None, None)))
        if self.causal:
            mask = mask & Causal()
        return mask if self.chunk_size is None else mask & Chunked(self.chunk_size)

    def per_head(self, sinks: Any, alibi_slopes: Any) -> dict[str, Array | None]:
        """Return sinks and ALiBi slopes as arrays, by name.

        Raises:
            ValueError: If they are not real numbers, or not one per query head, or if `sqrt_alibi` is set and
                there are no slopes.
        """
        if alibi_slopes is None and self.sqrt_alibi:
            raise ValueError("spec.sqrt_alibi=True requires ALiBi slopes. Pass alibi_slopes.")
        arrays: dict[str, Array | None] = {"sinks": None, "alibi_slopes": None}
        for name, values in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
            if values is None:
                continue
            array = _as_array(name, values)
            require_shape(name, array.shape, (self.num_q_heads,), "q_heads")
            is_real = jnp.issubdtype(array.dtype, jnp.floating)
            arrays[name] = array if is_real else array.astype(jnp.float32)
        return arrays

    def check_query_quantization(self, k_dtype: DTypeLike) -> None:
        """Check that queries are quantized to the keys' dtype, or not at all."""
        dtype, rule = QUERY_DTYPES[self.query_quantization], f"be None with {jnp.dtype(k_dtype)} keys"
        require(dtype in (None, k_dtype), "spec.query_quantization", rule, repr(self.query_quantization))

    def mask_with(self, mask: Mask | None) -> Mask | None:
        """Return `sparsity` combined with another mask; None if there is neither."""
        if self.sparsity is None or mask is None:
            return self.sparsity if mask is None else mask
        return self.sparsity & mask
