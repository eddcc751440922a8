"""Runs one region of a step with the kernel that a plan selects; interpreted without a GPU."""

from jattn.implementations import mosaic_gpu
from jattn.implementations.layer_config import layer_config, region_sizes
from jattn.implementations.mosaic_gpu import choose_kernel
from pallas_kernels import architectures


def kernel_for(query, kv, metadata, spec, mask=None, score_mod=None):
    """Return the selected kernel, or the reason why there is none."""
    (region,) = region_sizes(metadata)
    gpu = architectures.kernel_architecture(query)
    return choose_kernel(layer_config(spec, kv, query.dtype, score_mod), region, mask, gpu)


def attend_region(
    query, kv, metadata, spec, *, mask=None, sinks=None, alibi_slopes=None, score_mod=None, **options
):
    """Return the output and the log-sum-exp of a step that consists of one region."""
    kernel = kernel_for(query, kv, metadata, spec, mask, score_mod)
    assert not isinstance(kernel, str), kernel
    modifiers = {"mask": mask, "sinks": sinks, "alibi_slopes": alibi_slopes, "score_mod": score_mod}
    return mosaic_gpu.attend(query, kv, metadata, spec, kernel, None, **modifiers, **options)
