"""Norms, MLPs and the embedding lookup of a decoder."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from jattn.cache.fused_qkv import is_kernel_rms_norm
from jattn.models.activations import ACTIVATIONS, XIELU, gegelu
from jattn.models.rope import Rope
from jattn.models.specs import MLPSpec, NormSpec, QKNorm
from pallas_kernels import support
from pallas_kernels.add_norm import add_norm


class RMSNorm(nnx.Module):
    """RMS norm with a learned weight, computed in f32."""

    def __init__(
        self, width: int, *, eps: float, is_offset: bool, dtype: DTypeLike, rounds_once: bool = False
    ) -> None:
        """Initialize the weight.

        Args:
            width: Size of the last axis.
            eps: Number added to the mean square.
            is_offset: Whether the factor is 1 + weight and the product is rounded once (Gemma). False: the
                normalized input is rounded before the multiplication (Llama).
            dtype: Dtype of the weight.
            rounds_once: Whether only the product is rounded, not the normalized input; implied by is_offset.
        """
        self.eps, self.is_offset, self.rounds_once = eps, is_offset, rounds_once or is_offset
        self.weight = nnx.Param((jnp.zeros if is_offset else jnp.ones)(width, dtype))

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        """Normalize x; the result has x.dtype."""
        normalized = _rms_normalize(x, self.eps)
        weight = self.weight[...].reshape((1,) * (x.ndim - 1) + (-1,))
        weight = weight.astype(jnp.float32) + 1.0 if self.is_offset else weight
        return _apply_weight(normalized, weight, x.dtype, rounds_once=self.rounds_once)


class RMSNormNoWeight(nnx.Module):
    """RMS norm without a weight, computed in f32."""

    def __init__(self, eps: float) -> None:
        """Store eps, the number added to the mean square."""
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        """Normalize x; the result has x.dtype."""
        return _rms_normalize(x, self.eps).astype(x.dtype)


class LayerNorm(nnx.Module):
    """LayerNorm with an optional weight and bias, computed in f32."""

    def __init__(self, shape: int | tuple[int, ...], spec: NormSpec, *, dtype: DTypeLike) -> None:
        """Initialize the weight and the bias that the spec has.

        Args:
            shape: Shape of weight and bias. The last axis is normalized; a leading axis holds, for example,
                one row per head.
            spec: A kind of LayerNorm and its epsilon, which is added to the variance.
            dtype: Dtype of weight and bias.
        """
        self.eps, self.is_offset = spec.eps, spec.kind == "layer_offset"
        has_weight, has_bias = spec.kind != "layer_no_weight", spec.kind in ("layer", "layer_offset")
        initial = jnp.zeros if self.is_offset else jnp.ones
        self.weight = nnx.Param(initial(shape, dtype)) if has_weight else None
        self.bias = nnx.Param(jnp.zeros(shape, dtype)) if has_bias else None

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        """Normalize x; the result has x.dtype."""
        x_f32 = x.astype(jnp.float32)
        normalized = _rms_normalize(x_f32 - jnp.mean(x_f32, axis=-1, keepdims=True), self.eps)

        def broadcast(param: nnx.Param[Any]) -> Array:
            return param[...].astype(jnp.float32).reshape((1,) * (x.ndim - param.ndim) + param.shape)

        if self.weight is not None:
            normalized = normalized * (broadcast(self.weight) + (1.0 if self.is_offset else 0.0))
        if self.bias is not None:
            normalized = normalized + broadcast(self.bias)
        return normalized.astype(x.dtype)


def _rms_normalize(
    x: Float[Array, "*rows width"], eps: float, axis: int | tuple[int, ...] = -1, axis_name: str | None = None
) -> Float32[Array, "*rows width"]:
    x_f32 = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(x_f32), axis=axis, keepdims=True)
    if axis_name is not None:
        mean_square = jax.lax.pmean(mean_square, axis_name)
    return x_f32 * jax.lax.rsqrt(mean_square + eps)


def _apply_weight(normalized: Array, weight: Array, dtype: DTypeLike, *, rounds_once: bool) -> Array:
    """Multiply an RMS norm's normalized input by the weight, rounding as `RMSNorm` describes."""
    if rounds_once:
        return (normalized * weight.astype(jnp.float32)).astype(dtype)
    return normalized.astype(dtype) * weight.astype(dtype)


