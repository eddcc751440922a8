"""The parts of a decoder layer that are not attention."""

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
    """Divides by the root mean square, in f32, and multiplies by a learned weight."""

    def __init__(
        self, width: int, *, eps: float, is_offset: bool, dtype: DTypeLike, rounds_once: bool = False
    ) -> None:
        """Makes the weight.

        Args:
            width: Of the last axis.
            eps: Added to the mean square.
            is_offset: Gemma's: the factor is 1 + weight, and the product is rounded once. Else Llama's: the
                normalised input is rounded before it is multiplied.
            dtype: Of the weight.
            rounds_once: The product is rounded, not the normalised input; as with is_offset.
        """
        self.eps, self.is_offset, self.rounds_once = eps, is_offset, rounds_once or is_offset
        self.weight = nnx.Param((jnp.zeros if is_offset else jnp.ones)(width, dtype))

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        """The normalised x, in x.dtype."""
        wide = _over_root_mean_square(x, self.eps)
        weight = self.weight[...].reshape((1,) * (x.ndim - 1) + (-1,))
        weight = weight.astype(jnp.float32) + 1.0 if self.is_offset else weight
        return _weighted(wide, weight, x.dtype, rounds_once=self.rounds_once)


class BareRMSNorm(nnx.Module):
    """Divides by the root mean square, in f32."""

    def __init__(self, eps: float) -> None:
        """Makes nothing."""
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        """The normalised x, in x.dtype."""
        return _over_root_mean_square(x, self.eps).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Subtracts the mean, divides by the standard deviation, multiplies and adds, all in f32."""

    def __init__(self, shape: int | tuple[int, ...], spec: NormSpec, *, dtype: DTypeLike) -> None:
        """Makes the weight and the bias that the spec asks for.

        Args:
            shape: Of both. The last axis is normalised; rows of a weight with more are of heads, say.
            spec: A kind of LayerNorm; its eps is added to the variance.
            dtype: Of weight and bias.
        """
        self.eps, self.is_offset = spec.eps, spec.kind == "layer_offset"
        has_weight, has_bias = spec.kind != "layer_no_weight", spec.kind in ("layer", "layer_offset")
        make = jnp.zeros if self.is_offset else jnp.ones
        self.weight = nnx.Param(make(shape, dtype)) if has_weight else None
        self.bias = nnx.Param(jnp.zeros(shape, dtype)) if has_bias else None

    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        """The normalised x, in x.dtype."""
        wide = x.astype(jnp.float32)
        wide = _over_root_mean_square(wide - jnp.mean(wide, axis=-1, keepdims=True), self.eps)
        along = lambda param: (
            param[...].astype(jnp.float32).reshape((1,) * (x.ndim - param.ndim) + param.shape)
        )
        if self.weight is not None:
            wide = wide * (along(self.weight) + (1.0 if self.is_offset else 0.0))
        return (wide if self.bias is None else wide + along(self.bias)).astype(x.dtype)


def _over_root_mean_square(
    x: Float[Array, "*rows width"], eps: float, axis: int | tuple[int, ...] = -1, axis_name: str | None = None
) -> Float32[Array, "*rows width"]:
    wide = x.astype(jnp.float32)
    mean_square = jnp.mean(jnp.square(wide), axis=axis, keepdims=True)
    if axis_name is not None:
        mean_square = jax.lax.pmean(mean_square, axis_name)
    return wide * jax.lax.rsqrt(mean_square + eps)


def _weighted(wide: Array, weight: Array, dtype: DTypeLike, *, rounds_once: bool) -> Array:
    """An RMS norm's product, in dtype; see `RMSNorm`."""
    if rounds_once:
        return (wide * weight.astype(jnp.float32)).astype(dtype)
    return wide.astype(dtype) * weight.astype(dtype)


