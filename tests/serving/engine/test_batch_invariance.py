"""`batch_invariant`: a request's bits in bfloat16 depend neither on the batch nor on the cache."""

import functools
import random

import jax.numpy as jnp
import pytest
from flax import nnx

from jattn.batch.bucket import Bucket
from jattn.models import load, use_peer_memory
from jattn.parallel import make_mesh
from jattn.serving import Engine, SamplingParams
from jattn.serving.engine.block_manager import BlockManager
from jattn.serving.engine.scheduler import Scheduler
from tests.conftest import GOLDEN
from tests.serving.engine.test_prefix_cache import BLOCK_SIZE, Pool
from tests.serving.tiny import one_layer_model, sized_model

GREEDY = SamplingParams(max_tokens=12, logprobs=2)
ON_KERNELS = {"implementation": "mosaic_gpu"}


MODEL = sized_model()


def engine_of(num_blocks=65, max_num_seqs=4, budget=32, model=MODEL, **options):
    sizes = {"num_blocks": num_blocks, "max_num_seqs": max_num_seqs, "max_num_batched_tokens": budget}
    options = {"batch_invariant": True, "check_batches": True} | options
    return Engine(model, block_size=8, **sizes, **options)


def tokens_and_logprobs(completion):
    """Return the tokens and the bits of the log-probabilities."""
    return completion.token_ids, [
        [likely.logprob for likely in table.values()] for table in completion.logprobs
    ]


def bits(engine, batch, params=GREEDY):
    """Return the tokens and log-probabilities of each completion of a batch of prompts."""
    return [
        [tokens_and_logprobs(completion) for completion in result.outputs]
        for result in engine.generate(batch, params)
    ]


def prompts(count, shared=40, seed=0):
    """Return prompts with common prefixes of whole and partial blocks."""
    draw = random.Random(seed)
    ids = lambda count: draw.choices(range(256), k=count)
    beginning = ids(shared)
    return [beginning[: draw.randint(0, shared)] + ids(draw.randint(1, 30)) for _ in range(count)]


@pytest.fixture(scope="module")
def alone():
    """Return the result of a prompt in its own engine, without prefix caching."""
    engine = engine_of(enable_prefix_caching=False)
    return lambda prompt, params=GREEDY: bits(engine, [prompt], params)[0]


@pytest.fixture(scope="module")
def crowded():
    return engine_of()


@pytest.mark.kernels
class TestBits:
    def test_bits_do_not_depend_on_the_batch_or_the_cache(self, alone, crowded):
        batch = prompts(8)
        expected = [alone(prompt) for prompt in batch]
        assert bits(crowded, batch) == expected
        assert bits(crowded, batch[::-1]) == expected[::-1]
        assert crowded.stats.num_prefix_hit_tokens > 0
        assert crowded.stats.num_compiles == 2

    def test_cached_generated_tokens_are_not_reused_for_a_prompt(self, alone, crowded):
        (prompt,) = prompts(1, seed=1)
        ((ids, _),) = bits(crowded, [prompt])[0]
        longer, before = prompt + ids[:-1] + [7], crowded.stats.num_prefix_hit_tokens
        assert bits(crowded, [longer]) == [alone(longer)]
        assert crowded.stats.num_prefix_hit_tokens - before == len(prompt) // 8 * 8

    def test_bits_of_completions_are_independent(self, alone, crowded):
        hot = SamplingParams(temperature=1.5, seed=3, n=3, max_tokens=8, logprobs=1)
        batch = prompts(3, seed=2)
        expected = [
            [*alone(prompt, hot.of_completion(0)), *alone(prompt, hot.of_completion(1))] for prompt in batch
        ]
        assert [completions[:2] for completions in bits(crowded, batch, hot)] == expected
        assert crowded.stats.num_forked_tokens > 0

    def test_bits_are_unchanged_by_preemption(self, alone):
        batch, engine = prompts(6, shared=24, seed=3), engine_of(num_blocks=12)
        assert bits(engine, batch) == [alone(prompt) for prompt in batch]
        assert engine.stats.num_preemptions > 0

    @pytest.mark.kernels
    @pytest.mark.parametrize("options", [{}, {"num_blocks": 24, "sliding_window": 20}, {"budget": 3}])
    def test_bits_do_not_depend_on_the_batch_with_windows_and_chunks(self, options):
        model = sized_model(sliding_window=options.pop("sliding_window", None), num_layers=2)
        batch, options = prompts(6, shared=60), {"max_num_seqs": 6, "model": model} | options
        engine, uncached_engine = engine_of(**options), engine_of(enable_prefix_caching=False, **options)
        assert bits(engine, batch) == [bits(uncached_engine, [prompt])[0] for prompt in batch]
        assert engine.stats.num_prefix_hit_tokens > 0

    @pytest.mark.kernels
    def test_bits_depend_on_the_batch_without_batch_invariance(self, alone):
        engine = engine_of(batch_invariant=False)
        assert bits(engine, prompts(8)) != [alone(prompt) for prompt in prompts(8)]


