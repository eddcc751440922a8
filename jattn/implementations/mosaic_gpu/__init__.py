"""Attention by the Mosaic GPU kernels: which one and why not (why_not), what it is given (planning), run."""

from jattn.implementations.mosaic_gpu.attention import attend
from jattn.implementations.mosaic_gpu.backward import gradients, why_not_gradients
from jattn.implementations.mosaic_gpu.kernel_config import DecodeKernel, Kernel, PrefillKernel, score_of
from jattn.implementations.mosaic_gpu.kernel_plans import (
    DecodeWork,
    Work,
    decode_work,
    prefill_work,
    work_key,
)
from jattn.implementations.mosaic_gpu.kernel_selection import choose_kernel, sparse_sizes

__all__ = [
    "DecodeKernel",
    "DecodeWork",
    "Kernel",
    "PrefillKernel",
    "Work",
    "attend",
    "choose_kernel",
    "decode_work",
    "gradients",
    "prefill_work",
    "score_of",
    "sparse_sizes",
    "why_not_gradients",
    "work_key",
]
