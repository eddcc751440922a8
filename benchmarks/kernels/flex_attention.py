"""Gradients by torch's FlexAttention: cases and masks of `backward`, where Python has torch and a GPU."""

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.kernels.backward_cases import CASES, CHOICES, mask_of, per_head, score_of
from benchmarks.runner import Rows
from jattn import masks
from pallas_kernels.cases import PrefillCase
from pallas_kernels.checks import require

TOLERANCE = 2e-2  # of the largest number looked at, as backward's
CHECKED = 32  # queries of the first request, computed again in float32
ROWS = 64  # queries whose pairs are counted at once
DEVICE = "cuda"

type MaskMod = Callable[[Any, Any, Any, Any], Any]  # (batch, head, query, key) -> bool, elementwise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `python -m benchmarks backward-peers` takes."""
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; default all")
    parser.add_argument("--modifier", nargs="+", default=["plain"], choices=CHOICES)
    parser.add_argument("--out", help="folder of the rows")


def main(arguments: argparse.Namespace) -> None:
    """A row for each case and modifier."""
    import torch

    jax.config.update("jax_platforms", "cpu")  # masks are drawn there: the GPU's memory is torch's
    rows = Rows("backward-peers", arguments.out, gpu=torch.cuda.get_device_name())
    for name, modifier in itertools.product(arguments.cases or CASES, arguments.modifier):
        try:
            rows.add(**measure(CASES[name], modifier), torch=torch.__version__)
        except Exception as error:  # the other rows still count
            print(f"{name} {modifier}: {type(error).__name__}: {error}"[:500], flush=True)


def measure(case: PrefillCase, modifier: str) -> dict[str, Any]:
    """A row, if a few outputs and gradients of queries are those of float32.

    Equal requests are a batch, others one text whose parts do not see each other.

    Raises:
        NotImplementedError: FlexAttention has nothing like the modifier.
    """
    if modifier == "sinks":
        raise NotImplementedError("FlexAttention has no sinks. Leave the modifier out.")
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    lens = case.query_lens
    batch, tokens = (len(lens), lens[0]) if len(set(lens)) == 1 else (1, sum(lens))
    torch.manual_seed(0)
    draw = lambda heads: torch.randn((batch, heads, tokens, case.head_dim), device=DEVICE).bfloat16()
    q, k, v, grad = (draw(heads) for heads in (case.q_heads, case.kv_heads, case.kv_heads, case.q_heads))
    to = lambda x: torch.as_tensor(np.array(x), device=DEVICE)
    mask, score_mod = mask_of(case, modifier), score_mod_of(case, modifier, to)
    visible = mask_mod_of_case(case, modifier, mask, to)
    heads = case.q_heads if mask is not None and mask.num_heads[0] != 1 else None
    of_blocks = create_block_mask(
        visible, None, heads, tokens, tokens, device=DEVICE, _compile=heads is not None
    )
    compiled = torch.compile(flex_attention, dynamic=False)
    given = [x.requires_grad_() for x in (q, k, v)]
    options = {"block_mask": of_blocks, "score_mod": score_mod, "scale": case.head_dim**-0.5}
    out = compiled(*given, **options, enable_gqa=True)
    backward = lambda: torch.autograd.grad(out, given, grad, retain_graph=True)
    found = {"out": out, "query's gradient": backward()[0]}
    errors = errors_of(found, (q, k, v, grad), visible, score_mod)
    for name, error in errors.items():
        require(error < TOLERANCE, f"the error of {name}", f"be less than {TOLERANCE}", error)
    flops = 10.0 * case.head_dim * num_pairs(visible, batch, case.q_heads, tokens)
    us = microseconds(backward)
    row = {"name": case.name, "modifier": modifier, "peer": "flex_attention", "us": us}
    return row | {"tflop_per_s": flops / us / 1e6, "errors": {n: round(e, 5) for n, e in errors.items()}}


