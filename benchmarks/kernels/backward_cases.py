"""Cases of the gradient suites: lengths and heads, modifiers of the scores, and masks."""

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.cases import LLAMA_8B, PREFILL, PrefillCase, log_uniform
from benchmarks.kernels.score_mods import BASELINES, SOFT_CAP
from jattn import masks
from jattn.sparsity.scores import force_blocks, top_k_blocks
from pallas_kernels.shared import Score

STRIDES = {"block_size": 64, "local_blocks": 16, "vert_stride": 8}
WINDOW = 1023  # keys before the query's position that it sees
COLUMNS, SLASHES = 1000, 60  # per head, drawn independently, so almost every tile has some
SELECTED_KEYS = 2048  # of each query, as in DeepSeek-V3.2


def document_lens(tokens: int, seed: int) -> tuple[int, ...]:
    """Return random document lengths of 128 to 8k tokens that add up to `tokens`; the last one is cut."""
    lens = np.asarray(log_uniform(tokens // 128, 128, 8192, seed))
    lens = lens[: int((np.cumsum(lens) < tokens).sum())]
    return (*map(int, lens), tokens - int(lens.sum()))


def _case(name: str, lens: tuple[int, ...], heads: tuple[int, int, int] = LLAMA_8B) -> PrefillCase:
    q_heads, kv_heads, head_dim = heads
    return PrefillCase(
        name=name, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, query_lens=lens,
        context_lens=(0,) * len(lens),
    )  # fmt: skip


CASES = {
    case.name: case
    for case in (
        _case("t_1x8k", (8192,)),
        _case("t_1x16k", (16384,)),
        _case("t_1x32k", (32768,)),
        _case("t_1x64k", (65536,)),
        _case("t_8x2k", (2048,) * 8),
        _case("t_32x512", (512,) * 32),
        _case("t_d64_8x2k", (2048,) * 8, (64, 8, 64)),
        _case("t_d256_1x8k", (8192,), (16, 8, 256)),
        _case("t_d256_8x2k", (2048,) * 8, (16, 8, 256)),
        _case("t_mha_8x2k", (2048,) * 8, (16, 16, 128)),
        _case("t_16_heads_1x16k", (16384,), (32, 2, 128)),
        _case("t_16_heads_1x64k", (65536,), (32, 2, 128)),
        dataclasses.replace(PREFILL["p_ragged"], name="t_ragged"),
        _case("t_documents_16k", document_lens(16384, 2)),
        _case("t_documents_32k", document_lens(32768, 3)),
    )
}


def random_blocks(size: int, density: float, q_heads: int, tokens: int) -> masks.BlockMask:
    """Return a mask with random blocks per head. The blocks on the diagonal are always visible.

    Args:
        size: Number of queries, and of keys, per block.
        density: Share of the other blocks that are visible.
        q_heads: Number of query heads.
        tokens: Number of tokens of the longest request.
    """
    count = -(-tokens // size)
    blocks = jax.random.uniform(jax.random.key(4), (q_heads, count, count)) < density
    return masks.BlockMask(blocks=blocks | jnp.eye(count, dtype=bool)[None], block_q=size, block_kv=size)


def selected_blocks(q_heads: int, tokens: int) -> masks.BlockMask:
    """Return a mask in which each query selects 16 blocks of 64 keys for all heads, as in NSA.

    It selects the first block, its own, and random blocks before it.
    """
    scores = jax.random.uniform(jax.random.key(7), (1, 1, tokens, -(-tokens // 64)))
    scores = force_blocks(scores, block_q=1, block_kv=64, num_first=1)
    return masks.BlockMask(blocks=top_k_blocks(scores, 16)[0], block_q=1, block_kv=64)


def selected_keys(q_heads: int, tokens: int) -> masks.BlockMask:
    """Return a mask in which each query selects about SELECTED_KEYS keys for all heads, as in DSA.

    It selects its own key and random ones before it.
    """
    scores = jax.random.uniform(jax.random.key(8), (tokens, tokens))
    num_keys = jnp.arange(1, tokens + 1, dtype=jnp.float32)[:, None]
    is_selected = (scores * num_keys < SELECTED_KEYS) | jnp.eye(tokens, dtype=bool)
    return masks.BlockMask(blocks=is_selected[None], block_q=1, block_kv=1)


def local_strided(q_heads: int, tokens: int) -> masks.LocalStrided:
    """Return Phi-3-small's pattern."""
    return masks.LocalStrided(**STRIDES)


def documents_window(q_heads: int, tokens: int) -> masks.Mask:
    """Return a mask of documents of 128 to 8k tokens with a sliding window."""
    lens = document_lens(tokens, 5)
    ids = np.repeat(np.arange(len(lens), dtype=np.int32), lens)
    return masks.Document(ids=ids) & masks.Window(left=WINDOW)


def vertical_slash(q_heads: int, tokens: int, *, gather: bool = False) -> masks.VerticalSlash:
    """Return a mask with random columns and slashes per head. Every query sees its own position."""
    rng = np.random.default_rng(6)
    columns, slashes = (
        np.stack([rng.choice(tokens, count, replace=False) for _ in range(q_heads)])
        for count in (COLUMNS, SLASHES)
    )
    slashes[:, 0] = 0
    return masks.VerticalSlash.from_indices(jnp.asarray(columns), jnp.asarray(slashes), tokens, gather=gather)


# Modifier -> fields of Score. Its arrays come from `make_sinks` and `modifier_arrays`.
MODIFIERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {"causal": False},
    "window": {"window": (WINDOW, 0)},
    "soft_cap": {"soft_cap": SOFT_CAP},
    "alibi": {},
    "sinks": {},
    **{name: {} for name in BASELINES},
}
# Modifier -> function of the number of query heads and the tokens of the longest request that returns the
# mask of every request.
MASKS: dict[str, Callable[[int, int], masks.Mask]] = {
    **{f"blocks_{density}": functools.partial(random_blocks, 128, density) for density in (0.5, 0.25, 0.1)},
    **{
        f"blocks_{size}_{density}": functools.partial(random_blocks, size, density)
        for size in (64, 32, 16)
        for density in (0.25, 0.1)
    },
    "selected_blocks": selected_blocks,
    "selected_keys": selected_keys,
    "local_strided": local_strided,
    "documents_window": documents_window,
    "vertical_slash": vertical_slash,
}
CHOICES = (*MODIFIERS, *MASKS)


def make_score(case: PrefillCase, modifier: str) -> Score:
    """Return what a layer with the modifier does to scores. Masks are causal otherwise."""
    return Score(scale=case.head_dim**-0.5, **MODIFIERS.get(modifier, {}))


def make_mask(case: PrefillCase, modifier: str) -> masks.Mask | None:
    """Return the mask of a modifier, or None if it has none. May be traced."""
    return MASKS[modifier](case.q_heads, max(case.query_lens)) if modifier in MASKS else None


def make_sinks(case: PrefillCase, modifier: str) -> dict[str, np.ndarray]:
    """Return the sinks of a modifier, float32 [q_heads]; empty for other modifiers.

    A sink has about the weight of half of the keys of a request.
    """
    if modifier == "sinks":
        heads = np.arange(1, case.q_heads + 1, dtype=np.float32)
        mean_len = sum(case.query_lens) / len(case.query_lens)
        return {"sinks": np.float32(np.log(mean_len / 2)) + np.cos(heads)}
    return {}


def share_of_pairs(case: PrefillCase, modifier: str, mask: masks.Mask | None) -> float:
    """Return the number of visible query-key pairs relative to causal attention.

    Args:
        case: Requests without context.
        modifier: Name of the modifier.
        mask: Mask of the modifier; not traced.
    """
    if mask is None:
        score = make_score(case, modifier)
        return case.num_flops(score.causal, score.window[0]) / case.num_flops()
    visible_pairs, causal_pairs = 0.0, 0.0
    for tokens, count in collections.Counter(case.query_lens).items():
        pairs = count * tokens * (tokens + 1) / 2
        density = masks.density(
            mask, tokens, tokens, num_q_heads=case.q_heads, num_kv_heads=case.kv_heads, max_queries=tokens
        )
        visible_pairs += density * pairs
        causal_pairs += pairs
    return visible_pairs / causal_pairs
