"""Requests that engines of several processes and of one device must answer alike."""

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
    """Static scales a kv head that the prompts bring, of each layer's keys and values."""
    layers = jattn.calibrate(model, PROMPTS, per_head=True).layers
    return [[side.tolist() for side in layer] for layer in layers]


def drafted(engine):
    """Tokens by drafts of a model that is taken to cost nothing, forks too; and what came of the drafts."""
    engine._speculation._draft_cost = 0.0
    drawn = SamplingParams(n=2, temperature=0.8, seed=0, max_tokens=8)
    results = [*engine.generate(PROMPTS, max_tokens=12), *engine.generate(PROMPTS[1:2], drawn)]
    tokens = [[one.token_ids for one in result.outputs] for result in results]
    return {"tokens": tokens, "drafts": [engine.stats.num_draft_tokens, engine.stats.num_accepted_tokens]}


def asked(engine):
    """Tokens: greedy, drawn and forked, adjusted; and places of log-probabilities."""
    tokens = lambda results: [[one.token_ids for one in result.outputs] for result in results]
    drawn = SamplingParams(n=2, temperature=0.8, seed=0, max_tokens=12)
    adjust_logits = SamplingParams(max_tokens=8, repetition_penalty=1.3, logit_bias={5: 3.0}, min_tokens=4)
    scored = SamplingParams(max_tokens=4, logprobs=2, prompt_logprobs=2)
    (result,) = engine.generate(PROMPTS[1:2], scored)
    places = [place for place in (*result.prompt_logprobs, *result.logprobs) if place]
    return {
        "greedy": tokens(engine.generate(PROMPTS, max_tokens=12)),
        "drawn": tokens(engine.generate(PROMPTS[1:2], drawn)),
        "adjust_logits": tokens(engine.generate(PROMPTS, adjust_logits)),
        "scored": [sorted(place) for place in places],
    }
