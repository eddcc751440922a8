"""Runs one region of a step with the kernel that a plan selects; interpreted without a GPU."""

from jattn.implementations import mosaic_gpu
from jattn.implementations.layer_config import layer_config, region_sizes
from jattn.implementations.mosaic_gpu import choose_kernel
from jattn.implementations.region_inputs import RegionInputs
from pallas_kernels import architectures


def kernel_for(query, kv, metadata, spec, mask=None, score_mod=None):
    """Return the selected kernel, or the reason why there is none."""
    (region,) = region_sizes(metadata)
    gpu = architectures.kernel_architecture(query)
    return choose_kernel(layer_config(spec, kv, query.dtype, score_mod), region, mask, gpu)


def attend_region(query, kv, metadata, spec, *, return_lse=True, interpret=None, **modifiers):
    """Return the output and the log-sum-exp of a step that consists of one region."""
    inputs = RegionInputs(query=query, kv=kv, metadata=metadata, spec=spec, **modifiers)
    kernel = kernel_for(query, kv, metadata, spec, inputs.mask, inputs.score_mod)
    assert not isinstance(kernel, str), kernel
    return mosaic_gpu.attend(inputs, kernel, return_lse=return_lse, interpret=interpret)