def make_norm(spec: NormSpec, width: int, *, dtype: DTypeLike) -> RMSNorm | BareRMSNorm | LayerNorm:
    """The norm that a spec says, of the last axis."""
    if spec.kind == "rms_no_weight":
        return BareRMSNorm(spec.eps)
    if spec.kind.startswith("layer"):
        return LayerNorm(width, spec, dtype=dtype)
    is_offset, rounds_once = spec.kind == "rms_offset", spec.kind == "rms_f32"
    return RMSNorm(width, eps=spec.eps, is_offset=is_offset, dtype=dtype, rounds_once=rounds_once)


class AllHeadsNorm(nnx.Module):
    """An RMS norm of all heads as one, with a weight for each number.

    Attributes:
        axis_name: Inside shard_map, where heads are one device's: the axis that all of them lie along, each
            on as many devices as any other. None = they are all here.
    """

    def __init__(self, num_heads: int, head_dim: int, spec: NormSpec, *, dtype: DTypeLike) -> None:
        """Makes the weight."""
        self.spec = spec  # no rounds_once: kernels norm each head by itself
        self.weight = nnx.Param(jnp.ones((num_heads, head_dim), dtype))
        self.axis_name: str | None = None

    def __call__(self, x: Float[Array, "tokens heads head_dim"]) -> Float[Array, "tokens heads head_dim"]:
        """The normalised x, in x.dtype."""
        wide = _over_root_mean_square(x, self.spec.eps, (-2, -1), self.axis_name)
        return _weighted(wide, self.weight[...][None], x.dtype, rounds_once=self.spec.kind == "rms_f32")


class NormBehindRope(nnx.Module):
    """A norm of each head that stands behind the rope (`follows_rope`), with the same weights for all."""

    follows_rope = True

    def __init__(self, head_dim: int, spec: NormSpec, *, dtype: DTypeLike) -> None:
        """Makes the norm."""
        self.norm = make_norm(spec, head_dim, dtype=dtype)

    def __call__(self, x: Float[Array, "tokens heads head_dim"]) -> Float[Array, "tokens heads head_dim"]:
        """The normalised x, in x.dtype."""
        return self.norm(x)


def make_qk_norm(spec: QKNorm, num_heads: int, head_dim: int, *, dtype: DTypeLike) -> nnx.Module:
    """The norm of queries or keys that a spec says, with weights."""
    if spec.comes_after_rope:
        return NormBehindRope(head_dim, spec.norm, dtype=dtype)
    if spec.over == "all_heads":
        return AllHeadsNorm(num_heads, head_dim, spec.norm, dtype=dtype)
    if spec.over == "own_head":
        return LayerNorm((num_heads, head_dim), spec.norm, dtype=dtype)
    return make_norm(spec.norm, head_dim, dtype=dtype)


@dataclasses.dataclass(frozen=True)
class NormedRope:
    """A rope, and behind it a norm without weights over each head. Hashable: static for jit.

    Attributes:
        rope: What rotates.
        eps: Added to the mean square.
    """

    rope: Rope
    eps: float

    @property
    def needs_lengths(self) -> bool:
        """As the rope's."""
        return self.rope.needs_lengths

    def __call__(
        self,
        x: Float[Array, "tokens heads head_dim"],
        positions: Int[Array, " tokens"],
        lengths: Int[Array, " tokens"] | None = None,
    ) -> Float[Array, "tokens heads head_dim"]:
        """Queries or keys, rotated and then normalised in f32."""
        return _over_root_mean_square(self.rope(x, positions, lengths), self.eps).astype(x.dtype)


