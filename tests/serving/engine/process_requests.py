"""Requests whose results must be equal for engines of several processes and of one device."""

import jattn
from jattn.serving import SamplingParams

PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9] * 9, [20] * 40]
SIZES = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "num_blocks": 64,
    "speculative": "ngram",
    "num_speculative_tokens": 2,
}


def scales_of(model):
    """Return static scales per KV head that a prompt causes, for each layer's keys and values."""
    layers = jattn.calibrate(model, PROMPTS[1:2], per_head=True).layers
    return [[side.tolist() for side in layer] for layer in layers]


def speculative_results(engine):
    """Return tokens with a draft model that is assumed to cost nothing, also of forks, and draft
    statistics.
    """
    engine._speculation._draft_cost = 0.0
    drawn = SamplingParams(n=2, temperature=0.8, seed=0, max_tokens=8)
    results = [*engine.generate(PROMPTS, max_tokens=12), *engine.generate(PROMPTS[1:2], drawn)]
    tokens = [[completion.token_ids for completion in result.outputs] for result in results]
    return {"tokens": tokens, "drafts": [engine.stats.num_draft_tokens, engine.stats.num_accepted_tokens]}


def request_results(engine):
    """Return greedy, sampled, forked and adjusted tokens, and the tokens with log-probabilities."""
    tokens = lambda results: [[completion.token_ids for completion in result.outputs] for result in results]
    drawn = SamplingParams(n=2, temperature=0.8, seed=0, max_tokens=12)
    adjust_logits = SamplingParams(max_tokens=8, repetition_penalty=1.3, logit_bias={5: 3.0}, min_tokens=4)
    scored = SamplingParams(max_tokens=4, logprobs=2, prompt_logprobs=2)
    (result,) = engine.generate(PROMPTS[1:2], scored)
    position_logprobs = [table for table in (*result.prompt_logprobs, *result.logprobs) if table]
    return {
        "greedy": tokens(engine.generate(PROMPTS, max_tokens=12)),
        "drawn": tokens(engine.generate(PROMPTS[1:2], drawn)),
        "adjust_logits": tokens(engine.generate(PROMPTS, adjust_logits)),
        "scored": [sorted(table) for table in position_logprobs],
    }
