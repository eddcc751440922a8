"""What gradients are measured of: lengths and heads, what a layer does to scores, and masks."""

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn import masks
from pallas_kernels.cases import LLAMA_8B, PREFILL, PrefillCase, log_uniform
from pallas_kernels.shared import Score

BLOCK = 128  # queries, and keys, of a random block
STRIDES = {"block_size": 64, "local_blocks": 16, "vert_stride": 8}
WINDOW = 1023  # keys before a query's own
COLUMNS, SLASHES = 1000, 60  # of each head, drawn one by one: nearly every tile has some


def document_lens(tokens: int, seed: int) -> tuple[int, ...]:
    """As many documents of 128 to 8k as fill so many tokens; the last one is cut."""
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
        dataclasses.replace(PREFILL["p_ragged"], name="t_ragged"),
        _case("t_documents_16k", document_lens(16384, 2)),
        _case("t_documents_32k", document_lens(32768, 3)),
    )
}


def random_blocks(density: float, q_heads: int, tokens: int) -> masks.BlockMask:
    """Blocks of each head's own, those on the diagonal among them."""
    count = -(-tokens // BLOCK)
    drawn = jax.random.uniform(jax.random.key(4), (q_heads, count, count)) < density
    return masks.BlockMask(blocks=drawn | jnp.eye(count, dtype=bool)[None], block_q=BLOCK, block_kv=BLOCK)


def local_strided(q_heads: int, tokens: int) -> masks.LocalStrided:
    """Phi-3-small's pattern."""
    return masks.LocalStrided(**STRIDES)


def documents_window(q_heads: int, tokens: int) -> masks.Mask:
    """Documents of 128 to 8k inside of each request, and a window."""
    lens = document_lens(tokens, 5)
    ids = np.repeat(np.arange(len(lens), dtype=np.int32), lens)
    return masks.Document(ids=ids) & masks.Window(left=WINDOW)


def vertical_slash(q_heads: int, tokens: int, *, gather: bool = False) -> masks.VerticalSlash:
    """Columns and slashes of each head's own; every query sees itself."""
    rng = np.random.default_rng(6)
    draw = lambda count: np.stack([rng.choice(tokens, count, replace=False) for _ in range(q_heads)])
    columns, slashes = draw(COLUMNS), draw(SLASHES)
    slashes[:, 0] = 0
    return masks.VerticalSlash.from_indices(jnp.asarray(columns), jnp.asarray(slashes), tokens, gather=gather)


# Modifier -> the score's fields. Heads' numbers are drawn with the arrays, and a mask of MASKS is, too.
MODIFIERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full": {"causal": False},
    "window": {"window": (WINDOW, 0)},
    "soft_cap": {"soft_cap": 30.0},
    "alibi": {},
    "sinks": {},
}
# Modifier -> the mask for so many query heads and tokens of the longest request, the same for every request.
MASKS: dict[str, Callable[[int, int], masks.Mask]] = {
    **{f"blocks_{density}": functools.partial(random_blocks, density) for density in (0.5, 0.25, 0.1)},
    "local_strided": local_strided,
    "documents_window": documents_window,
    "vertical_slash": vertical_slash,
}
CHOICES = (*MODIFIERS, *MASKS)


def score_of(case: PrefillCase, modifier: str) -> Score:
    """The layer's; a mask's modifier leaves causal attention."""
    return Score(scale=case.head_dim**-0.5, **MODIFIERS.get(modifier, {}))


def mask_of(case: PrefillCase, modifier: str) -> masks.Mask | None:
    """The modifier's mask. Traced or not."""
    return MASKS[modifier](case.q_heads, max(case.query_lens)) if modifier in MASKS else None


def per_head(case: PrefillCase, modifier: str) -> dict[str, np.ndarray]:
    """Numbers of heads, f32 [q_heads]: slopes, or sinks that weigh as much as half a request's keys do."""
    heads = np.arange(1, case.q_heads + 1, dtype=np.float32)
    if modifier == "alibi":
        return {"alibi_slopes": 2.0 ** (-8 * heads / case.q_heads)}
    if modifier == "sinks":
        mean_len = sum(case.query_lens) / len(case.query_lens)
        return {"sinks": np.float32(np.log(mean_len / 2)) + np.cos(heads)}
    return {}


def share_of(case: PrefillCase, modifier: str, mask: masks.Mask | None) -> float:
    """Pairs that see each other, by those of causal attention; every one is counted.

    Args:
        case: Requests without context.
        modifier: The layer's.
        mask: The modifier's, not traced.
    """
    if mask is None:
        score = score_of(case, modifier)
        return case.num_flops(score.causal, score.window[0]) / case.num_flops()
    heads = {"num_q_heads": case.q_heads, "num_kv_heads": case.kv_heads}
    seen, pairs = 0.0, 0.0
    for tokens, count in collections.Counter(case.query_lens).items():
        causal = count * tokens * (tokens + 1) / 2
        seen += masks.density(mask, tokens, tokens, **heads, max_queries=tokens) * causal
        pairs += causal
    return seen / pairs
