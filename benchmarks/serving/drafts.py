"""Speculative decoding by prompt lookup on a Qwen3 of 8B sizes: repeating, unmatched and rejected drafts.

Attention and MLPs are computed but contribute zero, so the next token is a known function of the last one:
the number of accepted drafts is known, and step times are those of a real model. A row is recorded only if
the tokens with and without drafts are equal.
"""

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from benchmarks.models.random_decoder import random_decoder
from benchmarks.runner import Rows
from benchmarks.serving.engine import QWEN3_8B, random_prompts, time_call
from jattn.serving import Engine, SamplingParams

CYCLE = 64  # period in tokens of the text of the case "copying"
NUM_TOKENS, NUM_DRAFTS = 512, 7
BATCHES = (1, 8)
CASES = ("copying", "unmatched", "rejected")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `python -m benchmarks drafts`."""
    parser.add_argument("cases", nargs="*", help=f"Cases to run, of {', '.join(CASES)}. Default: all.")
    parser.add_argument("--out", help="Directory for the result rows.")


def main(arguments: argparse.Namespace) -> None:
    """Measure every case with and without drafts, on the same weights."""
    rows, model = Rows("drafts", arguments.out), random_decoder(QWEN3_8B)
    zero_layer_outputs(model)
    for case in arguments.cases or CASES:
        set_successors(model, CYCLE if case == "copying" else model.config.vocab_size)
        plain, drafting = make_engine(model, None), make_engine(model, "ngram")
        for batch in BATCHES:
            prompts = make_prompts(case, batch)
            rows.add(name=f"{case}_{batch}", **measure(plain, drafting, prompts))


def zero_layer_outputs(model: Any) -> None:
    """Zero the output projections of attention and MLPs, so the embeddings reach the logits unchanged."""
    for layer in model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.kernel.set_value(jnp.zeros_like(linear.kernel[...]))


def set_successors(model: Any, cycle: int) -> None:
    """Make token t + 1 follow token t; the last of every `cycle` ids is followed by the first of them."""
    tokens = np.arange(model.config.vocab_size)
    predecessors = tokens - tokens % cycle + (tokens - 1) % cycle
    embedding = model.embed_tokens.embedding[...]
    model.lm_head.kernel.set_value(jax.jit(lambda table, rows: table[rows].T)(embedding, predecessors))


def make_prompts(case: str, batch: int) -> list[list[int]]:
    """Return one prompt per request; NUM_TOKENS different tokens can follow its last token."""
    if case != "rejected":
        return random_prompts(batch, 1024, seed=batch)
    # The prompt contains every three consecutive tokens of the continuation, followed by a wrong fourth
    # token.
    starts = [CYCLE + 2048 * row for row in range(batch)]
    return [[i for n in range(NUM_TOKENS) for i in (s + n, s + n + 1, s + n + 2, 1)] + [s] for s in starts]


def make_engine(model: Any, speculative: str | None) -> Engine:
    """Create an engine with few buckets and without prefix caching.

    Args:
        model: Model to serve.
        speculative: Speculative method of the engine; None disables it.
    """
    bucket = functools.partial(jattn.Bucket, max_blocks=256)
    max_num_seqs = max(BATCHES)
    return Engine(
        model,
        num_blocks=4096,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=4096,
        max_model_len=4096,
        buckets=[
            *(bucket(max_decodes=rows) for rows in (2, max_num_seqs)),
            bucket(max_decodes=max_num_seqs, max_prefills=max_num_seqs, max_prefill_tokens=4096),
        ],
        enable_prefix_caching=False,
        speculative=speculative,
        num_speculative_tokens=NUM_DRAFTS,
    )


def measure(plain: Engine, drafting: Engine, prompts: list[list[int]]) -> dict[str, Any]:
    """Return tokens per second with and without drafts, prompts included, and the numbers of drafts.

    Raises:
        SystemExit: The tokens of the two engines differ.
    """
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    expected, token_ids = (
        [result.token_ids for result in engine.generate(prompts, params)] for engine in (plain, drafting)
    )
    if token_ids != expected:
        raise SystemExit("tokens with drafts differ from those without. No row is recorded.")

    def best_seconds(engine: Engine) -> float:
        return min(time_call(lambda: engine.generate(prompts, params)) for _ in range(3))

    before = drafting.stats
    plain_s, drafting_s = best_seconds(plain), best_seconds(drafting)
    after, count = drafting.stats, NUM_TOKENS * len(prompts)
    drafted = after.num_draft_tokens - before.num_draft_tokens
    return {
        "tokens_per_s": count / drafting_s,
        "tokens_per_s_without": count / plain_s,
        "ratio": plain_s / drafting_s,
        "drafted": drafted // 3,
        "accepted": (after.num_accepted_tokens - before.num_accepted_tokens) // 3,
    }
