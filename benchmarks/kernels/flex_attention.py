"""Gradients by torch's FlexAttention for the cases and masks of `backward`. Requires torch and a GPU."""

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from benchmarks.kernels.backward_cases import CASES, CHOICES, make_mask, make_score
from benchmarks.kernels.cases import PrefillCase
from benchmarks.kernels.score_mods import BASELINES, NUM_DISTANCES, alibi_slopes, relative_table
from benchmarks.runner import Rows
from jattn import masks
from pallas_kernels.checks import require

TOLERANCE = 2e-2  # relative to the largest sampled value, as in `backward`
NUM_CHECKED = 32  # queries of the first request that are compared with float32
CHUNK = 64  # queries whose visible pairs are counted at once
DEVICE = "cuda"

type MaskMod = Callable[[Any, Any, Any, Any], Any]  # (batch, head, query, key) -> bool, elementwise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks backward-peers`."""
    parser.add_argument("cases", nargs="*", help=f"Cases to run, of {', '.join(CASES)}. Default: all.")
    parser.add_argument(
        "--modifier",
        nargs="+",
        default=["plain"],
        choices=CHOICES,
        help="Modifiers and masks. Default: plain.",
    )
    parser.add_argument("--out", help="Directory for the result rows.")


def main(arguments: argparse.Namespace) -> None:
    """Record a row for each case and modifier."""
    import torch

    jax.config.update("jax_platforms", "cpu")  # JAX only draws the masks; torch uses the GPU
    rows = Rows("backward-peers", arguments.out, gpu=torch.cuda.get_device_name())
    for name, modifier in itertools.product(arguments.cases or CASES, arguments.modifier):
        try:
            rows.add(**measure(CASES[name], modifier), torch=torch.__version__)
        except Exception as error:  # continue with the other rows
            print(f"{name} {modifier}: {type(error).__name__}: {error}"[:500], flush=True)


def measure(case: PrefillCase, modifier: str) -> dict[str, Any]:
    """Measure both passes, check sampled outputs and gradients against float32, and return a row.

    Requests of equal length form a batch; others are packed into one sequence with a document mask.

    Args:
        case: Requests without context.
        modifier: Name of the modifier.

    Raises:
        NotImplementedError: FlexAttention does not support the modifier.
        ValueError: An error exceeds TOLERANCE.
    """
    if modifier == "sinks":
        raise NotImplementedError("FlexAttention has no sinks. Leave the modifier out.")
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    lens = case.query_lens
    batch, tokens = (len(lens), lens[0]) if len(set(lens)) == 1 else (1, sum(lens))
    torch.manual_seed(0)
    q, k, v, grad = (
        torch.randn((batch, heads, tokens, case.head_dim), device=DEVICE).bfloat16()
        for heads in (case.q_heads, case.kv_heads, case.kv_heads, case.q_heads)
    )

    def to_tensor(x: Any) -> Any:
        return torch.as_tensor(np.array(x), device=DEVICE)

    mask, score_mod = make_mask(case, modifier), make_score_mod(case, modifier, to_tensor)
    visible = make_mask_mod(case, modifier, mask, to_tensor)
    heads = case.q_heads if mask is not None and mask.num_heads[0] != 1 else None
    block_mask = create_block_mask(
        visible, None, heads, tokens, tokens, device=DEVICE, _compile=heads is not None
    )
    compiled = torch.compile(flex_attention, dynamic=False)
    inputs = [x.requires_grad_() for x in (q, k, v)]

    def forward() -> Any:
        options = {"block_mask": block_mask, "score_mod": score_mod, "enable_gqa": True}
        return compiled(*inputs, scale=case.head_dim**-0.5, **options)

    out = forward()

    def backward() -> Any:
        return torch.autograd.grad(out, inputs, grad, retain_graph=True)

    results = {"out": out, "query's gradient": backward()[0]}
    errors = max_errors(results, (q, k, v, grad), visible, score_mod)
    for name, error in errors.items():
        require(error < TOLERANCE, f"the error of {name}", f"be less than {TOLERANCE}", error)
    flops = 10.0 * case.head_dim * count_pairs(visible, batch, case.q_heads, tokens)
    us = kernel_sum_us(backward)
    with torch.no_grad():
        forward_us = kernel_sum_us(forward)
    row = {"name": case.name, "modifier": modifier, "peer": "flex_attention"}
    row |= {"us": us, "forward_us": forward_us}
    return row | {"tflop_per_s": flops / us / 1e6, "errors": {n: round(e, 5) for n, e in errors.items()}}