@pytest.mark.gpu
@pytest.mark.parametrize("sliding_window", [None, 200])
def test_kernel_bits_do_not_depend_on_the_batch_or_the_cache(sliding_window):
    """Long prompts in chunks, whose tiles start anywhere, and decodes with several splits."""
    overrides = {"head_dim": 128, "max_position_embeddings": 4096}
    model = one_layer_model(sliding_window=sliding_window, num_layers=3, dtype=jnp.bfloat16, **overrides)
    sizes = {"num_blocks": 1200, "max_num_seqs": 8, "max_num_batched_tokens": 700, "block_size": 16}
    make = functools.partial(Engine, model, batch_invariant=True, **ON_KERNELS, **sizes)
    draw = random.Random(0)
    ids = lambda count: draw.choices(range(256), k=count)
    shared = ids(1500)
    batch = [shared[: draw.randint(0, 1500)] + ids(count) for count in (1, 40, 300, 900, 2400, 70)]
    alone, crowded = make(enable_prefix_caching=False), make()
    expected = [bits(alone, [prompt])[0] for prompt in batch]
    assert bits(crowded, batch) == expected
    assert bits(crowded, batch[::-1]) == expected[::-1]
    assert crowded.stats.num_prefix_hit_tokens > 0


class Watched(Scheduler):
    """A model that records the type of step that wrote each slot: cached prompts must be written by prompt
    steps.
    """

    def __init__(self, *args, **limits):
        super().__init__(*args, batch_invariant=True, **limits)
        self.num_prompt_tokens, self.kinds, self.num_replayed = {}, {}, 0

    def add(self, request_id, num_prompt_tokens, *args, **more):
        super().add(request_id, num_prompt_tokens, *args, **more)
        self.num_prompt_tokens[request_id] = num_prompt_tokens

    def schedule(self, num_draft_tokens=0):
        step = super().schedule(num_draft_tokens)
        if step is None:
            return None
        assert step.num_decodes in (0, len(step.request_ids))
        slot = lambda table, position: (table[position // BLOCK_SIZE], position % BLOCK_SIZE)
        for source, target in step.block_copies:
            self.kinds |= {(target, i): self.kinds.get((source, i)) for i in range(BLOCK_SIZE)}
        rows = list(zip(step.request_ids, step.query_lens, step.seq_lens, step.block_tables, strict=True))
        for _, count, length, table in rows:
            assert step.num_decodes == 0 or count == 1
            self.kinds |= {slot(table, i): step.num_decodes > 0 for i in range(length - count, length)}
        for (request, _, length, table), samples in zip(rows, step.samples, strict=True):
            num_prompt_tokens = self.num_prompt_tokens[request]
            assert all(self.kinds[slot(table, i)] == (i >= num_prompt_tokens) for i in range(length))
            self.num_replayed += step.num_decodes > 0 and not samples
        return step


class TestScheduler:
    @pytest.mark.parametrize(("seed", "num_blocks"), [(0, 9), (1, 12), (2, 20)])
    def test_cached_keys_were_written_by_the_same_type_of_step(self, seed, num_blocks):
        pool, next_id = Pool(num_blocks, seed), 0
        scheduler = Watched(pool.manager, max_num_seqs=4, max_num_batched_tokens=9)
        pool.scheduler, draw = scheduler, pool.random
        for _ in range(1200):
            event = draw.random()
            if event < 0.25 and len(pool.tokens) < 8:
                length = draw.randint(1, 20)
                some = list(pool.tokens.values())
                old = list(draw.choice(some)) if some and draw.random() < 0.7 else []
                tokens = (old + [draw.randrange(2) for _ in range(length)])[:length]
                parent, most = None, min(9, (num_blocks - 1) * BLOCK_SIZE - length + 1)
                for _ in range(draw.choice([1, 1, 3])):
                    pool.add(next_id, tokens, draw.randint(1, most), parent=parent)
                    parent, next_id = next_id if parent is None else parent, next_id + 1
            elif event < 0.29 and pool.tokens:
                pool.abort(draw.choice(list(pool.tokens)))
            else:
                pool.step()
        while pool.step():
            pass
        assert (pool.num_done, scheduler.num_unfinished, pool.manager.num_used) == (next_id, 0, 0)
        assert min(scheduler.num_prefix_hit_tokens, scheduler.num_forked_tokens) > 100
        assert scheduler.num_replayed > 0 or num_blocks > 12

    def test_prompt_steps_and_decode_steps_alternate(self):
        scheduler = Scheduler(BlockManager(20, 4), max_num_batched_tokens=4, batch_invariant=True)
        scheduler.add(0, 3, 9)
        scheduler.add(1, 11, 9)
        rows = []
        for _ in range(7):
            step = scheduler.schedule()
            rows.append((step.num_decodes > 0, dict(zip(step.request_ids, step.query_lens, strict=True))))
            scheduler.update_after_start(step)
        prefill, decode = (lambda rows: (False, rows)), (lambda rows: (True, rows))
        expected = [prefill({0: 3, 1: 1}), decode({0: 1}), prefill({1: 4}), decode({0: 1}), prefill({1: 4})]
        assert rows == [*expected, decode({0: 1}), prefill({1: 2})]


class Foreign(nnx.Module):
    """A minimal model with what the engine requires and no layer of jattn."""

    config, tokenizer = MODEL.config, None
    cache_specs = lambda *_, **__: ()
    create_caches = plan = logits = __call__ = lambda *_: None


REFUSED = [
    ({"speculative": "ngram"}, NotImplementedError, r"speculative='ngram'.*Pass speculative=None"),
    ({"speculative": one_layer_model()}, NotImplementedError, r"speculative=a Decoder: steps with drafts"),
    (
        {"cascade_attention": True},
        NotImplementedError,
        r"cascade_attention=True.*Pass cascade_attention=None",
    ),
    (
        {"implementation": "reference"},
        NotImplementedError,
        r"implementation=.reference.*the bucket size.*=None",
    ),
    ({"model": Foreign()}, NotImplementedError, r"a Foreign has no PagedAttention layers"),
    (
        {"buckets": [Bucket(max_decodes=4, max_blocks=9)]},
        ValueError,
        r"buckets cannot be combined with batch_invariant",
    ),
]


@pytest.mark.parametrize(
    ("options", "error", "message"), REFUSED, ids=[next(iter(case[0])) for case in REFUSED]
)
def test_unsupported_options_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        engine_of(**options)


def test_a_model_with_peer_memory_is_refused():
    model = load(GOLDEN / "hf" / "llama", mesh=make_mesh(), dtype=jnp.bfloat16, progress=False)
    engine_of(model=model)
    use_peer_memory(model, max_rows=1)
    with pytest.raises(
        NotImplementedError, match=r"with peer memory: .*on which use_peer_memory was not called"
    ):
        engine_of(model=model)


def test_the_given_model_is_unchanged():
    engine_of()
    assert not MODEL.layers[0].self_attn.spec.batch_invariant
