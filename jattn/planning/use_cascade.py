"""When it pays to attend to a shared prefix once, as vLLM reckons."""

import numpy as np

from jattn.metadata.host import plain_ints
from jattn.metadata.namespace import IntVector, with_namespace
from pallas_kernels.checks import require, require_positive

# vLLM's numbers: shorter prefixes and smaller batches never gain; tiles of FlashAttention's kernels.
MIN_PREFIX_LEN = 256
MIN_REQS = 8
TILE_Q = 128
TILE_KV = 128


def use_cascade_attention(
    common_prefix_len: int,
    query_lens: IntVector,
    num_query_heads: int,
    num_kv_heads: int,
    use_alibi: bool,
    use_sliding_window: bool,
    use_local_attention: bool,
    num_sms: int,
    dcp_world_size: int = 1,
) -> bool:
    """Whether cascade attention should beat attending to the prefix in every request. Host only.

    Where grouped decode could run as FlashDecoding, the waves of thread blocks of both are compared.

    Args:
        common_prefix_len: Tokens that all requests share.
        query_lens: New tokens of each request.
        num_query_heads: Query heads of this device.
        num_kv_heads: Key/value heads of this device.
        use_alibi: Cascade cannot.
        use_sliding_window: Cascade cannot.
        use_local_attention: Cascade cannot.
        num_sms: Multiprocessors of the GPU.
        dcp_world_size: Decode context parallel devices; cascade needs 1.

    Raises:
        ValueError: A number is not positive, or kv heads do not divide query heads.

    Source: vLLM V1 FlashAttention `use_cascade_attention`.
    """
    common_prefix_len, num_query_heads, num_kv_heads, num_sms = plain_ints(
        common_prefix_len=common_prefix_len,
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        num_sms=num_sms,
    )
    require_positive(num_query_heads=num_query_heads, num_kv_heads=num_kv_heads, num_sms=num_sms)
    rule = f"be a multiple of num_kv_heads ({num_kv_heads})"
    require(num_query_heads % num_kv_heads == 0, "num_query_heads", rule, num_query_heads)
    lens = np.asarray(with_namespace(query_lens=query_lens)[1])
    if common_prefix_len < MIN_PREFIX_LEN or len(lens) < MIN_REQS or dcp_world_size > 1:
        return False
    if use_alibi or use_sliding_window or use_local_attention:
        return False
    q_heads_per_kv_head = num_query_heads // num_kv_heads
    if q_heads_per_kv_head == 1 or not (lens == 1).all():
        return True
    kv_tiles = _cdiv(common_prefix_len, TILE_KV)
    cascade_waves = _cdiv(num_query_heads * _cdiv(len(lens), TILE_Q), num_sms) * kv_tiles
    decode_waves = _cdiv(len(lens) * num_kv_heads * _cdiv(q_heads_per_kv_head, TILE_Q) * kv_tiles, num_sms)
    return cascade_waves < decode_waves


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