def make_norm(spec: NormSpec, width: int, *, dtype: DTypeLike) -> RMSNorm | RMSNormNoWeight | LayerNorm:
    """Create the norm of a spec, over the last axis."""
    if spec.kind == "rms_no_weight":
        return RMSNormNoWeight(spec.eps)
    if spec.kind.startswith("layer"):
        return LayerNorm(width, spec, dtype=dtype)
    is_offset, rounds_once = spec.kind == "rms_offset", spec.kind == "rms_f32"
    return RMSNorm(width, eps=spec.eps, is_offset=is_offset, dtype=dtype, rounds_once=rounds_once)


class AllHeadsNorm(nnx.Module):
    """An RMS norm over all heads together, with one weight per element.

    Attributes:
        axis_name: Inside shard_map, where each device has some of the heads: the mesh axis that heads are
            sharded over. None = all heads are on this device.
    """

    def __init__(self, num_heads: int, head_dim: int, spec: NormSpec, *, dtype: DTypeLike) -> None:
        """Initialize the weight."""
        self.spec = spec  # no rounds_once attribute: the kernels normalize each head separately
        self.weight = nnx.Param(jnp.ones((num_heads, head_dim), dtype))
        self.axis_name: str | None = None

    def __call__(self, x: Float[Array, "tokens heads head_dim"]) -> Float[Array, "tokens heads head_dim"]:
        """Normalize x; the result has x.dtype."""
        normalized = _rms_normalize(x, self.spec.eps, (-2, -1), self.axis_name)
        return _apply_weight(
            normalized, self.weight[...][None], x.dtype, rounds_once=self.spec.kind == "rms_f32"
        )


class NormAfterRope(nnx.Module):
    """A norm of each head that follows the rotary embedding, with the same weights for all heads."""

    follows_rope = True

    def __init__(self, head_dim: int, spec: NormSpec, *, dtype: DTypeLike) -> None:
        """Initialize the norm."""
        self.norm = make_norm(spec, head_dim, dtype=dtype)

    def __call__(self, x: Float[Array, "tokens heads head_dim"]) -> Float[Array, "tokens heads head_dim"]:
        """Normalize x; the result has x.dtype."""
        return self.norm(x)


def make_qk_norm(spec: QKNorm, num_heads: int, head_dim: int, *, dtype: DTypeLike) -> nnx.Module:
    """Create the norm of queries or keys that a spec describes."""
    if spec.comes_after_rope:
        return NormAfterRope(head_dim, spec.norm, dtype=dtype)
    if spec.over == "all_heads":
        return AllHeadsNorm(num_heads, head_dim, spec.norm, dtype=dtype)
    if spec.over == "own_head":
        return LayerNorm((num_heads, head_dim), spec.norm, dtype=dtype)
    return make_norm(spec.norm, head_dim, dtype=dtype)


@dataclasses.dataclass(frozen=True)
class NormedRope:
    """A rotary embedding followed by an RMS norm of each head without weights. Hashable: static for jit.

    Attributes:
        rope: The rotary embedding.
        eps: Number added to the mean square.
    """

    rope: Rope
    eps: float

    @property
    def needs_lengths(self) -> bool:
        """Whether the rotary embedding depends on the request's length."""
        return self.rope.needs_lengths

    def __call__(
        self,
        x: Float[Array, "tokens heads head_dim"],
        positions: Int[Array, " tokens"],
        lengths: Int[Array, " tokens"] | None = None,
    ) -> Float[Array, "tokens heads head_dim"]:
        """Apply the rotary embedding to queries or keys, then normalize them in f32."""
        return _rms_normalize(self.rope(x, positions, lengths), self.eps).astype(x.dtype)


