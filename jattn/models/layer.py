"""One layer of a decoder."""

from collections.abc import Sequence

import jax
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from jattn.cache import PagedCache
from jattn.metadata.batch import BatchMetadata
from jattn.models.config import DecoderConfig
from jattn.models.layers import MLP, RMSNorm, matmul_precision
from jattn.module import PagedAttention
from jattn.planning import Plan


class DecoderLayer(nnx.Module):
    """Attention and MLP, each behind a norm (Gemma2: between two) and beside the residual stream."""

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        *,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        implementation: str | Sequence[str] | None,
    ) -> None:
        """Makes layer number `layer`."""
        norm = lambda width=config.hidden_size: RMSNorm(
            width, eps=config.rms_norm_eps, is_offset=config.is_gemma, dtype=dtype
        )
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.self_attn = PagedAttention(
            config.hidden_size,
            config.attention_spec(layer),
            rngs=rngs,
            rope=config.ropes[layer],
            q_norm=norm(config.head_dim) if config.has_qk_norm else None,
            k_norm=norm(config.head_dim) if config.has_qk_norm else None,
            use_bias=config.attention_bias,
            use_out_bias=config.attention_out_bias,
            fuses_qkv=True,
            param_dtype=dtype,
            precision=matmul_precision(dtype),
            implementation=implementation,
        )
        self.mlp = MLP(
            config.hidden_size,
            config.intermediate_size,
            hidden_act=config.hidden_act,
            use_bias=config.mlp_bias,
            dtype=dtype,
            rngs=rngs,
        )
        self.is_gemma = config.is_gemma
        if config.is_gemma:
            self.pre_feedforward_layernorm, self.post_feedforward_layernorm = norm(), norm()

    @jax.jit  # traced and lowered once for all layers of a kind, whatever weights they hold
    def __call__(
        self,
        x: Float[Array, "tokens hidden"],
        cache: PagedCache | None,
        metadata: BatchMetadata,
        positions: Int32[Array, " tokens"],
        plan: Plan | None = None,
    ) -> tuple[Float[Array, "tokens hidden"], PagedCache | None]:
        """The residual stream behind this layer, and its cache with the step's keys and values in it."""
        attended, cache = self.self_attn(self.input_layernorm(x), cache, metadata, positions, plan)
        if not self.is_gemma:
            x = x + attended
            return x + self.mlp(self.post_attention_layernorm(x)), cache
        x = x + self.post_attention_layernorm(attended)
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x))), cache
