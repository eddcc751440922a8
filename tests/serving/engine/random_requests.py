"""Random requests in a small engine: each gets the same result as alone.

python -m tests.serving.engine.random_requests --count 10000 [--seed N] [--window W | --mixed]: more requests
than a test can run.
"""

import argparse
import collections
import functools
import random
import time

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from jattn.serving import Engine, SamplingParams
from jattn.serving.engine.logits_processors import RequestAdjustments, adjust_logits, build_logits_adjustments
from jattn.serving.engine.sampler import build_sampling_metadata, sample
from tests.serving.engine.test_engine_requests import engine_of
from tests.serving.engine.test_kv_cache_manager import TWO, gemma3
from tests.serving.tiny import one_layer_model, sized_model

ROUNDING = 1e-5  # of a float32 logit: steps of other sizes round differently
MAX_OPEN = 24  # requests that wait or run at once: some of them for long


def rounding_engines(sliding_window, is_mixed):
    """Return a crowded and a roomy engine in float32."""
    model = gemma3(TWO) if is_mixed else one_layer_model(sliding_window=sliding_window)
    crowded = engine_of(9, 11, model=model, max_blocks=None if sliding_window is None else 64)
    return crowded, engine_of(model=model, enable_prefix_caching=False)


def invariant_engines(sliding_window, is_mixed):
    """Return the same in bfloat16 with batch invariance, for a model that rounds differently for each step
    size.
    """
    assert not is_mixed
    model = sized_model(sliding_window=sliding_window)
    sizes = {"block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 11, "batch_invariant": True}
    engine = functools.partial(Engine, model, check_batches=True, **sizes)
    alone = engine(num_blocks=9 if sliding_window is None else 65, enable_prefix_caching=False)
    return engine(num_blocks=9), alone


class Crowd:
    """A crowded engine, and a roomy engine that runs each request alone."""

    def __init__(self, seed, sliding_window=None, batch_invariant=False, is_mixed=False):
        self.is_exact = batch_invariant
        self.draw = random.Random(seed)
        self.longest = 20 if sliding_window is None else 90  # of 64 tokens that fit the cache
        engines = invariant_engines if batch_invariant else rounding_engines
        self.crowded, self.alone = engines(sliding_window, is_mixed)
        self.shared = self.draw.choices(range(256), k=self.longest)
        self.open_requests, self.counts = {}, collections.Counter()
        self.got, self.ended = collections.defaultdict(list), collections.Counter()

    def params(self, number):
        """Return random parameters of a request."""
        choice = self.draw.choice
        temperature = choice([0.0, 0.0, 0.7, 2.0])
        max_tokens = self.draw.randint(1, 12)
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=choice([0, 0, min(3, max_tokens)]),
            temperature=temperature,
            seed=number,
            n=choice([1, 1, 2, 4]) if temperature else 1,
            top_k=choice([None, 3]),
            top_p=choice([1.0, 0.8]),
            min_p=choice([0.0, 0.05]),
            stop=choice([(), ("a",), ("\x10", "bc")]),
            stop_token_ids=choice([(), (3, 200)]),
            presence_penalty=choice([0.0, 0.0, 1.0]),
            frequency_penalty=choice([0.0, 0.0, -0.5]),
            repetition_penalty=choice([1.0, 1.0, 1.3]),
            logit_bias=choice([None, None, {9: 4.0}]),
            prompt_logprobs=choice([None] * 5 + [0]),
        )

    def add(self, number):
        """Add a request to the queue."""
        beginning = self.shared[: self.draw.randint(0, self.longest)]
        prompt = beginning + self.draw.choices(range(256), k=self.draw.randint(1, 9))
        params = self.params(number)
        name = self.crowded.add_request(prompt, params)
        self.open_requests[name] = prompt, params
        self.counts["requests"] += 1
        self.counts["completions"] += params.n

    def step(self):
        """Run a step and compare the requests that it finished."""
        for output in self.crowded.step():
            name = output.request_id
            self.got[name, output.index] += output.new_token_ids
            self.ended[name] += output.finish_reason is not None
            if self.ended[name] == self.open_requests[name][1].n:
                self.compare(name)

    def compare(self, name):
        """Compare a finished request with the same request run alone."""
        prompt, params = self.open_requests.pop(name)
        (alone,) = self.alone.generate([prompt], params)
        for index, completion in enumerate(alone.outputs):
            actual, expected = self.got.pop((name, index)), completion.token_ids
            if actual != expected:
                description = f"completion {index} of {prompt} with {params}"
                assert not self.is_exact, description
                assert self.is_near_tie(prompt, params.of_completion(index), actual, expected), description
                self.counts["near_ties"] += 1
            self.counts["compared"] += 1
            self.counts["tokens"] += len(actual)

    def is_near_tie(self, prompt, params, actual, expected):
        """Return whether the first different tokens are equally likely up to rounding."""
        pairs = enumerate(zip(actual, expected, strict=False))
        first = next(
            (i for i, (actual_token, expected_token) in pairs if actual_token != expected_token), None
        )
        if first is None:
            return False
        ids, before = jnp.asarray([*prompt, *expected[:first]]), np.asarray(expected[:first], np.int32)
        model, count = self.alone.model, np.asarray([first], np.int32)
        hidden, _ = model(ids, None, jattn.build_batch_metadata([len(ids)], [len(ids)], None))
        logits = model.logits(hidden)[-1:].astype(jnp.float32)
        adjustments = RequestAdjustments(params, np.asarray(prompt), before, params.stop_token_ids, first, -1)
        adjustment_arrays = build_logits_adjustments(
            [adjustments], jnp.zeros(1, jnp.int32), num_rows=1, vocab_size=logits.shape[1]
        )
        logits = logits if adjustment_arrays is None else adjust_logits(logits, adjustment_arrays, count)
        sampling, likely = build_sampling_metadata([params]), set()
        for seed in range(64):
            noise = ROUNDING * jax.random.normal(jax.random.key(seed), logits.shape)
            likely.add(int(sample(logits + noise, sampling, count)[0]))
        return {actual[first], expected[first]} <= likely

    def abort(self):
        """Abort a random open request."""
        name = self.draw.choice(sorted(self.open_requests))
        self.crowded.abort(name)
        _, params = self.open_requests.pop(name)
        for index in range(params.n):
            self.got.pop((name, index), None)
        self.counts["aborted"] += params.n

    def run(self, count):
        """Run requests that arrive, are aborted and are preempted at random."""
        for number in range(count):
            self.add(number)
            while self.draw.random() < 0.7 or len(self.open_requests) > MAX_OPEN:
                self.step()
            if self.open_requests and self.draw.random() < 0.05:
                self.abort()
        while self.crowded.has_unfinished_requests():
            self.step()

    def check(self):
        """Check that no request or block is left, and that requests were preempted."""
        stats, counts = self.crowded.stats, self.counts
        assert (stats.num_used_blocks, self.crowded.scheduler.num_unfinished, self.open_requests) == (
            0,
            0,
            {},
        )
        assert counts["compared"] + counts["aborted"] == counts["completions"]
        assert counts["near_ties"] <= max(counts["tokens"] // 10_000, 1)
        assert counts["aborted"] > 0
        assert stats.num_preemptions > 0
        assert stats.num_prefix_hit_tokens > 0
        assert stats.num_forked_tokens > 0
        assert self.alone.stats.num_used_blocks == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--window", type=int, help="of the model's layers; None = they see everything")
    parser.add_argument("--mixed", action="store_true", help="a layer with a window, and one without")
    parser.add_argument("--batch-invariant", action="store_true", help="bf16, and no token may differ")
    arguments = parser.parse_args()
    crowd = Crowd(arguments.seed, arguments.window, arguments.batch_invariant, arguments.mixed)
    start = time.perf_counter()
    crowd.run(arguments.count)
    crowd.check()
    stats = crowd.crowded.stats
    names = ("num_steps", "num_preemptions", "num_prefix_hit_tokens", "num_forked_tokens", "peak_blocks")
    statistics = {name: getattr(stats, name) for name in names}
    print(dict(crowd.counts) | statistics | {"seconds": round(time.perf_counter() - start, 1)}, flush=True)


if __name__ == "__main__":
    main()