class MLP(nnx.Module):
    """A gated MLP: `down(act(gate(x)) * up(x))`, or Phi-3-small's variant of it."""

    def __init__(self, hidden_size: int, spec: MLPSpec, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Initialize the projections; gate and up are one projection."""
        linear: Any = {"use_bias": spec.has_bias, "param_dtype": dtype, "precision": matmul_precision(dtype)}
        self.spec = spec
        self.gate_up_proj = nnx.LinearGeneral(hidden_size, (2, spec.intermediate_size), rngs=rngs, **linear)
        self.down_proj = nnx.Linear(spec.intermediate_size, hidden_size, rngs=rngs, **linear)

    def __call__(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        """Apply the MLP; the activation is computed in f32, the result has x.dtype."""
        gate, up = jnp.moveaxis(self.gate_up_proj(x), 1, 0)
        if self.spec.kind == "gegelu":
            return self.down_proj(gegelu(gate, up, self.spec.limit))
        gate = ACTIVATIONS[self.spec.hidden_act](gate.astype(jnp.float32)).astype(gate.dtype)
        return self.down_proj(gate * up)


class PlainMLP(nnx.Module):
    """An MLP without a gate: `down(act(up(x)))`."""

    def __init__(self, hidden_size: int, spec: MLPSpec, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Initialize the projections."""
        linear: Any = {"use_bias": spec.has_bias, "param_dtype": dtype, "precision": matmul_precision(dtype)}
        self.spec = spec
        self.activation = XIELU(dtype=dtype) if spec.hidden_act == "xielu" else None
        self.up_proj = nnx.Linear(hidden_size, spec.intermediate_size, rngs=rngs, **linear)
        self.down_proj = nnx.Linear(spec.intermediate_size, hidden_size, rngs=rngs, **linear)

    def __call__(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        """Apply the MLP; the activation is computed in f32, the result has x.dtype."""
        up = self.up_proj(x)
        activation = ACTIVATIONS[self.spec.hidden_act] if self.activation is None else self.activation
        return self.down_proj(activation(up.astype(jnp.float32)).astype(up.dtype))


def matmul_precision(dtype: DTypeLike) -> str | None:
    """Return the matmul precision: full f32 for f32 parameters, for which a GPU would otherwise use TF32."""
    return None if jnp.dtype(dtype).itemsize == 2 else "highest"


def add_and_norm(
    x: Float[Array, "tokens hidden"],
    sublayer_out: Float[Array, "tokens hidden"],
    norm: Any,
    *,
    allow_kernel: bool,
) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens hidden"]]:
    """Return x + sublayer_out and its norm, computed by one kernel where it is supported.

    Args:
        x: The residual stream.
        sublayer_out: Output of attention or MLP.
        norm: Norm before the next attention or MLP; None = the sum is not normalized.
        allow_kernel: Whether the kernel may be used; static. It has no gradient.

    Source: vLLM `RMSNorm.forward(x, residual)`.
    """
    if allow_kernel and _why_not_add_norm(x, sublayer_out, norm) is None:
        return _add_norm(x, sublayer_out, norm.weight[...], eps=norm.eps, is_offset=norm.is_offset)
    x = x + sublayer_out
    return x, x if norm is None else norm(x)


_add_norm = jax.jit(
    add_norm, static_argnames=("eps", "is_offset")
)  # jitted, so that it is lowered once for all callers


def _why_not_add_norm(x: Array, sublayer_out: Array, norm: Any) -> str | None:
    """Return why `add_norm` cannot be used, or None if it can."""
    if not is_kernel_rms_norm(norm):
        return "the norm is not an RMS norm that rounds as Llama's or Gemma's does"
    dtypes = (sublayer_out.dtype, norm.weight[...].dtype)
    return support.why_not_kernel_on("add_norm", x) or support.why_not_add_norm(
        dtype=x.dtype, other_dtypes=dtypes, width=x.shape[-1]
    )


@jax.custom_jvp
def take_rows(
    table: Float[Array, "rows hidden"], ids: Int[Array, " tokens"]
) -> Float[Array, "tokens hidden"]:
    """Look up the table's row of each id; ids out of range are clipped.

    The gradient of a row that many tokens share is summed in float32 and rounded once: a sum in bfloat16
    stops growing when a token's contribution is less than half a unit in its last place.
    """
    return jnp.take(table, ids, axis=0, mode="clip")


@take_rows.defjvp
def _take_rows_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Any]
) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens hidden"]]:
    # Only the tangent is cast to f32, so that its transpose sums in f32. The table is never copied.
    (table, ids), (tangent, _) = primals, tangents
    tangent = tangent.astype(jnp.float32) if table.dtype.itemsize < 4 else tangent
    return take_rows(table, ids), jnp.take(tangent, ids, axis=0, mode="clip").astype(table.dtype)