class MLP(nnx.Module):
    """`down(act(gate(x)) * up(x))`, or Phi-3-small's variety of it."""

    def __init__(self, hidden_size: int, spec: MLPSpec, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the projections, gate and up as one."""
        how: Any = {"use_bias": spec.has_bias, "param_dtype": dtype, "precision": matmul_precision(dtype)}
        self.spec = spec
        self.gate_up_proj = nnx.LinearGeneral(hidden_size, (2, spec.intermediate_size), rngs=rngs, **how)
        self.down_proj = nnx.Linear(spec.intermediate_size, hidden_size, rngs=rngs, **how)

    def __call__(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        """The layer's output, in x.dtype; the activation is computed in f32."""
        gate, up = jnp.moveaxis(self.gate_up_proj(x), 1, 0)
        if self.spec.kind == "gegelu":
            return self.down_proj(gegelu(gate, up, self.spec.limit))
        gate = ACTIVATIONS[self.spec.hidden_act](gate.astype(jnp.float32)).astype(gate.dtype)
        return self.down_proj(gate * up)


class PlainMLP(nnx.Module):
    """`down(act(up(x)))`."""

    def __init__(self, hidden_size: int, spec: MLPSpec, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        """Makes the projections."""
        how: Any = {"use_bias": spec.has_bias, "param_dtype": dtype, "precision": matmul_precision(dtype)}
        self.spec = spec
        self.activation = XIELU(dtype=dtype) if spec.hidden_act == "xielu" else None
        self.up_proj = nnx.Linear(hidden_size, spec.intermediate_size, rngs=rngs, **how)
        self.down_proj = nnx.Linear(spec.intermediate_size, hidden_size, rngs=rngs, **how)

    def __call__(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        """The layer's output, in x.dtype; the activation is computed in f32."""
        up = self.up_proj(x)
        activation = ACTIVATIONS[self.spec.hidden_act] if self.activation is None else self.activation
        return self.down_proj(activation(up.astype(jnp.float32)).astype(up.dtype))


def matmul_precision(dtype: DTypeLike) -> str | None:
    """Full f32 products where the parameters are f32 (a GPU would use TF32)."""
    return None if jnp.dtype(dtype).itemsize == 2 else "highest"


def add_and_norm(
    x: Float[Array, "tokens hidden"],
    delta: Float[Array, "tokens hidden"],
    norm: Any,
    *,
    may_take_kernel: bool,
) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens hidden"]]:
    """The sum x + delta, and its norm: by one kernel where it can, which has no gradient.

    Args:
        x: The stream.
        delta: What a part gave.
        norm: Of the next part; None = it reads the sum.
        may_take_kernel: Static.

    Source: vLLM `RMSNorm.forward(x, residual)`.
    """
    if may_take_kernel and _why_no_kernel(x, delta, norm) is None:
        return _add_norm(x, delta, norm.weight[...], eps=norm.eps, is_offset=norm.is_offset)
    x = x + delta
    return x, x if norm is None else norm(x)


_add_norm = jax.jit(add_norm, static_argnames=("eps", "is_offset"))  # lowered once for all that call it


def _why_no_kernel(x: Array, delta: Array, norm: Any) -> str | None:
    """Why `add_norm` does not serve; None if it does."""
    if not is_kernel_rms_norm(norm):
        return "the norm is no RMS norm that rounds as Llama's or Gemma's"
    others = (delta.dtype, norm.weight[...].dtype)
    return support.why_not_on(x) or support.why_not_add_norm(
        dtype=x.dtype, other_dtypes=others, width=x.shape[-1]
    )


@jax.custom_jvp
def take_rows(
    table: Float[Array, "rows hidden"], ids: Int[Array, " tokens"]
) -> Float[Array, "tokens hidden"]:
    """A row of the table for each id, the nearest one for ids beyond it.

    The gradient of a row that many tokens share is summed in float32 and rounded once: a sum in bfloat16
    stops growing where a token's part is less than half a unit in its last place.
    """
    return jnp.take(table, ids, axis=0, mode="clip")


@take_rows.defjvp
def _take_rows_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Any]
) -> tuple[Float[Array, "tokens hidden"], Float[Array, "tokens hidden"]]:
    # Tangents alone are widened, and turned into the gradient's sum: the table is never copied.
    (table, ids), (moves, _) = primals, tangents
    wide = moves.astype(jnp.float32) if table.dtype.itemsize < 4 else moves
    return take_rows(table, ids), jnp.take(wide, ids, axis=0, mode="clip").astype(table.dtype)
