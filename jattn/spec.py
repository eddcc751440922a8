"""What a layer's attention is: a hashable value, so a change of it recompiles."""

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from jattn.masks import BatchSizes, Causal, Chunked, Mask, Window, check_causal_mask
from jattn.pytree import set_bools, set_floats, set_ints
from pallas_kernels.checks import require, require_one_of, require_positive, require_shape
from pallas_kernels.shared import MAX_CHUNK_SIZE, normalize_window_side

# What each AttentionSpec.query_quantization rounds queries to.
QUERY_DTYPES = {None: None, "int8": jnp.int8, "fp8_e4m3": jnp.float8_e4m3fn}


def _window(window: Any) -> tuple[int | None, int | None] | None:
    """A checked window, as a tuple of ints; None where it hides nothing."""
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
    left, right = (normalize_window_side(None if width is None else int(width)) for width in window)
    return None if left is None and right is None else (left, right)


def _as_array(name: str, values: Any) -> Array:
    """Real numbers as an array: bools would count as 0 and 1, and imaginary parts be dropped."""
    try:
        array = jnp.asarray(values)
    except (TypeError, ValueError):  # of words, of None, of lists of several lengths
        require(False, name, "be numbers [q_heads]", repr(values)[:80])
        raise
    is_real = jnp.issubdtype(array.dtype, jnp.floating) or jnp.issubdtype(array.dtype, jnp.integer)
    require(is_real, name, "be real numbers [q_heads]", array.dtype)
    return array


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
            either or for both = unlimited, as 2**30 and more are. vLLM's sliding_window w is `(w - 1, 0)`.
        soft_cap: Scores become `soft_cap * tanh(score / soft_cap)`.
        chunk_size: Chunked-local attention: a query sees keys of its own chunk of this many positions.
        sqrt_alibi: With alibi_slopes, the bias is `-slope * sqrt(distance)` to the past and 0 to the future,
            not `-slope * distance`.
        sparsity: A mask without arrays, on top of the above; None = none. One with arrays: `attend(mask=)`.
            Where it lets queries see later keys, as a prefix LM does, causal must be False.
        batch_invariant: A request's output has the same bits whatever shares its step, in any bucket that
            gives it the same region.
        deterministic: Gradients have the same bits twice. Those of queries then have a kernel of their own,
            for seven products in all instead of five.
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
    deterministic: bool = False
    query_quantization: str | None = None

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
            "be positive (None switches it off)",
            self.soft_cap,
        )
        require(
            self.chunk_size is None or self.chunk_size > 0,
            "chunk_size",
            "be positive (None switches it off)",
            self.chunk_size,
        )
        is_counted = self.chunk_size is None or self.chunk_size <= MAX_CHUNK_SIZE
        rule = f"be at most {MAX_CHUNK_SIZE} (None switches it off)"
        require(is_counted, "chunk_size", rule, self.chunk_size)
        for name in ("scale", "soft_cap"):
            number = getattr(self, name)
            require(number is None or math.isfinite(number), name, "be finite or None", number)
        if self.sparsity is not None:
            check_causal_mask("sparsity", self.sparsity, causal=self.causal)
            self.sparsity.check(BatchSizes(num_q_heads=self.num_q_heads))
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

    @property
    def mask_of_numbers(self) -> Mask:
        """What `window`, `causal` and `chunk_size` let a query see."""
        mask: Mask = Window(*(self.window or (None, None)))
        if self.causal:
            mask = mask & Causal()
        return mask if self.chunk_size is None else mask & Chunked(self.chunk_size)

    def per_head(self, sinks: Any, alibi_slopes: Any) -> dict[str, Array | None]:
        """Numbers of each query head as arrays, by the names of the arguments.

        Raises:
            ValueError: They are no real numbers, or not one a query head.
        """
        arrays: dict[str, Array | None] = {"sinks": None, "alibi_slopes": None}
        for name, values in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
            if values is None:
                continue
            array = _as_array(name, values)
            require_shape(name, array.shape, (self.num_q_heads,), "q_heads")
            is_real = jnp.issubdtype(array.dtype, jnp.floating)
            arrays[name] = array if is_real else array.astype(jnp.float32)
        return arrays

    def check_keys(self, k_dtype: DTypeLike) -> None:
        """Queries are rounded to what the keys are, or not at all."""
        rounds_to, rule = QUERY_DTYPES[self.query_quantization], f"be None with keys of {jnp.dtype(k_dtype)}"
        is_right = rounds_to in (None, k_dtype)
        require(is_right, "spec.query_quantization", rule, repr(self.query_quantization))

    def mask_with(self, mask: Mask | None) -> Mask | None:
        """What a query sees beyond the numbers above: `sparsity` and another mask."""
        if self.sparsity is None or mask is None:
            return self.sparsity if mask is None else mask
        return self.sparsity & mask
