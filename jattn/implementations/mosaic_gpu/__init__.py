"""Attention with the Mosaic GPU kernels: kernel selection, kernel plans, calls and gradients."""

from jattn.implementations.mosaic_gpu.attention import attend
from jattn.implementations.mosaic_gpu.backward import gradients, why_not_gradients
from jattn.implementations.mosaic_gpu.kernel_config import (
    DecodeKernelConfig,
    KernelConfig,
    PrefillKernelConfig,
    score_of,
)
from jattn.implementations.mosaic_gpu.kernel_plans import (
    DecodeKernelPlan,
    KernelPlan,
    kernel_plan_key,
    plan_decode_kernel,
    plan_prefill_kernel,
)
from jattn.implementations.mosaic_gpu.kernel_selection import choose_kernel, sparse_sizes

__all__ = [
    "DecodeKernelConfig",
    "DecodeKernelPlan",
    "KernelConfig",
    "KernelPlan",
    "PrefillKernelConfig",
    "attend",
    "choose_kernel",
    "gradients",
    "kernel_plan_key",
    "plan_decode_kernel",
    "plan_prefill_kernel",
    "score_of",
    "sparse_sizes",
    "why_not_gradients",
]
