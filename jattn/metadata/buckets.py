"""Sizes that graphs are made for."""

from pallas_kernels.checks import require_positive

# vLLM captures no larger graph unless asked to.
DEFAULT_MAX_CAPTURE_SIZE = 512


def default_capture_sizes(
    max_num_seqs: int | None = None, max_capture_size: int | None = None
) -> tuple[int, ...]:
    """1, 2, 4, then every 8 up to 248, then every 16.

    Args:
        max_num_seqs: Most requests of a step; the largest size is then twice that, 512 at most.
        max_capture_size: The largest size; wins over max_num_seqs.

    Source: vLLM `VllmConfig._set_cudagraph_sizes`.
    """
    if max_capture_size is None:
        twice = DEFAULT_MAX_CAPTURE_SIZE if max_num_seqs is None else 2 * max_num_seqs
        max_capture_size = min(twice, DEFAULT_MAX_CAPTURE_SIZE)
    require_positive(max_capture_size=max_capture_size)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, max_capture_size + 1, 16)]
    return tuple(size for size in sizes if size <= max_capture_size)
