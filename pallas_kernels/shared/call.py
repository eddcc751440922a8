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


def split_tail(x: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array | None]:
    """Split an array into what TMA can read in place and a copy of its last rows; None if there is no need.

    TMA fills shared memory in groups of 8 rows, and a group that exceeds the array reads past its memory.
    Without the group the array is read in place, where padding would copy it: 95 us of a step of 700 us. The
    copy serves tiles of `num_rows` rows, each of which is read either from the array or from the copy.

    Args:
        x: Array whose first axis is the tokens.
        num_rows: Rows per copy by TMA, a multiple of 8. Static.

    Returns:
        All whole groups of the array, and the last `num_rows` rows of the array padded to groups.
    """
    num_missing = -x.shape[0] % ALIGN
    tail_start = x.shape[0] + num_missing - num_rows
    if num_missing and tail_start <= 0:
        return pad_tokens(x), None
    x = copy_if_unaligned(x)
    if not num_missing:
        return x, None
    padding = ((0, num_missing), *[(0, 0)] * (x.ndim - 1))
    return x[: x.shape[0] + num_missing - ALIGN], jnp.pad(x[tail_start:], padding)


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
