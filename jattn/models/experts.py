"""Mixtures of experts: a router sends each token through a few of many MLPs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from jattn.implementations.selection import ImplementationArg, requested_implementations
from jattn.models.activations import ClampedSwiGLU, GatedActivation
from jattn.models.expert_matmuls import ExpertStatics, ExpertWeights, run_experts
from jattn.models.layers import matmul_precision
from jattn.models.routing import Routing, TopKExperts
from pallas_kernels.checks import require


class ExpertLinear(nnx.Module):
    """A weight matrix per expert, with an optional bias per expert."""

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        in_axis: int,
        use_bias: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        """Initialize `weight` [experts, ...], and `bias` of the same shape without `in_axis`, or None."""
        outputs = [axis for axis in range(1, len(shape)) if axis != in_axis]
        bias_shape = (shape[0], *(shape[axis] for axis in outputs))
        initializer = nnx.initializers.lecun_normal(in_axis=in_axis, out_axis=outputs, batch_axis=0)
        self.weight = nnx.Param(initializer(rngs.params(), shape, jnp.dtype(dtype)))
        self.bias = nnx.Param(jnp.zeros(bias_shape, dtype)) if use_bias else None


class Experts(nnx.Module):
    """A router, its experts, and an optional expert that all tokens share.

    Parameters, with E experts: `router.kernel` [hidden, E] and `.bias` [E]; `router_correction` [E], in f32;
    `gate_up_proj.weight` [E, 2, intermediate, hidden], the gate first, and `.bias` [E, 2, intermediate];
    `down_proj.weight` [E, intermediate, hidden] and `.bias` [E, hidden]; `shared_expert`;
    `shared_expert_gate.kernel` [hidden, 1]. Biases and the shared expert are None unless requested.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        num_experts: int,
        experts_per_token: int,
        routing: Routing,
        activation: str | ClampedSwiGLU = "silu",
        use_bias: bool = False,
        shared_expert: Callable[[Array], Array] | None = None,
        gates_shared_expert: bool = False,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
        implementation: ImplementationArg = None,
    ) -> None:
        """Initialize the parameters.

        Args:
            hidden_size: Width of input and output.
            intermediate_size: Width of an expert's hidden layer.
            num_experts: Number of experts.
            experts_per_token: Number of experts that each token is routed to.
            routing: Selection and weighting of the experts.
            activation: A key of `jattn.models.activations.ACTIVATIONS`, or gpt-oss's clamped SwiGLU.
            use_bias: Whether the experts' projections have biases.
            shared_expert: Module that all tokens run through in addition, such as an MLP.
            gates_shared_expert: Whether the shared expert's output is multiplied by the sigmoid of a learned
                projection of the input (Qwen2-MoE).
            rngs: Random streams for the initial parameters.
            dtype: Dtype of the parameters.
            implementation: Requested implementations; see `jattn.attend`. The kernel is used only if they
                include "mosaic_gpu".

        Raises:
            ValueError: If a token has more experts than there are.
            NotImplementedError: If the activation is not supported.
        """
        rule = f"lie in [1, {num_experts}], the number of experts"
        require(1 <= experts_per_token <= num_experts, "experts_per_token", rule, experts_per_token)
        self.experts_per_token, self.routing = experts_per_token, routing
        self.activation = GatedActivation(activation) if isinstance(activation, str) else activation
        self.precision = matmul_precision(dtype)
        self.allow_kernel = "mosaic_gpu" in requested_implementations(implementation)
        linear: Any = {"param_dtype": dtype, "precision": self.precision, "rngs": rngs}
        self.router = nnx.Linear(hidden_size, num_experts, use_bias=routing.has_bias, **linear)
        correction = jnp.zeros(num_experts, jnp.float32) if routing.has_correction_bias else None
        self.router_correction = None if correction is None else nnx.Param(correction)
        expert_linear: Any = {"use_bias": use_bias, "dtype": dtype, "rngs": rngs}
        gate_up_shape = (num_experts, 2, intermediate_size, hidden_size)
        self.gate_up_proj = ExpertLinear(gate_up_shape, in_axis=3, **expert_linear)
        down_shape = (num_experts, intermediate_size, hidden_size)
        self.down_proj = ExpertLinear(down_shape, in_axis=1, **expert_linear)
        self.shared_expert = shared_expert
        gate = nnx.Linear(hidden_size, 1, use_bias=False, **linear) if gates_shared_expert else None
        self.shared_expert_gate = gate

    def __call__(self, x: Float[Array, "tokens hidden"]) -> Float[Array, "tokens hidden"]:
        """Apply the layer; the result has x.dtype. Padding tokens may hold anything, even NaN."""
        top_k = self.route(x)
        statics = ExpertStatics(self.activation, self.precision)
        out = run_experts(x, top_k, self.weights(), statics, allow_kernel=self.allow_kernel)
        if self.shared_expert is not None:
            shared = self.shared_expert(x).astype(jnp.float32)
            if self.shared_expert_gate is not None:
                shared = shared * jax.nn.sigmoid(self.shared_expert_gate(x).astype(jnp.float32))
            out = out + shared
        return out.astype(x.dtype)

    def route(self, x: Float[Array, "tokens hidden"]) -> TopKExperts:
        """Select the experts of each token."""
        correction = None if self.router_correction is None else self.router_correction[...]
        return self.routing.route(self.router_logits(x), self.experts_per_token, correction)

    def router_logits(self, x: Float[Array, "tokens hidden"]) -> Float32[Array, "tokens experts"]:
        """Return the router's logits, in f32."""
        kernel, bias = self.router.kernel[...], self.router.bias
        logits = jnp.matmul(x, kernel, precision=self.precision, preferred_element_type=jnp.float32)
        return logits if bias is None else logits + bias[...].astype(jnp.float32)[None, :]

    def weights(self) -> ExpertWeights:
        """Return the experts' parameters as arrays."""
        gate_up, down = self.gate_up_proj, self.down_proj
        return ExpertWeights(
            gate_up=gate_up.weight[...],
            gate_up_bias=None if gate_up.bias is None else gate_up.bias[...],
            down=down.weight[...],
            down_bias=None if down.bias is None else down.bias[...],
        )
