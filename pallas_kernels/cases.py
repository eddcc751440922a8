"""Named workloads of real models' widths: tests and benchmarks read these."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeCase:
    """A decode step: one new token of each request over `kv_lens` cached keys, 16-bit."""

    name: str
    q_heads: int
    kv_heads: int
    head_dim: int
    kv_lens: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that the step must move: every key and value once, queries in, outputs out."""
        kv = 2 * sum(self.kv_lens) * self.kv_heads * self.head_dim
        return 2 * (kv + 2 * len(self.kv_lens) * self.q_heads * self.head_dim)


def log_uniform(count: int, low: int, high: int, seed: int) -> tuple[int, ...]:
    """Lengths whose logarithms are uniform: many short, a few long."""
    logs = np.random.default_rng(seed).uniform(np.log(low), np.log(high), count)
    return tuple(int(n) for n in np.exp(logs))


def _case(name: str, heads: tuple[int, int, int], kv_lens: tuple[int, ...]) -> DecodeCase:
    q_heads, kv_heads, head_dim = heads
    return DecodeCase(name=name, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, kv_lens=kv_lens)


LLAMA_8B, LLAMA_70B, MHA, GPT_OSS = (32, 8, 128), (64, 8, 128), (32, 32, 128), (64, 8, 64)
DECODE = {
    case.name: case
    for case in (
        _case("d_1x1k", LLAMA_8B, (1024,)),
        _case("d_1x32k", LLAMA_8B, (32768,)),
        _case("d_8x8k", LLAMA_8B, (8192,) * 8),
        _case("d_64x4k", LLAMA_8B, (4096,) * 64),
        _case("d_256x1k", LLAMA_8B, (1024,) * 256),
        _case("d_ragged64", LLAMA_8B, log_uniform(64, 64, 16384, 0)),
        _case("d_70b_64x8k", LLAMA_70B, (8192,) * 64),
        _case("d_mha_32x2k", MHA, (2048,) * 32),
        _case("d_gptoss_64x4k", GPT_OSS, (4096,) * 64),
    )
}