def max_errors(results: dict[str, Any], arrays: Any, visible: MaskMod, score_mod: Any) -> dict[str, float]:
    """Return the largest errors of some queries of the first request, relative to the largest sampled value.

    Args:
        results: The output and the gradient of the queries, in this order.
        arrays: Queries, keys, values and the gradient of the output.
        visible: Mask function.
        score_mod: Score function, or None.
    """
    import torch

    q, k, v, grad = (x[0].detach().float() for x in arrays)
    group, tokens = q.shape[0] // k.shape[0], q.shape[1]
    rows = torch.linspace(0, tokens - 1, min(NUM_CHECKED, tokens), device=q.device).long()
    k, v = (x.repeat_interleave(group, dim=0) for x in (k, v))
    sampled_q = q[:, rows].requires_grad_()
    s = sampled_q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    positions = torch.arange(tokens, device=q.device)
    heads = torch.arange(len(q), device=q.device)[:, None, None]
    indices = (0 * rows[:1, None], heads, rows[:, None], positions)
    s = s if score_mod is None else score_mod(s, *indices)
    out = torch.softmax(s.masked_fill(~visible(*indices), -torch.inf), dim=-1) @ v
    (grad_q,) = torch.autograd.grad(out, sampled_q, grad[:, rows])
    errors = {}
    for (name, result), expected in zip(results.items(), (out, grad_q), strict=True):
        difference = (result[0][:, rows].float() - expected).abs().nan_to_num(torch.inf)
        errors[name] = float(difference.max() / expected.abs().max())
    return errors


def count_pairs(visible: MaskMod, batch: int, q_heads: int, tokens: int) -> int:
    """Return the number of query-key pairs that see each other, in all requests and heads."""
    import torch

    positions, heads = (torch.arange(n, device=DEVICE) for n in (tokens, q_heads))
    count = 0
    for rows in positions.split(CHUNK):
        pairs = visible(0 * heads[:1], heads[:, None, None], rows[:, None], positions)
        count += int(pairs.expand(q_heads, len(rows), tokens).sum())
    return batch * count


def kernel_sum_us(call: Callable[[], Any], *, rounds: int = 10) -> float:
    """Return the mean sum of a call's kernel times in microseconds, from torch's profiler (CUPTI)."""
    import torch

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(rounds):
            call()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    return sum(event.device_time_total for event in profile.events() if event.device_type == cuda) / rounds


def make_score_mod(
    case: PrefillCase, modifier: str, to_tensor: Callable[[Any], Any]
) -> Callable[..., Any] | None:
    """Return the modifier's function of scaled scores, or None if it does not change scores."""
    if modifier == "relative_table":
        table = to_tensor(relative_table(case.q_heads))
        return lambda s, b, h, q, k: s + table[h, (q - k).clip(0, NUM_DISTANCES - 1)]
    modifier = BASELINES.get(modifier, modifier)  # all are functions here
    cap = make_score(case, modifier).soft_cap
    if cap is not None:
        return lambda s, b, h, q, k: cap * (s / cap).tanh()
    if modifier == "alibi":
        slopes = to_tensor(alibi_slopes(case.q_heads))
        return lambda s, b, h, q, k: s - slopes[h] * (q - k)
    return None


def make_mask_mod(
    case: PrefillCase, modifier: str, mask: masks.Mask | None, to_tensor: Callable[[Any], Any]
) -> MaskMod:
    """Return the function that says which pairs of a case see each other.

    Args:
        case: Requests without context.
        modifier: Name of the modifier.
        mask: Mask of the modifier, or None.
        to_tensor: Function that converts an array to a tensor.
    """
    score, lens = make_score(case, modifier), case.query_lens
    mask_visible = (lambda b, h, q, k: q == q) if mask is None else convert_mask(mask, case, to_tensor)
    left = max(lens) if score.window[0] is None else score.window[0]

    def visible(b: Any, h: Any, q: Any, k: Any) -> Any:
        pairs = mask_visible(b, h, q, k) & (q - k <= left)
        return pairs & (q >= k) if score.causal else pairs

    if len(set(lens)) == 1:
        return visible
    request = to_tensor(np.repeat(np.arange(len(lens)), lens))
    position = to_tensor(np.concatenate([np.arange(n) for n in lens]))
    return lambda b, h, q, k: (request[q] == request[k]) & visible(b, h, position[q], position[k])


def convert_mask(mask: masks.Mask, case: PrefillCase, to_tensor: Callable[[Any], Any]) -> MaskMod:
    """Convert a mask to a function of pairs. It may return True for keys after the query."""
    match mask:
        case masks.And(masks=(first, second)):
            mods = [convert_mask(part, case, to_tensor) for part in (first, second)]
            return lambda b, h, q, k: mods[0](b, h, q, k) & mods[1](b, h, q, k)
        case masks.Window(left=left):
            return lambda b, h, q, k: q - k <= left
        case masks.Document():
            ids = to_tensor(mask.ids)
            return lambda b, h, q, k: ids[q] == ids[k]
        case masks.BlockMask(block_q=block_q, block_kv=block_kv):
            blocks, heads = to_tensor(mask.blocks), case.q_heads // len(mask.blocks)
            return lambda b, h, q, k: blocks[h // heads, q // block_q, k // block_kv]
        case masks.LocalStrided(block_size=size, local_blocks=local_blocks, vert_stride=stride):
            step = mask.head_sliding_step(case.q_heads, case.kv_heads)

            def visible(b: Any, h: Any, q: Any, k: Any) -> Any:
                is_local = q // size - k // size < local_blocks
                return is_local | ((k // size + h * step + 1) % stride == 0)

            return visible
    assert isinstance(mask, masks.VerticalSlash)
    columns, slashes = to_tensor(mask.columns), to_tensor(mask.slashes)
    return lambda b, h, q, k: columns[h, k] | slashes[h, abs(q - k)]
