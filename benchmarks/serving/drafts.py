"""Speculative decoding by prompt lookup on an 8B-wide Qwen3: a text that copies itself, and two that do not.

Attention and MLPs take their time and bring nothing, so that the next token follows from the last by a table:
what is accepted is known, and what it costs is real. No row where a token is another than without drafts.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from benchmarks.models.random_decoder import random_decoder
from benchmarks.runner import Rows
from benchmarks.serving.engine import QWEN3_8B, drawn_prompts, timed
from jattn.serving import Engine, SamplingParams

CYCLE = 64  # tokens after which a copying text repeats itself
NUM_TOKENS, NUM_DRAFTS = 512, 7
ROWS = (1, 8)  # requests at a time
CASES = ("copying", "unmatched", "rejected")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `python -m benchmarks drafts` takes."""
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; default all")
    parser.add_argument("--out", help="folder of the rows")


def main(arguments: argparse.Namespace) -> None:
    """Each case with drafts and without, on the same weights."""
    rows, model = Rows("drafts", arguments.out), random_decoder(QWEN3_8B)
    silence(model)
    for case in arguments.cases or CASES:
        chain(model, CYCLE if case == "copying" else model.config.vocab_size)
        plain, drafting = engine_of(model, None), engine_of(model, "ngram")
        for batch in ROWS:
            prompts = prompts_of(case, batch)
            rows.add(name=f"{case}_{batch}", **compared(plain, drafting, prompts))


def silence(model: Any) -> None:
    """Nothing is added to the embedding on its way to the logits; all of it is computed."""
    for layer in model.layers:
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.kernel.set_value(jnp.zeros_like(linear.kernel[...]))


def chain(model: Any, cycle: int) -> None:
    """Behind token t comes t + 1, and behind the last of each `cycle` tokens the first of them."""
    tokens = np.arange(model.config.vocab_size)
    before = tokens - tokens % cycle + (tokens - 1) % cycle
    embedding = model.embed_tokens.embedding[...]
    model.lm_head.kernel.set_value(jax.jit(lambda table, rows: table[rows].T)(embedding, before))


def prompts_of(case: str, batch: int) -> list[list[int]]:
    """Prompts that end with a token from which a chain of NUM_TOKENS runs."""
    if case != "rejected":
        return drawn_prompts(batch, 1024, seed=batch)
    # Each three tokens of the text to come stand in the prompt, with another token behind them.
    starts = [CYCLE + 2048 * row for row in range(batch)]
    return [[i for n in range(NUM_TOKENS) for i in (s + n, s + n + 1, s + n + 2, 1)] + [s] for s in starts]


def engine_of(model: Any, speculative: str | None) -> Engine:
    """Few buckets; the prompts of a run are not those of the run before."""
    bucket = lambda **sizes: jattn.Bucket(max_blocks=256, **sizes)
    most = max(ROWS)
    return Engine(
        model,
        num_blocks=4096,
        max_num_seqs=most,
        max_num_batched_tokens=4096,
        max_model_len=4096,
        buckets=[
            *(bucket(max_decodes=rows) for rows in (2, most)),
            bucket(max_decodes=most, max_prefills=most, max_prefill_tokens=4096),
        ],
        enable_prefix_caching=False,
        speculative=speculative,
        num_speculative_tokens=NUM_DRAFTS,
    )


def compared(plain: Engine, drafting: Engine, prompts: list[list[int]]) -> dict[str, Any]:
    """Tokens a second of both, prompts included, and what became of the drafts."""
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    ids = [[one.token_ids for one in engine.generate(prompts, params)] for engine in (plain, drafting)]
    if ids[0] != ids[1]:
        raise SystemExit("tokens with drafts are not those without: no row")
    before = drafting.stats
    best = lambda engine: min(timed(lambda: engine.generate(prompts, params)) for _ in range(3))
    seconds = best(plain), best(drafting)
    after, count = drafting.stats, NUM_TOKENS * len(prompts)
    drafted = after.num_draft_tokens - before.num_draft_tokens
    return {
        "tokens_per_s": count / seconds[1],
        "tokens_per_s_without": count / seconds[0],
        "ratio": seconds[0] / seconds[1],
        "drafted": drafted // 3,
        "accepted": (after.num_accepted_tokens - before.num_accepted_tokens) // 3,
    }
