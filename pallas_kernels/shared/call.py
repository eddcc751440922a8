"""What the entry points of the attention kernels share: checks, and arrays in the form kernels take."""

import jax
import jax.numpy as jnp

from pallas_kernels.checks import require, require_one_of, require_positive, require_shape, unsupported
from pallas_kernels.shared.memory import ALIGN, copy_if_unaligned
from pallas_kernels.shared.paged_kv import CacheTiling
from pallas_kernels.shared.softmax import LOG2E
from pallas_kernels.shared.types import Ref, Scalar


# ------------------------------------------------------------------------------------- checks
def check_heads(q_heads: int, kv_heads: int) -> None:
    """Raise ValueError unless the query heads form groups, one per KV head."""
    require_positive(kv_heads=kv_heads, q_heads=q_heads)
    require(q_heads % kv_heads == 0, "q_heads", f"be a multiple of kv_heads ({kv_heads})", q_heads)


def check_per_head(q_heads: int, **arrays: jax.Array | None) -> None:
    """Raise ValueError unless the named arrays are None or have one number per query head."""
    for name, array in arrays.items():
        require_shape(name, (q_heads,) if array is None else array.shape, (q_heads,), "q_heads")


def check_scale(name: str, scale: jax.Array | None, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Raise ValueError unless a scale is None or has one of these shapes."""
    if scale is not None:
        require_one_of(f"{name}'s shape", tuple(jnp.shape(scale)), shapes)


def check_supported(kernel: str, reason: str | None) -> None:
    """Raise NotImplementedError if there is a reason why a kernel does not support a call."""
    if reason is not None:
        raise unsupported(kernel, reason, "Call jattn.attend with implementation='xla'")


# ------------------------------------------------------------------------------------- arrays
def in_log2(x: jax.Array | None) -> jax.Array | None:
    """Return slopes or sinks in f32, times log2(e)."""
    return None if x is None else x.astype(jnp.float32) * LOG2E


def pad_tokens(x: jax.Array, *, axis: int = 0, extra: int = 0) -> jax.Array:
    """Pad an axis of tokens to a multiple of 8, which TMA needs, and by `extra` tokens."""
    missing = -x.shape[axis] % ALIGN + extra
    if not missing:
        return copy_if_unaligned(x)
    return jnp.pad(x, [(0, missing if n == axis else 0) for n in range(x.ndim)])


def tile_scale(scale: jax.Array | None, tiling: CacheTiling) -> jax.Array | None:
    """Return the scale of keys or values in the form of KvRefs."""
    if scale is None or scale.ndim == 1:
        return scale
    if scale.ndim == 3:
        return tiling.tile_scales(scale)
    return scale.reshape(1) if scale.ndim == 0 else tiling.tile_channel_scales(scale)


def load_head_scale(scale_g: Ref, kv_head: Scalar) -> Scalar:
    """Load the scale of a KV head from a scale with one axis: one for all heads, or one per head."""
    return scale_g[kv_head if scale_g.shape[0] > 1 else 0]
