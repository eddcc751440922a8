"""Score functions of the suites: soft cap and ALiBi as functions, and biases of relative positions."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from benchmarks.kernels.cases import PrefillCase
from jattn.implementations.layer_config import RegionSizes, layer_config
from jattn.implementations.mosaic_gpu.kernel_config import PrefillKernelConfig
from jattn.implementations.mosaic_gpu.kernel_selection import choose_kernel
from pallas_kernels.varlen_prefill import PrefillSizes

SOFT_CAP = 30.0
NUM_DISTANCES = 33
# Modifier -> the modifier whose time of the same run its own is divided by.
BASELINES = {"soft_cap_function": "soft_cap", "alibi_function": "alibi", "relative_table": "plain"}


def soft_cap(score: Any, batch: Any, head: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Limit the score to SOFT_CAP."""
    return SOFT_CAP * jnp.tanh(score / SOFT_CAP)


def alibi(score: Any, batch: Any, head: Any, q_idx: Any, kv_idx: Any, slopes: Any) -> Any:
    """Subtract the distance times the head's slope."""
    return score - slopes[head] * (q_idx - kv_idx).astype(jnp.float32)


def relative_bias(score: Any, batch: Any, head: Any, q_idx: Any, kv_idx: Any, table: Any) -> Any:
    """Add a bias of the head and the clipped distance."""
    return score + table[head, jnp.clip(q_idx - kv_idx, 0, NUM_DISTANCES - 1)]


def alibi_slopes(q_heads: int) -> np.ndarray:
    """Return a slope per query head, float32 [q_heads]."""
    slopes: np.ndarray = 2.0 ** (-8 * np.arange(1, q_heads + 1, dtype=np.float32) / q_heads)
    return slopes


def relative_table(q_heads: int) -> np.ndarray:
    """Return random biases, float32 [q_heads, NUM_DISTANCES]."""
    return np.random.default_rng(7).normal(size=(q_heads, NUM_DISTANCES)).astype(np.float32)


def modifier_arrays(modifier: str, q_heads: int) -> dict[str, Any]:
    """Return "alibi_slopes" or "score_mod" of a modifier; empty for other modifiers."""
    match modifier:
        case "alibi":
            return {"alibi_slopes": jnp.asarray(alibi_slopes(q_heads))}
        case "soft_cap_function":
            return {"score_mod": jattn.ScoreMod(soft_cap)}
        case "alibi_function":
            return {"score_mod": jattn.ScoreMod(alibi, jnp.asarray(alibi_slopes(q_heads)))}
        case "relative_table":
            return {"score_mod": jattn.ScoreMod(relative_bias, jnp.asarray(relative_table(q_heads)))}
    return {}


def kernel_arrays(arrays: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a kernel: the same arrays, with a score function as the kernels take it."""
    if "score_mod" not in arrays:
        return arrays
    return arrays | {"score_mod": arrays["score_mod"].for_kernels()}


@jax.jit
def apply_score_mod(score_mod: jattn.ScoreMod, s: jax.Array, *pair: jax.Array) -> jax.Array:
    """Return the new scores [kv_heads, group, keys] of a query, given row, heads, and both positions."""
    row, head, query, key = pair
    return score_mod(s, row, head, query, key[None, None])


def prefill_sizes(
    case: PrefillCase, modifier: str, block_size: int | None = None, gpu: str = "9.0"
) -> PrefillSizes:
    """Return the sizes that jattn chooses for the prefill kernel with a score function.

    Args:
        case: Case to measure.
        modifier: Score function, of BASELINES.
        block_size: Tokens per cache block of 16-bit values; None for packed keys.
        gpu: Compute capability that the kernel is built for.
    """
    spec = jattn.AttentionSpec(num_q_heads=case.q_heads, num_kv_heads=case.kv_heads, head_dim=case.head_dim)
    bucket = jattn.Bucket(max_prefills=len(case.query_lens), max_prefill_tokens=sum(case.query_lens))
    size = block_size or 16
    max_blocks = -(-max(case.seq_lens) // size)
    cache = None
    if block_size is not None:
        cache = jattn.CacheSpec(
            num_blocks=max_blocks * len(case.seq_lens),
            block_size=block_size,
            num_kv_heads=case.kv_heads,
            head_dim=case.head_dim,
        )
    layer = layer_config(spec, cache, jnp.bfloat16, modifier_arrays(modifier, case.q_heads)["score_mod"])
    kernel = choose_kernel(layer, RegionSizes("prefill", bucket, max_blocks, size), None, gpu)
    assert isinstance(kernel, PrefillKernelConfig), kernel
    return kernel.sizes


def with_baselines(modifiers: list[str]) -> list[str]:
    """Return the modifiers without duplicates, each score function after the modifier it is compared with."""
    ordered = (name for modifier in modifiers for name in (BASELINES.get(modifier), modifier))
    return list(dict.fromkeys(name for name in ordered if name is not None))


class Comparison:
    """Times of a run, by which rows of score functions and of other architectures are compared."""

    def __init__(self) -> None:
        self.times: dict[tuple[Any, ...], float] = {}

    def columns(
        self, key: tuple[Any, ...], modifier: str, us: float, target: str | None = None
    ) -> dict[str, Any]:
        """Record a time and return the columns that compare it with earlier ones.

        Args:
            key: What the compared rows have in common.
            modifier: Modifier of the row. A score function is compared with its baseline.
            us: Time in microseconds.
            target: Compute capability that the kernel was built for; None for the device's own, with which
                the others are compared.

        Returns:
            "of_baseline", the time divided by that of the baseline; and "of_native", the time of the device's
            own kernel divided by the time.
        """
        self.times[(*key, modifier, target)] = us
        baseline = self.times.get((*key, BASELINES.get(modifier), target))
        columns: dict[str, Any] = {} if baseline is None else {"of_baseline": us / baseline}
        native = self.times.get((*key, modifier, None))
        if target is not None:
            columns |= {"target": target} | ({} if native is None else {"of_native": native / us})
        return columns
