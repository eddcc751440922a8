"""How much a step takes where the engine was not told: what the device it runs on likes."""

from typing import NamedTuple

import jax

from pallas_kernels.support import why_not_device


class StepSizes(NamedTuple):
    """Most requests and most new tokens of a step."""

    max_num_seqs: int
    max_num_batched_tokens: int


OF_A_CPU = StepSizes(16, 512)  # where each row costs its time, and each bucket is compiled layer by layer
OF_A_GPU = StepSizes(256, 2048)  # vLLM's of most GPUs
WITH_KERNELS = StepSizes(256, 8192)  # vLLM's of an H100


def default_step_sizes(fills_buckets: bool) -> StepSizes:
    """Those of this process's first device.

    Args:
        fills_buckets: Each step costs its sizes, whatever is in it; then they are a CPU's everywhere.
    """
    device = jax.local_devices()[0]
    if device.platform == "cpu" or fills_buckets:
        return OF_A_CPU
    return OF_A_GPU if why_not_device(device) else WITH_KERNELS