def errors_of(found: dict[str, Any], arrays: Any, visible: MaskMod, score_mod: Any) -> dict[str, float]:
    """Of a few queries of the first request, by the largest number looked at."""
    import torch

    q, k, v, grad = (x[0].detach().float() for x in arrays)
    group, tokens = q.shape[0] // k.shape[0], q.shape[1]
    rows = torch.linspace(0, tokens - 1, min(CHECKED, tokens), device=q.device).long()
    k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
    mine = q[:, rows].requires_grad_()
    s = mine @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    places = torch.arange(tokens, device=q.device)
    at = (0 * rows[:1, None], torch.arange(len(q), device=q.device)[:, None, None], rows[:, None], places)
    s = s if score_mod is None else score_mod(s, *at)
    out = torch.softmax(s.masked_fill(~visible(*at), -torch.inf), dim=-1) @ v
    (of_query,) = torch.autograd.grad(out, mine, grad[:, rows])
    wanted = dict(zip(found, (out, of_query), strict=True))
    off = {
        name: (found[name][0][:, rows].float() - x).abs().nan_to_num(torch.inf) for name, x in wanted.items()
    }
    return {name: float(off[name].max() / x.abs().max()) for name, x in wanted.items()}


def num_pairs(visible: MaskMod, batch: int, q_heads: int, tokens: int) -> int:
    """Pairs that see each other, of all heads; every one is counted."""
    import torch

    places, heads = (torch.arange(n, device=DEVICE) for n in (tokens, q_heads))
    seen = lambda rows: visible(0 * heads[:1], heads[:, None, None], rows[:, None], places)
    of = lambda rows: int(seen(rows).expand(q_heads, len(rows), tokens).sum())
    return batch * sum(of(rows) for rows in places.split(ROWS))


def microseconds(call: Callable[[], Any], *, rounds: int = 10) -> float:
    """The sum of a call's kernels by torch's profiler (CUPTI), in the mean."""
    import torch

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(rounds):
            call()
        torch.cuda.synchronize()
    is_kernel = lambda event: event.device_type == torch.autograd.DeviceType.CUDA
    return sum(event.device_time_total for event in profile.events() if is_kernel(event)) / rounds


def score_mod_of(case: PrefillCase, modifier: str, to: Callable[[Any], Any]) -> Callable[..., Any] | None:
    """What the modifier makes of a scaled score; None = nothing."""
    cap = score_of(case, modifier).soft_cap
    if cap is not None:
        return lambda s, b, h, q, k: cap * (s / cap).tanh()
    if modifier == "alibi":
        slopes = to(per_head(case, modifier)["alibi_slopes"])
        return lambda s, b, h, q, k: s - slopes[h] * (q - k)
    return None


def mask_mod_of_case(
    case: PrefillCase, modifier: str, mask: masks.Mask | None, to: Callable[[Any], Any]
) -> MaskMod:
    """Which pairs see each other, of tables that `to` makes of arrays."""
    score, lens = score_of(case, modifier), case.query_lens
    inner = (lambda b, h, q, k: q == q) if mask is None else mask_mod_of_mask(mask, case, to)
    left = max(lens) if score.window[0] is None else score.window[0]

    def visible(b: Any, h: Any, q: Any, k: Any) -> Any:
        found = inner(b, h, q, k) & (q - k <= left)
        return found & (q >= k) if score.causal else found

    if len(set(lens)) == 1:
        return visible
    text = to(np.repeat(np.arange(len(lens)), lens))
    position = to(np.concatenate([np.arange(n) for n in lens]))
    return lambda b, h, q, k: (text[q] == text[k]) & visible(b, h, position[q], position[k])


def mask_mod_of_mask(mask: masks.Mask, case: PrefillCase, to: Callable[[Any], Any]) -> MaskMod:
    """The mask's part of it; later keys may be said to be seen, which causal attention hides."""
    match mask:
        case masks.And(masks=(first, second)):
            one, other = (mask_mod_of_mask(part, case, to) for part in (first, second))
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
