"""How vLLM's paged_attention kernels cut a long context."""

from typing import NamedTuple

from jattn.batch.host_arrays import plain_ints
from pallas_kernels.checks import require_positive

PARTITION_SIZE = 512
MAX_V1_SEQ_LEN = 8192


class PagedAttentionVersion(NamedTuple):
    """Whether one thread block attends to a whole context (v1), and how many share it otherwise (v2)."""

    use_v1: bool
    max_num_partitions: int


def choose_paged_attention_version(max_seq_len: int, num_seqs: int, num_heads: int) -> PagedAttentionVersion:
    """Chooses as vLLM does between its two decode kernels.

    V1 serves contexts that fit a partition, and those up to 8192 keys where requests x heads fill the GPU.

    Source: vLLM `PagedAttention.forward_decode`.
    """
    max_seq_len, num_seqs, num_heads = plain_ints(
        max_seq_len=max_seq_len, num_seqs=num_seqs, num_heads=num_heads
    )
    require_positive(max_seq_len=max_seq_len)
    num_partitions = -(-max_seq_len // PARTITION_SIZE)
    use_v1 = max_seq_len <= MAX_V1_SEQ_LEN and (num_partitions == 1 or num_seqs * num_heads > PARTITION_SIZE)
    return PagedAttentionVersion(use_v1, num_partitions)
