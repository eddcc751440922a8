"""Named workloads with the shapes of real models, which the suites and their tests share."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeCase:
    """A decode step with one new token per request; queries and outputs have 16 bits.

    Attributes:
        name: Name of the case.
        q_heads: Query heads.
        kv_heads: KV heads.
        head_dim: Elements per head.
        kv_lens: Cached keys of each request.
    """

    name: str
    q_heads: int
    kv_heads: int
    head_dim: int
    kv_lens: tuple[int, ...]

    def num_bytes(self, bytes_per_key: int) -> int:
        """Return the bytes that the step must move: every key and value, the queries and the outputs, once.

        Args:
            bytes_per_key: Bytes of a token's key and value in one head, including scales per token.
        """
        kv = sum(self.kv_lens) * self.kv_heads * bytes_per_key
        return kv + 4 * len(self.kv_lens) * self.q_heads * self.head_dim


def log_uniform(count: int, low: int, high: int, seed: int) -> tuple[int, ...]:
    """Return random lengths with uniform logarithms: many short ones, a few long ones."""
    logs = np.random.default_rng(seed).uniform(np.log(low), np.log(high), count)
    return tuple(int(n) for n in np.exp(logs))


def _decode(name: str, heads: tuple[int, int, int], kv_lens: tuple[int, ...]) -> DecodeCase:
    q_heads, kv_heads, head_dim = heads
    return DecodeCase(name=name, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, kv_lens=kv_lens)


# (q_heads, kv_heads, head_dim)
LLAMA_8B, LLAMA_70B, MHA, GPT_OSS = (32, 8, 128), (64, 8, 128), (32, 32, 128), (64, 8, 64)
DECODE = {
    case.name: case
    for case in (
        _decode("d_1x1k", LLAMA_8B, (1024,)),
        _decode("d_1x32k", LLAMA_8B, (32768,)),
        _decode("d_8x8k", LLAMA_8B, (8192,) * 8),
        _decode("d_64x4k", LLAMA_8B, (4096,) * 64),
        _decode("d_256x1k", LLAMA_8B, (1024,) * 256),
        _decode("d_ragged64", LLAMA_8B, log_uniform(64, 64, 16384, 0)),
        _decode("d_70b_64x8k", LLAMA_70B, (8192,) * 64),
        _decode("d_mha_32x2k", MHA, (2048,) * 32),
        _decode("d_gptoss_64x4k", GPT_OSS, (4096,) * 64),
    )
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefillCase:
    """A prefill step in 16 bits.

    Attributes:
        name: Name of the case.
        q_heads: Query heads.
        kv_heads: KV heads.
        head_dim: Elements per head.
        query_lens: New tokens of each request.
        context_lens: Cached tokens before them.
    """

    name: str
    q_heads: int
    kv_heads: int
    head_dim: int
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """Keys of each request."""
        return tuple(q + c for q, c in zip(self.query_lens, self.context_lens, strict=True))

    def num_flops(self, causal: bool = True, left: int | None = None) -> float:
        """Return the floating-point operations of Q K^T and P V over the visible pairs of query and key.

        Args:
            causal: Whether queries attend to no later key.
            left: Number of keys before the query's position that it attends to. None = all.
        """
        pairs = 0
        for q, c in zip(self.query_lens, self.context_lens, strict=True):
            position = np.arange(c, c + q)
            high = position + 1 if causal else np.full_like(position, c + q)
            pairs += int((high - (0 if left is None else np.maximum(position - left, 0))).sum())
        return 4.0 * self.q_heads * self.head_dim * pairs


def _prefill(
    name: str, heads: tuple[int, int, int], query_lens: tuple[int, ...], context: int = 0
) -> PrefillCase:
    q_heads, kv_heads, head_dim = heads
    return PrefillCase(
        name=name,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        query_lens=query_lens,
        context_lens=(context,) * len(query_lens),
    )


HEAD_DIM_256 = (16, 8, 256)
PREFILL = {
    case.name: case
    for case in (
        _prefill("p_1x8k", LLAMA_8B, (8192,)),
        _prefill("p_1x16k", LLAMA_8B, (16384,)),
        _prefill("p_8x2k", LLAMA_8B, (2048,) * 8),
        _prefill("p_32x512", LLAMA_8B, (512,) * 32),
        _prefill("p_ragged", LLAMA_8B, log_uniform(24, 32, 4096, 1)),
        _prefill("p_chunk_4x2k_ctx16k", LLAMA_8B, (2048,) * 4, context=14336),
        _prefill("p_1x128_ctx64k", LLAMA_8B, (128,), context=65408),
        _prefill("p_1x64_ctx64k", LLAMA_8B, (64,), context=65472),
        _prefill("p_1x512_ctx64k", LLAMA_8B, (512,), context=65024),
        _prefill("p_1x1k_ctx32k", LLAMA_8B, (1024,), context=31744),
        _prefill("p_8x64_ctx16k", LLAMA_8B, (64,) * 8, context=16320),
        _prefill("p_ragged_ctx8k", LLAMA_8B, log_uniform(16, 16, 512, 2), context=8192),
        _prefill("p_d64_8x2k", GPT_OSS, (2048,) * 8),
        _prefill("p_d192_1x8k", (16, 8, 192), (8192,)),
        _prefill("p_d256_1x8k", HEAD_DIM_256, (8192,)),
    )
}
