"""Modifiers of `backward` as FlexAttention takes them: of scores, and of pairs that see each other."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.backward_cases import per_head, score_of
from jattn import masks
from pallas_kernels.cases import PrefillCase

type Sees = Callable[[Any, Any, Any, Any], Any]  # (batch, head, query, key) -> bool, elementwise


def score_mod_of(case: PrefillCase, modifier: str, to: Callable[[Any], Any]) -> Callable[..., Any] | None:
    """What the modifier makes of a scaled score; None = nothing."""
    cap = score_of(case, modifier).soft_cap
    if cap is not None:
        return lambda s, b, h, q, k: cap * (s / cap).tanh()
    if modifier == "alibi":
        slopes = to(per_head(case, modifier)["alibi_slopes"])
        return lambda s, b, h, q, k: s - slopes[h] * (q - k)
    return None


def sees_of_case(case: PrefillCase, modifier: str, mask: masks.Mask | None, to: Callable[[Any], Any]) -> Sees:
    """Which pairs see each other, of tables that `to` makes of arrays."""
    score, lens = score_of(case, modifier), case.query_lens
    inner = (lambda b, h, q, k: q == q) if mask is None else sees_of(mask, case, to)
    left = max(lens) if score.window[0] is None else score.window[0]

    def sees(b: Any, h: Any, q: Any, k: Any) -> Any:
        found = inner(b, h, q, k) & (q - k <= left)
        return found & (q >= k) if score.causal else found

    if len(set(lens)) == 1:
        return sees
    text = to(np.repeat(np.arange(len(lens)), lens))
    position = to(np.concatenate([np.arange(n) for n in lens]))
    return lambda b, h, q, k: (text[q] == text[k]) & sees(b, h, position[q], position[k])


def sees_of(mask: masks.Mask, case: PrefillCase, to: Callable[[Any], Any]) -> Sees:
    """The mask's part of it; later keys may be said to be seen, which causal attention hides."""
    match mask:
        case masks.And(masks=(first, second)):
            one, other = (sees_of(part, case, to) for part in (first, second))
            return lambda b, h, q, k: one(b, h, q, k) & other(b, h, q, k)
        case masks.Window(left=left):
            return lambda b, h, q, k: q - k <= left
        case masks.Document():
            ids = to(mask.ids)
            return lambda b, h, q, k: ids[q] == ids[k]
        case masks.BlockMask(block_q=block_q, block_kv=block_kv):
            blocks = to(mask.blocks)
            return lambda b, h, q, k: blocks[h, q // block_q, k // block_kv]
        case masks.LocalStrided(block_size=size, local_blocks=near, vert_stride=stride):
            step = mask.head_sliding_step(case.q_heads, case.kv_heads)
            is_stripe = lambda h, k: (k // size + h * step + 1) % stride == 0
            return lambda b, h, q, k: (q // size - k // size < near) | is_stripe(h, k)
    assert isinstance(mask, masks.VerticalSlash)
    columns, slashes = to(mask.columns), to(mask.slashes)
    return lambda b, h, q, k: columns[h, k] | slashes[h, abs(q - k)]
