"""How large the engine makes what it was not told the size of."""

import jax

from pallas_kernels.checks import require

HOST_CACHE_BYTES = 2**30  # the largest cache made unasked where the device does not say what memory it has
SHARE_OF_FREE_MEMORY = 0.8  # the largest one made unasked where it does


def prefill_sizes(max_num_batched_tokens: int) -> list[int]:
    """The budget, a quarter of it, a quarter of that, down to 16: few to compile, little padding."""
    sizes = [max_num_batched_tokens]
    while sizes[-1] >= 64:
        sizes.append(sizes[-1] // 4)
    return sizes


def num_blocks_in(cache_bytes: int | None, bytes_per_block: int, *, most: int) -> int:
    """Blocks that fit `cache_bytes`; None: `most`, or fewer where memory is short.

    Raises:
        ValueError: Not even two fit.
    """
    if cache_bytes is None:
        memory = jax.local_devices()[0].memory_stats() or {}
        free = memory.get("bytes_limit", 0) - memory.get("bytes_in_use", 0)
        limit = int(free * SHARE_OF_FREE_MEMORY) if free > 0 else HOST_CACHE_BYTES
        return min(most, max(limit // bytes_per_block, 2))
    num_blocks = cache_bytes // bytes_per_block
    require(num_blocks > 1, "cache_bytes", f"hold two blocks ({2 * bytes_per_block} bytes)", cache_bytes)
    return num_blocks
